"""Rows from a log of what the target answered in use (mtp/traffic.py), mixed with distilled ones.

A head forgets what it is no longer shown, so that rows of the data it was first trained on are mixed in.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from mtp.files import whole_file
from mtp.target import Target
from mtp.traffic import TrafficError, TrafficRow, read_traffic
from train.checkpoints import find_checkpoint
from train.checks import answer_header
from train.config import RunConfig
from train.data import DataError, Row, load_rows, split_rows

logger = logging.getLogger(__name__)

CATEGORY = "logged traffic"
SETTLED = 32  # tokens before the first one that is trained on, where the prompt is not known whole
SNAPSHOT = "traffic.jsonl"


def with_traffic(
    config: RunConfig,
    accelerator: Accelerator,
    target: Target,
    tokenizer: Any,
    train: list[Row],
    held_out: list[Row],
) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows with those of the recipe's log among them; every process must call this.

    A log goes on growing while a run trains on it.  The run keeps what was there when it began in its own folder, so
    that it resumes with the same rows.

    Raises:
        DataError: for a log that cannot be trained on.
    """
    snapshot = Path(config.output) / SNAPSHOT
    if config.dry_run:
        rows = read_rows(config, target, tokenizer)
    else:
        if accelerator.is_main_process and find_checkpoint(Path(config.output), config.resume) is None:
            write_snapshot(snapshot, read_rows(config, target, tokenizer))
        accelerator.wait_for_everyone()
        rows = load_rows(snapshot)
    logged, logged_held_out = split_rows(rows, config.data.held_out_fraction)
    if not logged:
        raise DataError(f"{config.start.traffic} holds {len(rows)} rows, all of them held out: log more of them.")
    mixed = mix(train, logged, config.start.traffic_share, config.optim.seed)
    logger.info(
        "%d rows of the log and %d of %d distilled ones to train on", len(logged), len(mixed) - len(logged), len(train)
    )
    return mixed, take_turns(held_out, logged_held_out)


def fixed_rows(held_out: Sequence[Row]) -> list[Row]:
    """Those held-out rows that do not change with the log."""
    return [row for row in held_out if row.category != CATEGORY]


def read_rows(config: RunConfig, target: Target, tokenizer: Any) -> list[Row]:
    """The log's answers as rows to train on; those that are too short or too long are left out, and counted.

    Raises:
        DataError: if there is none, or the answers are not this target's.
    """
    assert config.start.traffic is not None
    try:
        answers = read_traffic(config.start.traffic, target)
    except TrafficError as error:
        raise DataError(f"start.traffic: {error}") from error
    header = answer_header(tokenizer)
    limit = min(config.data.max_length, target.max_positions or config.data.max_length)
    rows = [row for answer in answers if (row := as_row(answer, header)) is not None and len(row) <= limit]
    if len(rows) < len(answers):
        logger.warning("%d of %d logged answers are too short or too long", len(answers) - len(rows), len(answers))
    if not rows:
        raise DataError(
            f"start.traffic: none of {len(answers)} answers in {config.start.traffic} can be trained on: without "
            f"its prompt an answer needs more than {SETTLED} tokens, and none may have more than {limit}."
        )
    return rows


def as_row(logged: TrafficRow, header: Sequence[int]) -> Row | None:
    """A logged answer to train on; None if nothing of it is left.

    Without its prompt an answer stands behind the chat template's header, which says nothing but that an answer
    follows, and its first tokens count as context.  The target's states and its distributions are then those of the
    text without the prompt: a pair that belongs together, so that nothing false is learnt, but another one than in
    use.  How far apart the two are falls with the text before a token (docs/decisions.md).

    Args:
        header: token ids that the chat template puts right before an answer; empty without a template.
    """
    read_only = 0 if logged.whole else max(SETTLED - len(logged.context), 0)
    context = (logged.context or tuple(header)) + logged.answer[:read_only]
    answer = logged.answer[read_only:]
    return Row(context, answer, CATEGORY) if context and answer else None


def write_snapshot(path: Path, rows: Sequence[Row]) -> None:
    """Rows as ``load_rows`` reads them."""
    with whole_file(path) as staged, staged.open("w", encoding="ascii") as file:
        for row in rows:
            record = {"prompt_ids": row.prompt_ids, "response_ids": row.response_ids, "category": row.category}
            file.write(json.dumps(record) + "\n")


def mix(distilled: Sequence[Row], logged: Sequence[Row], share: float, seed: int) -> list[Row]:
    """All logged rows and as many distilled ones, drawn by ``seed``, that ``share`` of the trained tokens is logged."""
    wanted = trained(logged) * (1 - share) / share
    chosen: list[Row] = []
    for index in np.random.default_rng(seed).permutation(len(distilled)).tolist():
        if wanted <= 0:
            break
        chosen.append(distilled[index])
        wanted -= len(distilled[index].response_ids)
    if wanted > 0:
        found = trained(logged) / (trained(logged) + trained(chosen))
        logger.warning("start.traffic_share is %g, but there are too few distilled rows: it is %.2f", share, found)
    return [*chosen, *logged]


def trained(rows: Sequence[Row]) -> int:
    """Tokens of their answers."""
    return sum(len(row.response_ids) for row in rows)


def take_turns(one: Sequence[Row], other: Sequence[Row]) -> list[Row]:
    """One of each in turn for as long as there are both, so that the first few are of both kinds."""
    return [row for pair in zip_longest(one, other) for row in pair if row is not None]
