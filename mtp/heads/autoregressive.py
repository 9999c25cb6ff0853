"""Heads of one decoder layer that drafts token after token, each step reading the hidden state of the step before.

What EAGLE-1, EAGLE-3 and MTP modules share: trees drawn from such a layer, its own key-value cache, and training that
sees what drafting sees.  A family says what it reads of the target, how it joins that with a token's embedding, and how
it makes a hidden state into logits.

Positions.  The entry at position t holds token ``t + 1`` and the target's states at t; it guesses token ``t + 2``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import ClassVar

import torch
from torch import Tensor

from mtp.attention import AttentionPass, attend, mask_bias
from mtp.compiled_part import CompiledPart, Function
from mtp.drafters.base import TargetStates
from mtp.heads.base import Prediction, TrainingBatch
from mtp.heads.caching import CachingConfig, CachingHead
from mtp.heads.layers import DraftLayer, LayerSizes, Rotary, gather_positions
from mtp.heads.unrolling import Bases, UnrolledAttention, misses_own_token
from mtp.layer_call import BATCH, LENGTH

Past = tuple[Tensor, ...]  # what unrolled steps leave behind for those after them
#: From ``residual [M, H]``, ``x [M, I]``, the step and what those before it left behind, to hidden states ``[M, H]``
#: and what further steps need.  It has no other effect, so that a step can be computed again.
UnrolledLayer = Callable[[Tensor, Tensor, int, Past], tuple[Tensor, Past]]


class AutoregressiveHead(CachingHead):
    """See the module's text.  Drafts dynamic best-first trees, as EAGLE-2 (arXiv 2406.16858).

    Attributes:
        midlayer: the draft layer.
        rotary: its positions.
        compiled: stand in for the layer's parts before and behind attention; see ``compile_parts``.
    """

    follows_own_tokens: ClassVar[bool] = True
    of_the_moment: ClassVar[frozenset[str]] = CachingHead.of_the_moment | {"compiled"}
    config: CachingConfig
    midlayer: DraftLayer
    rotary: Rotary
    compiled: tuple[CompiledPart, ...] = ()

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

    def unrolled(self, entries: Tensor, bases: Bases) -> UnrolledLayer:
        """The layer as unrolled steps run it, behind the true tokens' ``entries [B, T, I]``."""
        attention = UnrolledAttention(self.midlayer, self.rotary, entries, bases)

        def run(residual: Tensor, x: Tensor, step: int, past: Past) -> tuple[Tensor, Past]:
            own = past if step == 0 else (*past, *attention.entry(x, step))
            return self.midlayer.finish(residual, attention(x, step, own)), own

        return run

    # ---- training -------------------------------------------------------------------------------------------------

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Training-time test: step s reads the hidden states that step s - 1 produced (EAGLE-3, section 3.2).

        At step s a base position sees the true entries up to itself and its own entries of steps 1 to s, exactly what
        a chain sees when it is drafted.  Of the positions that follow the head's own tokens (``batch.own_tokens``),
        only steps behind right guesses are trained, as only those are reached in decoding.
        """
        states = batch.states
        # Under autocast projections give bfloat16; the residual stream stays in the weights' own precision.
        embeddings = self._embed(states.tokens)
        entered = self.combine(embeddings[:, 1:], self.read_states(states)[:, :-1])
        bases = Bases.of(batch, steps)
        run = self.unrolled(entered[1], bases)
        rows, positions = bases.rows, bases.positions
        vocabulary = self.vocabulary(batch)
        added = self.added_by(vocabulary)

        def take_step(hidden: Tensor | None, step: int, past: Past) -> tuple[Tensor, Past]:
            if hidden is None:
                residual, x = (part[rows, positions] for part in entered)
            else:
                nodes = (positions + 1 + step).clamp_max(states.tokens.shape[1] - 1)
                residual, x = self.combine(embeddings[rows, nodes], hidden)
            return run(residual, x, step, past)

        def guess(hidden: Tensor, trained: Tensor, at: Tensor) -> Tensor:
            return self.logits_of(hidden[trained], 0, added, rows[trained], at)

        hidden: Tensor | None = None
        past: Past = ()
        follows = torch.rand(len(rows), device=rows.device) < batch.own_tokens
        reached = torch.ones_like(follows)
        predictions = []
        for step in range(steps):
            hidden, past = self.recomputed(take_step, hidden, step, past)
            trained = batch.bases(step + 2)[rows, positions] & reached
            at = positions[trained] + 1 + step
            logits = self.recomputed(guess, hidden, trained, at)
            estimate = hidden[trained] if self.estimates_hidden else None
            predictions.append(Prediction(logits, rows[trained], at, estimate))
            if batch.own_tokens > 0:
                misses = misses_own_token(logits, vocabulary.labels(states.tokens, rows[trained], at))
                reached = reached.index_put((trained.nonzero(as_tuple=True)), ~(misses & follows[trained]))
        return predictions

    # ---- decoding -------------------------------------------------------------------------------------------------

    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Enter what was committed since the last call; the roots carry their hidden states ``[B, 1, H]``."""
        states = self.state.unread.take()
        last = (states.counts - 1)[:, None]
        following = torch.cat([states.tokens[:, 1:], pending[:, None]], dim=1).scatter(1, last, pending[:, None])
        hidden, logits = self.entered(self._embed(following), self.read_states(states), states.counts)
        return hidden, self.extended(logits, hidden)

    def then(self, tokens: Tensor, carry: Tensor, seen: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        cache = self.state.cache
        cache.stage(tokens.shape[1])
        positions = (cache.lengths + (depth - 1))[:, None].expand_as(tokens)
        # Staged nodes' own positions matter to windows alone, and a draft layer sees everything.
        attention = AttentionPass(cache.lengths, cache.start, positions, seen, positions)
        hidden, logits = self.staged(self._embed(tokens), carry, attention)
        return hidden, self.extended(logits, hidden)

    def entered(self, embedding: Tensor, hidden: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The layer over committed tokens ``[B, T, H]``, ``counts [B]`` of them real, which enter the cache: hidden
        states ``[B, 1, H]`` and logits ``[B, 1, Vd]`` at each row's last."""
        cache, last = self.state.cache, (counts - 1)[:, None]
        cache.stage(embedding.shape[1])
        positions = cache.lengths[:, None] + torch.arange(embedding.shape[1], device=embedding.device)
        before, after = self._parts
        residual, query, key, value = before(embedding, hidden, positions)
        key, value = cache.update(key, value, 0)
        # The mask of one query a row: that of all would grow with the square of a prompt.
        seen = (torch.arange(embedding.shape[1], device=embedding.device) < counts[:, None])[:, None]
        attention = AttentionPass(cache.lengths, cache.start, positions.gather(1, last), seen, positions)
        query = query.gather(2, last[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        attended = self._attend(query, key, value, attention)
        cache.commit(None, counts, cache.longest_with(counts))
        hidden, logits = after(gather_positions(residual, last), attended)
        return hidden, logits

    def staged(self, embedding: Tensor, hidden: Tensor, attention: AttentionPass) -> tuple[Tensor, Tensor]:
        """The layer over the nodes ``[B, W, H]`` that were staged last: their hidden states, and logits
        ``[B, W, Vd]``."""
        before, after = self._parts
        residual, query, key, value = before(embedding, hidden, attention.positions)
        key, value = self.state.cache.update(key, value, 0)
        hidden, logits = after(residual, self._attend(query, key, value, attention))
        return hidden, logits

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionPass) -> Tensor:
        """``[B, T, heads * D]``."""
        bias = mask_bias(attention.mask(None, query.device), 1, query.dtype)
        return attend(query, key, value, bias, self.midlayer.head_dim**-0.5).flatten(2)

    def _embed(self, tokens: Tensor) -> Tensor:
        """``[...] -> [..., H]`` the target's embeddings, in the precision of the head's weights."""
        return self.target.embed(tokens).to(next(self.parameters()))

    # ---- the layer in two parts, without the cache between them ---------------------------------------------------

    @property
    def _parts(self) -> tuple[Function, Function]:
        before, after = self.compiled or (self.before_attention, self.after_attention)
        return before, after

    @property
    def runs_as(self) -> str:
        return f"{super().runs_as}, {sum(part.reason is None for part in self.compiled)} parts compiled"

    def refresh(self) -> None:
        super().refresh()
        for part in self.compiled:
            part.refresh()

    def before_attention(self, embedding: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The stream ``[B, T, H]``, and queries, keys and values ``[B, heads, T, D]`` at ``positions [B, T]``."""
        residual, x = self.combine(embedding, hidden)
        layer = self.midlayer
        query, key, value = (layer.split_heads(part(x)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        return residual, *self.rotary(positions, query, key), value

    def after_attention(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        """Hidden states ``[B, T, H]`` and logits ``[B, T, Vd]``."""
        hidden = self.midlayer.finish(residual, attended)
        return hidden, self.guess(hidden)

    @property
    def graph_settings(self) -> str:
        """What the parts depend on beside their code and the shapes of weights."""
        return f"{self.family} {[(size.name, getattr(self.config, size.name)) for size in fields(LayerSizes)]}"

    def compile_parts(self) -> list[str]:
        self.compiled = ()
        self.__dict__.pop("_packed", None)  # the parts have copies of their own
        layer, width = self.midlayer, self.config.hidden_size
        like, draws = layer.q_proj.weight, torch.Generator().manual_seed(0)
        # Each different: of two inputs that are one tensor, a graph would have but one.
        embedding, hidden, residual, attended = (
            torch.randn(BATCH, LENGTH, size, generator=draws).to(like)
            for size in (width, width, width, layer.num_heads * layer.head_dim)
        )
        positions = torch.arange(LENGTH, device=like.device).expand(BATCH, -1)
        self.compiled = (
            CompiledPart(self, self.before_attention, [embedding, hidden, positions], self.graph_settings),
            CompiledPart(self, self.after_attention, [residual, attended], self.graph_settings),
        )
        return [part.reason for part in self.compiled if part.reason is not None]
