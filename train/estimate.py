"""What the hidden states of a run take, in bytes and minutes, before any are computed."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtp.cost import synchronise
from train.data import DataError
from train.feature_cache import CachedFeatures
from train.features import PREFILL_POSITIONS, FeatureSource

logger = logging.getLogger(__name__)

FEWEST = 8192  # positions below which computing states takes seconds, and timing the target as long as the work


@dataclass(frozen=True)
class FeatureEstimate:
    """What hidden states will take.

    Attributes:
        positions: of all rows.
        missing: positions that are to be computed before training starts.
        recomputed: positions that are computed anew in each pass over the data.
        disk: bytes of the cache when it is complete, as far as the budget lets it.
        whole: bytes of the cache without a budget.
        rate: positions a second of the target; None where it was not measured.
    """

    positions: int
    missing: int
    recomputed: int
    disk: int
    whole: int
    rate: float | None

    def sentence(self) -> str:
        """For the terminal."""
        size = f"{self.disk / 1e9:.3g} GB on disk" if self.whole else "nothing on disk"
        if self.whole > self.disk:
            size += f" ({self.disk / self.whole:.0%} of {self.whole / 1e9:.3g} GB: features.budget_gb)"
        parts = [f"hidden states of {self.positions} positions: {size}"]
        if self.missing:
            parts.append(f"{self.missing} to compute now{self._duration(self.missing)}")
        if self.recomputed:
            parts.append(f"{self.recomputed} to compute in each pass{self._duration(self.recomputed)}")
        return ", ".join(parts)

    def _duration(self, positions: int) -> str:
        if self.rate is None:
            return ""
        return f", about {duration(positions / self.rate)} at {self.rate:.0f} positions/s"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def target_rate(source: FeatureSource) -> float:
    """Positions a second of the target's passes: one over rows of middle length, timed after a short one."""
    order = sorted(range(len(source.rows)), key=lambda row: len(source.rows[row]))
    middle = order[len(order) // 2 :]
    chosen: list[int] = []
    positions = 0
    for row in middle:
        if chosen and positions + len(source.rows[row]) > PREFILL_POSITIONS:
            break
        chosen.append(row)
        positions += len(source.rows[row])
    source.compute(chosen[:1])  # the first pass also packs weights and warms up the device
    synchronise(source.target.device)
    started = time.perf_counter()
    source.compute(chosen)
    synchronise(source.target.device)
    return positions / (time.perf_counter() - started)


def estimate_features(budgets: Mapping[FeatureSource, float], processes: int = 1) -> FeatureEstimate:
    """What states of some sources take, each within its budget in bytes.

    Raises:
        DataError: if the cache does not fit on the disk.
    """
    positions = missing = recomputed = disk = whole = written = 0
    for source, budget in budgets.items():
        lengths = [len(row) for row in source.rows]
        positions += sum(lengths)
        if not isinstance(source, CachedFeatures):
            recomputed += sum(lengths)
            continue
        kept = source.within(budget)
        absent = source.missing(kept)
        on_disk = {row for shard in kept for row in source.members(shard)}
        missing += sum(lengths[row] for shard in absent for row in source.members(shard))
        recomputed += sum(length for row, length in enumerate(lengths) if row not in on_disk)
        disk += sum(map(source.shard_bytes, kept))
        written += sum(map(source.shard_bytes, absent))
        whole += source.num_bytes
        _refuse_full_disk(source.folder, written)
    work = missing + recomputed
    rate = target_rate(next(iter(budgets))) * processes if work > FEWEST else None
    return FeatureEstimate(positions, missing, recomputed, disk, whole, rate)


def _refuse_full_disk(folder: Path, needed: int) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > 0.95 * free:
        raise DataError(
            f"The feature cache needs {needed / 1e9:.2f} GB more; {existing} has {free / 1e9:.2f} GB left. Set "
            f"features.budget_gb={0.9 * free / 1e9:.1f}, features.storage=int8, another features.folder, or "
            "features.mode=online."
        )
