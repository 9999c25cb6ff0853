"""Hydra (Ankner et al., arXiv 2402.05109): Medusa's heads, each of which also reads the tokens drafted before it.

Head s, standing at position t, reads the target's final hidden state at t and the embeddings of the tokens ``t + 1`` to
``t + 1 + s``, side by side, and guesses token ``t + 2 + s``.  It is ``layers`` residual SiLU blocks, of which the first
narrows its input to the target's width, and an output matrix of its own.

Weights are named as in the authors' ``HydraMLP``: ``hydra_mlp.{s}.{j}.linear``, ``hydra_mlp.{s}.0.res_connection``,
``hydra_lm_head.{s}``.  What differs: output matrices give the draft vocabulary, without a bias; every block has weights
of its own (there all blocks but the first are one), and inputs are divided by ``input_scale``, which the weights of the
first block can take over.

Hydra++ is the same behind a decoder layer of its own, run once a round, that attends to the committed text: the heads
read what it makes of the final hidden states in place of these.  The layer is ``prefix_embedding_layer``, and the norm
behind it ``prefix_norm``.  Its heads are deeper, and distilled on the target's distributions, as all heads are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtp.heads.base import Prediction, TrainingBatch
from mtp.heads.caching import CachingConfig, CachingHead, enter
from mtp.heads.growing import GrowingConfig, GrowingHead
from mtp.heads.layers import NormedDraftLayer, ResidualBlock, Rotary, gather_positions
from mtp.heads.unrolling import Bases, UnrolledAttention
from mtp.heads.warmstart import ChainRegression
from mtp.target import Target


@dataclass(frozen=True)
class HydraConfig(GrowingConfig):
    """Sizes of Hydra heads.  ``steps`` is the number of heads; no tree is deeper.

    Attributes:
        layers: residual blocks of each head.
    """

    layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(layers=1)
        if self.depth > self.steps:
            raise ValueError(f"Trees of depth {self.depth} need as many Hydra heads; found steps={self.steps}.")


class HydraHead(GrowingHead):
    """See the module's text."""

    family: ClassVar[str] = "hydra"
    attends_to_prompt: ClassVar[bool] = False
    config_class: ClassVar[type[HydraConfig]] = HydraConfig
    config: HydraConfig
    input_scale: Tensor

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        width = config.hidden_size
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(width, (step + 2) * width), *(ResidualBlock(width) for _ in range(config.layers - 1))
            )
            for step in range(config.steps)
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(config.steps)
        )
        self.add_context_weights(config.steps)
        self.register_buffer("input_scale", torch.ones(2 * width))

    @classmethod
    def default_sizes(cls, target: Target, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().default_sizes(target, asked), "depth": asked.get("steps", HydraConfig.steps)}

    @property
    def output_dtype(self) -> torch.dtype:
        """Of the weights; what inputs are scaled by is kept in a precision of its own."""
        return next(self.hydra_lm_head.parameters()).dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...] -> [..., H]``, as the heads read them."""
        return self.target.embed(tokens).to(self.input_scale) / self.input_scale[self.config.hidden_size :]

    def think(self, inputs: Tensor, step: int) -> Tensor:
        """``[..., H]`` behind the blocks of head ``step``, from ``[..., (step + 2) H]``: a state, then the tokens."""
        hidden: Tensor = self.hydra_mlp[step](inputs.to(self.output_dtype))
        return hidden

    def guess(self, hidden: Tensor, step: int = 0) -> Tensor:
        logits: Tensor = self.hydra_lm_head[step](hidden)
        return logits

    def read(self, batch: TrainingBatch, bases: Bases) -> Tensor:
        """``[M, H]`` what heads read of the text up to each base position."""
        return batch.states.hidden[bases.rows, bases.positions].to(self.input_scale)

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        bases = Bases.of(batch, steps)
        rows, positions = bases.rows, bases.positions
        inputs = self.read(batch, bases) / self.input_scale[: self.config.hidden_size]
        tokens = batch.states.tokens
        added = self.added_by(self.vocabulary(batch))

        def guess(inputs: Tensor, step: int, rows: Tensor, at: Tensor) -> Tensor:
            return self.logits_of(self.think(inputs, step), step, added, rows, at)

        predictions = []
        for step in range(min(steps, self.config.steps)):
            following = tokens[rows, (positions + 1 + step).clamp_max(tokens.shape[1] - 1)]
            inputs = torch.cat([inputs, self.embed(following)], dim=-1)
            trained = batch.bases(step + 2)[rows, positions]
            known = rows[trained], positions[trained] + 1 + step
            predictions.append(Prediction(self.recomputed(guess, inputs[trained], step, *known), *known))
        return predictions

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Head s starts as the linear map of its inputs onto the final state at ``t + 1 + s``, read by the target's own
        output matrix; what the blocks add starts small."""
        fit = ChainRegression(self.config.hidden_size, self.config.steps, self.input_scale.device)
        for batch in batches:
            bases = Bases.of(batch, self.config.steps)
            fit.add(batch, bases, self.read(batch, bases), self.target.embed)
        self.input_scale.copy_(fit.input_scale())
        state, token = self.input_scale.chunk(2)
        output = self.target.output.rows(self.draft_ids)[0] * fit.output_scale()
        for step in range(self.config.steps):
            for block in self.hydra_mlp[step].children():
                assert isinstance(block, ResidualBlock)
                block.start_small()
            narrowing = self.hydra_mlp[step].get_submodule("0.res_connection")
            scale = torch.cat([state, token.repeat(step + 1)]) / fit.output_scale()
            narrowing.get_parameter("weight").copy_(fit.solve(step) * scale)
            narrowing.get_parameter("bias").zero_()
            self.hydra_lm_head[step].get_parameter("weight").copy_(output)
        if self.config.extends:
            self.context_scale.fill_(fit.output_scale())

    # ---- decoding -------------------------------------------------------------------------------------------------

    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        return self._begin(self.state.hidden, pending)

    def _begin(self, states: Tensor, pending: Tensor) -> tuple[Tensor, Tensor]:
        """``first``, from what heads read of the text, ``[B, 1, H]``."""
        states = states.to(self.input_scale) / self.input_scale[: self.config.hidden_size]
        carry = torch.cat([states, self.embed(pending[:, None])], dim=-1)
        return carry, self._guess(carry, 0)

    def then(self, tokens: Tensor, carry: Tensor, seen: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        carry = torch.cat([carry, self.embed(tokens)], dim=-1)
        return carry, self._guess(carry, depth)

    def _guess(self, inputs: Tensor, step: int) -> Tensor:
        hidden = self.think(inputs, step)
        return self.extended(self.guess(hidden, step), hidden, step)


@dataclass(frozen=True)
class HydraPlusConfig(CachingConfig, HydraConfig):
    """Sizes of Hydra++; those of the layer are its prefix attention's."""

    layers: int = 4


class HydraPlusHead(CachingHead, HydraHead):
    """Hydra++: heads read ``prefix_norm(prefix_embedding_layer(h))`` in place of the final hidden states h."""

    family: ClassVar[str] = "hydra_plus"
    attends_to_prompt: ClassVar[bool] = True
    config_class: ClassVar[type[HydraConfig]] = HydraPlusConfig
    config: HydraPlusConfig

    def __init__(self, config: HydraPlusConfig):
        super().__init__(config)
        self.prefix_embedding_layer = NormedDraftLayer(config.hidden_size, config)
        self.prefix_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_positions)

    def read(self, batch: TrainingBatch, bases: Bases) -> Tensor:
        layer = self.prefix_embedding_layer
        hidden = batch.states.hidden.to(self.output_dtype)
        x = layer.input_layernorm(hidden)
        attention = UnrolledAttention(layer, self.rotary, x, bases)

        def finish(residual: Tensor, x: Tensor) -> Tensor:
            normed: Tensor = self.prefix_norm(layer.finish(residual, attention(x, step=0)))
            return normed

        return self.recomputed(finish, hidden[bases.rows, bases.positions], x[bases.rows, bases.positions])

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """As Hydra's, behind a layer that adds nothing yet."""
        layer = self.prefix_embedding_layer
        layer.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        super().warm_start(batches)

    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        layer, states = self.prefix_embedding_layer, self.state.unread.take()
        hidden = states.hidden.to(self.output_dtype)
        attended = enter(layer, self.rotary, self.state.cache, layer.input_layernorm(hidden), states.counts)
        last = gather_positions(hidden, (states.counts - 1)[:, None])
        return self._begin(self.prefix_norm(layer.finish(last, attended)), pending)
