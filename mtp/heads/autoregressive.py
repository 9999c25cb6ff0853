"""Heads of one decoder layer that drafts token after token, each step reading the hidden state of the step before.

What EAGLE-1, EAGLE-3 and MTP modules share: trees drawn from such a layer, its own key-value cache, and training that
sees what drafting sees.  A family says what it reads of the target, how it joins that with a token's embedding, and how
it makes a hidden state into logits.

Positions.  The entry at position t holds token ``t + 1`` and the target's states at t; it guesses token ``t + 2``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp.attention import AttentionPass, attend
from mtp.cache import TreeCache
from mtp.drafters.base import Budget, Draw, TargetStates
from mtp.growth import BestFirstGrowth, drawn_widths
from mtp.heads.base import Head, HeadConfig, Prediction, TrainingBatch
from mtp.heads.layers import DraftLayer, Rotary, gather_positions, rope_parameters
from mtp.heads.unrolling import Bases, UnrolledAttention, misses_own_token
from mtp.packing import PackedLinears
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from mtp.tree import TokenTree


@dataclass(frozen=True)
class AutoregressiveConfig(HeadConfig):
    """Sizes of a one-layer head; see ``HeadConfig`` for those every family has.

    Attributes:
        depth: longest path of drafted tokens in a tree.
        width: nodes expanded a level.
        calibration: for each depth from 1 on, offset and slope of the logit of being accepted over the logit of the
            head's own probability, fitted to held-out text; empty where that was not measured.
    """

    num_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 1536
    rms_norm_eps: float = 1e-6
    max_positions: int = 8192
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    depth: int = 6
    width: int = 6
    calibration: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(
                f"Rotary positions turn pairs of dimensions; found head_dim={self.head_dim}, an odd number."
            )


def layer_sizes(target: Target) -> dict[str, Any]:
    """Sizes of a draft layer like the target's own layers, its rotary settings included."""
    text = target.config
    heads = text.num_attention_heads
    return {
        "num_heads": heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        "max_positions": target.max_positions or AutoregressiveConfig.max_positions,
        "rope_parameters": rope_parameters(target),
    }


@dataclass
class DraftState:
    """One generation: entries that were read, and the target's states that wait for the token after them."""

    cache: TreeCache
    unread: TargetStates | None


