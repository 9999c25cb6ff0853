"""Pieces that several head families share."""

from __future__ import annotations

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
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=dict(parameters),
        )
        self.embedding = LlamaRotaryEmbedding(config)

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


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``; for inputs of another width than the output's, a linear map of x in place of x."""

    def __init__(self, hidden_size: int, input_size: int | None = None):
        super().__init__()
        self.linear = nn.Linear(input_size or hidden_size, hidden_size)
        self.res_connection = nn.Identity() if input_size is None else nn.Linear(input_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


def unit_scale(states: Tensor) -> float:
    """Root mean square over all entries: what states are divided by to have scale one."""
    return states.float().pow(2).mean().clamp_min(1e-12).sqrt().item()


def gather_positions(x: Tensor, positions: Tensor) -> Tensor:
    """``x [B, T, C]`` at ``positions [B, P]``: ``[B, P, C]``."""
    return torch.gather(x, 1, positions[..., None].expand(-1, -1, x.shape[-1]))
