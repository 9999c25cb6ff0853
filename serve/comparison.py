"""Systems compared on the same prompts: sums of what they did, and where their texts differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from mtp.model import SpeculativeModel
from mtp.stats import AcceptanceStats
from serve.divergence import divergence
from serve.questions import Conversation, Question, category_batches
from serve.systems import (
    DRAFTED,
    PLAIN,
    SYSTEMS,
    TRANSFORMERS,
    Decoding,
    Outcome,
    rounds_of,
    run_system,
)

WARM_UP_TOKENS = 16


@dataclass
class Tally:
    """Sums over some prompts."""

    prompts: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_token: dict[str, float] = field(default_factory=dict)
    timed: dict[str, int] = field(default_factory=dict)

    def add(self, outcomes: dict[str, Outcome]) -> None:
        """Take in what each system did with the same prompts."""
        self.prompts += len(outcomes[DRAFTED].answers)
        for system, outcome in outcomes.items():
            self.tokens[system] = self.tokens.get(system, 0) + outcome.new_tokens
            self.seconds[system] = self.seconds.get(system, 0.0) + outcome.seconds
            if outcome.first_token is not None:
                self.first_token[system] = self.first_token.get(system, 0.0) + outcome.first_token
                self.timed[system] = self.timed.get(system, 0) + 1
        stats = outcomes[DRAFTED].stats
        assert stats is not None
        self.stats.add(stats)

    def speed(self, system: str) -> float:
        """Tokens per second, the prompts' own passes inside."""
        return self.tokens[system] / self.seconds[system] if self.seconds.get(system) else 0.0

    def speedup(self, baseline: str) -> float | None:
        """Drafting's tokens per second over those of ``baseline``; the ratio of wall times where both gave the same
        tokens, as under greedy decoding."""
        return self.speed(DRAFTED) / self.speed(baseline) if self.speed(baseline) else None

    def stage_shares(self) -> dict[str, float]:
        """Share of the rounds' time by stage; reading the prompt is no part of a round."""
        rounds = {stage: seconds for stage, seconds in self.stats.seconds.items() if stage != "prefill"}
        total = sum(rounds.values())
        return {stage: seconds / total if total else 0.0 for stage, seconds in rounds.items()}

    def to_dict(self) -> dict[str, Any]:
        systems = {}
        for system, tokens in self.tokens.items():
            systems[system] = {
                "new_tokens": tokens,
                "seconds": round(self.seconds[system], 4),
                "tokens_per_second": round(self.speed(system), 3),
            }
            if self.timed.get(system) == self.prompts:  # batches have no clock for the first token
                later = max(tokens - self.prompts, 1)
                systems[system]["mean_time_to_first_token"] = round(self.first_token[system] / self.prompts, 5)
                systems[system]["time_per_later_token"] = round(
                    (self.seconds[system] - self.first_token[system]) / later, 5
                )
        ratios = {system: self.speedup(system) for system in (PLAIN, TRANSFORMERS) if system in self.tokens}
        return {
            "prompts": self.prompts,
            **self.stats.to_dict(),
            "stage_shares": {stage: round(share, 4) for stage, share in self.stage_shares().items()},
            "systems": systems,
            "speedup_over": {system: ratio and round(ratio, 4) for system, ratio in ratios.items()},
        }


