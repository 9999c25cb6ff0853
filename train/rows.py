"""The rows of a run: read, checked against the target and the recipe, and split."""

from __future__ import annotations

import logging
from typing import Any

from mtp.fingerprint import fingerprint_mismatch
from mtp.target import Target
from train.checks import check_rows, report
from train.config import RunConfig
from train.data import DataError, Row, distillation_record, load_rows, recorded_fraction, split_rows

logger = logging.getLogger(__name__)


def usable_rows(config: RunConfig, target: Target, tokenizer: Any, window: int | None) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, checked against the target and the recipe.

    Args:
        tokenizer: the target's.
        window: positions of a prompt that the head is shown; None for all.

    Raises:
        DataError: for rows that cannot be trained on.
    """
    rows = load_rows(config.data.path, config.data.limit)
    limit = min(config.data.max_length, target.max_positions or config.data.max_length)
    fitting = [row for row in rows if len(row) <= limit]
    if len(fitting) < len(rows):
        logger.warning(
            "%d of %d rows have more than %d tokens and are left out", len(rows) - len(fitting), len(rows), limit
        )
    if not fitting:
        raise DataError(
            f"{config.data.path}: every row has more than {limit} tokens (data.max_length, or the target's)."
        )
    largest = max(max(row.ids) for row in fitting)
    if largest >= target.vocab_size:
        raise DataError(
            f"{config.data.path} holds token id {largest}, but the target has {target.vocab_size} tokens: these "
            "answers come from another target."
        )
    train, held_out = split_rows(fitting, config.data.held_out_fraction)
    if not held_out:
        raise DataError(
            f"No held-out rows: data.held_out_fraction={config.data.held_out_fraction} of {len(fitting)} rows is none. "
            "Raise it or add rows: acceptance is only worth reporting on prompts that were not trained on."
        )
    if not train:
        raise DataError(f"No training rows: all {len(fitting)} rows are held out; lower data.held_out_fraction.")
    room = None if target.max_positions is None else target.max_positions - config.eval.max_new_tokens
    if room is not None and all(len(row.prompt_ids) > room for row in held_out[: config.eval.rows]):
        raise DataError(
            f"eval.max_new_tokens={config.eval.max_new_tokens}: behind none of the {len(held_out)} held-out prompts "
            f"are so many positions left of the target's {target.max_positions}, so that no acceptance could be "
            "measured. Lower it."
        )
    record = distillation_record(config.data.path)
    check_origin(config, target, record)
    findings = check_rows(
        train,
        held_out,
        steps=config.head.steps,
        window=window,
        end_ids=target.eos_token_ids,
        tokenizer=tokenizer,
        record=record,
    )
    report(findings)
    return train, held_out


def check_origin(config: RunConfig, target: Target, record: dict[str, Any]) -> None:
    """Refuse answers that another target wrote, or a split other than theirs, where the data says so."""
    fingerprint = record.get("fingerprint")
    if fingerprint and fingerprint_mismatch(target.fingerprint(), fingerprint):
        raise DataError(
            f"{config.data.path} holds answers of a target with fingerprint {fingerprint}; {config.target.path} has "
            f"{target.fingerprint()}. Distil again with this target."
        )
    fraction = recorded_fraction(record)
    if fraction is not None and fraction != config.data.held_out_fraction:
        raise DataError(
            f"{config.data.path} was split with held_out_fraction {fraction}; the recipe says "
            f"{config.data.held_out_fraction}. Set data.held_out_fraction={fraction}, so that what others measure on "
            "is not trained on here."
        )
