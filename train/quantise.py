"""Hidden states in eight bits: one scale a position, on top of one a dimension."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127


def unit_of(states: Tensor) -> Tensor:
    """``[H]`` root mean square of each dimension of ``states [T, H]``; 1 where a dimension is always zero.

    A residual stream has a few dimensions that are hundreds of times larger than the others.  Under one scale a
    position they would take all levels and leave the rest at zero; measured in this unit all dimensions are alike.
    """
    rms = states.float().pow(2).mean(0).sqrt()
    return torch.where(rms > 0, rms, 1.0)


def quantise(states: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """``states [T, H]`` as int8 ``[T, H]`` and float32 scales ``[T]``, in units of ``unit [H]``."""
    scaled = states.float() / unit
    scale = scaled.abs().amax(-1) / LEVELS
    # A position of zeros has no scale of its own; any will do.
    scale = torch.where(scale > 0, scale, 1.0)
    return (scaled / scale[:, None]).round().to(torch.int8), scale


def dequantise(levels: Tensor, scale: Tensor, unit: Tensor) -> Tensor:
    """Inverse of ``quantise``, in float32, to within half a level of each position."""
    return levels.float() * scale[:, None] * unit
