"""Static trees: the best there are by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp.static_tree import static_tree


def all_static_worths(accuracy: Any, nodes: int) -> float:
    """The best expected accepted tokens of any tree of at most ``nodes`` nodes, by trying them all."""
    everything = [
        ranks
        for depth in range(1, len(accuracy) + 1)
        for ranks in itertools.product(*(range(len(accuracy[level])) for level in range(depth)))
    ]
    worth = {}
    for ranks in everything:
        value = 1.0
        for level, rank in enumerate(ranks):
            value *= accuracy[level][rank]
        worth[ranks] = value
    best = 0.0
    for chosen in itertools.combinations(everything, min(nodes - 1, len(everything))):
        kept = set(chosen)
        if all(len(ranks) == 1 or ranks[:-1] in kept for ranks in kept):
            best = max(best, sum(worth[ranks] for ranks in kept))
    return best


rank_tables = st.lists(
    st.lists(st.floats(0.01, 0.5), min_size=3, max_size=3).map(lambda row: tuple(sorted(row, reverse=True))),
    min_size=2,
    max_size=2,
).map(tuple)


@settings(max_examples=15)
@given(rank_tables, st.integers(1, 5))
def test_static_tree_is_the_best_of_all_trees(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> None:
    tree = static_tree(accuracy, nodes)
    assert len(tree.parents) == nodes
    assert sum(tree.worths[1:]) == pytest.approx(all_static_worths(accuracy, nodes))


@given(rank_tables, st.integers(1, 13))
def test_static_trees_take_ranks_from_the_first_on(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> None:
    """What drawn trees over a static shape need: a node's children are its depth's first draws, in order."""
    tree = static_tree(accuracy, nodes)
    for node in range(len(tree.parents)):
        ranks = [rank for rank, parent in zip(tree.ranks, tree.parents, strict=True) if parent == node]
        assert ranks == list(range(len(ranks)))
        assert tree.parents[node] < node
        assert node == 0 or tree.depths[node] == tree.depths[tree.parents[node]] + 1


def test_static_tree_ends_where_there_are_no_more_guesses() -> None:
    assert len(static_tree(((0.5, 0.2),), 16).parents) == 3