class Comparison:
    """Everything measured under one way of decoding.  After an interrupt it holds what there was until then.

    Args:
        systems: which systems answer; drafting is always among them.
    """

    def __init__(self, model: SpeculativeModel, decoding: Decoding, systems: Sequence[str] = SYSTEMS):
        self.model = model
        self.decoding = decoding
        self.systems = tuple(systems)
        self.overall = Tally()
        self.categories: dict[str, Tally] = {}
        self.records: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.calls = 0

    @property
    def longest_prompt(self) -> int | None:
        """Tokens a prompt may have if the whole answer is to fit in the target's positions."""
        limit = self.model.target.max_positions
        return None if limit is None else limit - self.decoding.max_new_tokens

    def fits(self, question: Question, turn: int, prompt: Sequence[int]) -> bool:
        """Whether a prompt can be measured; one that cannot is noted."""
        limit = self.longest_prompt
        if prompt and (limit is None or len(prompt) <= limit):
            return True
        self.skipped.append({"name": question.name, "turn": turn, "prompt_tokens": len(prompt), "limit": limit})
        return False

    def run(
        self,
        questions: Sequence[Question],
        tokenizer: Any,
        *,
        batch_size: int = 1,
        raw: bool = False,
        all_turns: bool = False,
    ) -> None:
        """Answer the questions.

        Args:
            tokenizer: None will do where all prompts are given as token ids.
            raw: leave the chat template out.
            all_turns: ask all turns of a question, each behind drafting's own answers to those before.
        """
        bar = tqdm(
            total=len(questions),
            desc=f"temperature {self.decoding.temperature:g}, rule {self.decoding.rule}",
            unit="question",
            # Where nobody watches, a line now and then is enough.
            mininterval=0.1 if sys.stderr.isatty() else 30.0,
        )
        with bar:
            for batch in category_batches(questions, batch_size):
                conversations = [Conversation(question) for question in batch]
                while open_ones := [each for each in conversations if each.has_more(all_turns)]:
                    self._take_turn(open_ones, tokenizer, raw)
                bar.update(len(batch))
                bar.set_postfix(tau=f"{self.overall.stats.mean_accepted_length:.2f}")

    def _take_turn(self, conversations: list[Conversation], tokenizer: Any, raw: bool) -> None:
        """One turn of some conversations; those whose prompt has become too long are closed."""
        fitting, prompts = [], []
        for each in conversations:
            prompt = each.next_prompt(tokenizer, raw)
            each.closed = not self.fits(each.question, each.turn, prompt)
            if not each.closed:
                fitting.append(each)
                prompts.append(prompt)
        if not fitting:
            return
        outcomes = self.answer(prompts)
        self.note(fitting, prompts, outcomes)
        for each, answer in zip(fitting, outcomes[DRAFTED].answers, strict=True):
            if each.has_more(all_turns=True):
                each.answered(tokenizer.decode(answer.ids, skip_special_tokens=True))

    def answer(self, prompts: list[list[int]]) -> dict[str, Outcome]:
        """All systems on the same prompts.  The first to go is another one at every call; the first call of all is
        preceded by one that does not count."""
        if self.calls == 0:
            warm_up = replace(self.decoding, max_new_tokens=min(WARM_UP_TOKENS, self.decoding.max_new_tokens))
            for system in self.systems:
                run_system(self.model, system, prompts, warm_up)
        first = self.calls % len(self.systems)
        seed = self.decoding.seed + self.calls
        self.calls += 1
        order = self.systems[first:] + self.systems[:first]
        return {system: run_system(self.model, system, prompts, self.decoding, seed) for system in order}

    def note(self, conversations: list[Conversation], prompts: list[list[int]], outcomes: dict[str, Outcome]) -> None:
        """Add one batch to the sums and write one record a prompt."""
        self.overall.add(outcomes)
        self.categories.setdefault(conversations[0].question.category, Tally()).add(outcomes)
        for at, (each, prompt) in enumerate(zip(conversations, prompts, strict=True)):
            drafted = outcomes[DRAFTED].answers[at]
            passes, committed = rounds_of(drafted.kept or [])
            record: dict[str, Any] = {
                "name": each.question.name,
                "category": each.question.category,
                "turn": each.turn,
                "prompt_tokens": len(prompt),
                "target_passes": passes,
                "committed_tokens": committed,
                "order": list(outcomes),
                "new_tokens": {system: len(outcome.answers[at].ids) for system, outcome in outcomes.items()},
            }
            if len(prompts) == 1:
                record["seconds"] = {system: round(outcome.seconds, 5) for system, outcome in outcomes.items()}
            if self.decoding.temperature == 0:
                for system in (PLAIN, DRAFTED):
                    if system in outcomes and TRANSFORMERS in outcomes:
                        expected = outcomes[TRANSFORMERS].answers[at].ids
                        found = outcomes[system].answers[at].ids
                        record[f"{system}_diverges"] = divergence(self.model, prompt, expected, found)
            self.records.append(record)

    def equality(self) -> dict[str, Any] | None:
        """How many greedy answers are ``transformers``' own, and where the others leave them."""
        compared = [record for record in self.records if "drafted_diverges" in record]
        if not compared:
            return None
        result: dict[str, Any] = {"compared": len(compared)}
        for system in (DRAFTED, PLAIN):
            different = [
                {"name": record["name"], "turn": record["turn"], **record[f"{system}_diverges"]}
                for record in compared
                if record.get(f"{system}_diverges") is not None
            ]
            result[system] = {"equal": len(compared) - len(different), "different": different}
        return result

    def to_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.decoding.temperature,
            "rule": self.decoding.rule,
            "overall": self.overall.to_dict(),
            "categories": {name: tally.to_dict() for name, tally in self.categories.items()},
            "equality": self.equality(),
            "skipped": self.skipped,
            "records": self.records,
        }
