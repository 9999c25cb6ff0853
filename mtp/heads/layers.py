"""Pieces that several head families share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from mtp.target import Target


def rope_parameters(target: Target) -> dict[str, Any]:
    """The target's own rotary settings, in the flat form of Transformers 5 (never a default base).

    A target that has different settings per layer type gives those of its full-attention layers; a target without
    rotary positions gives the customary base of 10,000, since its draft layer still has to tell positions apart.
    """
    parameters = getattr(target.config, "rope_parameters", None) or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    if not parameters:
        return {"rope_type": "default", "rope_theta": 10_000.0}
    # The draft layer rotates whole heads, at the target's base; a scaling made for part of a head has no place in it.
    kept = {"rope_type": "default", **parameters}
    if kept.pop("partial_rotary_factor", 1.0) != 1.0:
        return {"rope_type": "default", "rope_theta": kept.get("rope_theta", 10_000.0)}
    return kept


class Rotary(nn.Module):
    """Rotary position embedding with given parameters, for any position up to the target's last."""

    def __init__(self, head_dim: int, parameters: dict[str, Any], max_positions: int):
        super().__init__()
        try:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(parameters),
            )
            self.embedding = LlamaRotaryEmbedding(config)
        except KeyError as error:
            raise ValueError(f"rope_parameters={parameters} lack or misname something: {error}.") from error

    def forward(self, positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Rotate each of ``states`` ``[B, heads, T, D]`` to ``positions [B, T]``."""
        cos, sin = (table[:, None] for table in self.embedding(states[0], positions))
        return tuple(x * cos + rotate_half(x) * sin for x in states)


class GatedMLP(nn.Module):
    """The SwiGLU block of Llama: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a draft layer; it has as many key-value heads as query heads.

    Attributes:
        num_heads: of attention, each of ``head_dim``.
        intermediate_size: of the MLP.
        rms_norm_eps: of its norms.
        max_positions: the longest text that it can be shown.
        rope_parameters: see ``rope_parameters``.
    """

    num_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 1536
    rms_norm_eps: float = 1e-6
    max_positions: int = 8192
    rope_parameters: dict[str, Any] = field(default_factory=dict)


def layer_sizes(target: Target) -> dict[str, Any]:
    """``LayerSizes`` of a draft layer like the target's own layers, its rotary settings included."""
    text = target.config
    heads = text.num_attention_heads
    return {
        "num_heads": heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        "max_positions": target.max_positions or LayerSizes.max_positions,
        "rope_parameters": rope_parameters(target),
    }


class DraftLayer(nn.Module):
    """A decoder layer without its input norm, in parts: a tree, a chain and training attend each in a way of its own.

    Args:
        hidden_size: of the residual stream.
        sizes: of attention and MLP.
        input_size: of what queries, keys and values are computed from; by default that of the stream.
    """

    def __init__(self, hidden_size: int, sizes: LayerSizes, input_size: int | None = None):
        super().__init__()
        inner, intermediate_size = sizes.num_heads * sizes.head_dim, sizes.intermediate_size
        input_size = input_size or hidden_size
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=sizes.rms_norm_eps)
        self.q_proj = nn.Linear(input_size, inner, bias=False)
        self.k_proj = nn.Linear(input_size, inner, bias=False)
        self.v_proj = nn.Linear(input_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)
        self.mlp = GatedMLP(hidden_size, intermediate_size)

    def split_heads(self, x: Tensor) -> Tensor:
        """``[B, T, heads * D] -> [B, heads, T, D]``."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP on top of ``residual [..., H]``: ``attended [..., heads * D]`` to ``[..., H]``."""
        hidden = residual + self.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class NormedDraftLayer(DraftLayer):
    """A draft layer with the norm of its input, which whoever runs it applies."""

    def __init__(self, hidden_size: int, sizes: LayerSizes):
        super().__init__(hidden_size, sizes)
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=sizes.rms_norm_eps)


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``; for inputs of another width than the output's, a linear map of x in place of x."""

    def __init__(self, hidden_size: int, input_size: int | None = None):
        super().__init__()
        self.linear = nn.Linear(input_size or hidden_size, hidden_size)
        self.res_connection = nn.Identity() if input_size is None else nn.Linear(input_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))

    @torch.no_grad()
    def start_small(self) -> None:
        """Leave a warm start nearly as it is, and yet let blocks on top of each other learn different things."""
        self.linear.weight.normal_(0, 0.1 * self.linear.in_features**-0.5)
        self.linear.bias.zero_()


def unit_scale(states: Tensor) -> float:
    """Root mean square over all entries: what states are divided by to have scale one; 0 where there are none."""
    if not states.numel():
        return 0.0
    return states.float().pow(2).mean().clamp_min(1e-12).sqrt().item()


def gather_positions(x: Tensor, positions: Tensor) -> Tensor:
    """``x [B, T, C]`` at ``positions [B, P]``: ``[B, P, C]``."""
    return torch.gather(x, 1, positions[..., None].expand(-1, -1, x.shape[-1]))
