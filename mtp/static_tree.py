"""Trees fixed from measured accuracies, for drafters whose guesses at one position do not depend on those before."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch

from mtp.drafters.base import RoundCosts


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree over the ranks of each depth's guesses; entry 0 of each tuple is the root.

    Attributes:
        parents: index of each node's parent, -1 at the root.
        depths: 0 at the root.
        ranks: which of its depth's guesses the node is, 0 the likeliest.
        worths: probability of each node to be accepted, if depths are independent.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    worths: tuple[float, ...]


@lru_cache(maxsize=64)
def static_tree(rank_accuracy: tuple[tuple[float, ...], ...], nodes: int) -> StaticTree:
    """The tree of ``nodes`` nodes with the largest expected accepted tokens (Medusa, arXiv 2401.10774, 3.3.3).

    Args:
        rank_accuracy: ``[depths][ranks]``: how often the guess of that rank, at that depth, was right on held-out
            data.  Depths are taken as independent, so that a path's worth is the product of its ranks'.
        nodes: nodes, the root included.
    """
    parents, depths, ranks = [-1], [0], [0]
    heap: list[tuple[float, int, int, int]] = []  # (-worth, parent, depth, rank)

    def offer(parent: int, worth: float, depth: int, rank: int) -> None:
        if depth <= len(rank_accuracy) and rank < len(rank_accuracy[depth - 1]):
            heapq.heappush(heap, (-worth * rank_accuracy[depth - 1][rank], parent, depth, rank))

    worths = [1.0]
    offer(0, 1.0, 1, 0)
    while heap and len(parents) < nodes:
        negative, parent, depth, rank = heapq.heappop(heap)
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        worths.append(-negative)
        offer(parent, worths[parent], depth, rank + 1)  # its next sibling
        offer(len(parents) - 1, -negative, depth + 1, 0)  # its first child
    return StaticTree(tuple(parents), tuple(depths), tuple(ranks), tuple(worths))


def best_static_tree(rank_accuracy: tuple[tuple[float, ...], ...], nodes: int, costs: RoundCosts) -> StaticTree:
    """The tree of at most ``nodes`` nodes that commits the most tokens a second at these costs.

    Sequoia (Chen et al., arXiv 2402.12374) solves for the best tree of every size by dynamic programming, and takes the
    size by measured time.  Where a node's worth is its parent's times its own accuracy, and accuracies fall with the
    rank, adding the worthiest node next gives the best tree of every size as well, so one pass is enough.
    """
    largest = static_tree(rank_accuracy, nodes)
    size, _ = costs.best(torch.tensor([largest.worths[1:]]), levels=1)
    return static_tree(rank_accuracy, size)
