"""Every acceptance rule against the target's law, on trees of its kind; and the one rule that is meant to leave it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from enumeration import (
    BUSH,
    CHAIN,
    EXACT,
    LEFT,
    SPLIT,
    UNEVEN,
    WRONG,
    Branches,
    Guesses,
    Proposals,
    continued,
    distance,
    draw_without_replacement,
    drawn_tree,
    error_of,
    every,
    law_of,
    only,
    top_k_tree,
)
from tiny import random_tree
from toy_targets import ROOT, Certain, Mixture, Processed, Table, Tokens, ToyGrammar, V
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from mtp.drafters import Budget
from mtp.growth import BestFirstGrowth
from mtp.rules import RULES, Rule
from mtp.tree import TokenTree
from mtp.typical import typical_row
from mtp.verify import Distribution, Randomness, sampled_walk_row, verdict_of, walk

EXACT_RULES = [pytest.param(rule, id=rule.name) for rule in RULES.values() if rule.exact]


def trees_for(rule: Rule, q: Table, shape: tuple[int, ...] = SPLIT) -> Proposals:
    """What a drafter may propose to a rule: all draws of a shape, or its likeliest children."""
    return drawn_tree(q, shape) if rule.drawn else only(top_k_tree(q, depth=3))


# ---- every exact rule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("vocab", [4, 5])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_text_has_the_targets_law(rule: Rule, vocab: int, share: float) -> None:
    """Drafters that know nothing, half, and all of the target."""
    p = Table(5, vocab)
    assert error_of(trees_for(rule, Mixture(p, 6, share)), rule.verify_row, p) < EXACT


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_tokens_that_the_target_rules_out_are_never_said(rule: Rule) -> None:
    """Two children a node, three deep; of four tokens the target has two."""
    p = Table(7, zeros=2)
    assert error_of(trees_for(rule, Mixture(p, 8, 0.5), LEFT), rule.verify_row, p, length=4) < EXACT


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("shape", "vocab"), [(CHAIN, 5), (UNEVEN, 4), (BUSH, 3)])
def test_trees_of_any_shape_keep_the_law(rule: Rule, shape: tuple[int, ...], vocab: int) -> None:
    p, q = Table(9, vocab), Table(10, vocab)
    assert error_of(trees_for(rule, q, shape), rule.verify_row, p, length=4) < EXACT


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_processors_that_look_at_the_text_keep_the_law(rule: Rule) -> None:
    """Penalties, a grammar and top-p: a node's distribution depends on the whole path to it."""
    raw = Table(17, vocab=5)
    p = Processed(
        raw, LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), ToyGrammar(), TopPLogitsWarper(0.8)])
    )
    assert p((1,)).count_nonzero() < 5
    proposals = trees_for(rule, Mixture(raw, 18, 0.5), shape=(-1, 0, 0, 1, 3))
    assert error_of(proposals, rule.verify_row, p, length=4) < EXACT


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_text_that_is_cut_at_an_end_token_keeps_its_law(rule: Rule) -> None:
    p, q = Table(11), Table(12)
    end = int(p(()).argmax())
    assert error_of(trees_for(rule, q, UNEVEN), rule.verify_row, p, length=4, end=end) < EXACT


def ragged(branches: Branches, q: Table) -> TokenTree:
    """Two rows of the same draws; the last nodes of the second are padding."""
    contexts: list[Tokens] = [()]
    for node in range(len(UNEVEN)):
        for token in draw_without_replacement(branches, q(contexts[node]).tolist(), UNEVEN.count(node)):
            contexts.append((*contexts[node], token))
    tokens = torch.tensor([[ROOT, *(context[-1] for context in contexts[1:])]]).expand(2, -1)
    tree = TokenTree.from_parents(tokens, torch.tensor([UNEVEN, UNEVEN]))
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    dense = torch.stack([q(context) for context in contexts]).expand(2, -1, -1)
    return TokenTree(tree.tokens, tree.parents, tree.depths, valid, q=dense)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("row", [0, 1])
def test_each_row_of_a_ragged_batch_keeps_its_law(rule: Rule, row: int) -> None:
    p, q = Table(13), Table(14)
    if rule.drawn:
        proposals = every(lambda branches: ragged(branches, q), row)
    else:
        proposals = only(random_tree(random.Random(1), batch=2, nodes=7, vocab=V, ragged=True), row)
    assert error_of(proposals, rule.verify_row, p) < EXACT


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_target_without_doubt_gives_its_own_greedy_text(rule: Rule) -> None:
    p, q = Certain(15), Table(16)
    assert error_of(trees_for(rule, q, UNEVEN), rule.verify_row, p, length=4) < EXACT


