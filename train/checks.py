"""Mistakes in the data that would train without a word and show as low acceptance: looked for before the first step."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from train.data import DataError, Row
from train.self_prompts import SENTINEL

logger = logging.getLogger(__name__)

CUT_SHARE = 0.5  # of the answers without an end token, above which a head hardly sees how answers end
TEMPLATE_SHARE = 0.5  # of the prompts with the template's header, below which they were made by another one
REPEATED_SHARE = 0.1
LEAKED_SHARE = 0.5  # of the held-out prompts among the training ones, above which nothing is measured
ANSWER_TOKENS = 16  # shorter answers may well be the same to different questions


@dataclass(frozen=True)
class Finding:
    """What is wrong with the data, in a sentence.

    Attributes:
        fatal: training would be worthless.
        text: what was found, what was expected, what to do.
    """

    fatal: bool
    text: str


def check_rows(
    train: Sequence[Row],
    held_out: Sequence[Row],
    *,
    steps: int,
    window: int | None,
    end_ids: Sequence[int],
    tokenizer: Any,
    record: dict[str, Any],
) -> list[Finding]:
    """Everything that can be found without a pass of the target.

    Args:
        steps: unrolled steps, or heads.
        window: positions of a prompt that the head is shown; None for all.
        end_ids: the target's end tokens.
        tokenizer: the target's.
        record: ``distill.json`` of the data; empty where there is none.
    """
    return [
        *masks(train, "training", steps, window),
        *masks(held_out, "held-out", steps, window),
        *cut_answers(train, end_ids),
        *templates(train, tokenizer, record),
        *repeats(train),
        *leaks(train, held_out, tokenizer),
    ]


def report(findings: Sequence[Finding]) -> None:
    """Warn of what was found.

    Raises:
        DataError: with all that is fatal.
    """
    for finding in findings:
        if not finding.fatal:
            logger.warning("data: %s", finding.text)
    if fatal := [finding.text for finding in findings if finding.fatal]:
        raise DataError(" ".join(fatal))


def trained_tokens(row: Row, step: int, window: int | None) -> int:
    """How many tokens of a row an unrolled step trains: those of the answer with ``step + 2`` positions before them."""
    prompt = len(row.prompt_ids) if window is None else min(len(row.prompt_ids), window)
    return max(0, len(row.response_ids) - max(0, step + 2 - prompt))


def masks(rows: Sequence[Row], which: str, steps: int, window: int | None) -> list[Finding]:
    """Loss masks that select nothing."""
    found = []
    for step in range(steps):
        empty = sum(trained_tokens(row, step, window) == 0 for row in rows)
        if empty == len(rows):
            text = (
                f"step {step + 1} of {steps} (head.steps) has no token to train in any of {len(rows)} {which} rows: "
                f"it needs {step + 2} tokens before one of an answer. Lower head.steps, or use longer rows."
            )
            return [Finding(True, text)]
        if empty and step == 0:
            found.append(Finding(False, f"{empty} of {len(rows)} {which} rows select no token to train: too short."))
    return found


def cut_answers(rows: Sequence[Row], end_ids: Sequence[int]) -> list[Finding]:
    """Answers that the length limit cut, and answers that are nothing but an end token."""
    if not end_ids:
        return []
    cut = sum(row.response_ids[-1] not in end_ids for row in rows)
    empty = sum(len(row.response_ids) == 1 and row.response_ids[0] in end_ids for row in rows)
    found = []
    if cut == len(rows):
        text = (
            f"none of {len(rows)} answers ends with one of the target's end tokens {list(end_ids)}: all were cut by "
            "the length limit, or were recorded without it. The head would never learn to end. Raise --max-new-tokens "
            "of train/distill.py, or record the end token."
        )
        found.append(Finding(False, text))
    elif cut / len(rows) > CUT_SHARE:
        text = f"{cut / len(rows):.0%} of the answers were cut by the length limit; raise it when distilling."
        found.append(Finding(False, text))
    if empty / len(rows) > REPEATED_SHARE:
        text = f"{empty / len(rows):.0%} of the answers are empty: nothing but an end token. Look at the prompts."
        found.append(Finding(False, text))
    return found


def answer_header(tokenizer: Any) -> tuple[int, ...]:
    """Token ids that the chat template puts between the user's words and the answer; empty without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    messages = [{"role": "user", "content": SENTINEL}]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    _, _, after = rendered.partition(SENTINEL)
    return tuple(tokenizer(after, add_special_tokens=False).input_ids) if after else ()


def template_digest(tokenizer: Any) -> str | None:
    """A short name of the chat template's text; None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else None


def templates(rows: Sequence[Row], tokenizer: Any, record: dict[str, Any]) -> list[Finding]:
    """Prompts that the target's chat template would have rendered otherwise."""
    header = answer_header(tokenizer)
    recorded = record.get("chat_template", "unknown")
    if not header or recorded is None:  # plain prompts, by the record's own word
        return []
    if recorded not in ("unknown", template_digest(tokenizer)):
        text = (
            "the prompts were rendered with another chat template than the target's tokenizer has now. Distil again, "
            "or point target.path at the tokenizer of then."
        )
        return [Finding(True, text)]
    # The first token of the header may merge with the user's last word.
    matching = sum(row.prompt_ids[-len(header) + 1 :] == header[1:] for row in rows if len(header) > 1)
    if len(header) > 1 and matching / len(rows) < TEMPLATE_SHARE:
        ending = tokenizer.decode(rows[0].prompt_ids[-len(header) - 8 :])
        text = (
            f"{matching} of {len(rows)} prompts end as the target's chat template ends them, with "
            f"{tokenizer.decode(header)!r}; the first ends with {ending!r}. Acceptance will be low in chats: render "
            "prompts with this template (train/distill.py does), unless the head is meant for plain text."
        )
        return [Finding(recorded != "unknown", text)]
    return []


def repeats(rows: Sequence[Row]) -> list[Finding]:
    """Prompts that occur several times among the training rows."""
    repeated = len(rows) - len({row.prompt_ids for row in rows})
    if repeated / len(rows) <= REPEATED_SHARE:
        return []
    text = f"{repeated} of {len(rows)} training rows repeat the prompt of another: they cost time and teach little."
    return [Finding(False, text)]


def leaks(train: Sequence[Row], held_out: Sequence[Row], tokenizer: Any) -> list[Finding]:
    """Held-out rows whose prompt, in other spelling, or whose answer is among the training rows."""
    prompts = Counter(_words(row, tokenizer) for row in train)
    answers = {row.response_ids for row in train if len(row.response_ids) >= ANSWER_TOKENS}
    asked = sum(bool(words := _words(row, tokenizer)) and words in prompts for row in held_out)
    answered = sum(row.response_ids in answers for row in held_out)
    if not asked and not answered:
        return []
    text = (
        f"of {len(held_out)} held-out rows {asked} ask what a training row asks (letters and digits alike) and "
        f"{answered} have the answer of one: acceptance on them says nothing about new text. Remove repeats before "
        "distilling."
    )
    return [Finding(asked / len(held_out) > LEAKED_SHARE, text)]


def _words(row: Row, tokenizer: Any) -> str:
    """A prompt's letters and digits in lower case: its ids where there is no tokenizer to read them."""
    if tokenizer is None:
        return " ".join(map(str, row.prompt_ids))
    text = str(tokenizer.decode(row.prompt_ids, skip_special_tokens=True))
    return "".join(letter for letter in text.lower() if letter.isalnum())
