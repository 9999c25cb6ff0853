"""Acceptance rules: the batched walk, the lazy one and the plain definition agree."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_tree, tiny_head, tiny_target
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from mtp.model import SpeculativeModel
from mtp.processors import RowProcessors
from mtp.rules import AUTO, RULES, available_rules, rule_for
from mtp.sampling import TargetSampler
from mtp.tree import TokenTree
from mtp.typical import DELTA, EPSILON, typical_row
from mtp.verify import Randomness, reject_row, traverse_row, walk, walk_row


@given(st.integers(0, 100_000), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_walk_and_lazy_walk_agree(seed: int, nodes: int, batch: int, ragged: bool) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, batch, nodes, vocab=4, ragged=ragged)
    choices = torch.tensor([[rng.randrange(4) for _ in range(nodes)] for _ in range(batch)])
    verdict = walk(tree, choices)
    for row in range(batch):
        path, token = walk_row(
            tree.children(row),
            tree.tokens[row].tolist(),
            lambda node: int(choices[row, node]),  # noqa: B023
        )
        assert verdict.path[row, : verdict.counts[row]].tolist() == path
        assert int(verdict.next_token[row]) == token


@given(st.integers(0, 100_000), st.integers(1, 12))
def test_walk_gives_valid_indices_as_padding(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 3, nodes, vocab=3 if nodes < 8 else 4, ragged=True)
    verdict = walk(tree, torch.randint(0, 3, (3, nodes), generator=torch.Generator().manual_seed(seed)))
    assert verdict.path.shape == (3, nodes)
    assert ((verdict.path >= 0) & (verdict.path < nodes)).all()
    assert (verdict.path[:, 0] == 0).all()


def test_padding_is_never_accepted() -> None:
    tree = TokenTree.chain(torch.tensor([1]), torch.tensor([[2, 3]]), torch.tensor([1]))
    verdict = walk(tree, torch.tensor([[2, 3, 4]]))
    assert verdict.counts.tolist() == [2]
    assert verdict.next_token.tolist() == [3]


def test_a_whole_accepted_chain_gives_a_bonus_token() -> None:
    verdict = walk(TokenTree.chain(torch.tensor([1]), torch.tensor([[2, 3]])), torch.tensor([[2, 3, 9]]))
    assert verdict.path.tolist() == [[0, 1, 2]]
    assert verdict.next_token.tolist() == [9]


class Never(Randomness):
    """Refuses whatever can be refused and remembers what is left to draw from."""

    def accept(self, probability: float) -> bool:
        return probability >= 1

    def draw(self, weights: torch.Tensor) -> int:
        self.left = weights
        return int(weights.argmax())


DRAWN_RULES = pytest.mark.parametrize("rule", [reject_row, traverse_row])


@DRAWN_RULES
def test_a_draw_that_the_target_rules_out_is_refused_and_never_drawn(rule: Callable[..., Any]) -> None:
    p, q = torch.tensor([0.0, 0.4, 0.6]), torch.tensor([0.8, 0.1, 0.1])
    randomness = Never()
    path, _ = rule([[1], []], [0, 0], lambda _: p, lambda _: q, randomness)
    assert path == [0]
    assert float(randomness.left[0]) == 0
    torch.testing.assert_close(randomness.left.sum(), torch.tensor(1.0, dtype=torch.float64))


@DRAWN_RULES
def test_children_of_no_probability_leave_the_target_as_it_is(rule: Callable[..., Any]) -> None:
    """More children than tokens the drafter gives any probability: nothing may become NaN."""
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 0.0, 0.0])
    randomness = Never()
    path, _ = rule([[1, 2, 3], [], [], []], [0, 0, 1, 2], lambda _: p, lambda _: q, randomness)
    assert path == [0]
    assert randomness.left.tolist() == [0.0, 0.5, 0.5]


@DRAWN_RULES
def test_identical_distributions_accept_the_first_path(rule: Callable[..., Any]) -> None:
    """In float32 too, where the drafter's and the target's softmax may round differently."""
    p = torch.tensor([0.2, 0.5, 0.3])
    children, tokens = [[1, 2], [3], [], []], [0, 2, 1, 0]
    path, _ = rule(children, tokens, lambda _: p, lambda _: p, Never())
    assert path == [0, 1, 3]
    nearly = p * (1 + 1e-7)
    path, token = rule(children, tokens, lambda _: p, lambda _: nearly, Randomness(torch.Generator().manual_seed(0)))
    assert path == [0, 1, 3]
    assert token in range(3)


@DRAWN_RULES
def test_a_target_that_is_no_distribution_is_not_accepted_in_silence(rule: Callable[..., Any]) -> None:
    """A processor that rules out every token leaves NaN: as in plain sampling, that is an error."""
    broken, q = torch.full((3,), float("nan")), torch.tensor([0.2, 0.5, 0.3])
    with pytest.raises(RuntimeError, match="nan"):
        rule([[1, 2], [], []], [0, 2, 1], lambda _: broken, lambda _: q, Randomness())


class Asked:
    """A distribution that notes at which nodes it was asked for."""

    def __init__(self, probs: list[list[float]]):
        self.probs = torch.tensor(probs)
        self.nodes: list[int] = []

    def __call__(self, node: int) -> torch.Tensor:
        self.nodes.append(node)
        return self.probs[node]


TWO_LEVELS = [[1, 2], [3, 4], [5, 6], [], [], [], []]


def test_traversal_asks_for_nothing_below_a_child_that_the_target_rules_out() -> None:
    q = torch.tensor([0.5, 0.3, 0.2])
    # Node 1 is token 0, which the target never says; node 2 is accepted with its child 5 for certain.
    p = Asked([[0.0, 1.0, 0.0], *[[0.1, 0.1, 0.8]] * 6])
    path, _ = traverse_row(TWO_LEVELS, [0, 0, 1, 0, 1, 2, 0], p, lambda _: q, Never())
    assert path == [0, 2, 5]
    assert p.nodes == [0, 2, 5]


def test_traversal_asks_each_node_at_most_once() -> None:
    q = torch.tensor([0.5, 0.3, 0.2])
    p = Asked([[0.3, 0.35, 0.35]] * 7)
    path, _ = traverse_row(TWO_LEVELS, [0, 0, 1, 0, 1, 0, 1], p, lambda _: q, Never())
    assert path == [0]
    assert p.nodes == [0, 1, 2]  # a refused leaf's own distribution is not needed


# ---- typical acceptance -------------------------------------------------------------------------------------------


def test_a_guess_is_plausible_above_the_threshold_of_the_targets_entropy() -> None:
    certain, open_ = [0.9, 0.05, 0.05], [0.4, 0.35, 0.25]
    for probs, x in [(certain, 1), (certain, 0), (open_, 2)]:
        p = torch.tensor(probs)
        threshold = min(EPSILON, DELTA * math.exp(-sum(-value * math.log(value) for value in probs)))
        path, _ = typical_row([[1], []], [0, x], lambda _: p, lambda _: p, Never())  # noqa: B023
        assert (len(path) == 2) == (probs[x] > threshold)
    assert certain[1] < EPSILON < open_[2]


def test_the_longest_plausible_path_is_kept_and_of_several_the_likeliest() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    children = [[1, 2], [], [3, 4], [], []]
    path, _ = typical_row(children, [0, 0, 1, 2, 1], lambda _: p, lambda _: p, Never())
    assert path == [0, 2, 4]


def test_behind_the_kept_path_the_target_chooses() -> None:
    """Nothing is plausible below node 1: the token after it is drawn from the target there, which is asked once."""
    p = Asked([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    path, token = typical_row([[1], [2], []], [0, 1, 0], p, p, Never())
    assert (path, token) == ([0, 1], 2)
    assert p.nodes == [0, 1]


# ---- rules by name ------------------------------------------------------------------------------------------------


def test_rules_are_found_by_name_and_auto_is_exact() -> None:
    assert available_rules() == [AUTO, *RULES]
    for do_sample in (False, True):
        assert rule_for(AUTO, do_sample) is RULES["walk"]
    assert rule_for(AUTO, True, "traversal") is RULES["traversal"]
    assert rule_for(AUTO, False, "traversal") is RULES["walk"]
    assert rule_for("traversal", do_sample=True) is RULES["traversal"]
    assert [name for name, rule in RULES.items() if not rule.exact] == ["typical"]


def test_unknown_rules_and_rules_for_sampling_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rule='traverse'.*expected one of auto, walk.*Did you mean 'traversal'"):
        rule_for("traverse", do_sample=True)
    for rule in RULES.values():
        if not rule.greedy:
            with pytest.raises(ValueError, match=f"rule='{rule.name}' is for sampling"):
                rule_for(rule.name, do_sample=False)


# ---- which processors look at the tokens --------------------------------------------------------------------------


def test_subclasses_of_plain_warpers_count_as_looking_at_tokens() -> None:
    class Mine(TopKLogitsWarper):
        pass

    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5), Mine(3), RepetitionPenaltyLogitsProcessor(1.2)])
    found = RowProcessors(processors, batch_size=2)
    assert found.token_processors == ["Mine", "RepetitionPenaltyLogitsProcessor"]
    assert found.in_order == ["Mine"]


@given(st.integers(0, 10_000))
def test_each_node_is_penalised_for_its_own_path_only(seed: int) -> None:
    """Greedy with a repetition penalty: every node's choice is the one that its own text gives alone."""
    rng = random.Random(seed)
    tree = random_tree(rng, 1, 8, vocab=6)
    logits = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(seed))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    sampler = TargetSampler(processors, do_sample=False)
    verdict = sampler.verify(sampler.at_nodes(tree, logits, [[5, 4]], [0]))
    node, text = 0, [5, 4, int(tree.tokens[0, 0])]
    expected = [0]
    while True:
        scores = processors(torch.tensor([text]), logits[0, node : node + 1].clone())
        token = int(scores.argmax())
        child = next((c for c in tree.children(0)[node] if int(tree.tokens[0, c]) == token), None)
        if child is None:
            break
        expected.append(child)
        node, text = child, [*text, token]
    assert verdict.path[0, : verdict.counts[0]].tolist() == expected
    assert int(verdict.next_token[0]) == token


