"""A bounded log of what a target answered in use, from which its head can be trained to stay aligned with the traffic.

    log = TrafficLog("runs/traffic", model.target, max_bytes=50_000_000)
    model.generate(**inputs, traffic=log)

Nothing is logged unless a log is handed over, and no prompt unless the log was made with ``context``.  An answer may
repeat what it was asked: whoever may not keep prompts should ask whether answers may be kept.

A log is a folder of segments, JSON lines, each with a first line that says whose answers follow.  A segment appears
whole or not at all under a name that no other writer uses, so that any number of processes may write and read without
a lock.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, LogitsProcessorList

from mtp.errors import ExplainedError
from mtp.files import whole_file
from mtp.fingerprint import fingerprint_mismatch
from mtp.stats import AcceptanceStats
from mtp.target import Target

logger = logging.getLogger(__name__)

FORMAT = 1
SEGMENTS = 16  # of which a full log consists, at least: what is dropped at once is a small part of it
SEGMENT_BYTES = 1_000_000
PATIENCE = 60.0  # seconds an answer waits for others before its segment is written
DEBRIS_AGE = 3600.0  # seconds after which an unfinished file is one of a writer that was killed


class TrafficError(ExplainedError):
    """A log that cannot be written or read; the message says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class TrafficRow:
    """One answer.

    Attributes:
        answer: its token ids, the end token included where there was one.
        kept: for each of them, whether the drafter had guessed it and the target agreed.  All others are the target's
            own: the correction of a guess, or a token for which there was none.
        context: token ids right before the answer, as far as they were to be kept.
        whole: whether ``context`` is all that there was.
        sampling: the settings under which tokens were chosen, as ``sampling_record`` gives them.
    """

    answer: tuple[int, ...]
    kept: tuple[bool, ...]
    context: tuple[int, ...]
    whole: bool
    sampling: dict[str, Any]

    @property
    def acceptance(self) -> AcceptanceStats:
        """What the drafter's guesses came to in this answer."""
        return AcceptanceStats.from_kept(self.kept)


def sampling_record(config: GenerationConfig, processors: LogitsProcessorList, rule: str) -> dict[str, Any]:
    """How tokens were chosen: greedy or by draws, the acceptance rule, and every processor by its class's name."""
    record: dict[str, Any] = {"do_sample": bool(config.do_sample)}
    if config.do_sample:
        record |= {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "rule": rule}
    if names := [type(processor).__name__ for processor in processors]:
        record["processors"] = names
    return record


