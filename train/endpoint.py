"""Answers of a target that runs elsewhere, behind an OpenAI-compatible server (vLLM, SGLang ...), as exact token ids.

Prompts are sent as token ids to ``/completions``, so that no server renders a template of its own.  What comes back
counts only as ids (train/replies.py).
"""

from __future__ import annotations

import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from threading import Event
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from mtp.anatomy import text_config
from train.config import TargetConfig
from train.data import DataError
from train.generation import Progress, Sampling, derived_seed, up_to_end
from train.replies import check_text, first_choice, token_ids, unfinished, with_end

logger = logging.getLogger(__name__)

RETRIED = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE = 30.0  # seconds
SEEDS = 2**31


class RefusedError(DataError):
    """A server does not take a request as it is; asking again would not help."""


@dataclass(frozen=True)
class Server:
    """How to reach a server.

    Attributes:
        url: up to ``/v1``.
        model: the name under which it serves the target.
        concurrency: requests at a time.
        retries: attempts after the first, with pauses that double from half a second on.
        timeout: seconds that one answer may take.
        key: sent as a bearer token; by default ``$OPENAI_API_KEY``.
    """

    url: str
    model: str
    concurrency: int = 32
    retries: int = 8
    timeout: float = 600.0
    key: str | None = None

    def post(self, path: str, body: dict[str, Any], stop: Event) -> dict[str, Any]:
        """The server's reply, asked for again while it fails in ways that pass, until ``stop`` is set.

        Raises:
            RefusedError: when it does not take the request.
            DataError: when it still fails after all attempts.
        """
        pause, trouble = 0.5, ""
        for attempt in range(self.retries + 1):
            if attempt:
                wait(min(pause, LONGEST_PAUSE), stop)
                pause *= 2
            if stop.is_set():
                raise DataError("Stopped before the server gave an answer.")
            try:
                with urllib.request.urlopen(self._request(path, body), timeout=self.timeout) as reply:
                    value = json.load(reply)
                if isinstance(value, dict) and not (trouble := unfinished(value)):
                    return value
                trouble = trouble or f"the reply is a {type(value).__name__}, expected a JSON object"
            except urllib.error.HTTPError as error:
                trouble = f"status {error.code}: {error.read(500).decode(errors='replace')}"
                if error.code not in RETRIED:
                    raise RefusedError(f"{self.url} refuses a request, {trouble}") from error
                pause = max(pause, _seconds(error.headers.get("Retry-After")))
            except (OSError, HTTPException, ValueError) as error:  # refused, reset, cut off in the middle, not JSON
                trouble = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{self.url} failed {self.retries + 1} times in a row ({trouble}). Complete shards are kept: the same "
            "command goes on when the server is back."
        )

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if key := self.key or os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        return urllib.request.Request(f"{self.url.rstrip('/')}{path}", json.dumps(body).encode(), headers)


def wait(seconds: float, stop: Event) -> None:
    """Pause, unless ``stop`` is set."""
    stop.wait(seconds)


def _seconds(header: str | None) -> float:
    """A ``Retry-After`` in seconds; 0 where there is none, or a date."""
    return float(header) if header is not None and header.strip().isdigit() else 0.0


class Endpoint:
    """A writer of answers, like ``train.generation.Generator``, that asks a server.

    Args:
        server: where.
        target: whose config names end tokens and longest text; its weights are not loaded.
        tokenizer: the target's.

    Raises:
        DataError: if the config cannot be read.
    """

    def __init__(self, server: Server, target: TargetConfig, tokenizer: PreTrainedTokenizerBase):
        self.server = server
        self.tokenizer = tokenizer
        self._extended = True
        options = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
        path = os.path.expanduser(target.path)
        try:
            config = text_config(AutoConfig.from_pretrained(path, **options))
        except (OSError, ValueError) as error:
            raise DataError(f"Cannot read the config of {target.path}: {error}") from error
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.end_ids = _end_ids(path, target.revision, config)

    def identity(self) -> dict[str, Any]:
        """Whose answers these are: as far as a server says, which is its name."""
        return {"fingerprint": None, "served_as": self.server.model, "dtype": None}

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        end_ids: set[int],
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """As ``Generator.__call__``; requests of a call run side by side.

        Raises:
            DataError: if the server refuses or keeps failing, or its replies do not say which tokens it generated.
        """
        pool, stop = ThreadPoolExecutor(self.server.concurrency), Event()
        try:
            futures = [
                pool.submit(self._answer, prompt, sampling, derived_seed(seed, "row", at) % SEEDS, end_ids, stop)
                for at, prompt in enumerate(prompts)
            ]
            answers = []
            for future in futures:
                answers.append(future.result())
                if progress is not None:
                    progress.count(answers[-1])
            return answers
        finally:
            stop.set()  # when one failed for good, or on an interrupt: the others give up at their next attempt
            pool.shutdown(cancel_futures=True)

    def _answer(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, end_ids: set[int], stop: Event
    ) -> list[int]:
        body = {
            "model": self.server.model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "logprobs": 0,
        }
        choice = first_choice(self._post(body, end_ids, stop))
        sent_back = choice.get("prompt_token_ids")
        if sent_back is not None and list(sent_back) != list(prompt):
            raise DataError(
                f"{self.server.url} read {len(sent_back)} other prompt tokens than the {len(prompt)} that were sent: "
                "it adds or drops some, and its answers would be to other prompts."
            )
        ids = up_to_end(with_end(token_ids(choice, self.tokenizer), choice, end_ids), end_ids)
        if not ids or max(ids) >= self.vocab_size or min(ids) < 0:
            found = f"token id {max(ids)}" if ids else "no token"
            raise DataError(
                f"{self.server.url} answered with {found}; the target has tokens 0 to {self.vocab_size - 1}. Is "
                f"{self.server.model!r} the target?"
            )
        check_text(ids, choice.get("text"), self.tokenizer)
        return ids

    def _post(self, body: dict[str, Any], end_ids: set[int], stop: Event) -> dict[str, Any]:
        """Ask with the fields that vLLM adds to OpenAI's, and without them once a server has refused them."""
        if self._extended:
            # Ids in the reply, where a text ends, and none of the penalties that the target's own config asks for.
            extensions = {
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "stop_token_ids": sorted(end_ids),
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            try:
                return self.server.post("/completions", body | extensions, stop)
            except RefusedError as error:
                reply = self.server.post("/completions", body, stop)  # raises when it was not for the extensions
                self._extended = False
                logger.warning("%s: asked without vLLM's extensions from now on", error)
                return reply
        return self.server.post("/completions", body, stop)


def _end_ids(path: str, revision: str | None, config: Any) -> set[int]:
    """As ``Target.eos_token_ids``: the generation config's, else the config's."""
    try:
        found = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError:  # there is none
        found = None
    found = config.eos_token_id if found is None else found
    return set() if found is None else set(found) if isinstance(found, list | tuple) else {found}