def test_logits_handed_to_verify_are_not_changed() -> None:
    tree = random_tree(random.Random(0), 2, 5, vocab=6)
    logits = torch.randn(2, 5, 6)
    before = logits.clone()
    for processors in ([TopKLogitsWarper(2)], [RepetitionPenaltyLogitsProcessor(3.0), TemperatureLogitsWarper(0.3)]):
        sampler = TargetSampler(LogitsProcessorList(processors), True, 2)
        sampler.verify(sampler.at_nodes(tree, logits, [[1], [2]], [0, 1]))
        assert torch.equal(logits, before)


# ---- the rule that is taken when none is named ----------------------------------------------------------------------


class Stateful(LogitsProcessor):
    """Not known to Transformers or to us: it may keep anything."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("medusa", {"nodes": 6}, "traversal"),
        ("medusa", {"nodes": 6, "do_sample": False}, "walk"),
        ("medusa", {"nodes": "auto"}, "walk"),  # a seed would not give its text again
        ("medusa", {"nodes": 6, "logits_processor": LogitsProcessorList([Stateful()])}, "walk"),
        ("medusa", {"nodes": 6, "rule": "rejection"}, "rejection"),
        ("eagle3", {"nodes": 6, "temperature": 0.6}, "walk"),
        ("eagle3", {"nodes": 6}, "traversal"),
    ],
)
def test_auto_is_the_rule_that_keeps_most_where_trees_have_a_fixed_size(
    family: str, options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def watched(*arguments: Any) -> TargetSampler:
        seen.append(arguments[-1].name)
        return TargetSampler(*arguments)

    monkeypatch.setattr("mtp.model.TargetSampler", watched)
    target = tiny_target()
    model = SpeculativeModel(target, tiny_head(family, target))
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **{"do_sample": True, **options})
    assert seen == [expected]
