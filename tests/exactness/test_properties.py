"""Properties that hold for every tree, every history of a cache and every composition of a batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny import VOCAB, ClutteringDrafter, OracleDrafter, padded, path_to, tiny_head, tiny_model
from torch import Tensor

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.drafters import Drafter
from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.target import Target
from mtp.tree import TokenTree, ancestor_mask
from mtp.verify import walk, walk_row

CACHED = ["llama", "mistral", "gemma3"]  # no window, a window in every layer, a window in some layers
MANY = settings(max_examples=60)  # where an example costs next to nothing
FEW = 3  # tokens of a vocabulary so small that guesses are often right and siblings often alike


@cache
def target_of(architecture: str) -> Target:
    return Target(tiny_model(architecture))


# ---- strategies ---------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn, batch: int | None = None, max_nodes: int = 10, vocab: int = VOCAB) -> TokenTree:
    """Batches of trees of any shape, padding anywhere but at the root; valid siblings have different tokens."""
    rows = draw(st.integers(1, 3)) if batch is None else batch
    nodes = draw(st.integers(1, max_nodes))
    node = st.tuples(st.integers(0, vocab - 1), st.booleans())
    drawn = [draw(st.lists(node, min_size=nodes, max_size=nodes)) for _ in range(rows)]
    parents = [[-1] + [draw(st.integers(0, at - 1)) for at in range(1, nodes)] for _ in range(rows)]
    valid = torch.zeros(rows, nodes, dtype=torch.bool)
    for row, members in enumerate(drawn):
        taken: set[tuple[int, int]] = set()
        for at, (token, real) in enumerate(members):
            name = (parents[row][at], token)
            valid[row, at] = at == 0 or (real and name not in taken)
            if valid[row, at]:
                taken.add(name)
    tokens = torch.tensor([[token for token, _ in members] for members in drawn])
    tree = TokenTree.from_parents(tokens, torch.tensor(parents))
    return TokenTree(tree.tokens, tree.parents, tree.depths, valid)


def prompts(max_rows: int = 3, max_length: int = 12) -> st.SearchStrategy[list[list[int]]]:
    """Rows of token ids of different lengths, without the padding token."""
    row = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=max_length)
    return st.lists(row, min_size=1, max_size=max_rows)


# ---- trees --------------------------------------------------------------------------------------------------------


@MANY
@given(trees(max_nodes=24))
def test_a_node_sees_what_lies_on_its_path_and_nothing_else(tree: TokenTree) -> None:
    naive = torch.zeros(tree.batch_size, tree.num_nodes, tree.num_nodes, dtype=torch.bool)
    for row, parents in enumerate(tree.parents.tolist()):
        for node in range(tree.num_nodes):
            naive[row, node, path_to(parents, node)] = True
    assert torch.equal(ancestor_mask(tree.parents), naive)


@MANY
@given(trees(), st.data())
def test_a_position_is_the_rows_length_and_the_steps_from_the_root(tree: TokenTree, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=tree.batch_size, max_size=tree.batch_size))
    attention = AttentionPass.over_tree(tree, torch.tensor(lengths), start=max(lengths))
    for row, parents in enumerate(tree.parents.tolist()):
        steps = [len(path_to(parents, node)) - 1 for node in range(tree.num_nodes)]
        assert attention.positions[row].tolist() == [lengths[row] + step for step in steps]


@MANY
@given(trees(vocab=FEW), st.data())
def test_the_batched_walk_is_the_walk_of_each_row(tree: TokenTree, data: st.DataObject) -> None:
    size = tree.batch_size * tree.num_nodes
    choices = torch.tensor(data.draw(st.lists(st.integers(0, FEW - 1), min_size=size, max_size=size)))
    choices = choices.view(tree.batch_size, tree.num_nodes)
    verdict = walk(tree, choices)
    assert int(verdict.path.min()) >= 0
    assert int(verdict.path.max()) < tree.num_nodes
    for row in range(tree.batch_size):
        path, token = walk_row(tree.children(row), tree.tokens[row].tolist(), choices[row].tolist().__getitem__)
        assert verdict.path[row, : verdict.counts[row]].tolist() == path
        assert int(verdict.next_token[row]) == token


# ---- the cache ----------------------------------------------------------------------------------------------------


def prefill(target: Target, rows: list[list[int]], capacity: int) -> TreeCache:
    longest = max(map(len, rows))
    ids = padded(rows, side="right")["input_ids"]
    cache = target.new_cache(len(rows), capacity)
    target.forward(ids, cache, AttentionPass.over_chain(longest, cache.lengths, start=0))
    cache.commit(torch.arange(longest).expand(len(rows), -1), torch.tensor(list(map(len, rows))), longest)
    return cache


def trees_for_the_rows_left(max_nodes: int = 8) -> st.SearchStrategy[TokenTree]:
    return st.runner().flatmap(lambda history: trees(batch=len(history.rows), max_nodes=max_nodes))


class CacheHistory(RuleBasedStateMachine):
    """Any order of verified trees, committed paths, discarded trees and rows that end.

    Attributes:
        architecture: of the target; set by a subclass.
        rows: the tokens that the cache should hold.
    """

    architecture: str

    def __init__(self) -> None:
        super().__init__()
        self.target = target_of(self.architecture)
        self.rows: list[list[int]] = []

    @initialize(rows=prompts(max_rows=4), spare=st.integers(0, 30))
    def read_prompts(self, rows: list[list[int]], spare: int) -> None:
        self.rows = [list(row) for row in rows]
        self.cache = prefill(self.target, self.rows, max(map(len, rows)) + spare)

    def verify(self, tree: TokenTree) -> None:
        self.target.forward(
            tree.tokens, self.cache, AttentionPass.over_tree(tree, self.cache.lengths, self.cache.start)
        )

    @rule(tree=trees_for_the_rows_left(), data=st.data())
    def commit_a_path_of_each_row(self, tree: TokenTree, data: st.DataObject) -> None:
        self.verify(tree)
        ends = data.draw(st.lists(st.integers(0, tree.num_nodes - 1), min_size=len(self.rows), max_size=len(self.rows)))
        paths = [path_to(tree.parents[row].tolist(), node) for row, node in enumerate(ends)]
        for row, path in enumerate(paths):
            self.rows[row] += tree.tokens[row, path].tolist()
        width = max(map(len, paths))
        # Entries past a row's count may be any valid index: here its first node, again and again.
        filled = torch.tensor([path + [0] * (width - len(path)) for path in paths])
        self.cache.commit(filled, torch.tensor(list(map(len, paths))), max(map(len, self.rows)))

    @rule(tree=trees_for_the_rows_left())
    def discard_a_tree(self, tree: TokenTree) -> None:
        self.verify(tree)
        self.cache.discard()

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def end_some_rows(self, data: st.DataObject) -> None:
        places = st.lists(st.sampled_from(range(len(self.rows))), min_size=1, max_size=len(self.rows) - 1, unique=True)
        kept = sorted(data.draw(places))
        self.rows = [self.rows[at] for at in kept]
        self.cache.select_rows(torch.tensor(kept), max(map(len, self.rows)))

    @invariant()
    def the_cache_is_that_of_a_fresh_prefill(self) -> None:
        if not self.rows:
            return
        assert self.cache.lengths.tolist() == list(map(len, self.rows))
        assert self.cache.start == self.cache.end == max(map(len, self.rows))
        fresh = prefill(self.target, self.rows, max(map(len, self.rows)))
        for ours, theirs in zip(self.cache.layers, fresh.layers, strict=True):
            for row, tokens in enumerate(self.rows):
                for name in ("keys", "values"):
                    mine, expected = (getattr(layer, name)[row, :, : len(tokens)] for layer in (ours, theirs))
                    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", CACHED)
def test_the_cache_always_holds_what_a_fresh_prefill_would(architecture: str) -> None:
    history = type("History", (CacheHistory,), {"architecture": architecture})
    run_state_machine_as_test(history, settings=settings(max_examples=8, stateful_step_count=8))


# ---- generation ---------------------------------------------------------------------------------------------------

NEW = 10


def greedy_of_transformers(architecture: str, prompt: list[int], new_tokens: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    return target_of(architecture).causal_lm.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0].tolist()


def answers(model: SpeculativeModel, rows: list[list[int]], side: str = "left", **options: Any) -> list[list[int]]:
    """What each row is continued with."""
    batch = padded(rows, side)
    sequences: Tensor = model.generate(**batch, max_new_tokens=NEW, **options)
    return sequences[:, batch["input_ids"].shape[1] :].tolist()


@settings(max_examples=5)
@given(
    rows=prompts(),
    side=st.sampled_from(["left", "right"]),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    clutter=st.integers(0, 6),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("architecture", CACHED)
def test_a_greedy_row_is_the_same_alone_in_a_batch_and_in_transformers(
    architecture: str, rows: list[list[int]], side: str, lengths: list[int], clutter: int, seed: int
) -> None:
    # A few tokens more than will be asked for, so that the last tree has right guesses too.
    whole = [greedy_of_transformers(architecture, row, NEW + 6)[len(row) :] for row in rows]
    truths = [answer[:NEW] for answer in whole]

    def model(indices: range | list[int]) -> SpeculativeModel:
        drafter = OracleDrafter([whole[at] for at in indices], lengths, clutter, seed)
        return SpeculativeModel(target_of(architecture), drafter)

    assert answers(model(range(len(rows))), rows, side, do_sample=False) == truths
    for at, row in enumerate(rows):
        assert answers(model([at]), [row], side, do_sample=False) == [truths[at]]


@settings(max_examples=3)
@given(
    rows=prompts(),
    side=st.sampled_from(["left", "right"]),
    seed=st.integers(0, 2**31 - 1),
    rule=st.sampled_from(["walk", "rejection", "traversal"]),
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
)
@pytest.mark.parametrize("drafter", [*sorted(HEADS), "random trees"])
def test_the_same_seed_gives_the_same_sampled_text(
    drafter: str, rows: list[list[int]], side: str, seed: int, rule: str, temperature: float
) -> None:
    target = target_of("llama")

    def fresh() -> Drafter:
        return ClutteringDrafter(seed=seed % 100) if drafter == "random trees" else tiny_head(drafter, target)

    def sample(model: SpeculativeModel, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return answers(model, rows, side, do_sample=True, rule=rule, temperature=temperature, nodes=8)

    used = SpeculativeModel(target, fresh())
    first = sample(used, seed)
    assert sample(SpeculativeModel(target, fresh()), seed) == first
    if drafter != "random trees":  # a head carries nothing over from one generation to the next
        sample(used, seed + 1)
        assert sample(used, seed) == first
