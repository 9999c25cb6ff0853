"""EAGLE-3 (Li et al., arXiv 2503.01840): one decoder layer that reads the target's hidden states.

Three tapped layers of the target are fused by ``fc`` into one hidden state.  The layer reads
``[norm(embedding of the next token); norm(hidden)]`` and gives a hidden state, from which the next token is guessed and
which takes the fused state's place at the next step.  Weights are named and used as vLLM and SGLang expect them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtp.drafters.base import TargetStates
from mtp.heads.autoregressive import AutoregressiveHead
from mtp.heads.base import TrainingBatch
from mtp.heads.caching import CachingConfig
from mtp.heads.context_vocabulary import OutputRows
from mtp.heads.layers import DraftLayer, Rotary, unit_scale
from mtp.heads.warmstart import RidgeRegression, carry_linear_map
from mtp.target import Target


@dataclass(frozen=True)
class Eagle3Config(CachingConfig):
    """Sizes of an EAGLE-3 head; ``taps`` are three layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.taps) != 3:
            raise ValueError(f"EAGLE-3 reads three layers of the target; found taps={self.taps}.")


class Eagle3Layer(DraftLayer):
    """The draft layer.  Its input is twice as wide as its output."""

    def __init__(self, config: Eagle3Config):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(hidden, config, input_size=2 * hidden)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)


class Eagle3Head(AutoregressiveHead):
    """See the module's text."""

    family: ClassVar[str] = "eagle3"
    fixed_sizes: ClassVar[frozenset[str]] = frozenset()
    config_class: ClassVar[type[Eagle3Config]] = Eagle3Config
    config: Eagle3Config
    midlayer: Eagle3Layer
    tap_scale: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.register_buffer("tap_scale", torch.ones(3 * config.hidden_size))
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.add_context_weights()
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_positions)

    @classmethod
    def default_sizes(cls, target: Target, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().default_sizes(target, asked), "taps": target.default_taps()}

    def read_states(self, states: TargetStates) -> Tensor:
        """The tapped states as one hidden state.

        Some dimensions of a residual stream are hundreds of times larger than others, and one step of the optimiser
        would move what they feed by as much; so ``fc`` reads every dimension at unit scale.  For engines that know no
        ``tap_scale``, ``fc.weight / tap_scale`` is the same map.
        """
        assert states.taps is not None
        weight = self.fc.weight
        return self.fc((states.taps.to(self.tap_scale.dtype) / self.tap_scale).to(weight.dtype)).to(weight.dtype)

    def combine(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        return hidden, torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)], dim=-1)

    def guess(self, hidden: Tensor, step: int = 0) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits

    def guess_context(self, hidden: Tensor, rows: OutputRows, step: int = 0) -> Tensor:
        return super().guess_context(self.norm(hidden), rows, step)

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Fit the layer as a linear map onto the target's final states, and leave the MLP at zero.

        With u the target's final hidden state at unit scale, the layer is to compute ``u[t+1]`` from the next token's
        embedding and from its hidden input, so that a step can follow a step:

        1. ``u[t+1] ~ A e + M u[t]``, with e the normalised embedding of token t + 1; A and M - I become the value and
           output projections of attention heads that look only at their own position;
        2. ``u[t+1] - A e ~ W f``, with f the tapped states: what all three layers know about the next state;
        3. ``fc`` gives, from f, the hidden input whose image under M is closest to W f, near the estimate of u[t].
        """
        width, layer = self.config.hidden_size, self.midlayer
        fit = RidgeRegression(5 * width, width, device=self.fc.weight.device)
        scale = 0.0
        for batch in batches:
            inputs, target = _fit_inputs(self, batch)
            scale = scale or unit_scale(target)
            inputs[:, width : 2 * width] /= scale
            fit.add(inputs, target / scale)
        step = fit.solve(slice(0, 2 * width))
        a, m = step[:, :width], step[:, width:]
        residual = fit.cross - fit.gram[:, :width] @ a.T.double()
        w = fit.solve(slice(2 * width, None), cross=residual)
        current = fit.solve(slice(2 * width, None), cross=fit.gram[:, width : 2 * width])
        normal = m.T @ m + 0.1 * torch.eye(width, device=m.device)
        fused = current + torch.linalg.solve(normal, m.T @ (w - m @ current))
        self.tap_scale.copy_((fit.gram.diagonal()[2 * width :] / fit.count).sqrt())
        self.fc.weight.copy_(fused * self.tap_scale)
        layer.hidden_norm.weight.fill_(1.0)
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        identity = torch.eye(width, device=m.device)
        carry_linear_map(layer, torch.cat([a, m - identity], dim=1))
        layer.mlp.down_proj.weight.zero_()
        self.norm.weight.fill_(1.0)
        self.lm_head.weight.copy_(self.target.output.rows(self.draft_ids)[0] * scale)
        if self.config.extends:
            self.context_scale.fill_(scale)


def _fit_inputs(head: Eagle3Head, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """``[M, 5H]`` (normalised next embedding, final state, tapped states) and ``[M, H]`` (next final state)."""
    states = batch.states
    assert states.taps is not None
    rows, bases = batch.bases(2).nonzero(as_tuple=True)
    embedding = head.target.embed(states.tokens[rows, bases + 1]).float()
    embedding = embedding * torch.rsqrt(embedding.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps)
    inputs = torch.cat([embedding, states.hidden[rows, bases], states.taps[rows, bases]], dim=-1)
    return inputs, states.hidden[rows, bases + 1]
