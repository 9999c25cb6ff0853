"""The library's own proposals and its sampler, end to end, by enumeration; and the trick by which heads draw."""

from __future__ import annotations

import pytest
import torch
from enumeration import (
    EXACT,
    ROUNDED,
    SPLIT,
    Branches,
    EveryDraw,
    Guesses,
    Proposals,
    RowRule,
    drawn_tree,
    error_of,
    every,
)
from scipy.stats import chisquare
from tiny import tiny_head, tiny_target
from toy_targets import PROMPT, Processed, Table, ToyGrammar, V
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from mtp.attention import AttentionPass
from mtp.drafters import Budget, Draw, TargetStates
from mtp.heads import HEADS
from mtp.heads.growing import GrowingHead
from mtp.heads.medusa import MedusaHead
from mtp.rules import RULES
from mtp.sampling import TargetSampler
from mtp.tree import TokenTree
from mtp.verify import Distribution, Randomness

DRAWN_RULES = [pytest.param(rule.verify_row, id=rule.name) for rule in RULES.values() if rule.drawn]


def head_proposals(family: str, nodes: int, draft_vocab: int) -> Proposals:
    """Every tree that a real (random, tiny) head may draw for one prompt."""
    target = tiny_target("llama", vocab=V + 1, layers=2)
    sizes = {"depth": 2} if issubclass(HEADS[family], GrowingHead) else {}
    head = tiny_head(family, target, draft_vocab=draft_vocab, steps=2, **sizes)
    if isinstance(head, MedusaHead):  # two children, each with a child of its own
        head.set_rank_accuracy(((0.5, 0.4), (0.5, 0.01)))
    ids = torch.tensor([[3, 1, 2]])
    cache = target.new_cache(1, 16)
    output = target.forward(ids, cache, AttentionPass.over_chain(3, cache.lengths, 0), head.taps)

    def propose(branches: Branches) -> TokenTree:
        head.start(TargetStates(ids, output.hidden, output.taps, torch.tensor([3])), 16)
        return head.propose(torch.tensor([2]), Budget(nodes), EveryDraw(temperature=1.3, branches=branches))

    return every(propose)


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
@pytest.mark.parametrize("family", sorted(HEADS))
@pytest.mark.parametrize(("nodes", "draft_vocab"), [(7, 3), (4, 4)])
def test_trees_drawn_by_real_heads_give_the_targets_law(
    verify_row: RowRule, family: str, nodes: int, draft_vocab: int
) -> None:
    assert error_of(head_proposals(family, nodes, draft_vocab), verify_row, Table(20, vocab=V + 1)) < EXACT


def through_sampler(raw: Table, processors: LogitsProcessorList, rule: str) -> RowRule:
    """The rule as `TargetSampler.verify` applies it, with processors, on the logits of a table."""

    def verify_row(
        children: list[list[int]], tokens: list[int], p: Distribution, q: Distribution, randomness: Randomness
    ) -> tuple[list[int], int]:
        parents = [next((at for at, below in enumerate(children) if node in below), -1) for node in range(len(tokens))]
        tree = TokenTree.from_parents(
            torch.tensor([tokens]),
            torch.tensor([parents]),
            q=torch.stack([q(below[0]) if below else torch.zeros(V).double() for below in children])[None],
        )
        logits = torch.stack([raw(context).log() for context in Guesses.of(tree).contexts])[None]
        sampler = TargetSampler(processors, do_sample=True, randomness=randomness, rule=RULES[rule])
        verdict = sampler.verify(sampler.at_nodes(tree, logits, [list(PROMPT)], [0]))
        return verdict.path[0, : verdict.counts[0]].tolist(), int(verdict.next_token)

    return verify_row


LOGITS_ALONE = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(2)]
TEXT_TOO = [RepetitionPenaltyLogitsProcessor(1.5), TopKLogitsWarper(3)]


@pytest.mark.parametrize(
    ("rule", "processors"),
    [
        pytest.param("rejection", LOGITS_ALONE, id="rejection, logits alone"),
        pytest.param("rejection", [*TEXT_TOO, ToyGrammar()], id="rejection, the text before a node and a grammar"),
        pytest.param("traversal", LOGITS_ALONE, id="traversal, logits alone"),
        pytest.param("traversal", TEXT_TOO, id="traversal, the text before a node"),
    ],
)
def test_sampler_applies_the_rule_to_the_processed_distribution(rule: str, processors: list[LogitsProcessor]) -> None:
    raw, prepared = Table(21), LogitsProcessorList(processors)
    proposals = drawn_tree(Table(22), SPLIT)
    assert error_of(proposals, through_sampler(raw, prepared, rule), Processed(raw, prepared)) < ROUNDED


# ---- the Gumbel trick that the enumeration replaces -----------------------------------------------------------------


def test_drawn_children_are_ordered_draws_without_replacement() -> None:
    q = Table(23)(())
    samples = 20_000
    drawn = Draw(generator=torch.Generator().manual_seed(1)).children(q.log().float().expand(samples, V), 2)
    pairs = [(a, b) for a in range(V) for b in range(V) if a != b]
    expected = [float(q[a] * q[b] / (1 - q[a])) * samples for a, b in pairs]
    observed = [int(((drawn[:, 0] == a) & (drawn[:, 1] == b)).sum()) for a, b in pairs]
    assert sum(observed) == samples
    total = sum(expected)
    assert chisquare(observed, [value * samples / total for value in expected]).pvalue > 1e-3
