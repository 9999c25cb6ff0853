"""Prompts from nothing at all: an instruct target writes its own, as the user of its chat template."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mtp.files import whole_file
from train.data import DataError, read_jsonl
from train.generation import Progress, Sampling, Writer, derived_seed
from train.prompts import Question, make_question, require_template

logger = logging.getLogger(__name__)

SELF_WRITTEN = "self-written"
SENTINEL = "mtpuserturnmtp"  # letters alone, so that no template trims, escapes or translates it
FRUITLESS_ROUNDS = 5


@dataclass(frozen=True)
class UserTurn:
    """How a chat template frames the user's turn.

    Attributes:
        header: token ids of everything before the user's words, a default system prompt included.
        end_id: the special token that closes the turn, where the template closes it with one.
        end_text: what stands behind the user's words, without the space around it; may be empty.
    """

    header: tuple[int, ...]
    end_id: int | None
    end_text: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> UserTurn:
        """Read it off the rendering of one user message that holds a sentinel.

        Raises:
            DataError: if there is no chat template, or it does not show the user's words.
        """
        require_template(tokenizer)
        rendered = str(tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}], tokenize=False))
        before, found, after = rendered.partition(SENTINEL)
        if not found:
            raise DataError("The chat template does not show the user's words; pass --prompts or --dataset.")
        # A space at the end of the header ("[INST] ") would be a token of its own, which no real prompt starts with.
        header = tokenizer(before.rstrip(" "), add_special_tokens=False).input_ids
        if not header:
            raise DataError(
                "The chat template puts nothing before the user's words, so the target has nothing to continue; pass "
                "--prompts or --dataset."
            )
        end_text = after.strip()
        closing = tokenizer(end_text, add_special_tokens=False).input_ids if end_text else []
        end_id = closing[0] if closing and closing[0] in special_ids(tokenizer) else None
        return cls(tuple(header), end_id, end_text)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of all control tokens."""
    added = {token for token, what in tokenizer.added_tokens_decoder.items() if what.special}
    return added | set(tokenizer.all_special_ids)


def user_text(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, turn: UserTurn, end_ids: set[int]
) -> tuple[str, str]:
    """The words of a sampled user turn, and ``ok`` or why it cannot be used: cut off, malformed or empty.

    Args:
        ids: sampled behind the user header, the token that ended them included.
        end_ids: tokens that end the turn.
    """
    ended = bool(ids) and ids[-1] in end_ids
    body = list(ids[:-1]) if ended else list(ids)
    text = str(tokenizer.decode(body, skip_special_tokens=False))
    if not ended and turn.end_text and turn.end_text in text:  # a template that closes the turn with plain words
        text, ended = text[: text.index(turn.end_text)], True
    text = text.strip()
    if not ended:
        return text, "cut off"
    # A control token in the middle would be one again when rendered, and a broken character is none a user types.
    if special_ids(tokenizer).intersection(body) or "\ufffd" in text:
        return text, "malformed"
    return text, "ok" if text else "empty"


class PromptWriter:
    """Samples user turns behind the header of the target's chat template.

    Raises:
        DataError: if the target has no chat template that a user's turn can be read off.
    """

    def __init__(self, generator: Writer, sampling: Sampling, seed: int):
        self.generator = generator
        self.sampling = sampling
        self.seed = seed
        self.turn = UserTurn.of(generator.tokenizer)
        self.end_ids = set(generator.end_ids)
        if self.turn.end_id is not None:
            self.end_ids.add(self.turn.end_id)

    def sample(self, at: int, candidates: int) -> list[str]:
        """The usable texts among those of round ``at``; the same round gives the same texts."""
        progress = Progress(candidates, 0, "prompts")
        headers = [self.turn.header] * candidates
        seed = derived_seed(self.seed, "prompts", at)
        sampled = self.generator(headers, self.sampling, seed, self.end_ids, progress)
        progress.bar.close()
        judged = [user_text(ids, self.generator.tokenizer, self.turn, self.end_ids) for ids in sampled]
        verdicts = Counter(verdict for _, verdict in judged)
        logger.info("sampled prompts: %s", ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
        return [text for text, verdict in judged if verdict == "ok"]

    def write(self, path: Path, count: int, round_size: int) -> list[Question]:
        """``count`` different prompts, kept in ``path`` so that an interrupted run goes on with the same ones.

        Args:
            path: a JSONL file; rewritten whole after each round of sampling.
            round_size: candidates sampled in a round.

        Raises:
            DataError: if round after round gives nothing new.
        """
        records = [record for _, record in read_jsonl(path)] if path.exists() else []
        at = records[-1]["round"] + 1 if records else 0
        seen = {record["prompt"] for record in records}
        fruitless = 0
        while len(records) < count:
            fresh = [text for text in dict.fromkeys(self.sample(at, round_size)) if text not in seen]
            seen.update(fresh)
            records += [{"prompt": text, "source": SELF_WRITTEN, "round": at} for text in fresh[: count - len(records)]]
            if fresh:
                with whole_file(path) as staged:
                    staged.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
            logger.info("%d of %d prompts written", len(records), count)
            fruitless = 0 if fresh else fruitless + 1
            if fruitless == FRUITLESS_ROUNDS:
                raise DataError(
                    f"The target wrote {len(records)} of {count} prompts, and nothing new in {fruitless} rounds of "
                    f"{round_size}. Raise --max-prompt-tokens or --prompt-temperature, or pass --prompts or --dataset."
                )
            at += 1
        return [
            make_question(record["prompt"], f"{path}, line {number}", record, SELF_WRITTEN)
            for number, record in enumerate(records, start=1)
        ]
