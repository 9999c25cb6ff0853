"""Batches as Transformers has them, padded, and the rows in them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig


def real_tokens(padded: list[list[int]], mask: Tensor | None) -> list[list[int]]:
    """The prompts without their padding, whichever side it is on."""
    if mask is None:
        return padded
    keep = mask.bool().tolist()
    if not all(any(row) for row in keep):
        raise ValueError("The attention mask hides all tokens of a row; every prompt needs at least one.")
    return [
        [token for token, real in zip(row, flags, strict=True) if real] for row, flags in zip(padded, keep, strict=True)
    ]


def pad_sequences(rows: Sequence[Sequence[int]], config: GenerationConfig, input_ids: Tensor) -> Tensor:
    """``[B, T]``: the rows, right-padded as Transformers pads rows that ended early."""
    longest = max(len(row) for row in rows)
    pad = padding_token(config)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=input_ids.device)


def padding_token(config: GenerationConfig) -> int | None:
    """What rows that end early are filled with: the pad token, or as in Transformers the first end token."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    ends = config.eos_token_id
    return ends[0] if isinstance(ends, list | tuple) else ends


def by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Per-row lists of ``[V]`` as one ``[B, V]`` a step; zeros where a row had ended."""
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.stack(step) for step in itertools.zip_longest(*rows, fillvalue=nothing))
