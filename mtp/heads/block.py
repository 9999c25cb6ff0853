"""Block drafter: one pass drafts a whole block, however long.

The target's hidden states enter every draft layer as keys and values, and K slots attend to them and to each other
(DFlash, Chen et al., arXiv 2602.06036).  Slot k guesses the token k + 1 places behind the pending one without knowing
those in between; a low-rank *Markov bias* on its logits, from the token drafted just before, makes a child depend on
its parent, and a *confidence* output says how far to believe it (DSpark).  The tree is grown best first from these
conditional distributions (DDTree, Ringel and Romano): a level costs one low-rank product, not a pass of the drafter.

Here a slot is not a bare mask embedding: it starts from a linear map of the pending token's embedding and of the
target's last state, which can be fitted by least squares before any gradient step.

Positions.  The context entry at position t holds the target's states at t.  Standing there, with token ``t + 1``
pending, slot k has position ``t + 1 + k`` and guesses token ``t + 2 + k``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtp.attention import AttentionPass, attend, mask_bias
from mtp.drafters.base import TargetStates
from mtp.heads.base import Prediction, TrainingBatch
from mtp.heads.blockfit import BlockFit
from mtp.heads.caching import CachingConfig, CachingHead
from mtp.heads.layers import NormedDraftLayer, Rotary, gather_positions
from mtp.heads.unrolling import Bases, attend_with_block
from mtp.target import Target


@dataclass(frozen=True)
class BlockConfig(CachingConfig):
    """Sizes of a block drafter; ``steps`` is the number of slots, and no tree is deeper.

    Attributes:
        layers: draft layers.
        markov_rank: of the bias that a drafted token lays on the guesses at the next.
    """

    layers: int = 1
    markov_rank: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(layers=0, markov_rank=1)
        if self.markov_rank > self.hidden_size:
            raise ValueError(
                f"A Markov bias has the rank of hidden states at most ({self.hidden_size}); found "
                f"markov_rank={self.markov_rank}."
            )
        if self.depth > self.steps:
            raise ValueError(
                f"A block of {self.steps} slots (steps) drafts {self.steps} tokens at most; found depth={self.depth}."
            )
        if not self.taps:
            raise ValueError("A block drafter reads at least one layer of the target; found taps=().")


class BlockHead(CachingHead):
    """See the module's text."""

    family: ClassVar[str] = "block"
    fixed_sizes: ClassVar[frozenset[str]] = frozenset()
    of_the_moment: ClassVar[frozenset[str]] = CachingHead.of_the_moment | {"_block"}
    config_class: ClassVar[type[BlockConfig]] = BlockConfig
    config: BlockConfig
    feature_mean: Tensor
    feature_scale: Tensor
    _block: tuple[Tensor, Tensor] | None = None

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        hidden, features = config.hidden_size, (len(config.taps) + 1) * config.hidden_size
        self.fc = nn.Linear(features, hidden, bias=False)
        # Some dimensions of a residual stream are hundreds of times larger than others, and some never change sign:
        # raw, one step of the optimiser would move what they feed by as much.
        self.register_buffer("feature_mean", torch.zeros(features))
        self.register_buffer("feature_scale", torch.ones(features))
        self.context_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.embedding_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.slots = nn.Linear(2 * hidden, config.steps * hidden)
        self.layers = nn.ModuleList(NormedDraftLayer(hidden, config) for _ in range(config.layers))
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        # The first slot knows the token before its guess, the pending one, by itself.
        self.markov_down = nn.ModuleList(
            nn.Linear(hidden, config.markov_rank, bias=False) for _ in range(config.steps - 1)
        )
        self.markov_up = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
        if config.extends:  # the bias on what the target's rows read, in place of one on logits
            self.markov_context = nn.Linear(config.markov_rank, hidden, bias=False)
        self.add_context_weights()
        self.confidence = nn.Linear(hidden + config.markov_rank, 1)
        for parameter in self.confidence.parameters():
            nn.init.zeros_(parameter)
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_positions)

    @classmethod
    def default_sizes(cls, target: Target, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().default_sizes(target, asked),
            "taps": target.default_taps(),
            "markov_rank": min(BlockConfig.markov_rank, target.hidden_size),
            "depth": asked.get("steps", BlockConfig.steps),
        }

    def _layers(self) -> Iterator[NormedDraftLayer]:
        for layer in self.layers:
            assert isinstance(layer, NormedDraftLayer)
            yield layer

    def features(self, states: TargetStates) -> Tensor:
        """``[B, T, H]``: the target's tapped and final states as one feature a position."""
        assert states.taps is not None
        features = torch.cat([states.taps, states.hidden], dim=-1)
        # Under autocast projections give bfloat16; features and slots stay in the weights' own precision.
        centred = (features.to(self.feature_scale.dtype) - self.feature_mean) / self.feature_scale
        return self.fc(centred.to(self.fc.weight.dtype)).to(self.fc.weight.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...] -> [..., H]``: the target's embeddings at unit scale."""
        embedded: Tensor = self.embedding_norm(self.target.embed(tokens).to(self.fc.weight))
        return embedded

    def open(self, pending: Tensor, context: Tensor) -> Tensor:
        """``[..., K, H]``: what the slots start from, given pending tokens ``[...]`` and last features ``[..., H]``."""
        slots = self.slots(torch.cat([self.embed(pending), context], dim=-1))
        return slots.unflatten(-1, (self.config.steps, -1)).to(self.fc.weight.dtype)

    def guess(self, hidden: Tensor, step: int = 0) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def remember(self, slot: Tensor, before: Tensor, depth: int) -> Tensor:
        """``[..., r]`` what slot ``depth``, of hidden state ``[..., H]``, keeps of the token ``before [...]`` it."""
        if depth == 0:
            return slot.new_zeros(*before.shape, self.config.markov_rank)
        seen: Tensor = self.markov_down[depth - 1](self.embed(before))
        return seen

    def read_beside(self, slot: Tensor, seen: Tensor) -> Tensor:
        """``[..., H]`` what the target's rows read of a slot that has ``seen [..., r]`` the token before it."""
        return slot + self.markov_context(seen) if self.config.extends else slot

    def confidence_in(self, slot: Tensor, seen: Tensor) -> Tensor:
        """``[...]`` confidences in what such a slot guesses (see ``Prediction``)."""
        # What the guesses are does not depend on how far they are believed: no gradient flows back from here.
        heard = torch.cat([slot.expand(*seen.shape[:-1], -1), seen.to(slot.dtype)], dim=-1).detach()
        confidence: Tensor = self.confidence(heard)
        return confidence.squeeze(-1)

    # ---- training -------------------------------------------------------------------------------------------------

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Every base position drafts a block, as in decoding; the bias is that of the true token before each guess."""
        states, slots = batch.states, self.config.steps
        context = self.features(states)
        seen = self.context_norm(context)
        everywhere = torch.arange(context.shape[1], device=context.device)[None]
        bases = Bases.of(batch, min(steps, slots))
        rows, positions = bases.rows, bases.positions
        ahead = (bases.grid[:, :, None] + 1 + torch.arange(slots, device=rows.device)).flatten(1)
        x = self.open(states.tokens[rows, positions + 1], context[rows, positions])  # [M, K, H]

        def run(layer: NormedDraftLayer, x: Tensor) -> Tensor:
            (key,) = self.rotary(everywhere, layer.split_heads(layer.k_proj(seen)))
            value = layer.split_heads(layer.v_proj(seen))
            own = layer.input_layernorm(x)
            query, own_key, own_value = (
                layer.split_heads(bases.spread(project(own).flatten(1)).unflatten(-1, (slots, -1)).flatten(1, 2))
                for project in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            query, own_key = self.rotary(ahead, query, own_key)
            block = (states.unflatten(2, (-1, slots)) for states in (query, own_key, own_value))
            attended = attend_with_block(key, value, bases.grid, *block)
            return layer.finish(x, attended[bases.place])

        for layer in self._layers():
            x = self.recomputed(run, layer, x)
        added = self.added_by(self.vocabulary(batch))
        predictions = []
        for step in range(min(steps, slots)):
            trained = batch.bases(step + 2)[rows, positions]
            r, at, slot = rows[trained], positions[trained] + 1 + step, x[trained, step]
            remembered = self.remember(slot, states.tokens[r, at], step)
            logits = self.guess(slot) + self.markov_up(remembered) if step else self.guess(slot)
            logits = self.joined(logits, self.read_beside(slot, remembered), 0, added, r, at)
            predictions.append(Prediction(logits, r, at, confidence=self.confidence_in(slot, remembered)))
        return predictions

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Each slot starts as a linear map onto the target's final state before its token; see ``BlockFit``."""
        width, slots = self.config.hidden_size, self.config.steps
        for norm in self.modules():
            if isinstance(norm, nn.RMSNorm):
                norm.weight.fill_(1.0)
        fit = BlockFit(width, (len(self.config.taps) + 1) * width, slots, self.fc.weight.device)
        for batch in batches:
            fit.add(batch, self.embed)
        maps = fit.solve(self.config.markov_rank)
        self.feature_mean.copy_(maps.feature_mean)
        self.feature_scale.copy_(maps.feature_scale)
        self.fc.weight.copy_(maps.context * maps.feature_scale)
        self.slots.weight.copy_(maps.slots.flatten(0, 1))
        self.slots.bias.copy_(maps.slots_bias.flatten())
        for down, start in zip(self.markov_down, maps.markov_down, strict=True):
            down.get_parameter("weight").copy_(start)
        output = self.target.output.rows(self.draft_ids)[0].float() * maps.scale
        self.lm_head.weight.copy_(output)
        self.markov_up.weight.copy_(output @ maps.markov_up)
        if self.config.extends:
            self.markov_context.weight.copy_(maps.markov_up)
            self.context_scale.fill_(maps.scale)
        for layer in self._layers():
            layer.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    # ---- decoding -------------------------------------------------------------------------------------------------

    @property
    def cached_layers(self) -> int:
        return self.config.layers

    @property
    def most_staged(self) -> int:
        return self.config.steps

    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Draft the block.  What a token carries is no more than how far its children are believed ``[B, W, 1]``."""
        block = self._draft(pending)
        self._block = block, self.guess(block)
        return self._guess(pending[:, None], depth=0)

    def then(self, tokens: Tensor, carry: Tensor, seen: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self._guess(tokens, depth)

    def _guess(self, before: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """What follows the tokens ``before [B, W]``: confidences ``[B, W, 1]`` and logits ``[B, W, V']``."""
        assert self._block is not None
        block, logits = self._block
        slot, guess = block[:, depth, None], logits[:, depth, None]
        seen = self.remember(slot, before, depth)
        if depth:
            guess = guess + self.markov_up(seen)
        return self.confidence_in(slot, seen)[..., None], self.extended(guess, self.read_beside(slot, seen))

    def confidence_of(self, carry: Tensor) -> Tensor:
        return carry[..., 0].float()

    def _draft(self, pending: Tensor) -> Tensor:
        """Enter what was committed since the last call, and draft a block behind it: ``[B, K, H]``."""
        states, cache = self.state.unread.take(), self.state.cache
        context = self.features(states)
        seen = self.context_norm(context)
        last = (states.counts - 1)[:, None]
        cache.stage(seen.shape[1])
        places = cache.lengths[:, None] + torch.arange(seen.shape[1], device=seen.device)
        for index, layer in enumerate(self._layers()):
            (key,) = self.rotary(places, layer.split_heads(layer.k_proj(seen)))
            cache.update(key, layer.split_heads(layer.v_proj(seen)), index)
        cache.commit(None, states.counts, cache.longest_with(states.counts))
        x = self.open(pending, gather_positions(context, last)[:, 0])
        batch, slots, _ = x.shape
        cache.stage(slots)
        positions = cache.lengths[:, None] + torch.arange(slots, device=x.device)
        together = torch.ones(batch, slots, slots, dtype=torch.bool, device=x.device)
        mask = AttentionPass(cache.lengths, cache.start, positions, together, positions).mask(None, x.device)
        bias = mask_bias(mask, 1, x.dtype)
        for index, layer in enumerate(self._layers()):
            own = layer.input_layernorm(x)
            query, key = (layer.split_heads(project(own)) for project in (layer.q_proj, layer.k_proj))
            query, key = self.rotary(positions, query, key)
            key, value = cache.update(key, layer.split_heads(layer.v_proj(own)), index)
            x = layer.finish(x, attend(query, key, value, bias, self.config.head_dim**-0.5).flatten(2))
        cache.discard()
        return x
