"""Questions to measure on: where they come from, and how they become the target's token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.data import DataError, distillation_record, is_held_out, load_rows, read_jsonl, recorded_fraction

UNNAMED = "uncategorised"
KEYS = ("turns", "messages", "prompt", "prompt_ids")

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """One conversation to have with the model.

    Attributes:
        name: how reports call it: its id in the file, or its place there.
        category: the kind of question.
        turns: what the person says, one after the other.
        context: the conversation before the first turn.
        prompt_ids: the prompt, where it is given as token ids; there are no turns then.
    """

    name: str
    category: str = UNNAMED
    turns: tuple[str, ...] = ()
    context: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] | None = None


@dataclass
class Conversation:
    """A question while it is answered.

    Attributes:
        messages: everything said so far, the turn at hand included.
        turn: turns begun.
        closed: no further turn can be asked.
    """

    question: Question
    messages: list[Message] = field(default_factory=list)
    turn: int = 0
    closed: bool = False

    def next_prompt(self, tokenizer: Any, raw: bool) -> list[int]:
        """Begin the next turn; returns the token ids of the prompt."""
        question, self.turn = self.question, self.turn + 1
        if question.prompt_ids is not None:
            return list(question.prompt_ids)
        if self.turn == 1:
            self.messages.extend(question.context)
        self.messages.append({"role": "user", "content": question.turns[self.turn - 1]})
        return render(tokenizer, self.messages, raw)

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def has_more(self, all_turns: bool) -> bool:
        """Whether another turn is to be answered."""
        turns = max(len(self.question.turns), 1)
        return not self.closed and self.turn < (turns if all_turns else 1)


def render(tokenizer: Any, messages: Sequence[Message], raw: bool = False) -> list[int]:
    """Token ids of a conversation up to where the model's answer begins.

    Args:
        raw: leave the chat template out and put the messages' text one below the other.  A tokenizer that has no
            template is always used so.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def read_questions(path: str | Path, held_out_fraction: float | None = None) -> list[Question]:
    """Read a folder of distilled rows, or a JSONL file with any of the keys in ``KEYS`` in each line.

    Args:
        held_out_fraction: of distilled rows, take only those that training with this fraction held out; by default
            the fraction in the folder's own record, so that nobody measures on training rows unawares.

    Raises:
        DataError: if there is nothing, or something else than that; with the number of the line.
    """
    path = Path(path)
    if path.is_dir():
        rows = load_rows(path)
        if held_out_fraction is None:
            held_out_fraction = recorded_fraction(distillation_record(path))
        questions = [
            Question(f"row {number}", UNNAMED if row.category == "all" else row.category, prompt_ids=row.prompt_ids)
            for number, row in enumerate(rows, start=1)
        ]
    else:
        questions = [parse_question(record, f"{path}, line {number}", number) for number, record in read_jsonl(path)]
    if held_out_fraction is None:
        return questions
    if any(question.prompt_ids is None for question in questions):
        raise DataError(
            f"{path} holds text; a held-out fraction picks among distilled rows, by the hash of their 'prompt_ids'. "
            "Leave --held-out-fraction out."
        )
    held_out = [q for q in questions if q.prompt_ids is not None and is_held_out(q.prompt_ids, held_out_fraction)]
    if not held_out:
        raise DataError(f"{path}: {held_out_fraction} of {len(questions)} rows held out is none.")
    return held_out


def parse_question(record: dict[str, Any], where: str, number: int) -> Question:
    """One line of a file.

    Raises:
        DataError: if it is no question; the message begins with ``where``.
    """
    found = [key for key in KEYS if key in record]
    if not found:
        raise DataError(
            f"{where}: found keys {', '.join(map(repr, record)) or '(none)'}; expected one of {', '.join(KEYS)}."
        )
    key = found[0]
    value = record[key]
    name = str(record.get("question_id", record.get("id", f"line {number}")))
    category = str(record.get("category") or UNNAMED)
    if key == "prompt_ids":
        _require(_is_list_of(value, int) and min(value) >= 0, where, key, value, "a non-empty list of token ids")
        return Question(name, category, prompt_ids=tuple(value))
    if key == "prompt":
        _require(isinstance(value, str) and value, where, key, value, "a non-empty text")
        return Question(name, category, (value,))
    if key == "turns":
        _require(_is_list_of(value, str) and all(value), where, key, value, "a non-empty list of texts")
        return Question(name, category, tuple(value))
    wanted = "a list of {'role': text, 'content': text} with one of role 'user'"
    _require(_is_list_of(value, dict), where, key, value, wanted)
    messages = [{"role": message.get("role"), "content": message.get("content")} for message in value]
    _require(all(isinstance(part, str) for m in messages for part in m.values()), where, key, value, wanted)
    # What follows the last question is an answer, somebody else's: the model is to give its own.
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    _require(bool(messages), where, key, value, wanted)
    return Question(name, category, (messages[-1]["content"],), tuple(messages[:-1]))


def first_of_each(questions: Iterable[Question], per_category: int | None, limit: int | None) -> list[Question]:
    """The first ``per_category`` questions of each category, and of these the first ``limit``, in their order."""
    seen: dict[str, int] = {}
    chosen = []
    for question in questions:
        seen[question.category] = seen.get(question.category, 0) + 1
        if per_category is None or seen[question.category] <= per_category:
            chosen.append(question)
    return chosen[:limit]


def category_batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Batches of at most ``size`` questions of one category, so that a batch's counters belong to one category."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _require(holds: Any, where: str, key: str, value: Any, expected: str) -> None:
    if not holds:
        raise DataError(f"{where}: {key!r} is {value!r:.80}; expected {expected}.")
