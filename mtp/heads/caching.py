"""Heads that attend to the text with a layer of their own, and so keep its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp.attention import AttentionPass, attend, mask_bias
from mtp.cache import TreeCache
from mtp.drafters.base import Budget, Draw, TargetStates
from mtp.drafters.unread import Unread
from mtp.heads.context_vocabulary import ContextVocabulary
from mtp.heads.growing import GrowingConfig, GrowingHead
from mtp.heads.layers import DraftLayer, LayerSizes, Rotary, gather_positions, layer_sizes
from mtp.target import Target
from mtp.tree import TokenTree


@dataclass(frozen=True)
class CachingConfig(LayerSizes, GrowingConfig):
    """Sizes of a head with decoder layers of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(num_heads=1, head_dim=2, intermediate_size=1, max_positions=1, rms_norm_eps=0)
        if self.head_dim % 2:
            raise ValueError(
                f"Rotary positions turn pairs of dimensions; found head_dim={self.head_dim}, an odd number."
            )


@dataclass
class DraftState:
    """One generation, for heads with a cache.

    Attributes:
        cache: keys and values of what was read.
        unread: the target's states that are to be read before the next guess.
        context: what the texts add to the vocabulary; None where they add nothing.
    """

    cache: TreeCache
    unread: Unread
    context: ContextVocabulary | None

    def observe(self, states: TargetStates) -> None:
        self.unread.add(states)
        if self.context is not None:
            self.context.observe(states.tokens, states.counts)

    def select_rows(self, rows: Tensor) -> None:
        self.cache.select_rows(rows, int(self.cache.lengths[rows].max()))
        self.unread.select_rows(rows)
        if self.context is not None:
            self.context.select_rows(rows)

    def rewind(self, length: int) -> int:
        """An entry may hold the token after its position: the last one that is known to stay is one token short."""
        kept = max(min(length - 1, int(self.cache.lengths[0])), 0)
        self.cache.crop(kept)
        self.unread = Unread()
        if self.context is not None:
            self.context.rewind(kept)
        return kept


class CachingHead(GrowingHead):
    """A head with a cache.  It reads what was committed only when asked to guess, so that plain rounds cost nothing.

    Attributes:
        cached_layers: that keep keys and values.
    """

    config: CachingConfig
    state: DraftState

    @classmethod
    def default_sizes(cls, target: Target, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().default_sizes(target, asked), **layer_sizes(target)}

    @property
    def cached_layers(self) -> int:
        return 1

    @property
    def most_staged(self) -> int:
        """Entries of a round that are not there to stay, at most."""
        return 2 * self.config.width * self.config.depth

    @torch.no_grad()
    def start(self, states: TargetStates, capacity: int) -> None:
        rows, device = states.tokens.shape[0], self.draft_ids.device
        cache = TreeCache(self.cached_layers, rows, capacity + self.most_staged, device)
        self.state = DraftState(cache, Unread(states), self.read_text(states))

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        tree = super().propose(pending, budget, draw)
        self.state.cache.discard()
        return tree


def enter(layer: DraftLayer, rotary: Rotary, cache: TreeCache, x: Tensor, counts: Tensor) -> Tensor:
    """Put a layer's inputs ``x [B, T, I]``, of which ``counts [B]`` are real, behind what ``cache`` holds of each row.

    Returns:
        ``[B, 1, heads * D]`` what the last entry of each row attends to; the others are there to be looked back at.
    """
    cache.stage(x.shape[1])
    positions = cache.lengths[:, None] + torch.arange(x.shape[1], device=x.device)
    (key,) = rotary(positions, layer.split_heads(layer.k_proj(x)))
    key, value = cache.update(key, layer.split_heads(layer.v_proj(x)), 0)
    last = (counts - 1)[:, None]
    (query,) = rotary(positions.gather(1, last), layer.split_heads(layer.q_proj(gather_positions(x, last))))
    # The mask of one query a row: that of all would grow with the square of a prompt.
    seen = (torch.arange(x.shape[1], device=x.device) < counts[:, None])[:, None]
    attention = AttentionPass(cache.lengths, cache.start, positions.gather(1, last), seen, positions)
    bias = mask_bias(attention.mask(None, query.device), 1, query.dtype)
    attended = attend(query, key, value, bias, layer.head_dim**-0.5).flatten(2)
    cache.commit(None, counts, cache.longest_with(counts))
    return attended
