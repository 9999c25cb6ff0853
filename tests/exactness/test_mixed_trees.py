"""Merged trees under every exact rule, by enumeration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from enumeration import (
    EXACT,
    ROUNDED,
    WRONG,
    Branches,
    EveryDraw,
    Guesses,
    Proposals,
    RowRule,
    error_of,
    every,
    expected_accepted,
    grown,
    grown_tree,
    only,
    top_k_tree,
)
from tiny import tiny_head, tiny_target
from toy_targets import PROMPT, ROOT, Mixture, Table
from transformers import LogitsProcessorList

from mtp.attention import AttentionPass
from mtp.drafters import Budget, MixedDrafter, NgramDrafter, TargetStates
from mtp.drafters.merging import graft, merge
from mtp.drafters.reliability import Reliability
from mtp.heads import HEADS
from mtp.heads.growing import GrowingHead
from mtp.rules import RULES
from mtp.sampling import TargetSampler
from mtp.tree import TokenTree
from mtp.verify import Distribution, Randomness, reject_row, sampled_walk_row, traverse_row

DRAWN_RULES = [pytest.param(rule.verify_row, id=rule.name) for rule in RULES.values() if rule.drawn]


# ---- likeliest guesses of all parts ---------------------------------------------------------------------------------


def sampled(tree: TokenTree, raw: Table, rule: str) -> RowRule:
    """What `TargetSampler.verify` decides about a tree that depends on no draws, asked for this rule."""

    def verify_row(
        children: list[list[int]], tokens: list[int], p: Distribution, q: Distribution, randomness: Randomness
    ) -> tuple[list[int], int]:
        logits = torch.stack([raw(context).log() for context in Guesses.of(tree).contexts])[None]
        sampler = TargetSampler(LogitsProcessorList(), do_sample=True, randomness=randomness, rule=RULES[rule])
        verdict = sampler.verify(sampler.at_nodes(tree, logits, [list(PROMPT)], [0]))
        return verdict.path[0, : verdict.counts[0]].tolist(), int(verdict.next_token)

    return verify_row


@pytest.mark.parametrize("rule", [rule.name for rule in RULES.values() if rule.exact])
@pytest.mark.parametrize("nodes", [3, 6, 20])
def test_merged_trees_give_the_targets_law(rule: str, nodes: int) -> None:
    raw = Table(30)
    tree = merge([top_k_tree(Table(31)), top_k_tree(Table(32), width=3)], Reliability(4)).tree.worthiest(nodes)
    assert tree.num_nodes > 2
    assert error_of(only(tree), sampled(tree, raw, rule), raw) < ROUNDED


# ---- some drawn, some not -------------------------------------------------------------------------------------------


def tree(*paths: tuple[int, ...]) -> TokenTree:
    """The tree of these paths, each behind the one that it goes on from; the longer, the less it is worth."""
    parents = [-1, *(1 + paths.index(path[:-1]) if len(path) > 1 else 0 for path in paths)]
    tokens = [ROOT, *(path[-1] for path in paths)]
    found = TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]))
    return replace(found, worth=0.5**found.depths)


def grafted(q: Table, guesses: TokenTree, branching: int, expanded: list[int]) -> Proposals:
    return every(lambda branches: graft(grown(q, branching, expanded, branches), guesses, nodes=16))


GUESSES = {
    "one": tree((2,)),
    "a path": tree((1,), (1, 3), (1, 3, 0)),
    "bushes": tree((0,), (2,), (0, 1), (0, 2), (2, 3)),
}


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
@pytest.mark.parametrize("guesses", [pytest.param(guesses, id=name) for name, guesses in GUESSES.items()])
@pytest.mark.parametrize(("branching", "expanded"), [(1, [1, 1]), (2, [1, 1]), (3, [1])])
def test_guesses_behind_drawn_children_keep_the_law(
    verify_row: RowRule, guesses: TokenTree, branching: int, expanded: list[int]
) -> None:
    p, q = Table(40), Table(41)
    assert error_of(grafted(q, guesses, branching, expanded), verify_row, p, length=4) < EXACT


def test_what_was_drawn_and_guessed_is_one_node_with_what_both_have_below() -> None:
    drawn = TokenTree.from_parents(
        torch.tensor([[ROOT, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]), q=torch.full((1, 4, 4), 0.25)
    )
    both = graft(drawn, tree((1,), (1, 0), (0,), (1, 3)), nodes=16)
    assert both.fixed is not None
    found = {tuple(both.path_tokens(0, node)[1:]): bool(both.fixed[0, node]) for node in range(1, both.num_nodes)}
    assert found == {(1,): False, (2,): False, (1, 3): False, (1, 0): True, (0,): True}
    assert both.children(0)[0] == [1, 2, 5], "drawn children come first"


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_guesses_that_pass_for_drawn_ones_are_detected(verify_row: RowRule) -> None:
    q = Table(41)
    proposals = [
        (chance, Guesses(each.children, each.contexts, each.q))
        for chance, each in grafted(q, GUESSES["one"], branching=1, expanded=[1])
    ]
    assert error_of(proposals, verify_row, Table(40)) > WRONG


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_guesses_may_be_chosen_by_any_draws(verify_row: RowRule) -> None:
    """Refusing one says nothing of the draw that chose it: it is refused as often, whatever it is."""

    def propose(branches: Branches) -> TokenTree:
        drawn = grown(Table(41), 2, [1], branches)
        first, second = drawn.tokens[0, 1:].tolist()
        return graft(drawn, tree((first,), (first, second)), nodes=9)

    assert error_of(every(propose), verify_row, Table(40), length=4) < EXACT


@pytest.mark.parametrize("nodes", [4, 5, 6])
def test_no_more_guesses_are_added_than_there_is_room_for(nodes: int) -> None:
    def propose(branches: Branches) -> TokenTree:
        found = graft(grown(Table(41), 2, [1], branches), GUESSES["bushes"], nodes)
        assert found.num_nodes <= nodes
        return found

    assert error_of(every(propose), traverse_row, Table(40)) < EXACT


@pytest.mark.parametrize("family", sorted(HEADS))
@pytest.mark.parametrize("verify_row", DRAWN_RULES)
def test_a_mix_with_a_head_that_draws_gives_the_targets_law(verify_row: RowRule, family: str) -> None:
    target = tiny_target("llama", vocab=4, layers=2)
    sizes = {"depth": 2} if issubclass(HEADS[family], GrowingHead) else {}
    head = tiny_head(family, target, draft_vocab=3, steps=2, **sizes)
    mix = MixedDrafter([NgramDrafter(), head])
    ids = torch.tensor([[2, 3, 1, 2, 3, 1]])
    cache = target.new_cache(1, 16)
    output = target.forward(ids, cache, AttentionPass.over_chain(6, cache.lengths, 0), mix.taps)
    sizes_seen = set()

    def propose(branches: Branches) -> TokenTree:
        mix.start(TargetStates(ids, output.hidden, output.taps, torch.tensor([6])), 16)
        found = mix.propose(torch.tensor([2]), Budget(8), EveryDraw(temperature=1.3, branches=branches))
        assert found.fixed is not None
        assert found.fixed.any()
        sizes_seen.add(found.num_nodes)
        return found

    assert error_of(every(propose), verify_row, Table(20, vocab=4)) < EXACT
    assert max(sizes_seen) <= 8


@pytest.mark.parametrize("verify_row", [reject_row, traverse_row])
def test_guesses_that_are_mostly_right_add_to_what_a_drawn_tree_keeps(verify_row: RowRule) -> None:
    p = Table(42, sharpness=4.0)
    q = Mixture(p, 43, 0.3)
    guesses = merge([top_k_tree(p, width=1, depth=3)], Reliability(2)).tree
    alone, both = grown_tree(q, 2, [1, 1]), grafted(q, guesses, 2, [1, 1])
    assert expected_accepted(both, verify_row, p) > 1.1 * expected_accepted(alone, verify_row, p)
    assert expected_accepted(both, verify_row, p) > expected_accepted(only(guesses), sampled_walk_row, p)
