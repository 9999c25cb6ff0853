"""Many systems on the same prompts, taking turns; one record a prompt, of which every figure can be computed again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtp.model import SpeculativeModel
from mtp.stats import AcceptanceStats
from serve.divergence import divergence
from serve.loading import UsageError, pad_token_id
from serve.peers import PeerError
from serve.systems import Outcome, timed_call

logger = logging.getLogger(__name__)

PLAIN_TRANSFORMERS = "transformers"
PROMPT_LOOKUP = "transformers, prompt lookup"
ASSISTED = "transformers, assisted"
PLAIN = "mtp, plain"
OURS = "mtp, "
FORMAT = 1  # of the file that scripts/bench.py writes
LOOKUP_TOKENS = 10  # what Transformers' documentation uses
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class System:
    """A way to the target's text: ``answer(prompt, max_new_tokens)``, greedily."""

    name: str
    answer: Callable[[list[int], int], Outcome]


@dataclass(frozen=True)
class Prompt:
    """``name`` is the question's, unique within its category."""

    name: str
    category: str
    ids: list[int]


def transformers_systems(model: SpeculativeModel, assistant: Any = None) -> list[System]:
    """``transformers``' ways to the text: plainly, with its prompt lookup, and with a smaller model if there is one."""
    ways: dict[str, dict[str, Any]] = {
        PLAIN_TRANSFORMERS: {},
        PROMPT_LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    }
    if assistant is not None:
        ways[ASSISTED] = {"assistant_model": assistant}
    generate = model.target.causal_lm.generate
    return [System(name, partial(_answer, model, generate, more)) for name, more in ways.items()]


def own_systems(model: SpeculativeModel, drafters: Sequence[str], nodes: int | None = None) -> list[System]:
    """This engine plainly and with each drafter; ``nodes`` None leaves the size of trees to the planner."""
    ways: dict[str, dict[str, Any]] = {
        PLAIN: {"drafter": "none"},
        **{OURS + name: {"drafter": name, "nodes": nodes} for name in drafters},
    }
    more = {"return_dict_in_generate": True}
    return [System(name, partial(_answer, model, model.generate, {**more, **way})) for name, way in ways.items()]


def _answer(
    model: SpeculativeModel, generate: Callable[..., Any], more: dict[str, Any], ids: list[int], max_new_tokens: int
) -> Outcome:
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad_token_id(model), **more}
    return timed_call(model, generate, options, [ids], seed=0)


def take_turns(
    model: SpeculativeModel,
    systems: Sequence[System],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    records: list[dict[str, Any]],
    save: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Ask every system every prompt that ``records`` does not hold yet; who goes first changes from prompt to prompt.

    A peer that fails is left out from then on, and the others go on.

    Args:
        systems: plain ``transformers`` among them, whose answer the others' are compared with.
        records: is added to.
        save: called after each prompt.

    Returns:
        What became of the peers that failed, by name.
    """
    known = {(record["category"], record["name"]) for record in records}
    todo = [prompt for prompt in prompts if (prompt.category, prompt.name) not in known]
    failed: dict[str, str] = {}
    if todo:  # a first call packs, allocates, measures costs
        _ask(systems, todo[0].ids, min(WARM_UP_TOKENS, max_new_tokens), failed)
    for at, prompt in enumerate(tqdm(todo, desc=str(model.target.dtype), unit="prompt")):
        going = [system for system in systems if system.name not in failed]
        first = at % len(going)
        outcomes = _ask([*going[first:], *going[:first]], prompt.ids, max_new_tokens, failed)
        records.append(record_of(model, prompt, outcomes))
        save()
    return failed


def _ask(systems: Sequence[System], ids: list[int], count: int, failed: dict[str, str]) -> dict[str, Outcome]:
    outcomes = {}
    for system in systems:
        try:
            outcomes[system.name] = system.answer(ids, count)
        except PeerError as error:
            failed[system.name] = str(error)
            logger.warning("%s is left out from here on: %s", system.name, error)
    return outcomes


def record_of(model: SpeculativeModel, prompt: Prompt, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """What is kept of one prompt."""
    expected = outcomes[PLAIN_TRANSFORMERS].answers[0].ids
    return {
        "name": prompt.name,
        "category": prompt.category,
        "prompt_tokens": len(prompt.ids),
        "order": list(outcomes),
        "systems": {
            name: {
                "tokens": outcome.new_tokens,
                "seconds": round(outcome.seconds, 5),
                "diverges": divergence(model, prompt.ids, expected, outcome.answers[0].ids),
                "acceptance": None if outcome.stats is None else outcome.stats.to_dict(),
            }
            for name, outcome in outcomes.items()
        },
    }


@dataclass
class Sums:
    """What one system did with some prompts, and plain ``transformers`` with the same ones.

    Attributes:
        equal: answers that are ``transformers``' own.
        near_ties: of the others, those that leave them where rounding decides.
    """

    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    base_tokens: int = 0
    base_seconds: float = 0.0
    equal: int = 0
    near_ties: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def speed(self) -> float:
        """Tokens per second, reading the prompt inside."""
        return self.tokens / self.seconds

    @property
    def speedup(self) -> float:
        """Over plain ``transformers``."""
        return self.speed / (self.base_tokens / self.base_seconds)

    @property
    def tau(self) -> float | None:
        return self.stats.mean_accepted_length if self.stats.target_passes else None

    def shares(self) -> dict[str, float] | None:
        """Share of the rounds' time by stage; reading the prompt is no part of a round.  None where it is not known."""
        rounds = {stage: seconds for stage, seconds in self.stats.seconds.items() if stage != "prefill"}
        whole = sum(rounds.values())
        return {stage: seconds / whole for stage, seconds in rounds.items()} if whole else None

    def to_dict(self) -> dict[str, Any]:
        """Everything above, ratios included, for whoever reads the file."""
        counted = ("prompts", "tokens", "equal", "near_ties")
        return {
            **{name: getattr(self, name) for name in counted},
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.speed, 3),
            "speedup": round(self.speedup, 4),
            "mean_accepted_length": None if self.tau is None else round(self.tau, 4),
            "stage_shares": self.shares(),
        }


def sums_of(records: Sequence[dict[str, Any]], category: str | None = None) -> dict[str, Sums]:
    """By system, over the records of a category or over all; a system that answered none of them is not there."""
    sums: dict[str, Sums] = {}
    for record in records:
        if category is not None and record["category"] != category:
            continue
        base = record["systems"][PLAIN_TRANSFORMERS]
        for name, found in record["systems"].items():
            each = sums.setdefault(name, Sums())
            each.prompts += 1
            each.tokens += found["tokens"]
            each.seconds += found["seconds"]
            each.base_tokens += base["tokens"]
            each.base_seconds += base["seconds"]
            each.equal += found["diverges"] is None
            each.near_ties += found["diverges"] is not None and found["diverges"]["within_rounding"]
            if found["acceptance"] is not None:
                each.stats.add(AcceptanceStats.from_dict(found["acceptance"]))
    return sums


def categories_of(records: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["category"] for record in records))


def read_results(path: Path) -> dict[str, Any]:
    """Raises ``UsageError`` if the file was not written by scripts/bench.py."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "dtypes" not in found:
        raise UsageError(f"{path} holds no results of scripts/bench.py (format {FORMAT}); name another file.")
    return found
