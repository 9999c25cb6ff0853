"""May a head take another's place?  Both are decoded with on the same held-out rows, and the new one must not be worse.

The bar is on the new head: it passes if its mean accepted length is not below the old one's on these rows, *and* a
fall of more than the tolerance is ruled out with 95 % confidence, by a bootstrap over questions in pairs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtp.checkpoint import load_head
from mtp.heads import Head
from mtp.model import SpeculativeModel
from mtp.planner import FixedPlanner
from mtp.stats import AcceptanceStats
from mtp.target import Target
from train.config import RunConfig
from train.data import DataError, Row
from train.evaluate import chunks_by_category, decode_greedily
from train.processes import ALONE, Share

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Comparison:
    """A new head against an old one.

    Attributes:
        questions: held-out prompts that both were decoded with.
        before: mean accepted length of the old head.
        after: of the new one.
        change: ``after / before - 1``.
        lowest: the change at the lower end of its one-sided confidence interval.
        tolerance: the relative fall that has to be ruled out.
    """

    questions: int
    before: float
    after: float
    change: float
    lowest: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether the new head may take the old one's place."""
        return self.change >= 0 and self.lowest >= -self.tolerance

    def sentence(self) -> str:
        """For the terminal."""
        return (
            f"mean accepted length on {self.questions} fixed held-out prompts: {self.before:.3f} before, "
            f"{self.after:.3f} now ({self.change:+.1%}; with {CONFIDENCE:.0%} confidence no worse than "
            f"{self.lowest:+.1%}, {-self.tolerance:+.1%} allowed)"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passes": self.passes}


def compare_heads(
    config: RunConfig, target: Target, old: Path, new: Path, rows: Sequence[Row], share: Share = ALONE
) -> Comparison:
    """The heads of two checkpoints, as a user would load them.

    Args:
        rows: held out from both; the first ``start.gate_rows`` count.
        share: what this process decodes; every process gets the numbers of all.

    Raises:
        DataError: if no row leaves room for an answer.
    """
    rows = rows[: config.start.gate_rows]
    if target.max_positions is not None:
        rows = [row for row in rows if len(row.prompt_ids) + config.eval.max_new_tokens <= target.max_positions]
    if not rows:
        raise DataError("No held-out row of data.path leaves room for eval.max_new_tokens: heads cannot be compared.")
    before, after = (decode_questions(target, load_head(folder, target), rows, config, share) for folder in (old, new))
    return compare(before, after, config)


def decode_questions(
    target: Target, head: Head, rows: Sequence[Row], config: RunConfig, share: Share = ALONE
) -> list[AcceptanceStats]:
    """The real decoder's counters, greedy, on each of ``rows``, in an order that is the same for all heads.

    Args:
        share: as in ``compare_heads``.
    """
    model = SpeculativeModel(target, head)
    chunks = chunks_by_category(rows, config.eval.batch_size)
    counted = []
    for chunk in share.of(chunks):
        # Both heads with trees of one size, or the larger trees would win.
        planner = FixedPlanner(config.head.nodes)
        output = decode_greedily(model, chunk, config.eval.max_new_tokens, planner)
        counted.append([AcceptanceStats.from_kept(kept) for kept in output.kept])
    return [stats for chunk in share.gather(counted) for stats in chunk]


def compare(old: Sequence[AcceptanceStats], new: Sequence[AcceptanceStats], config: RunConfig) -> Comparison:
    """Counters of the same questions by two heads, in pairs."""
    committed, passes = (
        np.array([[getattr(stats, name) for stats in head] for head in (old, new)], dtype=np.float64)
        for name in ("committed_tokens", "target_passes")
    )
    # Questions are drawn again with what both heads made of them: easy ones are easy for both.
    draws = np.random.default_rng(0).integers(len(old), size=(RESAMPLES, len(old)))
    everything = np.arange(len(old))[None]
    (change,), changes = (relative_change(committed, passes, chosen) for chosen in (everything, draws))
    before, after = (committed.sum(1) / np.maximum(passes.sum(1), 1)).tolist()
    return Comparison(
        questions=len(old),
        before=round(before, 4),
        after=round(after, 4),
        change=float(change),
        lowest=float(np.quantile(changes, 1 - CONFIDENCE)),
        tolerance=config.start.gate_tolerance,
    )


def relative_change(committed: np.ndarray, passes: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """``[R]`` by how much the second head's mean accepted length is above the first's, over R choices of questions.

    Args:
        committed: ``[2, Q]`` tokens of each head's answers.
        passes: ``[2, Q]`` passes of the target that they took.
        chosen: ``[R, n]`` indices of questions.
    """
    before, after = (committed[head][chosen].sum(1) / np.maximum(passes[head][chosen].sum(1), 1) for head in (0, 1))
    return after / np.maximum(before, 1e-9) - 1


def put_in_place(link: Path, old: Path, new: Path) -> None:
    """Make ``link``, which leads to ``old``, lead to ``new``: at every moment it leads to one of them, whole.

    Raises:
        DataError: if it leads elsewhere by now: another run has replaced the head, and was not compared with.
    """
    if link.resolve() != old:
        raise DataError(
            f"{link} led to {old} when the heads were compared and leads to {link.resolve()} now: not replaced."
        )
    staged = link.with_name(f".{link.name}.{os.getpid()}.partial")
    staged.unlink(missing_ok=True)
    staged.symlink_to(os.path.relpath(new.resolve(), link.parent.resolve()), target_is_directory=True)
    try:
        os.replace(staged, link)
    finally:
        staged.unlink(missing_ok=True)
