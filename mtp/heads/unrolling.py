"""Training-time test without an L x L tensor a step: which positions are unrolled, and what each one sees.

An unrolled step at base position p sees the true entries up to p and its own entries of the steps before (EAGLE-3,
arXiv 2503.01840, section 3.2; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp.heads.base import TrainingBatch


def base_ranges(batch: TrainingBatch, steps: int) -> Tensor:
    """``[B, P]`` consecutive positions of each row from which some step trains; those past a row's last are -1."""
    wanted = torch.stack([batch.bases(step + 2) for step in range(steps)]).any(0)
    count = wanted.shape[1]
    index = torch.arange(count, device=wanted.device)
    first = torch.where(wanted, index, count).amin(1, keepdim=True)
    last = torch.where(wanted, index, -1).amax(1, keepdim=True)
    length = max(int((last - first).max()) + 1, 1)
    bases = first + torch.arange(length, device=wanted.device)
    return torch.where(bases <= last, bases, -1)


def spread(x: Tensor, place: tuple[Tensor, ...], like: Tensor) -> Tensor:
    """``x [M, C]`` put at ``place`` into zeros ``[B, P, C]``, where ``like`` is ``[B, P]``."""
    return x.new_zeros(*like.shape, x.shape[1]).index_put(place, x)


def attend_with_own(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """Attention of ``query [B, h, P, D]`` to ``key [B, h, T, D]`` where ``visible [B, P, T]``, and to the key of the
    same index p in each of ``own_keys``.  Returns ``[B, P, h * D]``."""
    scaling = query.shape[-1] ** -0.5
    shared = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible[:, None], float("-inf"))
    own = [(query * k).sum(-1, keepdim=True) * scaling for k in own_keys]
    weights = torch.cat([shared, *own], dim=-1).softmax(-1)
    length = key.shape[2]
    out = weights[..., :length] @ value
    for at, v in enumerate(own_values):
        out = out + weights[..., length + at, None] * v
    return out.transpose(1, 2).flatten(2)


def attend_with_block(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, block_key: Tensor, block_value: Tensor
) -> Tensor:
    """Attention of every base position's block to the text before it and to the whole of itself.

    Args:
        query: ``[B, h, P, K, D]`` of K slots for each of P base positions; ``block_key``, ``block_value`` likewise.
        key: ``[B, h, T, D]``, and ``value``: of the text.
        visible: ``[B, P, T]`` which of it each base position sees.

    Returns:
        ``[B, P, K, h * D]``.
    """
    slots = query.shape[3]
    query = query * query.shape[-1] ** -0.5
    shared = (query.flatten(2, 3) @ key.transpose(2, 3)).unflatten(2, (-1, slots))
    shared = shared.masked_fill(~visible[:, None, :, None], float("-inf"))
    weights = torch.cat([shared, query @ block_key.transpose(3, 4)], dim=-1).softmax(-1)
    length = key.shape[2]
    out = (weights[..., :length].flatten(2, 3) @ value).unflatten(2, (-1, slots))
    out = out + weights[..., length:] @ block_value
    return out.permute(0, 2, 3, 1, 4).flatten(3)
