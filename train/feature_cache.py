"""The target's hidden states on disk: computed once, within a budget, and refused when they are another target's.

On a CPU the target's pass is the dearest part of training: a cache pays from the second pass over the data on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mtp.files import read_json, whole_file, write_json
from mtp.target import Target
from train.config import Storage
from train.data import DataError, Row, length_batches
from train.features import PREFILL_POSITIONS, FeatureSource
from train.quantise import dequantise, quantise, unit_of

logger = logging.getLogger(__name__)

ROWS_A_SHARD = 64
RECORD = "cache.json"
NUM_BYTES = {"bfloat16": 2, "int8": 1}


class CachedFeatures(FeatureSource):
    """Reads states from disk; ``build`` writes what is missing, shard by shard, as far as a budget allows.

    Rows whose shard is not there are computed when they are asked for.  Passes over the data read every row equally
    often, so that which shards stay matters little and replacing them not at all: the longest rows stay, which cost
    most a token.

    The folder is named by what it holds (target, layers, precision, token ids and hence the chat template): other
    states never meet in one.

    Args:
        root: folder of caches; this one gets a folder of its own there.
        storage: precision on disk.
    """

    def __init__(
        self,
        target: Target,
        rows: Sequence[Row],
        taps: Sequence[int],
        root: str | Path,
        dtype: torch.dtype | None = None,
        prompt_positions: int | None = None,
        storage: Storage = "bfloat16",
    ):
        super().__init__(target, rows, taps, dtype, prompt_positions)
        self.storage = storage
        self.order: list[int] = np.argsort([len(row) for row in rows], kind="stable").tolist()
        self.record = self._describe()
        name = hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = Path(root) / name
        self._place = {row: (at // ROWS_A_SHARD, at % ROWS_A_SHARD) for at, row in enumerate(self.order)}

    def _describe(self) -> dict[str, Any]:
        ids = hashlib.sha256()
        for row in self.rows:
            ids.update(np.asarray([len(row.prompt_ids), *row.ids], dtype=np.int32).tobytes())
        return {
            "fingerprint": self.target.fingerprint(),
            "taps": list(self.taps),
            "computed_in": str(self.dtype).removeprefix("torch."),
            "storage": self.storage,
            "prompt_positions": self.prompt_positions,
            "rows": len(self.rows),
            "rows_a_shard": ROWS_A_SHARD,
            "token_ids": ids.hexdigest()[:16],
        }

    # ---- size -----------------------------------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        return -(-len(self.order) // ROWS_A_SHARD)

    def members(self, shard: int) -> list[int]:
        """Rows in a shard."""
        return self.order[shard * ROWS_A_SHARD : (shard + 1) * ROWS_A_SHARD]

    def shard_bytes(self, shard: int) -> int:
        """Size of a shard on disk, a few kilobytes of names left out."""
        parts = 1 + len(self.taps)
        scales = 4 * parts if self.storage == "int8" else 0
        position = parts * self.target.hidden_size * NUM_BYTES[self.storage] + scales
        return position * sum(len(self.shown_ids(row)) for row in self.members(shard))

    @property
    def num_bytes(self) -> int:
        """Size of the complete cache on disk."""
        return sum(map(self.shard_bytes, range(self.num_shards)))

    def within(self, budget: float) -> list[int]:
        """The shards that stay under a budget in bytes: from the longest rows down, as many as fit."""
        kept: list[int] = []
        for shard in reversed(range(self.num_shards)):
            budget -= self.shard_bytes(shard)
            if budget < 0:
                break
            kept.append(shard)
        return sorted(kept)

    def missing(self, shards: Sequence[int]) -> list[int]:
        """Those among ``shards`` that are not on disk."""
        return [shard for shard in shards if not self.shard_path(shard).exists()]

    # ---- writing --------------------------------------------------------------------------------------------------

    def shard_path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.safetensors"

    def build(self, budget: float = float("inf"), part: int = 0, parts: int = 1) -> None:
        """Compute the shards that belong on disk and are not there yet; remove those beyond the budget.

        Interrupted, it loses the shard at hand and no other.

        Args:
            budget: bytes that this cache may take.
            part: of ``parts`` processes, the one whose share is computed.

        Raises:
            DataError: if the folder holds states of something else.
        """
        self._claim()
        kept = self.within(budget)
        for shard in range(part, self.num_shards, parts):
            if shard not in kept:
                self.shard_path(shard).unlink(missing_ok=True)
        missing = self.missing(kept[part::parts])
        total = sum(len(self.rows[row]) for shard in missing for row in self.members(shard))
        with tqdm(total=total, unit="tok", desc="hidden states", unit_scale=True, disable=not missing) as bar:
            for shard in missing:
                with whole_file(self.shard_path(shard)) as staged:
                    save_file(self._shard(self.members(shard), bar), staged)

    def _claim(self) -> None:
        path = self.folder / RECORD
        if not path.exists():
            write_json(path, self.record)
            return
        found = read_json(path)
        if differences := differing(found, self.record):
            raise DataError(
                f"{self.folder} holds hidden states of something else ({'; '.join(differences)}). Remove it, or set "
                "features.folder to another place."
            )

    def _shard(self, members: Sequence[int], bar: tqdm[Any]) -> dict[str, Tensor]:
        """States of rows ``members`` by name: ``i.hidden`` and ``i.taps.k`` for the i-th of them."""
        states: dict[str, Tensor] = {}
        for batch in length_batches([len(self.rows[row]) for row in members], PREFILL_POSITIONS, generator=None):
            hidden, taps = self.compute([members[i] for i in batch])
            for at, i in enumerate(batch):
                count = len(self.shown_ids(members[i]))
                for name, values in self._parts(hidden[at, :count], None if taps is None else taps[at, :count]):
                    states[f"{i}.{name}"] = values.to("cpu", torch.bfloat16, copy=True)
                bar.update(len(self.rows[members[i]]))
        return states if self.storage == "bfloat16" else quantised(states)

    def _parts(self, hidden: Tensor, taps: Tensor | None) -> list[tuple[str, Tensor]]:
        """The last layer and each tapped one by name: their scales differ, so each is stored by itself."""
        tapped = [] if taps is None else taps.chunk(len(self.taps), dim=-1)
        return [("hidden", hidden), *((f"taps.{at}", values) for at, values in enumerate(tapped))]

    # ---- reading --------------------------------------------------------------------------------------------------

    def _states(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        counts = [len(self.shown_ids(index)) for index in indices]
        width = self.target.hidden_size
        both = torch.zeros(len(indices), max(counts), width * (1 + len(self.taps)))
        absent = []
        for at, (index, count) in enumerate(zip(indices, counts, strict=True)):
            try:
                both[at, :count] = self._read(index)
            except FileNotFoundError:
                absent.append(at)
        if absent:
            hidden, taps = self.compute([indices[at] for at in absent])
            computed = hidden if taps is None else torch.cat([hidden, taps], dim=-1)
            for at, values in zip(absent, computed, strict=True):
                both[at, : counts[at]] = values[: counts[at]]
        hidden, taps = both.to(self.target.device).split([width, width * len(self.taps)], dim=-1)
        return hidden, taps if self.taps else None

    def _read(self, index: int) -> Tensor:
        """``[T, (1 + n) * H]`` of one row.

        Raises:
            FileNotFoundError: if its shard is not on disk.
        """
        shard, at = self._place[index]
        names = ["hidden", *(f"taps.{tap}" for tap in range(len(self.taps)))]
        with safe_open(self.shard_path(shard), framework="pt") as file:
            values = [file.get_tensor(f"{at}.{name}") for name in names]
            if self.storage == "int8":
                values = [
                    dequantise(levels, file.get_tensor(f"{at}.{name}.scale"), file.get_tensor(f"unit.{name}"))
                    for name, levels in zip(names, values, strict=True)
                ]
        return torch.cat([part.float() for part in values], dim=-1)


def quantised(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """A shard's states in eight bits: beside each entry ``i.name`` an ``i.name.scale``, and for all a ``unit.name``."""
    packed: dict[str, Tensor] = {}
    for name in {key.split(".", 1)[1] for key in states}:
        entries = {key: values for key, values in states.items() if key.split(".", 1)[1] == name}
        unit = packed[f"unit.{name}"] = unit_of(torch.cat(list(entries.values())))
        for key, values in entries.items():
            packed[key], packed[f"{key}.scale"] = quantise(values, unit)
    return packed


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs between two records, in words."""
    keys = sorted(found.keys() | expected.keys())
    return [
        f"{key}: {found.get(key)} there, {expected.get(key)} now" for key in keys if found.get(key) != expected.get(key)
    ]


def other_caches(root: str | Path, ours: Sequence[CachedFeatures]) -> dict[Path, dict[str, Any]]:
    """Caches in ``root`` that ``ours`` are not, with their records; the one longest unused first."""
    own = {source.folder for source in ours}
    found = [path for path in Path(root).glob(f"*/{RECORD}") if path.parent not in own]
    found.sort(key=lambda path: path.parent.stat().st_mtime_ns)
    return {path.parent: read_json(path) for path in found}


def folder_bytes(folder: Path) -> int:
    """Size of a cache's shards."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def make_room(root: str | Path, ours: Sequence[CachedFeatures], budget: float) -> None:
    """Remove other caches, the longest unused first, until those that are wanted fit beside the rest into ``budget``.

    A run that still reads a removed cache computes its states again.
    """
    others = other_caches(root, ours)
    sizes = {folder: folder_bytes(folder) for folder in others}
    wanted = sum(source.num_bytes for source in ours)
    for folder, record in others.items():
        if sum(sizes.values()) + wanted <= budget:
            return
        freed = sizes.pop(folder) / 1e9
        reason = "; ".join(differing(record, ours[0].record))
        logger.warning("features: removing %s (%.2f GB) to stay in the budget; it differs in %s", folder, freed, reason)
        shutil.rmtree(folder)
