"""Which tree to verify: grown best-first from a drafter's own confidences, or fixed from measured accuracies."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mtp.drafters.base import Draw
from mtp.tree import TokenTree


class BestFirstGrowth:
    """A tree that grows level by level where the drafter is most confident (EAGLE-2, arXiv 2406.16858).

    A level's most likely candidates, by the joint probability of their path, are expanded; in the end the most likely
    ``nodes`` of all candidates make the tree.  A child is never likelier than its parent, so what is kept is connected.

    Args:
        pending: ``[B]`` the roots' tokens.
        nodes: most nodes a row, the root included.
        width: children looked at for each node, and nodes expanded a level.
    """

    def __init__(self, pending: Tensor, nodes: int, width: int):
        self.pending = pending
        self.nodes = nodes
        self.width = width
        batch, device = pending.shape[0], pending.device
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._log_q: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._q: list[Tensor] = []  # drawn trees: distributions of the nodes expanded at each level
        self._q_nodes: list[Tensor] = []
        self._draft_ids: Tensor | None = None
        # The nodes expanded last: their index among all candidates (-1: the root), score, and view of staged nodes.
        self._open = torch.full((batch, 1), -1, dtype=torch.long, device=device)
        self._open_scores = torch.zeros(batch, 1, device=device)
        self._open_mask = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        self._count = 0

    def add(self, log_probs: Tensor, draft_ids: Tensor, draw: Draw | None = None) -> None:
        """Take in what the expanded nodes predict: ``log_probs [B, W, Vd]`` over ``draft_ids [Vd]``."""
        count = min(self.width, log_probs.shape[-1])
        if draw is None:
            log_q, choice = log_probs.topk(count, dim=-1)
        else:
            choice = draw.children(log_probs, count)
            log_q = log_probs.gather(-1, choice)
            self._q.append(log_probs)
            self._q_nodes.append(self._open)
            self._draft_ids = draft_ids
        scores = self._open_scores[..., None] + log_q
        self._tokens.append(draft_ids[choice].flatten(1))
        self._log_q.append(log_q.flatten(1))
        self._scores.append(scores.flatten(1))
        self._parents.append(self._open[..., None].expand_as(choice).flatten(1))

    def is_settled(self) -> bool:
        """Whether no deeper node can enter the tree: every open candidate scores below enough others already."""
        scores = torch.cat(self._scores, dim=1)
        wanted = self.nodes - 1
        if wanted < 1:
            return True
        if scores.shape[1] < wanted:
            return False
        threshold = scores.topk(wanted, dim=1).values[:, -1]
        return bool((self._scores[-1].amax(1) <= threshold).all())

    def frontier(self, width: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The nodes to expand next.

        Returns:
            tokens: ``[B, W]``.
            parents: ``[B, W]`` index of each one's parent among the nodes expanded last.
            mask: ``[B, W, S]`` which of all nodes expanded so far, these included, each one sees.
        """
        last = self._scores[-1]
        scores, choice = last.topk(min(width or self.width, last.shape[1]), dim=1)
        parents = choice // (last.shape[1] // self._open.shape[1])
        self._open = self._count + choice
        self._count += last.shape[1]
        self._open_scores = scores
        seen = torch.gather(self._open_mask, 1, parents[..., None].expand(-1, -1, self._open_mask.shape[2]))
        itself = torch.eye(choice.shape[1], dtype=torch.bool, device=choice.device).expand(choice.shape[0], -1, -1)
        self._open_mask = torch.cat([seen, itself], dim=2)
        return self._tokens[-1].gather(1, choice), parents, self._open_mask

    def tree(self) -> TokenTree:
        """The most likely nodes of all candidates."""
        scores = torch.cat(self._scores, dim=1)
        # Stable: where the drafter is certain of a child, it scores as its parent, which came first and stays first.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.nodes - 1]
        # In order of creation, parents come before children.
        return self._assemble(best.sort(dim=1).values)

    def drawn_tree(self, vocab_size: int) -> TokenTree:
        """All candidates.  Pruning them by value would bias what is left, so none is."""
        count = sum(tokens.shape[1] for tokens in self._tokens)
        batch = self.pending.shape[0]
        everything = torch.arange(count, device=self.pending.device).expand(batch, -1)
        assert self._draft_ids is not None
        q = self._q[0].new_zeros(batch, count + 1, vocab_size)
        rows = torch.arange(batch, device=q.device)[:, None]
        for nodes, log_probs in zip(self._q_nodes, self._q, strict=True):
            dense = q.new_zeros(*log_probs.shape[:2], vocab_size)
            dense[..., self._draft_ids] = log_probs.exp()
            q[rows, nodes + 1] = dense
        return self._assemble(everything, q)

    def _assemble(self, chosen: Tensor, q: Tensor | None = None) -> TokenTree:
        """The tree of candidates ``chosen [B, N - 1]`` (in order of creation) below the root."""
        batch, count = chosen.shape
        parents = torch.cat(self._parents, dim=1)
        place = torch.zeros(batch, parents.shape[1] + 1, dtype=torch.long, device=chosen.device)  # entry 0: the root
        place.scatter_(1, chosen + 1, torch.arange(1, count + 1, device=chosen.device).expand(batch, -1))
        root = chosen.new_full((batch, 1), -1)
        new_parents = place.gather(1, parents.gather(1, chosen) + 1)
        tokens = torch.cat(self._tokens, dim=1).gather(1, chosen)
        log_q = torch.cat(self._log_q, dim=1).gather(1, chosen)
        depth_of = torch.cat([torch.full_like(t, at + 1) for at, t in enumerate(self._tokens)], dim=1)
        depths = torch.cat([torch.zeros_like(root), depth_of.gather(1, chosen)], dim=1)
        return TokenTree(
            tokens=torch.cat([self.pending[:, None], tokens], dim=1),
            parents=torch.cat([root, new_parents], dim=1),
            depths=depths,
            valid=torch.ones_like(depths, dtype=torch.bool),
            log_q=torch.cat([torch.zeros_like(log_q[:, :1]), log_q], dim=1) if count else None,
            q=q,
        )


def drawn_widths(nodes: int, depth: int) -> tuple[int, list[int]]:
    """Shape of a tree of drawn children: children a node, and nodes expanded at each level.

    The shape is fixed before anything is drawn, with at most ``nodes`` nodes, the root included.
    """
    branching = max(1, round(nodes**0.5) - 1)
    budget = max((nodes - 1) // branching, 0)
    levels = min(depth, budget)
    expanded: list[int] = []
    for level in range(levels):
        share = -(-(budget - sum(expanded)) // (levels - level))
        expanded.append(min(share, expanded[-1] * branching if expanded else 1))
    return branching, expanded


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree over the ranks of each depth's guesses; entry 0 of each tuple is the root.

    Attributes:
        parents: index of each node's parent, -1 at the root.
        depths: 0 at the root.
        ranks: which of its depth's guesses the node is, 0 the likeliest.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]


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
    return StaticTree(tuple(parents), tuple(depths), tuple(ranks))


def expected_accepted(rank_accuracy: Sequence[Sequence[float]], tree: StaticTree) -> float:
    """Expected accepted tokens of a static tree under the independence that ``static_tree`` assumes."""
    worth = [1.0]
    for node in range(1, len(tree.parents)):
        worth.append(worth[tree.parents[node]] * rank_accuracy[tree.depths[node] - 1][tree.ranks[node]])
    return sum(worth[1:])
