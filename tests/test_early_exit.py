"""The target drafting with some of its layers: the same text, an untouched cache, and layers that are found."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, CORE, POSITIONS
from tiny import FOUR, padded, random_prompts, tiny_model, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from mtp.attention import AttentionPass
from mtp.drafters import Budget, Draw, EarlyExit, drafter_by_name
from mtp.drafters.base import RoundCosts
from mtp.drafters.early_exit import default_skip
from mtp.drafters.lm_tree import TreeShape
from mtp.model import SpeculativeModel
from mtp.skip_search import SkipCosts, _Comparison, calibrate_early_exit, search
from mtp.support import UnsupportedTargetError
from mtp.target import Target

NEW = 20
ONE = random_prompts([5], seed=3)
CHAIN = TreeShape(width=1, depth=4)
model_of = cache(tiny_model)


def reference(lm: PreTrainedModel, prompts: list[list[int]], **settings: Any) -> Tensor:
    return lm.generate(**padded(prompts), **{"max_new_tokens": NEW, "do_sample": False, **settings})


def drafted(lm: PreTrainedModel, drafter: EarlyExit | str, prompts: list[list[int]], **settings: Any) -> Any:
    model = SpeculativeModel.from_target(lm, drafter)
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(**padded(prompts), **settings)


# ---- exact whatever is skipped ------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_of_ragged_rows_equals_transformers(architecture: str) -> None:
    lm = model_of(architecture)
    assert torch.equal(drafted(lm, "early_exit", FOUR).sequences, reference(lm, FOUR))


@pytest.mark.parametrize("skip", [(0,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("architecture", CORE)
def test_any_layers_may_be_skipped(architecture: str, skip: tuple[int, ...]) -> None:
    lm = model_of(architecture)
    assert torch.equal(drafted(lm, EarlyExit(skip), ONE).sequences, reference(lm, ONE))


@pytest.mark.parametrize("prompts", [ONE, FOUR], ids=["one", "ragged batch"])
@pytest.mark.parametrize("architecture", CORE)
def test_without_a_layer_skipped_every_guess_is_right(architecture: str, prompts: list[list[int]]) -> None:
    lm = model_of(architecture)
    out = drafted(lm, EarlyExit((), CHAIN), prompts, nodes=5, max_new_tokens=21)
    assert torch.equal(out.sequences, reference(lm, prompts, max_new_tokens=21))
    assert out.acceptance.mean_accepted_length == CHAIN.depth + 1


def test_rows_that_end_change_nothing_for_the_others() -> None:
    lm, ends = model_of("mistral"), [3, 4, 9, 14]
    out = drafted(lm, EarlyExit([1]), FOUR, eos_token_id=ends)
    assert torch.equal(out.sequences, reference(lm, FOUR, eos_token_id=ends))
    assert len({len(kept) for kept in out.kept}) > 1


def test_a_conversation_goes_on_with_an_early_exit_made_anew_for_every_turn() -> None:
    lm = model_of("gemma3")
    model = SpeculativeModel.from_target(lm, "none")
    settings = {"max_new_tokens": NEW, "do_sample": False, "drafter": "early_exit"}
    first = model.generate(**padded(ONE), **settings, return_dict_in_generate=True)
    longer = [[*first.sequences[0, :12].tolist(), 5, 7]]
    assert torch.equal(model.generate(**padded(longer), **settings, past=first.past), reference(lm, longer))


def test_trees_as_large_as_pays_are_exact_too() -> None:
    lm = model_of("llama")
    assert torch.equal(drafted(lm, "early_exit", FOUR, nodes="auto").sequences, reference(lm, FOUR))


def test_drafting_goes_on_up_to_the_last_position() -> None:
    lm = model_of("gpt2")
    prompts = random_prompts([POSITIONS - 12], seed=5)
    out = drafted(lm, EarlyExit((), CHAIN), prompts, max_new_tokens=12)
    assert torch.equal(out.sequences, reference(lm, prompts, max_new_tokens=12))


@pytest.mark.parametrize("draw", [None, Draw()], ids=["likeliest", "drawn"])
def test_the_targets_cache_is_left_as_it_was(draw: Draw | None) -> None:
    target = Target(model_of("llama"))
    ids = torch.tensor(random_prompts([9], seed=6))
    kept = target.new_cache(1, 12)  # so small that drafting makes it grow
    target.forward(ids, kept, AttentionPass.over_chain(9, kept.lengths, 0))
    kept.commit(torch.arange(9)[None], torch.tensor([9]), 9)
    before = [layer.keys[:, :, :9].clone() for layer in kept.tree_layers]
    drafter = EarlyExit([1]).attach(target)
    drafter.share(kept)
    tree = drafter.propose(torch.tensor([7]), Budget(12), draw)
    assert tree.num_nodes > 8
    assert kept.num_staged == 0
    assert kept.lengths.tolist() == [9]
    assert all(torch.equal(layer.keys[:, :, :9], keys) for layer, keys in zip(kept.tree_layers, before, strict=True))


def test_layers_are_themselves_again_after_a_pass_and_after_one_that_failed() -> None:
    target = tiny_target("llama")
    drafter = EarlyExit([1]).attach(target)
    kept = target.new_cache(1, 8)
    drafter.share(kept)
    drafter.propose(torch.tensor([7]), Budget(4))
    with pytest.raises(IndexError):
        drafter.propose(torch.tensor([10_000]), Budget(4))
    assert all("forward" not in layer.__dict__ for layer in target.layers)


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [[3], [-1], [0, 7]])
def test_layers_that_do_not_exist_are_refused(skip: list[int]) -> None:
    with pytest.raises(ValueError, match="has layers 0 to 2"):
        SpeculativeModel.from_target(model_of("llama"), EarlyExit(skip))


def test_one_layer_has_to_stay() -> None:
    with pytest.raises(ValueError, match="skip all 3 layers"):
        SpeculativeModel.from_target(model_of("llama"), EarlyExit(range(3)))


def test_a_layer_whose_keys_and_values_others_read_is_not_skipped() -> None:
    lm = model_of("gemma4")
    with pytest.raises(UnsupportedTargetError, match="read the keys and values of layer 1"):
        SpeculativeModel.from_target(lm, EarlyExit([1]))
    assert 1 not in default_skip(Target(lm))


def test_the_layers_to_skip_can_be_said_by_name() -> None:
    """So that every program can be told what a search has found."""
    found = drafter_by_name("early_exit:0,2")
    assert isinstance(found, EarlyExit)
    assert found.config.skip == (0, 2)
    model = SpeculativeModel.from_target(tiny_model("llama"), "none")
    mix = model.drafter_for("early_exit:1+ngram")
    assert mix is model.drafter_for("early_exit:1+ngram")
    assert mix.parts[0].skip == (1,)
    for name in ("early_exit:", "early_exit:1,", "early_exit:-1", "early_exit:all", "ngram:1"):
        with pytest.raises(ValueError, match=rf"No drafter '{name}'; there are early_exit, ngram"):
            drafter_by_name(name)
    with pytest.raises(ValueError, match="has layers 0 to 2"):
        model.drafter_for("early_exit:9")


def test_an_early_exit_alone_says_what_it_lacks() -> None:
    with pytest.raises(RuntimeError, match="attached to no target"):
        EarlyExit([1]).propose(torch.tensor([3]), Budget(4))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_tree_has_nodes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one node a level"):
        TreeShape(*sizes)


# ---- which layers to skip -----------------------------------------------------------------------------------------

DEAR = SkipCosts(RoundCosts((0.0, *[1.0 + 0.01 * nodes for nodes in range(8)]), 1.0, 1.0, 0.0), saved=0.25)


def idle_layers(lm: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """The model with layers that add nothing."""
    for layer in layers:
        block = lm.model.layers[layer]
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    return lm


def test_layers_that_do_nothing_are_found_and_skipped() -> None:
    target = Target(idle_layers(tiny_model("llama", layers=6), [1, 3, 4]))
    drafter = calibrate_early_exit(target, random_prompts([24, 17], seed=2), costs=DEAR)
    assert set(drafter.skip) >= {1, 3, 4}
    out = drafted(target.causal_lm, EarlyExit([1, 3, 4], CHAIN), ONE, nodes=5, max_new_tokens=21)
    assert out.acceptance.mean_accepted_length == CHAIN.depth + 1


def test_costs_are_measured_where_they_are_not_given() -> None:
    target = tiny_target("llama")
    drafter = calibrate_early_exit(target, random_prompts([12], seed=2), shape=CHAIN)
    assert drafter.config.shape == CHAIN
    lm = target.causal_lm
    assert torch.equal(drafted(lm, drafter, FOUR).sequences, reference(lm, FOUR))


def test_a_layer_that_others_need_is_not_tried() -> None:
    target = Target(model_of("gemma4"))
    assert 1 not in calibrate_early_exit(target, random_prompts([12], seed=2), costs=DEAR).skip


def test_agreement_is_that_of_the_first_guess_when_decoding() -> None:
    target = Target(model_of("gemma3"))  # layers with a window of 8 among them
    text, skip = random_prompts([20], seed=9)[0], (1,)
    comparison = _Comparison(target, text)
    drafter = EarlyExit(skip, CHAIN).attach(target)
    same = 0
    for at in range(1, len(text)):
        kept = target.new_cache(1, 64)
        ids = torch.tensor([text[:at]])
        target.forward(ids, kept, AttentionPass.over_chain(at, kept.lengths, 0))
        kept.commit(torch.arange(at)[None], torch.tensor([at]), at)
        drafter.share(kept)
        guess = int(drafter.propose(torch.tensor([text[at]]), Budget(2)).tokens[0, 1])
        same += guess == int(comparison.choices[at])
    first = _Comparison(target, text[:1]).hits(skip)
    assert 0 < same < len(text)
    assert comparison.hits(skip) == same + first


def test_texts_too_short_to_compare_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Found 2 texts, none of two tokens"):
        calibrate_early_exit(Target(model_of("llama")), [[], [3]], costs=DEAR)


def weights(skip: tuple[int, ...]) -> float:
    """Agreement of a model whose layer k is worth k / 10."""
    return max(1.0 - sum(skip) / 10, 0.0)


def test_the_search_gives_up_the_cheapest_layers_first() -> None:
    chosen = search(range(5), weights, lambda share, skipped: share * (1 + skipped), seconds=60)
    assert chosen.skip == (0, 1, 2)
    assert chosen.agreement == pytest.approx(0.7)


def test_the_search_looks_at_few_sets_and_stops_when_nothing_can_be_won() -> None:
    seen = []

    def agreement(skip: tuple[int, ...]) -> float:
        seen.append(skip)
        return weights(skip)

    search(range(8), agreement, lambda share, skipped: share * (1 + skipped), seconds=60)
    assert len(seen) < 8 + 7 + 6  # each layer alone, and then two or three sets a layer: all of them would be 33


def test_without_time_some_layer_is_skipped_all_the_same() -> None:
    assert len(search(range(5), weights, lambda share, skipped: share * (1 + skipped), seconds=0).skip) == 1


def test_better_guesses_and_fewer_layers_are_faster() -> None:
    rates = [DEAR.best_rate(agreement, skipped=2, depth=5) for agreement in (0.0, 0.4, 0.8, 1.0)]
    assert rates == sorted(rates)
    assert DEAR.best_rate(0.5, 3, 5) > DEAR.best_rate(0.5, 2, 5)
    # Free drafts that are always right: all six tokens for one pass of the target.
    free = SkipCosts(RoundCosts((0.0, *[1.0] * 7), 1.0, 1.0, 0.0), saved=0.5)
    assert free.best_rate(1.0, 2, 5) == pytest.approx(6.0)


def test_the_default_leaves_out_layers_of_the_middle() -> None:
    assert default_skip(tiny_target("llama", layers=8)) == (3, 5)
    assert default_skip(tiny_target("llama", layers=3)) == (1,)
