"""How often a round waits for the device: every number that the host reads back stops it until all work is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_planner import GPU, KnownCosts
from tiny import random_prompts, tiny_head, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from mtp import growth
from mtp.decode import Decoder
from mtp.heads import HEADS
from mtp.heads.growing import GrowingHead
from mtp.model import SpeculativeModel
from mtp.planner import CostPlanner

# What reads a number, or needs one to know the shape of its result.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}


class Waits(TorchDispatchMode):
    """Counts the calls that would wait for a device, on whatever device they run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        if name in WAITING or by_mask:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_waits() -> Iterator[Counter[str]]:
    """Waits of any kind inside the block; ``tolist`` and copies of Python numbers go past the dispatcher."""
    tolist, tensor = torch.Tensor.tolist, torch.tensor
    with Waits() as waits, pytest.MonkeyPatch.context() as patch:

        def reading(self: torch.Tensor) -> Any:
            waits.calls["tolist"] += 1
            return tolist(self)

        def copying(*args: Any, **kwargs: Any) -> torch.Tensor:
            waits.calls["tensor"] += 1
            return tensor(*args, **kwargs)

        patch.setattr(torch.Tensor, "tolist", reading)
        patch.setattr(torch, "tensor", copying)
        yield waits.calls


def waits_of_rounds(
    model: SpeculativeModel, monkeypatch: pytest.MonkeyPatch, batch: int = 1, **settings: Any
) -> list[Counter[str]]:
    """Of each round of a generation, as on a device where numbers are not at hand."""
    found: list[Counter[str]] = []
    plain_round = Decoder._round

    def counted(self: Decoder, *args: Any) -> torch.Tensor:
        with counting_waits() as calls:
            pending = plain_round(self, *args)
        found.append(calls)
        return pending

    monkeypatch.setattr(growth, "may_ask", lambda device: False)
    monkeypatch.setattr(Decoder, "_round", counted)
    prompts = random_prompts([6] * batch, 1)
    model.generate(torch.tensor(prompts), do_sample=False, max_new_tokens=24, **settings)
    return found


@pytest.mark.parametrize("batch", [1, 3])
def test_a_plain_round_waits_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SpeculativeModel.from_target(tiny_target("llama").model, drafter="none")
    rounds = waits_of_rounds(model, monkeypatch, batch, drafter="none")
    assert rounds == [Counter(tolist=1)] * 23


GROWING = sorted(family for family, head in HEADS.items() if issubclass(head, GrowingHead))


@pytest.mark.parametrize("family", GROWING)
@pytest.mark.parametrize("architecture", ["llama", "phi3_longrope"])
def test_a_drafted_round_waits_once(family: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(architecture)
    model = SpeculativeModel(target, tiny_head(family, target))
    rounds = waits_of_rounds(model, monkeypatch, nodes=8)[1:]  # in the first, heads prepare what they keep
    assert len(rounds) > 5
    assert rounds[:-1] == [Counter(tolist=1)] * (len(rounds) - 1)
    # The last one may end inside its block, and then says so to the device.
    assert rounds[-1] in (Counter(tolist=1), Counter(tolist=1, tensor=1))


@pytest.mark.parametrize("family", GROWING)
def test_a_planned_round_waits_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are sized by the round before, so that nothing of the one at hand is asked for."""
    target = tiny_target("llama")
    model = SpeculativeModel(target, tiny_head(family, target))
    planner = CostPlanner(KnownCosts(GPU), nodes=16, ahead=True)
    planner.resting = 0
    rounds = waits_of_rounds(model, monkeypatch, planner=planner)[1:-1]
    assert len(rounds) > 5
    assert rounds == [Counter(tolist=1)] * len(rounds)


def test_the_count_sees_what_waits() -> None:
    x = torch.arange(4)
    with counting_waits() as calls:
        int(x.max()), bool((x > 9).any()), x[x > 2], x.tolist(), torch.tensor([1]), (x > 2).nonzero()
    assert calls == Counter(_local_scalar_dense=2, index=1, tolist=1, tensor=1, nonzero=1)
