"""The three ways to the target's text that are compared, run alike and timed alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from mtp.model import SpeculativeModel
from mtp.rules import AUTO
from mtp.stats import AcceptanceStats
from serve.loading import pad_token_id
from train.generation import left_padded, up_to_end

DRAFTED, PLAIN, TRANSFORMERS = "drafted", "plain", "transformers"
SYSTEMS = (DRAFTED, PLAIN, TRANSFORMERS)


@dataclass(frozen=True)
class Decoding:
    """What all systems are asked for.

    Attributes:
        max_new_tokens: of each answer.
        temperature: 0 decodes greedily; otherwise the whole distribution is sampled, whatever top-k or top-p the
            target's generation config asks for.  Penalties that it asks for stay in force, for all systems.
        seed: of the draws.
        nodes: of a draft tree; None is the drafter's own choice.
        rule: of acceptance, by name, for drafting (``mtp.rules``).
        drafter: by name; None is the checkpoint's own.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    nodes: int | None = None
    rule: str = AUTO
    drafter: str | None = None

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate``."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            options.update(temperature=self.temperature, top_k=0, top_p=1.0)
        return options


@dataclass(frozen=True)
class Answer:
    """What a system said to one prompt.

    Attributes:
        ids: the new tokens up to the end token, this included.
        kept: for each, whether the drafter had guessed it; None for a system that does not draft.
    """

    ids: list[int]
    kept: list[bool] | None = None


@dataclass(frozen=True)
class Outcome:
    """One batch of prompts by one system.

    Attributes:
        answers: one a prompt.
        seconds: wall time of the call, prompts read included.
        first_token: seconds until the first token; None for batches.
        stats: the round loop's counters; None for ``transformers``.
    """

    answers: list[Answer]
    seconds: float
    first_token: float | None = None
    stats: AcceptanceStats | None = None

    @property
    def new_tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.answers)


@dataclass
class FirstTokenClock(BaseStreamer):
    """Notes when the first token arrives, as Transformers' streamer and as our listener.

    Transformers hands a streamer the prompt first.
    """

    first: float | None = None
    prompt_seen: bool = False

    def put(self, value: Tensor) -> None:
        if self.prompt_seen:
            self.on_token()
        self.prompt_seen = True

    def end(self) -> None:
        pass

    def on_token(self, *_: Any) -> None:
        if self.first is None:
            self.first = time.perf_counter()


def run_system(
    model: SpeculativeModel, system: str, prompts: Sequence[Sequence[int]], decoding: Decoding, seed: int | None = None
) -> Outcome:
    """Answer a batch of prompts.

    Args:
        system: one of ``SYSTEMS``.
        seed: of this call's draws; None is ``decoding.seed``.
    """
    clock = FirstTokenClock() if len(prompts) == 1 else None
    generate, options = _call_of(model, system, decoding, clock)
    return timed_call(model, generate, options, prompts, decoding.seed if seed is None else seed, clock)


def timed_call(
    model: SpeculativeModel,
    generate: Callable[..., Any],
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    seed: int,
    clock: FirstTokenClock | None = None,
) -> Outcome:
    """Answer a batch of prompts by ``generate``, ours or that of ``transformers``, with ``options``."""
    device = model.target.device
    tokens, mask = left_padded(prompts, device)
    torch.manual_seed(seed)
    _wait_for(device)
    start = time.perf_counter()
    output = generate(tokens, attention_mask=mask, **options)
    _wait_for(device)
    seconds = time.perf_counter() - start
    sequences = output if isinstance(output, Tensor) else output.sequences
    kept = getattr(output, "kept", None)
    answers = []
    for row, ids in enumerate(sequences[:, tokens.shape[1] :].tolist()):
        ids = up_to_end(ids, model.target.eos_token_ids)
        answers.append(Answer(ids, None if kept is None else kept[row][: len(ids)]))
    first = None if clock is None or clock.first is None else clock.first - start
    return Outcome(answers, seconds, first, getattr(output, "acceptance", None))


def _call_of(
    model: SpeculativeModel, system: str, decoding: Decoding, clock: FirstTokenClock | None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that answers for a system, and its arguments."""
    options = {"pad_token_id": pad_token_id(model), **decoding.options()}
    if system == TRANSFORMERS:
        return model.target.causal_lm.generate, options | ({} if clock is None else {"streamer": clock})
    return model.generate, {
        **options,
        "return_dict_in_generate": True,
        "nodes": decoding.nodes,
        "drafter": "none" if system == PLAIN else decoding.drafter,
        "rule": decoding.rule if system == DRAFTED else AUTO,
        "on_token": None if clock is None else clock.on_token,
    }


def rounds_of(kept: Sequence[bool]) -> tuple[int, int]:
    """``(passes of the target, tokens they committed)`` behind one answer, read off which tokens were guessed.

    The first token came with the prompt.  Every round after it ends with a token of the target's own, except a last
    round that ended inside the guessed tokens.
    """
    rounds = list(kept[1:])
    unfinished = bool(rounds) and rounds[-1]
    return rounds.count(False) + unfinished, len(rounds)


def _wait_for(device: torch.device) -> None:
    """Until an accelerator has done what it was given, its time would count for the next system."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
