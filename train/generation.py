"""The target's continuations of many prompts: batches, seeds and a progress bar."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mtp import SpeculativeModel
from mtp.drafters.plain import PlainDrafter
from mtp.target import Target

logger = logging.getLogger(__name__)

# What a generation config may say that changes nothing here, or that this program's options say instead.
OWN_SETTINGS = {
    *("transformers_version", "_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("do_sample", "temperature", "top_p", "top_k", "max_length", "max_new_tokens", "cache_implementation"),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.  A temperature of 0 takes the likeliest one."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


class Progress:
    """A bar over prompts with tokens a second.

    Attributes:
        tokens: generated so far, by this process.
    """

    def __init__(self, total: int, done: int, what: str):
        self.bar = tqdm(total=total, initial=done, desc=what, unit="prompt", smoothing=0, mininterval=1)
        self.tokens = 0
        self._started = self._drawn = time.perf_counter()

    def watch(self, rows: int, limit: int, end_ids: set[int]) -> Callable[[int, int, bool], None]:
        """A listener to the tokens of a batch of ``rows``, which end at ``limit`` tokens or with one of ``end_ids``."""
        left = [limit] * rows

        def listen(row: int, token: int, kept: bool) -> None:
            self.tokens += 1
            left[row] -= 1
            if token in end_ids or left[row] == 0:
                self.bar.update()
            if time.perf_counter() - self._drawn > 1:  # a batch may take minutes before its first row ends
                self._drawn = time.perf_counter()
                self.bar.set_postfix_str(f"{self.tokens / self.seconds:.0f} tokens/s")

        return listen

    def count(self, answer: Sequence[int]) -> None:
        """Count a whole row."""
        self.tokens += len(answer)
        self.bar.update()
        self.bar.set_postfix_str(f"{self.tokens / self.seconds:.0f} tokens/s", refresh=False)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started


class Writer(Protocol):
    """Whatever continues prompts as the target: the engine here (``Generator``), or a server (``endpoint.Endpoint``).

    Attributes:
        tokenizer: the target's.
        end_ids: tokens that end an answer.
        max_positions: most tokens of prompt and answer; None without a limit.
    """

    tokenizer: PreTrainedTokenizerBase
    end_ids: set[int]
    max_positions: int | None

    def identity(self) -> dict[str, Any]:
        """Which target this is, for the record."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        end_ids: set[int],
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """The ids generated behind each prompt, in order, each up to its end token, that one included."""


class Generator:
    """The target's continuations of many prompts, with the project's own engine.

    The target's generation config gives the end and padding tokens and nothing else: a penalty it may ask for would
    make every row's distribution depend on its history, and is not what a head can learn from hidden states.
    """

    def __init__(self, target: Target, tokenizer: PreTrainedTokenizerBase, batch_size: int):
        self.model = SpeculativeModel(target, PlainDrafter())
        self.target = target
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        ends = target.eos_token_ids
        self.end_ids = set(ends)
        self.max_positions = target.max_positions
        pads = (tokenizer.pad_token_id, *ends, 0)
        self._config = GenerationConfig(eos_token_id=ends or None, pad_token_id=next(p for p in pads if p is not None))
        asked = target.causal_lm.generation_config
        neutral = (None, False, 0, 1)
        if ignored := {k: v for k, v in asked.to_diff_dict().items() if k not in OWN_SETTINGS and v not in neutral}:
            logger.warning("the target's generation config also sets %s: left out of distillation", ignored)

    def identity(self) -> dict[str, Any]:
        """Which target this is, for the record."""
        return {"fingerprint": self.target.fingerprint(), "dtype": str(self.target.dtype).removeprefix("torch.")}

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        end_ids: set[int],
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """Generate behind each prompt.

        Args:
            seed: for sampling; the same prompts, batch size and seed give the same tokens.
            end_ids: tokens that end a row.

        Returns:
            The generated ids in the order of ``prompts``, each up to its end token, that one included.
        """
        torch.manual_seed(seed)
        results: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            generated = self._batch([prompts[at] for at in batch], sampling, end_ids, progress)
            for at, ids in zip(batch, generated, strict=True):
                results[at] = up_to_end(ids, end_ids)
        return results

    def _batch(
        self, prompts: list[Sequence[int]], sampling: Sampling, end_ids: set[int], progress: Progress | None
    ) -> list[list[int]]:
        ids, mask = left_padded(prompts, self.target.device)
        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        with self._plain_config():
            sequences = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=sorted(end_ids) or None,
                on_token=progress and progress.watch(len(prompts), sampling.max_new_tokens, end_ids),
                **settings,
            )
        return sequences[:, ids.shape[1] :].tolist()

    @contextmanager
    def _plain_config(self) -> Iterator[None]:
        lm = self.target.causal_lm
        before, lm.generation_config = lm.generation_config, self._config
        try:
            yield
        finally:
            lm.generation_config = before


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts of different length as ``generate`` takes them: token ids ``[B, T]`` and attention mask ``[B, T]``."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def up_to_end(ids: Sequence[int], end_ids: Container[int]) -> list[int]:
    """``ids`` up to the first end token, that one included; what follows is padding and counts for nothing."""
    return list(next((ids[: at + 1] for at, token in enumerate(ids) if token in end_ids), ids))


def derived_seed(seed: int, purpose: str, index: int) -> int:
    """A seed of its own for each shard, so that a resumed run draws what an uninterrupted one would have."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()[:7], "big")