# ---- the walk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [0, 2])
def test_walk_over_every_choice_of_the_target_gives_the_targets_law(zeros: int) -> None:
    """The walk of a whole batch: one row for each way the target may choose at all nodes at once."""
    p, q = Table(1, zeros=zeros), Table(2)
    tree = top_k_tree(q)
    contexts = Guesses.of(tree).contexts
    choices = torch.tensor(list(itertools.product(range(V), repeat=tree.num_nodes)))
    at_node = torch.stack([p(context) for context in contexts])
    weights = at_node[torch.arange(tree.num_nodes), choices].prod(1)
    verdict = walk(tree.select_rows(torch.zeros(len(choices), dtype=torch.long)), choices)
    sums: dict[Tokens, float] = {}
    for path, count, token, weight in zip(
        verdict.path.tolist(), verdict.counts.tolist(), verdict.next_token.tolist(), weights.tolist(), strict=True
    ):
        tokens = (*contexts[path[count - 1]], token)
        sums[tokens] = sums.get(tokens, 0.0) + weight
    assert distance(continued(sums, p), p) < EXACT


def test_walk_is_exact_on_trees_of_any_shape() -> None:
    for seed in range(8):
        tree = random_tree(random.Random(seed), nodes=7, vocab=V)
        assert error_of(only(tree), sampled_walk_row, Table(seed), length=4) < EXACT


def test_pruning_top_k_children_by_value_keeps_the_walk_exact() -> None:
    p, q = Table(3), Table(4)
    growth = BestFirstGrowth(torch.tensor([ROOT]), Budget(4), width=3)
    growth.add(q(()).log()[None, None], torch.arange(V))
    tokens, _, _ = growth.frontier()
    growth.add(torch.stack([q((token,)).log() for token in tokens[0].tolist()])[None], torch.arange(V))
    assert error_of(only(growth.tree()), sampled_walk_row, p) < EXACT


def test_greedy_walk_commits_the_targets_own_greedy_tokens() -> None:
    for seed in range(60):
        p = Table(seed)
        tree = random_tree(random.Random(seed), nodes=8, vocab=V, ragged=True)
        guesses = Guesses.of(tree)
        verdict = walk(tree, torch.tensor([[int(p(context).argmax()) for context in guesses.contexts]]))
        deepest = int(verdict.path[0, verdict.counts[0] - 1])
        tokens = (*guesses.contexts[deepest], int(verdict.next_token))
        greedy: Tokens = ()
        while len(greedy) < len(tokens):
            greedy = (*greedy, int(p(greedy).argmax()))
        assert tokens == greedy
        # As far as the tree knows: the greedy text leaves it exactly at the committed path's end.
        assert all(guesses.tokens[child] != tokens[-1] for child in guesses.children[deepest])


def test_a_drafter_that_has_seen_the_targets_choice_is_detected() -> None:
    """The control for the walk."""

    def seeing(
        children: list[list[int]], tokens: list[int], p: Distribution, q: Distribution, randomness: Randomness
    ) -> tuple[list[int], int]:
        path, token = sampled_walk_row(children, tokens, p, q, randomness)
        return (path, token) if len(path) > 1 else (path, tokens[1])

    assert error_of(only(top_k_tree(Table(6))), seeing, Table(5)) > WRONG


# ---- typical acceptance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_typical_acceptance_leaves_the_targets_law(share: float) -> None:
    p = Table(5)
    assert not RULES["typical"].exact
    assert error_of(only(top_k_tree(Mixture(p, 6, share))), RULES["typical"].verify_row, p) > WRONG


def test_typical_acceptance_of_nothing_is_the_target() -> None:
    p = Table(5)

    def strict(*arguments: object) -> tuple[list[int], int]:
        return typical_row(*arguments, epsilon=1.0, delta=float("inf"))  # type: ignore[arg-type]

    law = law_of(only(top_k_tree(p)), strict, p)
    assert distance(law, p) < EXACT


def test_verdict_of_rows_pads_shorter_paths() -> None:
    verdict = verdict_of([([0, 2, 3], 7), ([0], 5)], torch.device("cpu"))
    assert verdict.path.tolist() == [[0, 2, 3], [0, 0, 0]]
    assert verdict.counts.tolist() == [3, 1]
    assert verdict.next_token.tolist() == [7, 5]
