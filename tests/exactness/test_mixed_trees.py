"""Merged trees under every exact rule, by enumeration."""

from __future__ import annotations

import pytest
import torch
from enumeration import ROUNDED, Guesses, RowRule, error_of, only, top_k_tree
from toy_targets import PROMPT, Table
from transformers import LogitsProcessorList

from mtp.drafters.merging import merge
from mtp.drafters.reliability import Reliability
from mtp.rules import RULES
from mtp.sampling import TargetSampler
from mtp.tree import TokenTree
from mtp.verify import Distribution, Randomness


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
