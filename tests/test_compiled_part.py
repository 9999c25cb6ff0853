"""Compiled parts of drafters: what the parts themselves give, and never in their way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import FOUR, VOCAB, padded, tiny_head, tiny_target
from torch import Tensor, nn

from mtp import SpeculativeModel, compiled_part
from mtp.compiled_part import CompiledPart
from mtp.drafters import Drafter, MixedDrafter, NgramDrafter
from mtp.drafters.assistant import Assistant
from mtp.heads import HEADS
from mtp.heads.autoregressive import AutoregressiveHead
from mtp.layer_call import BATCH, LENGTH
from mtp.packing import is_available
from mtp.target import Target

pytestmark = pytest.mark.skipif(not is_available(), reason="this build of torch cannot pack weights")

FAMILIES = sorted(HEADS)
IN_PARTS = ["eagle", "eagle3"]


def drafted(target: Target, drafter: Drafter, **settings: Any) -> tuple[list[list[int]], list[list[bool]]]:
    """What is generated behind four ragged prompts, and which of it had been guessed."""
    out = SpeculativeModel(target, drafter).generate(
        **padded(FOUR), max_new_tokens=12, nodes=9, return_dict_in_generate=True, **{"do_sample": False, **settings}
    )
    return out.sequences.tolist(), out.kept


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_head_keeps_what_it_kept(family: str, graphs: list[str]) -> None:
    target = tiny_target()
    expected = drafted(target, tiny_head(family, target))
    head = tiny_head(family, target)
    assert head.compile_parts() == []
    assert (len(graphs) == 2) == (family in IN_PARTS)
    assert drafted(target, head) == expected


@pytest.mark.parametrize("family", IN_PARTS)
def test_drawn_trees_are_the_same_compiled(family: str, graphs: list[str]) -> None:
    target = tiny_target()
    found = []
    for compile_it in (False, True):
        head = tiny_head(family, target)
        if compile_it:
            assert head.compile_parts() == []
        settings = {"do_sample": True, "rule": "traversal", "generator": torch.Generator().manual_seed(3)}
        found.append(drafted(target, head, **settings))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", IN_PARTS)
def test_parts_take_any_number_of_rows_and_tokens_anywhere_in_a_text(family: str, graphs: list[str]) -> None:
    """Each argument by itself: two that were swapped, or of which one was lost, would show."""
    head = tiny_head(family, tiny_target())
    assert head.compile_parts() == []
    assert isinstance(head, AutoregressiveHead)
    before, after = head.compiled
    with torch.no_grad():
        for batch, length, at in [(1, 1, 0), (1, 6, 40), (3, 2, 7), (BATCH, LENGTH, 1)]:
            embedding, hidden, attended = torch.randn(3, batch, length, head.config.hidden_size)
            positions = at + torch.arange(length).expand(batch, -1)
            for part, function, inputs in (
                (before, head.before_attention, (embedding, hidden, positions)),
                (after, head.after_attention, (hidden, attended)),
            ):
                for found, expected in zip(part(*inputs), function(*inputs), strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def change(head: AutoregressiveHead) -> None:
    head.load_state_dict(
        {name: -value for name, value in head.state_dict().items() if value.is_floating_point()}, False
    )


def narrow(head: AutoregressiveHead) -> None:
    head.cast(torch.bfloat16)


def replace(head: AutoregressiveHead) -> None:
    other = copy.deepcopy(head.midlayer.o_proj)
    head.midlayer.o_proj = other.requires_grad_(False)
    other.weight.neg_()


def listen(head: AutoregressiveHead) -> None:
    head.midlayer.o_proj.register_forward_hook(lambda module, args, output: -output)


def other_vocabulary(head: AutoregressiveHead) -> None:
    head.set_draft_vocabulary(head.draft_ids.flip(0))


@pytest.mark.parametrize("happens", [change, narrow, replace, listen, other_vocabulary])
@pytest.mark.parametrize("family", IN_PARTS)
def test_weights_that_change_are_noticed(family: str, happens: Any, graphs: list[str]) -> None:
    target = tiny_target()
    heads = [tiny_head(family, target) for _ in range(2)]
    assert heads[1].compile_parts() == []
    drafted(target, heads[1])
    for head in heads:
        happens(head)
    assert drafted(target, heads[1]) == drafted(target, heads[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_has_drafted_can_be_cast(family: str, dtype: torch.dtype) -> None:
    target = Target(tiny_target().model.to(dtype))
    used, fresh = tiny_head(family, target), tiny_head(family, target).cast(dtype)
    model = SpeculativeModel(target, used)
    for _ in range(2):
        kept = model.generate(**padded(FOUR), max_new_tokens=8, return_dict_in_generate=True, do_sample=False).kept
        used.cast(dtype)
    assert len(kept) == len(drafted(target, fresh)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_targets_precision_is_not_taken_over(family: str) -> None:
    head = tiny_head(family, tiny_target())
    assert {weight.dtype for weight in head.cast(torch.int8).parameters()} == {torch.float32}


@pytest.mark.parametrize("family", IN_PARTS)
def test_under_autocast_a_part_is_the_function_itself(family: str, graphs: list[str]) -> None:
    target = tiny_target()
    head = tiny_head(family, target)
    head.compile_parts()
    with torch.autocast("cpu", torch.bfloat16):
        assert drafted(target, head) == drafted(target, tiny_head(family, target))


@pytest.mark.parametrize("family", IN_PARTS)
def test_parts_are_fed_with_what_they_were_compiled_for(family: str, graphs: list[str]) -> None:
    """Native code takes whatever memory it is given for numbers of the kind that it was compiled for."""
    target = Target(tiny_target().model.to(torch.bfloat16))
    head = tiny_head(family, target).cast(torch.bfloat16)
    assert head.compile_parts() == []
    assert isinstance(head, AutoregressiveHead)
    for part in head.compiled:
        part._function = lambda *tensors: pytest.fail(f"not for {[tensor.dtype for tensor in tensors]}")
    drafted(target, head)


@pytest.mark.parametrize("family", IN_PARTS)
def test_attached_again_a_head_keeps_what_was_compiled(family: str, graphs: list[str]) -> None:
    target = tiny_target()
    head = tiny_head(family, target)
    head.compile_parts()
    model = SpeculativeModel(target, head)
    expected = drafted(target, head)
    model.generate(**padded(FOUR), max_new_tokens=4, drafter="head+ngram", do_sample=False)
    target.output.weight.data.add_(0.0)
    assert len(graphs) == 2
    assert head.compiled
    assert drafted(target, head) == expected


@pytest.mark.parametrize("family", IN_PARTS)
def test_heads_that_differ_in_what_a_graph_does_not_hold_share_it(family: str, graphs: list[str]) -> None:
    target = tiny_target()
    head = tiny_head(family, target)
    head.compile_parts()
    head.set_calibration(((0.1, 1.2),))
    head.compile_parts()
    assert len(graphs) == 4
    assert len(set(graphs)) == 2


def test_what_a_targets_logits_are_scaled_by_is_part_of_a_graph(graphs: list[str]) -> None:
    for cap in (None, 5.0):
        target = tiny_target()
        target.config.final_logit_softcapping = cap
        tiny_head("eagle", target).compile_parts()
    assert len(set(graphs)) == len(graphs) == 4


def test_with_gradients_a_part_is_the_function_itself(graphs: list[str]) -> None:
    head = tiny_head("eagle3", tiny_target())
    head.compile_parts()
    assert isinstance(head, AutoregressiveHead)
    states = torch.randn(2, 1, 3, head.config.hidden_size)
    head.compiled[1](*states)[1].sum().backward()
    assert head.midlayer.o_proj.weight.grad is not None


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def joined(self, one: Tensor, other: Tensor) -> tuple[Tensor]:
        return (self.linear(one) - other,)


EXAMPLE = [torch.randn(BATCH, LENGTH, 4), torch.randn(BATCH, LENGTH, 4)]


def test_a_part_that_gives_something_else_compiled_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Sum()
    monkeypatch.setattr(compiled_part, "native_function", lambda *args: lambda inputs: [inputs[0] + inputs[1]])
    part = CompiledPart(owner, owner.joined, EXAMPLE, "")
    assert "gives something else" in str(part.reason)
    with torch.no_grad():
        assert torch.equal(part(*EXAMPLE)[0], owner.joined(*EXAMPLE)[0])


def test_a_part_that_gives_nothing_but_zeros_is_no_wrong_one(graphs: list[str]) -> None:
    owner = Sum()
    nn.init.zeros_(owner.linear.weight)
    nn.init.zeros_(owner.linear.bias)
    assert CompiledPart(owner, owner.joined, [EXAMPLE[0], torch.zeros_like(EXAMPLE[1])], "").reason is None


def test_a_part_that_cannot_be_packed_says_why() -> None:
    owner = Sum().to(torch.float64)
    part = CompiledPart(owner, owner.joined, [each.double() for each in EXAMPLE], "")
    assert part.reason == "joined: a Linear in it cannot be packed"


def test_a_mix_compiles_what_it_is_made_of(graphs: list[str]) -> None:
    target = tiny_target()
    expected = drafted(target, MixedDrafter([tiny_head("eagle3", target), NgramDrafter()]).attach(target))
    mix = MixedDrafter([tiny_head("eagle3", target), NgramDrafter()]).attach(target)
    before = mix.runs_as
    assert SpeculativeModel(target, mix).compile(progress=False).compiled
    assert mix.runs_as != before, "costs that were measured before hold no longer"
    assert drafted(target, mix) == expected


@pytest.mark.parametrize("family", ["assistant"])
def test_an_assistants_costs_depend_on_how_it_runs(family: str) -> None:
    target = tiny_target()
    assert tiny_head(family, target).runs_as != tiny_head(family, target).cast(torch.bfloat16).runs_as


def test_an_assistants_weights_are_looked_at_when_a_text_goes_on(graphs: list[str]) -> None:
    target = tiny_target()
    looked: list[bool] = []
    assistant = Assistant(tiny_target(layers=2).model).attach(target)
    assistant.model.refresh = lambda: looked.append(True)  # type: ignore[method-assign]
    model = SpeculativeModel(target, assistant)
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(torch.tensor(FOUR[:1]), **settings)
    looked.clear()
    model.generate(out.sequences, past=out.past, **settings)
    assert looked


def test_an_assistant_compiles_its_model(graphs: list[str]) -> None:
    target = tiny_target()
    assistant = Assistant(tiny_target(layers=2).model).attach(target)
    expected = drafted(target, assistant)
    assert assistant.compile_parts() == []
    assert assistant.runs_as == "2 layers compiled"
    assert drafted(target, assistant) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", IN_PARTS)
def test_native_parts_give_what_the_parts_give(family: str, dtype: torch.dtype) -> None:
    target = Target(tiny_target().model.to(dtype))
    head = tiny_head(family, target, draft_vocab=VOCAB - 3).cast(dtype)
    assert head.compile_parts() == []
    assert isinstance(head, AutoregressiveHead)
    assert all(part.reason is None for part in head.compiled)
    expected = drafted(target, tiny_head(family, target, draft_vocab=VOCAB - 3).cast(dtype))
    if dtype == torch.float32:  # rounded as coarsely as bfloat16 is, guesses change
        assert drafted(target, head) == expected
