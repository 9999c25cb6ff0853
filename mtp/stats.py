"""What every round reports, summed before any ratio is taken."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

STAGES = ("prefill", "draft", "verify", "commit", "other")


@dataclass
class AcceptanceStats:
    """Counters over the rounds of one or many generations.

    A *round* here is one row's share of one pass of the target over a tree.

    Attributes:
        committed_tokens: tokens added by rounds (the one that a prompt's own pass gives is not among them).
        target_passes: rounds; with several rows in a batch, one for each row that was still going.
        drafted_tokens: guessed nodes that were verified.
        histogram: how many rounds kept exactly so many guessed tokens.
        plain_rounds: rounds in which nothing was guessed, because it would not have paid or was not asked for.
        seconds: wall time by stage.
        notes: what a reader should know, for example which processor forced the slow path.
        drift: how the head does of late beside what it was measured to do (``Drift.to_dict``); None where its
            checkpoint holds no measurement, or another drafter was asked.
    """

    committed_tokens: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    plain_rounds: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    notes: list[str] = field(default_factory=list)
    drift: dict[str, Any] | None = None

    @classmethod
    def from_kept(cls, kept: Sequence[bool]) -> Self:
        """The rounds of one answer, found again in its flags (``SpeculativeOutput.kept``).

        A round ends with a token of the target's own, or with the answer; the first token is the prompt's pass's and
        belongs to none.  How much was drafted is not in the flags: ``drafted_tokens`` and ``plain_rounds`` stay 0.
        """
        runs = [len(run) for run in "".join("+" if flag else "|" for flag in kept[1:]).split("|")]
        if not runs[-1]:
            runs.pop()  # behind the last token of the target's own
        return cls(len(kept[1:]), len(runs), histogram=Counter(runs))

    @property
    def mean_accepted_length(self) -> float:
        """Tau: committed tokens per pass of the target, its own token included; plain decoding is 1."""
        return self.committed_tokens / self.target_passes if self.target_passes else 0.0

    def acceptance_by_position(self) -> list[float]:
        """Share of rounds in which at least i + 1 guessed tokens were kept (unconditional, as vLLM counts)."""
        deepest = max(self.histogram, default=0)
        return [
            sum(count for kept, count in self.histogram.items() if kept > i) / max(self.target_passes, 1)
            for i in range(deepest)
        ]

    def record(self, kept: int, committed: int, drafted: int) -> None:
        """Count one round of one row."""
        self.histogram[kept] += 1
        self.target_passes += 1
        self.committed_tokens += committed
        self.drafted_tokens += drafted
        self.plain_rounds += drafted == 0

    def add(self, other: AcceptanceStats) -> None:
        """Take in the counters of another, later generation."""
        self.committed_tokens += other.committed_tokens
        self.target_passes += other.target_passes
        self.drafted_tokens += other.drafted_tokens
        self.plain_rounds += other.plain_rounds
        self.histogram.update(other.histogram)
        for stage, seconds in other.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.notes.extend(note for note in other.notes if note not in self.notes)
        self.drift = other.drift or self.drift  # a later window holds the earlier one's rounds

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the block's wall time to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The counters that ``to_dict`` wrote; ratios are computed anew."""
        counters = ("committed_tokens", "target_passes", "drafted_tokens", "plain_rounds")
        return cls(
            **{name: values[name] for name in counters},
            histogram=Counter({int(kept): count for kept, count in values["histogram"].items()}),
            seconds=dict(values["seconds"]),
            notes=list(values["notes"]),
            drift=values.get("drift"),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean_accepted_length": round(self.mean_accepted_length, 4),
            "committed_tokens": self.committed_tokens,
            "target_passes": self.target_passes,
            "drafted_tokens": self.drafted_tokens,
            "plain_rounds": self.plain_rounds,
            "acceptance_by_position": [round(value, 4) for value in self.acceptance_by_position()],
            "histogram": {str(kept): self.histogram[kept] for kept in sorted(self.histogram)},
            "seconds": {stage: round(value, 4) for stage, value in self.seconds.items()},
            "notes": list(self.notes),
            **({} if self.drift is None else {"drift": self.drift}),
        }


WINDOW = 512  # drafted rounds that count as of late
FEWEST = 64  # of them, before anything is said
FALLEN = 0.75  # share of the promised guesses below which text counts as unlike what the heads were trained for


class Drift:
    """Whether the drafter still does what it was measured to do, over the last rounds of all generations.

    A tree's size decides how much of it is accepted, so rounds are held against what the drafter's confidences, which
    were calibrated on held-out text, promised of the very trees that were verified.

    Args:
        expected: mean accepted length that the checkpoint's ``acceptance.json`` names; None where nothing was measured
            and calibrated, and nothing can be said.
    """

    def __init__(self, expected: float | None):
        self.expected = expected
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # (committed, promised) a round
        self._warned = False

    def to_dict(self) -> dict[str, Any] | None:
        """What there is to compare, or None where nothing was measured: the mean accepted length that
        ``acceptance.json`` names (``measured``), that of drafted rounds of late and the one that their trees promised
        (both None before enough were seen), how many rounds these are, and whether it has ``fallen``."""
        if self.expected is None:
            return None
        means = {"recent": self.recent, "promised": self.promised}
        rounded = {name: None if mean is None else round(mean, 4) for name, mean in means.items()}
        return {"measured": self.expected, **rounded, "rounds": len(self._recent), "fallen": self.has_fallen}

    @property
    def has_fallen(self) -> bool:
        """Whether drafted rounds of late commit clearly less than their trees promised."""
        recent, promised = self.recent, self.promised
        return recent is not None and promised is not None and recent - 1 < FALLEN * (promised - 1)

    @property
    def recent(self) -> float | None:
        """Mean accepted length of drafted rounds of late; None before enough were seen."""
        return self._mean(0)

    @property
    def promised(self) -> float | None:
        """What the drafter's confidences promised it to be."""
        return self._mean(1)

    def _mean(self, which: int) -> float | None:
        if len(self._recent) < FEWEST:
            return None
        return sum(round[which] for round in self._recent) / len(self._recent)

    def record(self, committed: int, promised: float) -> None:
        """Count one drafted round of one row: tokens committed, and how many its tree promised."""
        self._recent.append((committed, promised))

    def warning(self) -> str | None:
        """A sentence when acceptance has fallen off, once until it has recovered."""
        recent, promised = self.recent, self.promised
        if self.expected is None or recent is None or promised is None:
            return None
        warned, self._warned = self._warned, self.has_fallen
        if warned or not self._warned:
            return None
        return (
            f"mean accepted length has fallen to {recent:.2f} where {promised:.2f} was promised (on held-out text this "
            f"head was measured at {self.expected:.2f}): the text is unlike what it was trained on, or is sampled. "
            "Train it on such text."
        )
