"""Distilled rows: what the target answered, as token ids, and which of them are held out.

A row is never re-tokenised, and its loss mask never guessed from a chat template: the response is the response.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtp.errors import ExplainedError
from mtp.files import read_json

COLUMNS = ("prompt_ids", "response_ids", "category", "source", "finish_reason")


class DataError(ExplainedError):
    """Data that cannot be used; the message names the file, the line where there is one, and what was expected."""


@dataclass(frozen=True)
class Row:
    """One prompt and the target's answer to it.

    Attributes:
        prompt_ids: everything before the answer, the assistant's header included.
        response_ids: the answer as generated, the end token included when there was one.
        category: the kind of prompt, for reports.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    category: str = "all"

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def is_held_out(prompt_ids: Sequence[int], fraction: float) -> bool:
    """Whether a prompt belongs to the held-out split: a hash decides, so the same prompt always lands on one side."""
    digest = hashlib.sha256(np.asarray(prompt_ids, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction


def split_rows(rows: Iterable[Row], held_out_fraction: float) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, in their original order."""
    train: list[Row] = []
    held_out: list[Row] = []
    for row in rows:
        (held_out if is_held_out(row.prompt_ids, held_out_fraction) else train).append(row)
    return train, held_out


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """``(line number, object)`` of every line of a ``.jsonl`` or ``.jsonl.gz`` file, blank lines left out.

    Raises:
        DataError: if the file is missing or holds no line, or a line is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"No file at {path}; expected a JSONL file, one object a line.")
    empty = True
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    empty = False
                    yield number, _parse_line(path, number, line)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start} of a block).") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is damaged ({error}); expected JSON lines compressed by gzip. Copy it again."
        ) from error
    if empty:
        raise DataError(f"{path} is empty; expected one JSON object a line.")


def _parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}, line {number}: found a {type(value).__name__}, expected a JSON object.")
    return value


def load_rows(path: str | Path, limit: int | None = None) -> list[Row]:
    """Read distilled rows: a folder that ``train/distill.py`` wrote, or a JSONL file of token ids.

    Args:
        path: a folder of parquet files, or a ``.jsonl``/``.jsonl.gz`` file, with ``prompt_ids`` and ``response_ids``.
        limit: read only the first so many rows.

    Raises:
        DataError: if nothing is there, a column is missing, or a row has no prompt or no response.
    """
    path = Path(path)
    if path.is_dir():
        records: Iterable[tuple[int, dict[str, Any]]] = _read_parquet(path)
    elif path.exists():
        records = read_jsonl(path)
    else:
        raise DataError(f"No distilled data at {path}; write some with train/distill.py, or point data.path elsewhere.")
    rows: list[Row] = []
    for number, record in records:
        if limit is not None and len(rows) == limit:
            break
        for column in ("prompt_ids", "response_ids"):
            ids = record.get(column)
            if not ids or not all(isinstance(token, int) for token in ids):
                raise DataError(
                    f"{path}, row {number}: {column!r} is {ids!r:.60}; expected a non-empty list of token ids."
                )
        rows.append(Row(tuple(record["prompt_ids"]), tuple(record["response_ids"]), record.get("category") or "all"))
    if not rows:
        raise DataError(f"{path} holds no rows.")
    return rows


def _read_parquet(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import datasets

    files = sorted(glob.glob(os.path.join(glob.escape(str(folder)), "*.parquet")))
    if not files:
        raise DataError(f"{folder} holds no .parquet files; expected a folder that train/distill.py wrote.")
    try:
        table = datasets.Dataset.from_parquet(files, keep_in_memory=True)
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error)
        raise DataError(f"{folder}: a .parquet file cannot be read ({reason}). Distil it again, or copy it.") from error
    missing = {"prompt_ids", "response_ids"} - set(table.column_names)
    if missing:
        raise DataError(f"{folder}: no column {', '.join(sorted(missing))}; found {', '.join(table.column_names)}.")
    yield from enumerate(table, start=1)


def distillation_record(path: str | Path) -> dict[str, Any]:
    """What ``train/distill.py`` wrote beside its answers; empty for rows from elsewhere."""
    record = Path(path) / "distill.json"
    return read_json(record) if record.is_file() else {}


def recorded_fraction(record: dict[str, Any]) -> float | None:
    """The share of the prompts that the data's own record says is held out; None where it says nothing."""
    fraction: float | None = record.get("settings", {}).get("held_out", {}).get("fraction")
    return fraction


def draft_vocabulary(rows: Sequence[Row], size: int | None, vocab_size: int, always: Sequence[int]) -> Tensor:
    """Token ids ``[Vd]`` in rising order: the end tokens, and the most frequent tokens of the answers.

    Raises:
        DataError: if no token is asked for, or more than the target has.
    """
    if size is None:
        return torch.arange(vocab_size)
    if not 1 <= size <= vocab_size:
        raise DataError(
            f"head.draft_vocab_size is {size}; the target's vocabulary has {vocab_size} tokens. Expected 1 to "
            f"{vocab_size}, or null for all of them."
        )
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        counts += torch.bincount(torch.tensor(row.response_ids), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def length_batches(lengths: Sequence[int], positions: int, generator: np.random.Generator | None) -> list[list[int]]:
    """Group rows into batches of at most ``positions`` padded positions, rows of like length together.

    Args:
        lengths: positions of each row.
        positions: budget of a batch, padding included; a longer row makes a batch of its own.
        generator: shuffles rows (within neighbourhoods of like length) and batches; None keeps them sorted.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    if generator is not None:
        # Sorting by a jittered length mixes neighbours from pass to pass and wastes little padding.
        order = np.argsort(np.asarray(lengths) * generator.uniform(0.9, 1.1, len(lengths)), kind="stable")
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = 0
    for index in order.tolist():
        longest = max(longest, lengths[index])
        if batch and longest * (len(batch) + 1) > positions:
            batches.append(batch)
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        batches.append(batch)
    if generator is not None:
        generator.shuffle(batches)
    return batches
