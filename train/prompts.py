"""Prompts from a JSONL file or a data set, and how they become token ids."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from train.data import DataError, read_jsonl

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One prompt before it is tokenised.

    Attributes:
        content: plain text, or a conversation that ends with the user's turn.
        place: where it was read, for error messages.
        category: the kind of prompt, for reports.
        source: where it comes from, for reports.
    """

    content: str | Messages
    place: str
    category: str
    source: str


@dataclass(frozen=True)
class Prompt:
    """What the target is to answer; ``ids`` end with the assistant's header where there is a chat template."""

    ids: tuple[int, ...]
    category: str
    source: str


def read_questions(path: str | Path) -> Iterator[Question]:
    """The prompts of a JSONL file of ``{"prompt": text}`` or ``{"messages": [...]}``, in its order.

    ``category`` and ``source`` may stand beside them.

    Raises:
        DataError: for a missing or empty file, and for a line that is not such an object, naming file and line.
    """
    try:
        for number, record in read_jsonl(path):
            place = f"{path}, line {number}"
            if ("prompt" in record) == ("messages" in record):
                found = "both" if "prompt" in record else f"the keys {', '.join(map(repr, record)) or 'nothing'}"
                raise DataError(f'{place}: found {found}; expected either "prompt" or "messages".')
            key = "prompt" if "prompt" in record else "messages"
            if not isinstance(record[key], str if key == "prompt" else list):
                expected = "a string" if key == "prompt" else "a list of messages"
                raise DataError(f"{place}: {key!r} is {record[key]!r:.60}; expected {expected}.")
            yield make_question(record[key], place, record, source=Path(path).name)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error


def read_dataset(name: str, subset: str | None, split: str, column: str) -> Iterator[Question]:
    """The prompts of a column (texts, or conversations) of a data set on the Hub or in a local folder.

    Conversations in data sets mostly end with somebody else's answer; it is dropped, the target gives its own.

    Raises:
        DataError: if the data set cannot be loaded, has no such column, or a row holds something else.
    """
    import datasets

    try:
        table = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"Cannot load split {split!r} of data set {name}: {error}") from error
    if column not in table.column_names:
        raise DataError(f"{name} has no column {column!r}; it has {', '.join(table.column_names)}. Pass --column.")
    for number, record in enumerate(table, start=1):
        content = record[column]
        while isinstance(content, list) and content and _role(content[-1]) == "assistant":
            content = content[:-1]
        yield make_question(content, f"{name}, row {number}, column {column!r}", record, source=name)


def make_question(content: Any, place: str, record: Mapping[str, Any], source: str) -> Question:
    """Check one prompt.

    Args:
        content: a text, or a list of messages.
        record: the row it comes from, for its ``category`` and ``source``.
        source: used where the row names none.

    Raises:
        DataError: naming ``place``, what was found and what was expected.
    """
    if isinstance(content, str):
        if not content.strip():
            raise DataError(f"{place}: the prompt is empty.")
    elif isinstance(content, list):
        check_messages(content, place)
    else:
        raise DataError(f"{place}: found {content!r:.60}, expected a text or a list of messages.")
    labels = {"category": "all", "source": source}
    for key in labels:
        value = record.get(key)
        if value is not None and not isinstance(value, str):
            raise DataError(f"{place}: {key!r} is {value!r:.60}; expected a string.")
        labels[key] = value or labels[key]
    return Question(content, place, **labels)


def check_messages(messages: Sequence[Any], place: str) -> None:
    """Raise ``DataError`` unless these are messages that end with the user's turn."""
    if not messages:
        raise DataError(f"{place}: there are no messages; expected at least one, of the user.")
    for at, message in enumerate(messages, start=1):
        if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
            raise DataError(
                f'{place}: message {at} is {message!r:.80}; expected an object with the texts "role" and "content".'
            )
    if messages[-1]["role"] != "user":
        raise DataError(
            f"{place}: the last message is of role {messages[-1]['role']!r}; expected 'user', because the target is to "
            "answer it."
        )


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def prompt_ids(tokenizer: PreTrainedTokenizerBase, content: str | Messages, raw: bool = False) -> tuple[int, ...]:
    """Token ids of a prompt: through the chat template up to the assistant's header, or as they are with ``raw``.

    Raises:
        DataError: if the target has no chat template or it refuses the messages; or for messages with ``raw``.
    """
    if raw:
        if not isinstance(content, str):
            raise DataError('found "messages", but --raw takes plain texts ("prompt") only.')
        return tuple(tokenizer(content).input_ids)
    require_template(tokenizer)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    try:
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except TemplateError as error:
        raise DataError(f"the chat template refuses these messages: {error}") from error


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``DataError`` for a target that cannot be chatted with, saying what to do."""
    if not tokenizer.chat_template:
        raise DataError(
            "The target has no chat template, so it can neither be sent messages nor write its own prompts. Pass plain "
            'prompts ({"prompt": ...} rows, or a text column) with --raw, or choose an instruct target.'
        )


def tokenise(
    questions: Iterable[Question],
    tokenizer: PreTrainedTokenizerBase,
    raw: bool,
    longest: int | None,
    limit: int | None = None,
) -> list[Prompt]:
    """The prompts to answer, in order: each once, and none that leaves too little room for its answer.

    Args:
        longest: most tokens of a prompt.
        limit: stop at so many prompts.

    Raises:
        DataError: if a prompt cannot be tokenised (see ``prompt_ids``), or none is left.
    """
    prompts: dict[tuple[int, ...], Prompt] = {}
    dropped: Counter[str] = Counter()
    for question in questions:
        if limit is not None and len(prompts) == limit:
            break
        try:
            ids = prompt_ids(tokenizer, question.content, raw)
        except DataError as error:
            raise DataError(f"{question.place}: {error}") from error
        if not ids:
            dropped["empty"] += 1
        elif ids in prompts:
            dropped["repeated"] += 1
        elif longest is not None and len(ids) > longest:
            dropped["too long"] += 1
        else:
            prompts[ids] = Prompt(ids, question.category, question.source)
    for reason, count in dropped.items():
        detail = f" (more than {longest} tokens)" if reason == "too long" else ""
        logger.warning("%d prompts skipped: %s%s", count, reason, detail)
    if not prompts:
        skipped = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(f"No prompts are left to answer ({skipped or 'none were found'}).")
    return list(prompts.values())
