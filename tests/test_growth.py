"""Trees that grow from confidences: well formed, and the best there are by brute force."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtp.drafters import Budget, Draw
from mtp.growth import BestFirstGrowth, drawn_widths
from mtp.tree import TokenTree

Path = tuple[int, ...]


class Table:
    """Log-probabilities after every path, made up on the spot; in some rows one token is certain (exactly 0)."""

    def __init__(self, seed: int, vocab: int, certain: float = 0.0):
        self.rng = random.Random(seed)
        self.vocab, self.certain = vocab, certain
        self.rows: dict[Path, Tensor] = {}

    def __call__(self, path: Path) -> Tensor:
        if path not in self.rows:
            logits = torch.tensor([self.rng.gauss(0, 2) for _ in range(self.vocab)])
            if self.rng.random() < self.certain:
                logits[self.rng.randrange(self.vocab)] = 60.0
            self.rows[path] = logits.log_softmax(-1)
        return self.rows[path]

    def score(self, path: Path) -> float:
        return sum(float(self(path[:at])[token]) for at, token in enumerate(path))


def grow(
    tables: list[Table], nodes: int, width: int, depth: int, settle: bool = True, draw: Draw | None = None
) -> BestFirstGrowth:
    vocab = tables[0].vocab
    growth = BestFirstGrowth(torch.zeros(len(tables), dtype=torch.long), Budget(nodes), width)
    paths: list[list[Path]] = [[()] for _ in tables]
    for level in range(depth):
        if level > 0:
            if settle and not growth.pays_to_go_on():
                break
            tokens, parents, mask = growth.frontier()
            assert mask.shape[1] == tokens.shape[1]
            paths = [
                [(*before[parent], token) for token, parent in zip(row, above, strict=True)]
                for before, row, above in zip(paths, tokens.tolist(), parents.tolist(), strict=True)
            ]
        rows = [torch.stack([table(path) for path in row]) for table, row in zip(tables, paths, strict=True)]
        growth.add(torch.stack(rows), torch.arange(vocab), draw)
    return growth


def paths_of(tree: TokenTree, row: int = 0) -> list[Path]:
    found: list[Path] = [()]
    for node in range(1, tree.num_nodes):
        found.append((*found[int(tree.parents[row, node])], int(tree.tokens[row, node])))
    return found


def assert_well_formed(tree: TokenTree, nodes: int) -> None:
    assert tree.num_nodes <= nodes
    assert (tree.parents[:, 0] == -1).all()
    index = torch.arange(tree.num_nodes)
    assert (tree.parents[:, 1:] >= 0).all()
    assert (tree.parents < index)[:, 1:].all()
    for row in range(tree.batch_size):
        paths = paths_of(tree, row)
        assert len(set(paths)) == len(paths)  # siblings differ
        assert tree.depths[row].tolist() == [len(path) for path in paths]


def best_paths(table: Table, nodes: int, width: int, depth: int) -> set[Path]:
    """Best-first growth in plain Python: expand the best of each level, keep the best of all."""
    level: list[Path] = [()]
    candidates: list[Path] = []
    for _ in range(depth):
        below = [
            (*path, token) for path in level for token in table(path).topk(min(width, table.vocab)).indices.tolist()
        ]
        candidates += below
        level = sorted(below, key=table.score, reverse=True)[:width]
    return {(), *sorted(candidates, key=table.score, reverse=True)[: nodes - 1]}


@given(st.integers(0, 10_000), st.integers(1, 14), st.integers(1, 5), st.integers(1, 4))
def test_growth_gives_the_best_candidates_connected(seed: int, nodes: int, width: int, depth: int) -> None:
    tables = [Table(seed, 5), Table(seed + 1, 5)]
    tree = grow(tables, nodes, width, depth).tree()
    assert_well_formed(tree, nodes)
    for row, table in enumerate(tables):
        assert set(paths_of(tree, row)) == best_paths(table, nodes, width, depth)


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_wide_growth_finds_the_best_tree_of_all(seed: int, nodes: int) -> None:
    table, depth = Table(seed, 4), 3
    tree = grow([table], nodes, width=64, depth=depth).tree()
    everything = [path for length in range(1, depth + 1) for path in itertools.product(range(4), repeat=length)]
    best = sorted(everything, key=table.score, reverse=True)[: nodes - 1]
    assert set(paths_of(tree)) == {(), *best}


@given(st.integers(0, 10_000), st.integers(2, 12))
def test_stopping_when_settled_changes_nothing(seed: int, nodes: int) -> None:
    tables = [Table(seed, 5, certain=0.3), Table(seed + 1, 5)]
    early, late = (grow(tables, nodes, 4, 5, settle).tree() for settle in (True, False))
    for row in range(2):
        assert set(paths_of(early, row)) == set(paths_of(late, row))


@given(st.integers(0, 10_000), st.integers(2, 10))
def test_a_certain_child_never_comes_without_its_parent(seed: int, nodes: int) -> None:
    """Where the drafter is certain the child's log-probability is exactly 0: its path is as likely as its parent's."""
    table = Table(seed, 4, certain=0.9)
    tree = grow([table], nodes, width=4, depth=4).tree()
    assert_well_formed(tree, nodes)


@pytest.mark.parametrize("level", [-1.0, -100.0, -1000.0, -5000.0])
def test_ties_far_down_the_scale_of_scores_stay_connected(level: float) -> None:
    """Every path has the same tiny probability and every child is certain: float32 must still order them."""
    first = torch.full((1, 1, 4), level)
    certain = torch.tensor([0.0, -9000.0, -9000.0, -9000.0]).expand(1, 4, 4)
    for nodes in range(2, 14):
        growth = BestFirstGrowth(torch.zeros(1, dtype=torch.long), Budget(nodes), width=4)
        growth.add(first, torch.arange(4))
        for _ in range(3):
            growth.frontier()
            growth.add(certain, torch.arange(4))
        tree = growth.tree()
        paths = paths_of(tree)
        assert tree.depths[0].tolist() == [len(path) for path in paths]
        assert len(set(paths)) == len(paths)


@given(st.integers(0, 10_000), st.integers(2, 10))
def test_log_q_is_the_drafters_log_probability_of_each_node(seed: int, nodes: int) -> None:
    table = Table(seed, 5)
    tree = grow([table], nodes, 3, 3).tree()
    for node, path in enumerate(paths_of(tree)):
        expected = float(table(path[:-1])[path[-1]]) if path else 0.0
        assert float(tree.log_q[0, node]) == pytest.approx(expected, abs=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_frontier_masks_show_each_node_its_ancestors_among_those_expanded(seed: int, width: int) -> None:
    table = Table(seed, 5)
    growth = BestFirstGrowth(torch.zeros(1, dtype=torch.long), Budget(50), width)
    growth.add(table(())[None, None], torch.arange(5))
    expanded: list[Path] = []
    level: list[Path] = [()]
    for _ in range(3):
        tokens, parents, mask = growth.frontier()
        level = [(*level[parent], token) for token, parent in zip(tokens[0].tolist(), parents[0].tolist(), strict=True)]
        expanded += level
        for path, sees in zip(level, mask[0].tolist(), strict=True):
            assert [other == path[: len(other)] for other in expanded] == sees
        growth.add(torch.stack([table(path) for path in level])[None], torch.arange(5))


def test_growth_translates_draft_vocabulary_to_target_tokens() -> None:
    growth = BestFirstGrowth(torch.tensor([7]), Budget(3), width=2)
    growth.add(torch.tensor([[[0.1, 0.7, 0.2]]]).log(), torch.tensor([11, 22, 33]))
    assert growth.tree().tokens.tolist() == [[7, 22, 33]]


@given(st.integers(0, 10_000), st.integers(2, 20), st.integers(1, 4))
def test_drawn_trees_keep_every_candidate_and_name_its_distribution(seed: int, nodes: int, depth: int) -> None:
    branching, expanded = drawn_widths(nodes, depth)
    tables = [Table(seed, 6), Table(seed + 1, 6)]
    growth = BestFirstGrowth(torch.zeros(2, dtype=torch.long), Budget(nodes), branching)
    draw = Draw(generator=torch.Generator().manual_seed(seed))
    paths: list[list[Path]] = [[()], [()]]
    for level, width in enumerate(expanded):
        if level > 0:
            tokens, parents, _ = growth.frontier(width)
            paths = [
                [(*paths[row][parent], token) for token, parent in zip(*pair, strict=True)]
                for row, pair in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True))
            ]
        rows = [torch.stack([tables[row](path) for path in paths[row]]) for row in range(2)]
        growth.add(torch.stack(rows), torch.arange(6), draw)
    tree = growth.drawn_tree(6)
    assert_well_formed(tree, nodes)
    assert tree.num_nodes == 1 + branching * sum(expanded)
    for row in range(2):
        for node, (path, children) in enumerate(zip(paths_of(tree, row), tree.children(row), strict=True)):
            assert len(children) in (0, branching)
            if children:
                torch.testing.assert_close(tree.q[row, node], tables[row](path).exp())
            else:
                assert not tree.q[row, node].any()


@given(st.integers(1, 200), st.integers(1, 10))
def test_drawn_widths_fit_the_budget_and_the_level_above(nodes: int, depth: int) -> None:
    branching, expanded = drawn_widths(nodes, depth)
    assert 1 + branching * sum(expanded) <= nodes
    assert len(expanded) <= depth
    for level, width in enumerate(expanded):
        assert 1 <= width <= (1 if level == 0 else branching * expanded[level - 1])
    if nodes > 1:
        assert expanded
