"""What reading takes: drafters while the planner decodes plainly and when they are asked again, targets over a prompt.

Counted, not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import random_prompts, tiny_head, tiny_model, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtp.attention import AttentionPass
from mtp.drafters import DRAFTERS, Assistant, Budget, Drafter, MixedDrafter, TargetStates, drafter_by_name
from mtp.drafters.lm_tree import TreeShape
from mtp.heads import HEADS
from mtp.heads.caching import CachingHead
from mtp.target import Target

MAKERS: dict[str, Callable[[Target], Drafter]] = {
    **{family: lambda target, family=family: tiny_head(family, target) for family in HEADS},
    **{name: lambda target, name=name: drafter_by_name(name) for name in DRAFTERS},
    "an assistant": lambda target: Assistant(tiny_model("llama", seed=1, layers=1)),
    "an assistant at the end of its context": lambda target: Assistant(short_model()),
    "a mix": lambda target: MixedDrafter([tiny_head("eagle3", target), drafter_by_name("ngram")]),
}


def short_model() -> Any:
    model = tiny_model("llama", seed=1, layers=1)
    model.config.max_position_embeddings = 4
    return model


class Elements(TorchDispatchMode):
    """Counts the elements of all tensors that operations give back."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            self.count += each.numel() if isinstance(each, Tensor) else 0
        return out


def states_of(target: Target, length: int, batch: int) -> TargetStates:
    ids = torch.tensor(random_prompts([length] * batch, seed=2))
    hidden, taps = target.encode(ids, (0, 1, 2))
    return TargetStates(ids, hidden, taps, torch.full((batch,), length))


def piece(states: TargetStates, begin: int, end: int, taps: int) -> TargetStates:
    """Tokens from ``begin`` to ``end`` of all rows, with as many tapped layers as the drafter reads."""
    assert states.taps is not None
    tapped = states.taps[:, begin:end, : taps * states.hidden.shape[2]] if taps else None
    return TargetStates(
        states.tokens[:, begin:end], states.hidden[:, begin:end], tapped, torch.full_like(states.counts, end - begin)
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_a_plain_round_costs_a_drafter_the_same_however_long_it_was_not_asked(name: str, batch: int) -> None:
    target = tiny_target()
    drafter = MAKERS[name](target).attach(target)
    states, taps = states_of(target, 60, batch), len(drafter.taps)
    drafter.share(target.new_cache(batch, 80))
    drafter.start(piece(states, 0, 8, taps), capacity=80)
    counts = []
    for at in range(8, 60):
        with Elements() as elements:
            drafter.observe(piece(states, at, at + 1, taps))
        counts.append(elements.count)
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_being_asked_where_there_is_no_room_left_costs_the_same_every_time(batch: int) -> None:
    target = tiny_target()
    drafter = MAKERS["an assistant at the end of its context"](target).attach(target)
    states = states_of(target, 60, batch)
    drafter.start(piece(states, 0, 8, 0), capacity=80)
    counts = []
    for at in range(8, 59):
        with Elements() as elements:
            drafter.observe(piece(states, at, at + 1, 0))
            drafter.propose(states.tokens[:, at + 1], Budget(8))
        counts.append(elements.count)
    assert counts[-1] == counts[1]


# An MTP module runs a layer of the target over all that it reads, with masks as the target has them.
READING_AT_ONCE = [
    family for family, head in sorted(HEADS.items()) if issubclass(head, CachingHead) and family != "mtp"
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", READING_AT_ONCE)
def test_reading_a_text_takes_a_head_no_more_than_twice_as_much_for_twice_as_long_a_text(
    family: str, batch: int
) -> None:
    target = tiny_target()
    head = tiny_head(family, target, depth=1)
    states, taps = states_of(target, 97, batch), len(head.taps)
    counts = []
    for length in (12, 24, 48, 96):  # what is prepared at the first call is not counted
        head.start(piece(states, 0, length, taps), capacity=100)
        with Elements() as elements:
            head.propose(states.tokens[:, length], Budget(4))
        counts.append(elements.count)
    _, short, middle, long = counts
    assert long - middle <= 2 * (middle - short)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_reading_a_prompt_makes_no_square_mask(architecture: str, batch: int) -> None:
    target = tiny_target(architecture)
    counts = []
    for length in (12, 24, 48, 96):
        ids = torch.ones(batch, length, dtype=torch.long)
        cache = target.new_cache(batch, 100)
        with Elements() as elements:
            attention = AttentionPass.over_chain(length, cache.lengths, 0)
            target.forward(ids, cache, attention, logits_at=torch.tensor([length - 1]))
        counts.append(elements.count)
    _, short, middle, long = counts
    assert long - middle <= 2 * (middle - short)


def test_the_trees_of_an_assistant_are_the_same_after_a_plain_stretch() -> None:
    target = tiny_target()
    states = states_of(target, 30, 2)
    steady, rested = (Assistant(tiny_model("llama", seed=1), shape=TreeShape(3, 3)).attach(target) for _ in range(2))
    for drafter in (steady, rested):
        drafter.start(piece(states, 0, 8, 0), capacity=60)
    for at in range(8, 29):
        for drafter in (steady, rested):
            drafter.observe(piece(states, at, at + 1, 0))
        ours = steady.propose(states.tokens[:, at + 1], Budget(8))
    theirs = rested.propose(states.tokens[:, 29], Budget(8))
    assert torch.equal(ours.tokens, theirs.tokens)
    torch.testing.assert_close(ours.log_q, theirs.log_q, atol=1e-5, rtol=1e-5)
