"""The target's hidden states for distilled rows: computed online, or once into a cache that later passes read.

On a CPU the target's pass is the dearest part of training: a cache pays from the second pass over the data on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mtp.drafters.base import TargetStates
from mtp.files import whole_file, write_json
from mtp.target import Target
from train.config import ConfigError, Precision
from train.data import Row, length_batches

logger = logging.getLogger(__name__)

ROWS_A_SHARD = 64
PREFILL_POSITIONS = 2048  # positions of one pass of the target; large enough for full speed, small enough for memory


class FeatureSource(ABC):
    """Gives the target's states for some of the rows it was made for.

    Args:
        target: the frozen model.
        rows: distilled rows.
        taps: layers whose states are wanted beside the last.
        dtype: precision to compute in; by default the target's own.
    """

    def __init__(self, target: Target, rows: Sequence[Row], taps: Sequence[int], dtype: torch.dtype | None = None):
        self.target = target
        self.rows = rows
        self.taps = tuple(taps)
        self.dtype = dtype or target.dtype

    def batch(self, indices: Sequence[int]) -> TargetStates:
        """States of rows ``indices``, right-padded, on the target's device, in float32."""
        rows = [self.rows[index] for index in indices]
        tokens, counts = pad_rows([row.ids for row in rows], self.target.device)
        hidden, taps = self._states(indices, tokens)
        return TargetStates(tokens, hidden, taps, counts)

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target's states, computed in ``dtype``."""
        narrower = self.dtype != self.target.dtype
        with torch.autocast(tokens.device.type, dtype=self.dtype if narrower else None, enabled=narrower):
            return self.target.encode(tokens, self.taps)

    @abstractmethod
    def _states(self, indices: Sequence[int], tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Last hidden states ``[B, T, H]`` and taps ``[B, T, n * H]`` of the rows whose padded ids are ``tokens``."""


class OnlineFeatures(FeatureSource):
    """Runs the target for every batch: no disk, any number of rows."""

    def _states(self, indices: Sequence[int], tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, taps = self.encode(tokens)
        return hidden.float(), None if taps is None else taps.float()


class CachedFeatures(FeatureSource):
    """Reads states from disk, in bfloat16; ``build`` writes what is missing, shard by shard.

    The folder is named by what it holds: another target, set of layers or set of rows never meets an old cache.
    """

    def __init__(
        self,
        target: Target,
        rows: Sequence[Row],
        taps: Sequence[int],
        root: str | Path,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(target, rows, taps, dtype)
        self.order = np.argsort([len(row) for row in rows], kind="stable").tolist()
        identity = hashlib.sha256()
        identity.update(json.dumps([target.fingerprint(), str(self.dtype), list(taps), ROWS_A_SHARD]).encode())
        for row in rows:
            identity.update(np.asarray(row.ids, dtype=np.int32).tobytes())
        self.folder = Path(root) / identity.hexdigest()[:16]
        self._place = {row: (at // ROWS_A_SHARD, at % ROWS_A_SHARD) for at, row in enumerate(self.order)}

    @property
    def num_bytes(self) -> int:
        """Size of the complete cache on disk."""
        return sum(len(row) for row in self.rows) * self.target.hidden_size * (1 + len(self.taps)) * 2

    def shard_path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def build(self, part: int = 0, parts: int = 1) -> None:
        """Compute the shards that are not there yet (of ``parts`` processes, the share of process ``part``).

        Interrupted, it loses the shard at hand and no other.
        """
        shards = range(0, len(self.order), ROWS_A_SHARD)
        missing = [s for s in range(part, len(shards), parts) if not self.shard_path(s).exists()]
        if not missing:
            return
        logger.info("feature cache: %.1f GB in %s", self.num_bytes / 1e9, self.folder)
        members = {s: self.order[s * ROWS_A_SHARD : (s + 1) * ROWS_A_SHARD] for s in missing}
        write_json(self.folder / "cache.json", {"fingerprint": self.target.fingerprint(), "taps": list(self.taps)})
        total = sum(len(self.rows[row]) for rows in members.values() for row in rows)
        with tqdm(total=total, unit="tok", desc="hidden states", unit_scale=True) as bar:
            for shard, rows in members.items():
                tensors: dict[str, Tensor] = {}
                for batch in length_batches([len(self.rows[r]) for r in rows], PREFILL_POSITIONS, generator=None):
                    tokens, counts = pad_rows([self.rows[rows[i]].ids for i in batch], self.target.device)
                    hidden, taps = self.encode(tokens)
                    for at, (i, count) in enumerate(zip(batch, counts.tolist(), strict=True)):
                        tensors[f"{i}.hidden"] = hidden[at, :count].to("cpu", torch.bfloat16).contiguous()
                        if taps is not None:
                            tensors[f"{i}.taps"] = taps[at, :count].to("cpu", torch.bfloat16).contiguous()
                    bar.update(int(counts.sum()))
                with whole_file(self.shard_path(shard)) as staged:
                    save_file(tensors, staged)

    def _states(self, indices: Sequence[int], tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        batch, length = tokens.shape
        width = self.target.hidden_size
        hidden = torch.zeros(batch, length, width)
        taps = torch.zeros(batch, length, width * len(self.taps)) if self.taps else None
        for at, index in enumerate(indices):
            shard, place = self._place[index]
            count = len(self.rows[index])
            with safe_open(self.shard_path(shard), framework="pt") as file:
                hidden[at, :count] = file.get_tensor(f"{place}.hidden")
                if taps is not None:
                    taps[at, :count] = file.get_tensor(f"{place}.taps")
        device = tokens.device
        return hidden.to(device), None if taps is None else taps.to(device)


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
