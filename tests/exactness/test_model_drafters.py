"""Trees drawn by language models, an assistant and the target's own layers, give the target's law: by enumeration."""

from __future__ import annotations

import pytest
import torch
from enumeration import EXACT, Branches, EveryDraw, Proposals, RowRule, error_of, every
from tiny import tiny_model, tiny_target
from toy_targets import Table

from mtp.attention import AttentionPass
from mtp.drafters import Assistant, Budget, Drafter, EarlyExit, TargetStates
from mtp.drafters.lm_tree import TreeShape
from mtp.rules import RULES
from mtp.tree import TokenTree

DRAWN_RULES = [pytest.param(rule.verify_row, id=rule.name) for rule in RULES.values() if rule.drawn]
VOCAB = 3  # every tree that may be drawn is tried
SHAPE = TreeShape(depth=2)

DRAFTERS = {
    "assistant": lambda: Assistant(tiny_model("qwen3", vocab=VOCAB, layers=1, seed=1), shape=SHAPE),
    "early exit": lambda: EarlyExit([1], SHAPE),
}


def proposals_of(drafter: Drafter, nodes: int) -> Proposals:
    """Every tree that the drafter may draw for one prompt."""
    target = tiny_target("llama", vocab=VOCAB, layers=2)
    drafter.attach(target)
    ids = torch.tensor([[0, 1, 2]])
    cache = target.new_cache(1, 16)
    output = target.forward(ids, cache, AttentionPass.over_chain(3, cache.lengths, 0))
    cache.commit(torch.arange(3)[None], torch.tensor([3]), 3)

    def propose(branches: Branches) -> TokenTree:
        drafter.share(cache)
        drafter.start(TargetStates(ids, output.hidden, None, torch.tensor([3])), 16)
        return drafter.propose(torch.tensor([2]), Budget(nodes), EveryDraw(temperature=1.3, branches=branches))

    return every(propose)


@pytest.mark.parametrize("verify_row", DRAWN_RULES)
@pytest.mark.parametrize("nodes", [4, 7])
@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_trees_drawn_by_language_models_give_the_targets_law(name: str, nodes: int, verify_row: RowRule) -> None:
    assert error_of(proposals_of(DRAFTERS[name](), nodes), verify_row, Table(20, vocab=VOCAB)) < EXACT
