"""Rules for drawn children: what drafters may do to a drawn tree, what they may not, and how much each rule keeps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from enumeration import (
    CHAIN,
    EXACT,
    LEFT,
    SPLIT,
    WRONG,
    Branches,
    EveryDraw,
    Guesses,
    RowRule,
    draw_without_replacement,
    drawn_tree,
    error_of,
    every,
    expected_accepted,
    grown_tree,
    only,
    top_k_tree,
    verdicts,
)
from toy_targets import Mixture, Table, Tokens, V

import mtp.verify
from mtp.growth import drawn_widths
from mtp.rules import RULES
from mtp.static_tree import static_tree
from mtp.tree import TokenTree
from mtp.verify import Distribution, Randomness, reject_row, sampled_walk_row, traverse_row

DRAWN_RULES = [pytest.param(rule.verify_row, id=rule.name) for rule in RULES.values() if rule.drawn]


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_every_token_may_be_drawn(verify_row: RowRule) -> None:
    p, q = Table(8, vocab=3), Table(9, vocab=3)
    assert error_of(grown_tree(q, branching=3, expanded=[1, 2]), verify_row, p) < EXACT


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_expanding_only_the_best_drawn_children_keeps_the_law(verify_row: RowRule) -> None:
    """Which nodes are expanded may depend on all draws above: what is below them is still drawn afresh."""
    p, q = Table(10), Table(11)
    assert error_of(grown_tree(q, branching=2, expanded=[1, 1]), verify_row, p) < EXACT
    p, q = Table(12, vocab=3), Table(13, vocab=3)
    assert error_of(grown_tree(q, branching=2, expanded=[1, 2, 1]), verify_row, p, length=4) < EXACT


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
@pytest.mark.parametrize("nodes", [2, 4])
def test_the_shapes_that_drawn_widths_gives_keep_the_law(verify_row: RowRule, nodes: int) -> None:
    branching, expanded = drawn_widths(nodes, depth=2)
    assert error_of(grown_tree(Table(15), branching, expanded), verify_row, Table(14)) < EXACT


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_drafts_over_a_part_of_the_vocabulary_keep_the_law(verify_row: RowRule) -> None:
    class Partial(Table):
        def row(self, context: Tokens) -> torch.Tensor:
            kept = super().row(context)
            kept[1] = 0.0
            return kept / kept.sum()

    assert error_of(drawn_tree(Partial(19), (-1, 0, 0, 1, 2)), verify_row, Table(18)) < EXACT


# ---- how much is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [pytest.param(CHAIN, id="chain"), pytest.param(LEFT, id="tree")])
def test_the_nearer_the_drafter_the_more_each_rule_keeps(shape: tuple[int, ...]) -> None:
    """Traversal keeps no less than rejection, and rejection no less than the walk over as many likeliest children."""
    p = Table(20, vocab=3)
    before = [0.0, 0.0, 0.0]
    for share in (0.5, 0.9):
        q = Mixture(p, 21, share)
        drawn, likeliest = drawn_tree(q, shape), only(top_k_tree(q, width=1 if shape == CHAIN else 2, depth=3))
        kept = [
            expected_accepted(likeliest, sampled_walk_row, p),
            expected_accepted(drawn, reject_row, p),
            expected_accepted(drawn, traverse_row, p),
        ]
        assert kept == sorted(kept)
        assert kept[2] > kept[1] + 1e-6
        assert all(now > then for now, then in zip(kept, before, strict=True))
        before = kept


def block_verification(
    children: list[list[int]],
    tokens: list[int],
    target_probs: Distribution,
    draft_probs: Distribution,
    randomness: Randomness,
) -> tuple[list[int], int]:
    """Block verification as Sun et al. (arXiv 2403.10444) write it down: from the first guess to the last, one uniform
    each, and the last success counts."""
    depth = len(tokens) - 1
    weight, end, left = 1.0, 0, target_probs(0)
    for at in range(depth + 1):
        p = target_probs(at)
        if at > 0:
            weight = min(1.0, weight * float(target_probs(at - 1)[tokens[at]] / draft_probs(at)[tokens[at]]))
        rest = p if at == depth else (weight * p - draft_probs(at + 1)).clamp_min(0)
        chance = weight if at == depth else float(rest.sum() / (rest.sum() + 1 - weight)) if at > 0 else 1.0
        if randomness.accept(chance):
            end, left = at, rest
    return list(range(end + 1)), randomness.draw(left)


def test_traversal_of_a_chain_is_block_verification() -> None:
    """Not only the same text: for every draft the same joint law of accepted length and next token."""
    p = Table(22, zeros=1)
    for _, guesses in drawn_tree(Mixture(p, 23, 0.6), CHAIN):
        difference: Counter[tuple[int, int]] = Counter()
        for sign, rule in ((1, traverse_row), (-1, block_verification)):
            for weight, path, token in verdicts(guesses, rule, p):
                difference[len(path), token] += sign * weight
        assert max(map(abs, difference.values())) < 1e-12


# ---- the check itself can fail --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verify_row", "kept"),
    [
        pytest.param(reject_row, "refused", id="rejection that leaves refused tokens in q"),
        pytest.param(reject_row, "p", id="rejection that draws from p after refusals"),
        pytest.param(traverse_row, "refused", id="traversal that leaves refused tokens in q"),
        pytest.param(traverse_row, "p", id="traversal that draws from p after refusals"),
        pytest.param(traverse_row, "weight", id="traversal that does not take refused paths off the weight"),
    ],
)
def test_a_refusal_that_forgets_something_is_detected(
    verify_row: RowRule, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposals, p = drawn_tree(Table(6), SPLIT), Table(5)
    assert error_of(proposals, verify_row, p) < EXACT
    right = mtp.verify._Odds.after_refusing

    def forgetful(odds: Any, x: int) -> Any:
        return dataclasses.replace(right(odds, x), **{kept: getattr(odds, kept)})

    monkeypatch.setattr(mtp.verify._Odds, "after_refusing", forgetful)
    assert error_of(proposals, verify_row, p) > WRONG


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_pruning_drawn_children_by_value_is_detected(verify_row: RowRule) -> None:
    q = Table(6)

    def propose(branches: Branches) -> Guesses:
        drawn = draw_without_replacement(branches, q(()).tolist(), 3)
        kept = sorted(drawn, key=lambda token: -float(q(())[token]))[:2]
        below = [(token,) for token in drawn if token in kept]
        return Guesses([[1, 2], [], []], [(), *below], [q(())])

    assert error_of(every(propose), verify_row, Table(5)) > WRONG


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_verifying_the_likeliest_children_as_if_they_were_drawn_is_detected(verify_row: RowRule) -> None:
    q = Table(6)
    tree = top_k_tree(q, depth=1)
    tree = TokenTree(tree.tokens, tree.parents, tree.depths, tree.valid, q=q(()).expand(1, 3, V))
    assert error_of(only(tree), verify_row, Table(5)) > WRONG


def test_traversal_over_draws_that_nodes_share_is_detected() -> None:
    """Why each node draws on its own: rejection, which follows one path, would not mind."""
    shape = static_tree(((0.5, 0.3, 0.1), (0.8, 0.3, 0.2)), 7)
    q = Table(17)
    dists = torch.stack([q((depth,)) for depth in range(2)])

    def propose(branches: Branches) -> TokenTree:
        drawn = EveryDraw(branches=branches).children(dists.log(), 3)
        tokens = [
            0,
            *(int(drawn[depth - 1, rank]) for depth, rank in zip(shape.depths[1:], shape.ranks[1:], strict=True)),
        ]
        q_at = torch.cat([dists, torch.zeros(1, V, dtype=torch.float64)])[torch.tensor(shape.depths)]
        return TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([shape.parents]), q=q_at[None])

    proposals = every(propose)
    assert error_of(proposals, reject_row, Table(16)) < EXACT
    assert error_of(proposals, traverse_row, Table(16)) > WRONG
