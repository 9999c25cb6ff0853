"""EAGLE-1 and EAGLE-2 (Li et al., arXiv 2401.15077, 2406.16858): one decoder layer that foretells the target's states.

``fc`` joins the next token's embedding with the target's last hidden state.  A decoder layer makes of it an estimate of
the target's next hidden state, which the target's own, frozen output matrix reads, and which takes the hidden state's
place at the next step.  EAGLE-1 trains one step; with more this is HASS (arXiv 2408.15766), whose alignment is the one
that every head here is unrolled with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtp.drafters.base import TargetStates
from mtp.heads.base import TrainingBatch
from mtp.heads.caching import CachingConfig
from mtp.heads.layers import DraftLayer, Rotary, unit_scale
from mtp.heads.target_output import TargetOutputHead
from mtp.heads.warmstart import RidgeRegression


@dataclass(frozen=True)
class EagleConfig(CachingConfig):
    """Sizes of an EAGLE head.

    Attributes:
        noise: while training, the target's hidden states are moved by up to this much of each dimension's scale, so
            that the head learns to do with its own, which are not exact.
    """

    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(noise=0)


class EagleHead(TargetOutputHead):
    """See the module's text.  As in the paper the layer has no norm of its own before the attention.

    Attributes:
        input_scale: ``[2H]`` scale of each dimension that ``fc`` reads; ``fc.weight / input_scale`` is the same map for
            engines that know no scale.
    """

    family: ClassVar[str] = "eagle"
    estimates_hidden: ClassVar[bool] = True
    config_class: ClassVar[type[EagleConfig]] = EagleConfig
    config: EagleConfig
    input_scale: Tensor

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("input_scale", torch.ones(2 * width))
        self.midlayer = DraftLayer(width, config)
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_positions)

    def read_states(self, states: TargetStates) -> Tensor:
        hidden = states.hidden.to(self.input_scale.dtype)
        if self.training and self.config.noise > 0:
            reach = self.config.noise * self.input_scale[self.config.hidden_size :]
            hidden = hidden + reach * (2 * torch.rand_like(hidden) - 1)
        return hidden.to(self.fc.weight.dtype)

    def combine(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.fc.weight
        joined = self.fc((torch.cat([embedding, hidden], dim=-1) / self.input_scale).to(weight.dtype)).to(weight.dtype)
        return joined, joined

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """``fc`` starts as the least-squares map onto the target's next hidden state, and the layer adds nothing."""
        width, layer = self.config.hidden_size, self.midlayer
        fit = RidgeRegression(2 * width, width, device=self.fc.weight.device)
        scale = 0.0
        for batch in batches:
            hidden = batch.states.hidden
            rows, bases = batch.bases(2).nonzero(as_tuple=True)
            scale = scale or unit_scale(hidden[rows, bases + 1])
            embedding = self.target.embed(batch.states.tokens[rows, bases + 1])
            fit.add(torch.cat([embedding.to(hidden), hidden[rows, bases]], dim=-1), hidden[rows, bases + 1])
        onto_next = fit.solve()
        self.input_scale.copy_((fit.gram.diagonal() / fit.count).sqrt().clamp_min(1e-6))
        self.fc.weight.copy_(onto_next * self.input_scale)
        layer.post_attention_layernorm.weight.fill_(1.0)
        # The layer reads the stream without a norm: its scores would grow with the square of the target's scale.
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.normal_(0, width**-0.5 / scale)
        layer.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
