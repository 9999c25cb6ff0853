"""Trees grown by a language model that reads its own guesses, as a smaller model and an early exit do.

The model reads one level of the tree a pass, staged in a cache behind the text, and guesses what follows each node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.drafters.base import Budget, Draw
from mtp.growth import BestFirstGrowth, drawn_widths
from mtp.tree import TokenTree


@dataclass(frozen=True)
class TreeShape:
    """Bounds on the trees that a language model grows.

    Attributes:
        width: nodes read a level, and children looked at for each.
        depth: longest path of drafted tokens; also the passes of the model, the first over the pending token included.
        nodes: of trees of drawn children where the planner knows costs: they cannot be cut to what pays, since their
            shape must not depend on what is drawn.
    """

    width: int = 6
    depth: int = 6
    nodes: int = 16

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.nodes) < 1:
            raise ValueError(f"A tree has at least one node a level, one level and its root; found {self}.")

    def within(self, depth: int) -> TreeShape | None:
        """The same, at most ``depth`` deep; None where nothing is left."""
        return replace(self, depth=min(self.depth, depth)) if depth >= 1 else None


@dataclass(frozen=True)
class Reader:
    """A language model with its cache, as ``grow`` uses it.

    Attributes:
        forward: one pass over staged tokens: ``(ids [B, T], attention) -> logits [B, T, V']``.
        cache: where the pass stages.  What is staged in it already is seen by every node: the pending token, unless
            that is committed.
        vocab_size: of the target.
        draft_ids: tokens that may be guessed; None for all that both models have.
    """

    forward: Callable[[Tensor, AttentionPass], Tensor]
    cache: TreeCache
    vocab_size: int
    draft_ids: Tensor | None = None


def grow(
    reader: Reader, pending: Tensor, logits: Tensor, budget: Budget, shape: TreeShape, draw: Draw | None
) -> TokenTree:
    """The tree below ``pending [B]``, for which the model gave ``logits [B, 1, V']``; nothing is left staged.

    Entries of the logits beyond the target's vocabulary (padding of the model's matrix) are no guesses.
    """
    levels = min(shape.depth, budget.levels or shape.depth)
    if draw is None:
        width, widths = shape.width, [shape.width] * levels
    else:
        nodes = budget.nodes if budget.costs is None else min(budget.nodes, shape.nodes)
        width, widths = drawn_widths(nodes, levels)
    growth = BestFirstGrowth(pending, budget, width)
    every = min(logits.shape[-1], reader.vocab_size)
    draft_ids = torch.arange(every, device=pending.device) if reader.draft_ids is None else reader.draft_ids
    cache = reader.cache
    begun = cache.num_staged
    places = cache.lengths[:, None] + torch.arange(begun, device=cache.lengths.device)
    for depth, count in enumerate(widths):
        if depth > 0:
            if draw is None and not growth.pays_to_go_on():
                break
            tokens, _, mask = growth.frontier(count)
            tokens, mask = tokens.to(places.device), mask.to(places.device)
            positions = (cache.lengths + (begun + depth - 1))[:, None].expand_as(tokens)
            places = torch.cat([places, positions], dim=1)
            seen = torch.cat([mask.new_ones(*tokens.shape, begun), mask], dim=2)
            logits = reader.forward(tokens, AttentionPass(cache.lengths, cache.start, positions, seen, places))
        scores = (logits[..., :every] if reader.draft_ids is None else logits[..., draft_ids]).float()
        scores = scores.to(pending.device)
        log_probs = torch.log_softmax(scores, dim=-1) if draw is None else draw.log_probs(scores)
        growth.add(log_probs, draft_ids, draw)
    cache.discard()
    if not widths:
        return TokenTree.root_only(pending)
    return growth.tree() if draw is None else growth.drawn_tree(reader.vocab_size)