class TrafficLog:
    """Writes answers; safe to share between threads, and beside writers in other processes.

    A log that cannot be written (a full disk) never fails a generation: rows are lost, counted and warned of.

    Args:
        folder: of the log; made when missing.  What is in it is readable by its owner alone.
        target: whose answers are logged; a folder with those of another is refused.
        max_bytes: what the folder may take.  Its oldest segments are removed to make room for new ones.
        context: how many tokens of each prompt are kept, counted from its end: 0 for none, None for all.

    Attributes:
        lost: answers that could not be written.

    Raises:
        TrafficError: for a bound that holds nothing, or the log of another target.
    """

    def __init__(
        self, folder: str | Path, target: Target, *, max_bytes: int = 50_000_000, context: int | None = 0
    ) -> None:
        if max_bytes <= 0 or (context is not None and context < 0):
            raise TrafficError(
                f"Found max_bytes={max_bytes}, context={context}; expected more than 0 bytes, and 0 or more tokens "
                "(None for whole prompts)."
            )
        self.folder = Path(folder)
        self.target = target
        self.max_bytes = max_bytes
        self.context = context
        self.lost = 0
        self._head = json.dumps({"format": FORMAT, "fingerprint": target.fingerprint()}) + "\n"
        self._lines: list[str] = []
        self._bytes = len(self._head)
        self._since = 0.0
        self._lock = threading.Lock()
        self._claim()
        atexit.register(self.close)

    def _claim(self) -> None:
        """Make the folder, or see whose it is."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for segment in _segments(self.folder)[-1:]:
            list(_read_segment(segment, self.target))
        for left in self.folder.glob(".*.partial"):  # by a writer that was killed
            written = _stat(left)
            if written is not None and time.time() - written.st_mtime > DEBRIS_AGE:
                left.unlink(missing_ok=True)

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        kept: Sequence[Sequence[bool]],
        sampling: dict[str, Any],
    ) -> None:
        """Log the answers of one batch.

        Args:
            prompts: token ids before each answer, padding left out.
            answers: new token ids.
            kept: for each of them, whether the drafter had guessed it.
            sampling: from ``sampling_record``.
        """
        with self._lock:
            for prompt, answer, flags in zip(prompts, answers, kept, strict=True):
                self._add(_line(prompt, answer, flags, sampling, self.context))
            if self._lines and time.monotonic() - self._since > PATIENCE:
                self._write()

    def _add(self, line: str) -> None:
        if len(self._head) + len(line) > self.max_bytes:
            self._lose(1, f"an answer takes {len(line)} bytes, and the log may take {self.max_bytes}")
            return
        if self._lines and self._bytes + len(line) > min(SEGMENT_BYTES, self.max_bytes // SEGMENTS):
            self._write()
        if not self._lines:
            self._since = time.monotonic()
        self._lines.append(line)
        self._bytes += len(line)

    def flush(self) -> None:
        """Write what waits; readers see it from here on."""
        with self._lock:
            if self._lines:
                self._write()

    def close(self) -> None:
        """Write what waits, at the end of the program at the latest."""
        self.flush()
        atexit.unregister(self.close)

    def __enter__(self) -> TrafficLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        """One segment, whole or not at all; room is made for it first, and again where others wrote meanwhile."""
        lines, size = self._lines, self._bytes
        self._lines, self._bytes = [], len(self._head)
        name = f"answers-{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        try:
            self._make_room(size)
            with whole_file(self.folder / name) as staged:
                staged.touch(mode=0o600)
                staged.write_text(self._head + "".join(lines), encoding="ascii")
            self._make_room(0)
        except OSError as error:
            self._lose(len(lines), str(error))

    def _make_room(self, wanted: int) -> None:
        """Remove segments, oldest first, until ``wanted`` more bytes fit."""
        there = {segment: found.st_size for segment in _segments(self.folder) if (found := _stat(segment)) is not None}
        left = sum(there.values())
        for segment, size in there.items():
            if left + wanted <= self.max_bytes:
                break
            segment.unlink(missing_ok=True)
            left -= size

    def _lose(self, rows: int, reason: str) -> None:
        self.lost += rows
        logger.warning("%s: %d answers lost (%d so far): %s", self.folder, rows, self.lost, reason)


def _line(
    prompt: Sequence[int], answer: Sequence[int], kept: Sequence[bool], sampling: dict[str, Any], context: int | None
) -> str:
    shown = list(prompt) if context is None else list(prompt[max(len(prompt) - context, 0) :])
    row = {
        "context": shown,
        "whole": len(shown) == len(prompt),
        "answer": list(answer),
        "kept": "".join("1" if flag else "0" for flag in kept),
        "sampling": sampling,
    }
    return json.dumps(row, separators=(",", ":")) + "\n"


def read_traffic(folder: str | Path, target: Target) -> list[TrafficRow]:
    """All answers of a log, oldest first; writers may go on meanwhile.

    Args:
        target: whose answers they have to be.

    Raises:
        TrafficError: if there are none, they are another target's, or a segment is damaged.
    """
    folder = Path(folder)
    rows = [row for segment in _segments(folder) for row in _read_segment(segment, target)]
    if not rows:
        raise TrafficError(
            f"No logged answers in {folder}; expected a folder that a TrafficLog or serve/generate.py --log wrote."
        )
    return rows


def _segments(folder: Path) -> list[Path]:
    """Oldest first: names begin with the time."""
    return sorted(folder.glob("answers-*.jsonl"))


def _stat(path: Path) -> os.stat_result | None:
    """None if another writer has removed or renamed it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _read_segment(segment: Path, target: Target) -> Iterator[TrafficRow]:
    try:
        head, *lines = segment.read_text(encoding="ascii").splitlines()
        written = json.loads(head)
        form, whose = int(written["format"]), str(written["fingerprint"])
    except FileNotFoundError:  # made room for a newer one
        return
    except (ValueError, KeyError, TypeError) as error:
        raise TrafficError(f"{segment} does not begin as a segment of a log does ({error!r}); remove it.") from error
    if form > FORMAT:
        raise TrafficError(f"{segment} has format {form}; this version of mtp reads up to {FORMAT}.")
    if (difference := fingerprint_mismatch(found := target.fingerprint(), whose)) is not None:
        raise TrafficError(
            f"{segment} holds answers of a target with fingerprint {whose}; the target at hand has {found}: its "
            f"{difference} differ. Each target needs a folder of its own."
        )
    for number, line in enumerate(lines, start=2):
        yield _parse_row(segment, number, line, target.vocab_size)


def _parse_row(segment: Path, number: int, line: str, vocab_size: int) -> TrafficRow:
    try:
        row = json.loads(line)
        parsed = TrafficRow(
            answer=tuple(map(int, row["answer"])),
            kept=tuple(flag == "1" for flag in row["kept"]),
            context=tuple(map(int, row["context"])),
            whole=bool(row["whole"]),
            sampling=dict(row["sampling"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise TrafficError(f"{segment}, line {number}: no answer ({error!r}); remove the segment.") from error
    if len(parsed.kept) != len(parsed.answer) or not parsed.answer:
        raise TrafficError(
            f"{segment}, line {number}: {len(parsed.answer)} tokens and {len(parsed.kept)} flags; expected at least "
            "one token and a flag for each. Remove the segment."
        )
    if not all(0 <= token < vocab_size for token in parsed.answer + parsed.context):
        raise TrafficError(f"{segment}, line {number}: token ids beyond the target's {vocab_size}; remove the segment.")
    return parsed
