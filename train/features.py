"""The target's hidden states for distilled rows, computed for every batch or read from a cache (feature_cache.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mtp.drafters.base import TargetStates
from mtp.target import Target
from train.config import ConfigError, Precision
from train.data import Row

PREFILL_POSITIONS = 2048  # positions of one pass of the target; large enough for full speed, small enough for memory


class FeatureSource(ABC):
    """Gives the target's states for some of the rows it was made for.

    A long prompt need not be shown whole: with ``prompt_positions`` a row begins so many positions before its answer.
    Its states are nevertheless those behind the whole prompt, and heads see positions relative to each other only.

    Args:
        target: the frozen model.
        rows: distilled rows.
        taps: layers whose states are wanted beside the last.
        dtype: precision to compute in; by default the target's own.
        prompt_positions: how many positions of a prompt are shown, counted from its end; None for all.
    """

    def __init__(
        self,
        target: Target,
        rows: Sequence[Row],
        taps: Sequence[int],
        dtype: torch.dtype | None = None,
        prompt_positions: int | None = None,
    ):
        self.target = target
        self.rows = rows
        self.taps = tuple(taps)
        self.dtype = dtype or target.dtype
        self.prompt_positions = prompt_positions

    def response_start(self, index: int) -> int:
        """Position of the answer's first token in row ``index`` as it is shown."""
        whole = len(self.rows[index].prompt_ids)
        return whole if self.prompt_positions is None else min(whole, self.prompt_positions)

    def shown_ids(self, index: int) -> tuple[int, ...]:
        """Token ids of row ``index`` as it is shown."""
        row = self.rows[index]
        return row.ids[len(row.prompt_ids) - self.response_start(index) :]

    def batch(self, indices: Sequence[int]) -> TargetStates:
        """States of rows ``indices``, right-padded, on the target's device, in float32."""
        tokens, counts = pad_rows([self.shown_ids(index) for index in indices], self.target.device)
        hidden, taps = self._states(indices)
        return TargetStates(tokens, hidden.float(), None if taps is None else taps.float(), counts)

    def compute(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Last states ``[B, T, H]`` and taps ``[B, T, n * H]`` of rows as they are shown, by a pass of the target."""
        tokens, _ = pad_rows([self.rows[index].ids for index in indices], self.target.device)
        narrower = self.dtype != self.target.dtype
        with torch.autocast(tokens.device.type, dtype=self.dtype if narrower else None, enabled=narrower):
            hidden, taps = self.target.encode(tokens, self.taps)
        hidden_from = [len(self.rows[index].prompt_ids) - self.response_start(index) for index in indices]
        if not any(hidden_from):
            return hidden, taps
        longest = max(len(self.shown_ids(index)) for index in indices)
        shift = torch.tensor(hidden_from, device=tokens.device)[:, None]
        place = (torch.arange(longest, device=tokens.device) + shift).clamp_max(tokens.shape[1] - 1)
        row = torch.arange(len(indices), device=tokens.device)[:, None]
        return hidden[row, place], None if taps is None else taps[row, place]

    @abstractmethod
    def _states(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """As ``compute``, from wherever this source has them, on the target's device."""


class OnlineFeatures(FeatureSource):
    """Runs the target for every batch: no disk, any number of rows."""

    def _states(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        return self.compute(indices)


def resolve_dtype(name: Precision, target: Target) -> torch.dtype:
    """The precision that ``features.dtype`` names; ``auto`` is bfloat16 where a CPU multiplies it natively.

    Raises:
        ConfigError: for a precision that the target cannot compute in: its weights were rounded when it was loaded, and
            autocast only ever narrows float32.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        if dtype != target.dtype and target.dtype != torch.float32:
            own = str(target.dtype).removeprefix("torch.")
            raise ConfigError(
                f"features.dtype: found {name}, but the target is loaded in {own} and computes in nothing else. "
                f"Set target.dtype={name}, or leave features.dtype at auto."
            )
        return dtype
    if target.device.type == "cpu" and target.dtype == torch.float32 and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return target.dtype


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Right-pad token ids with zeros: ``[B, T]`` and the rows' lengths ``[B]``."""
    counts = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(counts.max()), dtype=torch.long)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = torch.tensor(row)
    return tokens.to(device), counts.to(device)
