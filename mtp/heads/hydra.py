"""Hydra (Ankner et al., arXiv 2402.05109): Medusa's heads, each of which also reads the tokens drafted before it.

Head s, standing at position t, reads the target's final hidden state at t and the embeddings of the tokens ``t + 1`` to
``t + 1 + s``, side by side, and guesses token ``t + 2 + s``.  It is ``layers`` residual SiLU blocks, of which the first
narrows its input to the target's width, and an output matrix of its own.

Weights are named as in the authors' ``HydraMLP``: ``hydra_mlp.{s}.{j}.linear``, ``hydra_mlp.{s}.0.res_connection``,
``hydra_lm_head.{s}``.  What differs: output matrices give the draft vocabulary and have no bias, every block has weights
of its own (there all but the first share theirs), and inputs are divided by ``input_scale``, which the weights of the
first block can take over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mtp.heads.base import HeadConfig, Prediction, TrainingBatch
from mtp.heads.growing import GrowingConfig, GrowingHead
from mtp.heads.layers import ResidualBlock
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
        if self.depth > self.steps:
            raise ValueError(f"Trees of depth {self.depth} need as many Hydra heads; found steps={self.steps}.")


class HydraHead(GrowingHead):
    """See the module's text."""

    family: ClassVar[str] = "hydra"
    config_class: ClassVar[type[HeadConfig]] = HydraConfig
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
        self.register_buffer("input_scale", torch.ones(2 * width))

    @classmethod
    def from_target(cls, target: Target, draft_ids: Tensor, **sizes: Any) -> Self:
        config = HydraConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_ids.numel(),
            **{"depth": sizes.get("steps", HydraConfig.steps), **sizes},
        )
        head = cls(config).to(target.device).attach(target)
        head.set_draft_vocabulary(draft_ids)
        return head

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...] -> [..., H]``, as the heads read them."""
        return self.target.embed(tokens).to(self.input_scale) / self.input_scale[self.config.hidden_size :]

    def context(self, hidden: Tensor) -> Tensor:
        """Final hidden states ``[..., H]``, as the heads read them."""
        return hidden.to(self.input_scale) / self.input_scale[: self.config.hidden_size]

    def guess(self, inputs: Tensor, step: int) -> Tensor:
        """Logits ``[..., Vd]`` of head ``step`` from ``inputs [..., (step + 2) H]``: the context, then the tokens."""
        logits: Tensor = self.hydra_lm_head[step](self.hydra_mlp[step](inputs))
        return logits

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        states = batch.states
        predictions = []
        for step in range(min(steps, self.config.steps)):
            rows, bases = batch.bases(step + 2).nonzero(as_tuple=True)
            drafted = [self.embed(states.tokens[rows, bases + 1 + k]) for k in range(step + 1)]
            inputs = torch.cat([self.context(states.hidden[rows, bases]), *drafted], dim=-1)
            predictions.append(Prediction(self.guess(inputs, step), rows, bases + 1 + step))
        return predictions

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Head s starts as the linear map of its inputs onto the final state at ``t + 1 + s``, read by the target's own
        output matrix; the blocks behind the first start as the identity."""
        fit = ChainRegression(self.config.hidden_size, self.config.steps, self.input_scale.device)
        for batch in batches:
            fit.add(batch, batch.states.hidden, self.target.embed)
        self.input_scale.copy_(fit.input_scale())
        context, token = self.input_scale.chunk(2)
        output = self.target.output_matrix[self.draft_ids].float() * fit.output_scale()
        for step in range(self.config.steps):
            first = self.hydra_mlp[step].get_submodule("0")
            scale = torch.cat([context, token.repeat(step + 1)])
            first.get_parameter("res_connection.weight").copy_(fit.solve(step) * scale / fit.output_scale())
            first.get_parameter("linear.weight").zero_()
            for name, parameter in self.hydra_mlp[step].named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
            self.hydra_lm_head[step].get_parameter("weight").copy_(output)

    # ---- decoding -------------------------------------------------------------------------------------------------

    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.cat([self.context(self.state), self.embed(pending[:, None])], dim=-1)
        return carry, self.guess(carry, 0)

    def then(self, tokens: Tensor, carry: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        carry = torch.cat([carry, self.embed(tokens)], dim=-1)
        return carry, self.guess(carry, depth)