class AutoregressiveHead(Head):
    """See the module's text.  Drafts dynamic best-first trees, as EAGLE-2 (arXiv 2406.16858).

    Attributes:
        midlayer: the draft layer.
        rotary: its positions.
    """

    follows_own_tokens: ClassVar[bool] = True
    config: AutoregressiveConfig
    state: DraftState
    midlayer: DraftLayer
    rotary: Rotary

    def attach(self, target: Target) -> Self:
        super().attach(target)
        width = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
        if width != self.config.hidden_size:
            raise UnsupportedTargetError(
                f"A {self.family} head reads embeddings as wide as hidden states ({self.config.hidden_size}); those of "
                f"this target have {width} dimensions. Train a head that reads no embeddings (head.family=medusa)."
            )
        return self

    @abstractmethod
    def read_states(self, states: TargetStates) -> Tensor:
        """``[B, T, H]`` what the head knows of the target's states, in the place of a hidden state of its own."""

    @abstractmethod
    def combine(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Join a token's ``embedding [..., H]`` with the ``hidden [..., H]`` of the position before it.

        Returns:
            residual: ``[..., H]`` the stream that the layer adds to.
            x: ``[..., I]`` what queries, keys and values are computed from.
        """

    @abstractmethod
    def guess(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` hidden states of the layer to logits ``[..., Vd]``."""

    # ---- training -------------------------------------------------------------------------------------------------

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Training-time test: step s reads the hidden states that step s - 1 produced (EAGLE-3, section 3.2).

        At step s a base position sees the true entries up to itself and its own entries of steps 1 to s, exactly what
        a chain sees when it is drafted.  Of the positions that follow the head's own tokens (``batch.own_tokens``),
        only steps behind right guesses are trained, as only those are reached in decoding.
        """
        states, layer = batch.states, self.midlayer
        # Under autocast projections give bfloat16; the residual stream stays in the weights' own precision.
        embeddings = self._embed(states.tokens)
        residual, x = self.combine(embeddings[:, 1:], self.read_states(states)[:, :-1])
        bases = Bases.of(batch, steps)
        attention = UnrolledAttention(layer, self.rotary, x, bases)
        rows, positions = bases.rows, bases.positions
        residual, x = residual[rows, positions], x[rows, positions]
        hidden = residual
        follows = torch.rand(len(rows), device=rows.device) < batch.own_tokens
        reached = torch.ones_like(follows)
        predictions = []
        for step in range(steps):
            if step > 0:
                nodes = (positions + 1 + step).clamp_max(states.tokens.shape[1] - 1)
                residual, x = self.combine(embeddings[rows, nodes], hidden)
                attention.add_own(x, step)
            hidden = layer.finish(residual, attention(x, step))
            trained = batch.bases(step + 2)[rows, positions] & reached
            logits, at = self.guess(hidden[trained]), positions[trained] + 1 + step
            estimate = hidden[trained] if self.estimates_hidden else None
            predictions.append(Prediction(logits, rows[trained], at, estimate))
            if batch.own_tokens > 0:
                misses = misses_own_token(logits, self.draft_index(states.tokens[rows[trained], at + 1]))
                reached = reached.index_put((trained.nonzero(as_tuple=True)), ~(misses & follows[trained]))
        return predictions

    # ---- decoding -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, states: TargetStates, capacity: int) -> None:
        staged = 2 * self.config.width * self.config.depth
        cache = TreeCache(1, states.tokens.shape[0], capacity + staged, self.draft_ids.device)
        self.state = DraftState(cache, states)

    @torch.no_grad()
    def observe(self, states: TargetStates) -> None:
        unread = self.state.unread
        self.state.unread = states if unread is None else unread.then(states)

    @torch.no_grad()
    def select_rows(self, rows: Tensor) -> None:
        cache = self.state.cache
        cache.select_rows(rows, int(cache.lengths[rows].max()))
        assert self.state.unread is not None
        self.state.unread = self.state.unread.select_rows(rows)

    @torch.no_grad()
    def rewind(self, length: int) -> int:
        """The entry at a position holds the token after it: the last one that is known to stay is one token short."""
        kept = max(min(length - 1, int(self.state.cache.lengths[0])), 0)
        self.state.cache.crop(kept)
        self.state.unread = None
        return kept

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        with self._packed.active():
            hidden, logits = self._read(pending)
            if draw is None:
                return self._grow_best_first(pending, budget, hidden, logits)
            return self._grow_drawn(pending, budget, hidden, logits, draw)

    def _read(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Enter what was committed since the last call, and guess what follows the pending tokens.

        Returns hidden states ``[B, 1, H]`` and logits ``[B, 1, Vd]`` of the roots.
        """
        states, layer, cache = self.state.unread, self.midlayer, self.state.cache
        assert states is not None
        last = (states.counts - 1)[:, None]
        following = torch.cat([states.tokens[:, 1:], pending[:, None]], dim=1).scatter(1, last, pending[:, None])
        residual, x = self.combine(self._embed(following), self.read_states(states))
        cache.stage(x.shape[1])
        attention = AttentionPass.over_chain(x.shape[1], cache.lengths, cache.start)
        (key,) = self.rotary(attention.positions, layer.split_heads(layer.k_proj(x)))
        key, value = cache.update(key, layer.split_heads(layer.v_proj(x)), 0)
        # Only the last entry of a row guesses; the others are there to be looked back at.
        position = attention.positions.gather(1, last)
        (query,) = self.rotary(position, layer.split_heads(layer.q_proj(gather_positions(x, last))))
        mask = attention.mask(None, query.device)
        mask = mask.gather(1, last[..., None].expand(-1, -1, mask.shape[2]))
        attended = attend(query, key, value, mask, self.config.head_dim**-0.5).flatten(2)
        hidden = layer.finish(gather_positions(residual, last), attended)
        everything = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        longest = int((cache.lengths + states.counts).max())
        cache.commit(everything, states.counts, longest)
        self.state.unread = None
        return hidden, self.guess(hidden)

    def _step(self, tokens: Tensor, parents_hidden: Tensor, staged_mask: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """One level of the tree: ``tokens [B, W]`` whose parents gave ``parents_hidden [B, W, H]``."""
        layer, cache = self.midlayer, self.state.cache
        cache.stage(tokens.shape[1])
        residual, x = self.combine(self._embed(tokens), parents_hidden)
        positions = (cache.lengths + (depth - 1))[:, None].expand_as(tokens)
        attention = AttentionPass(cache.lengths, cache.start, positions, staged_mask, positions)
        query, key = (layer.split_heads(project(x)) for project in (layer.q_proj, layer.k_proj))
        query, key = self.rotary(positions, query, key)
        key, value = cache.update(key, layer.split_heads(layer.v_proj(x)), 0)
        mask = attention.mask(None, x.device)
        attended = attend(query, key, value, mask, self.config.head_dim**-0.5).flatten(2)
        hidden = layer.finish(residual, attended)
        return hidden, self.guess(hidden)

    def _grow_best_first(self, pending: Tensor, budget: Budget, hidden: Tensor, logits: Tensor) -> TokenTree:
        growth = BestFirstGrowth(pending, budget, self.config.width, self._calibrated)
        growth.add(torch.log_softmax(logits.float(), dim=-1), self.draft_ids)
        for depth in range(1, self.config.depth):
            if not growth.pays_to_go_on():
                break
            tokens, picked, mask = growth.frontier()
            hidden, logits = self._step(tokens, gather_positions(hidden, picked), mask, depth)
            growth.add(torch.log_softmax(logits.float(), dim=-1), self.draft_ids)
        self.state.cache.discard()
        return growth.tree()

    def _grow_drawn(self, pending: Tensor, budget: Budget, hidden: Tensor, logits: Tensor, draw: Draw) -> TokenTree:
        # The shape of a drawn tree must not depend on what is drawn, so costs cannot cut it: it has the head's size.
        nodes = budget.nodes if budget.costs is None else min(budget.nodes, self.config.nodes)
        branching, expanded = drawn_widths(nodes, min(self.config.depth, budget.levels or self.config.depth))
        if not expanded:
            return TokenTree.root_only(pending)
        growth = BestFirstGrowth(pending, budget, width=branching)
        for depth, width in enumerate(expanded):
            if depth > 0:
                tokens, picked, mask = growth.frontier(width)
                hidden, logits = self._step(tokens, gather_positions(hidden, picked), mask, depth)
            growth.add(draw.log_probs(logits), self.draft_ids, draw)
        self.state.cache.discard()
        return growth.drawn_tree(self.config.vocab_size)

    def _calibrated(self, log_q: Tensor, depth: int) -> Tensor:
        """Log-probability of being accepted, from the head's own; see ``AutoregressiveConfig.calibration``."""
        if not self.config.calibration:
            return log_q
        offset, slope = self.config.calibration[min(depth, len(self.config.calibration)) - 1]
        return F.logsigmoid(offset + slope * torch.logit(log_q.exp(), eps=1e-6))

    def set_calibration(self, calibration: tuple[tuple[float, float], ...]) -> None:
        self.config = replace(self.config, calibration=calibration)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.midlayer.post_attention_layernorm.weight)

    @cached_property
    def _packed(self) -> PackedLinears:
        return PackedLinears(self)
