"""Other engines beside ours: each in a process of its own, under a Python of its own, asked one prompt at a time.

The process says ``{"ready": true}`` when it has loaded, then answers each line ``{"prompt_ids": [...],
"max_new_tokens": n}`` on its standard input with one line on its standard output: ``{"ids": [...], "seconds": s}``, and
if it drafts ``"rounds"``, ``"drafted"`` and ``"accepted"``, counted over this answer.  It ends with its input.
Until it is asked it is stopped with all of its process group, so that it takes no time from those whose turn it is: an
engine's threads may go on spinning when there is nothing to do (vLLM's took 15 % of everybody else's speed).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from mtp.stats import AcceptanceStats
from serve.systems import Answer, Outcome
from train.generation import up_to_end

logger = logging.getLogger(__name__)

START_SECONDS = 900.0  # an engine may compile its model first
ANSWER_SECONDS = 900.0
SHOWN_LINES = 15  # of a dead peer's log


class PeerError(RuntimeError):
    """A peer that ended, or said something else than an answer; the message says what, and where its log is."""


class Peer:
    """A running engine.

    Args:
        name: for messages.
        command: what to run.
        log: where its standard error goes.
        end_tokens: those that end an answer; what comes after one is cut.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, end_tokens: Collection[int] = ()):
        self.name, self.log, self.end_tokens = name, log, list(end_tokens)
        self._lines: queue.Queue[str | None] = queue.Queue()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            try:
                # In a group of its own, to be stopped as a whole, but in our session: should we be killed, the system
                # wakes a stopped group that nobody is left to wake.
                self.process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    process_group=0,
                )
            except OSError as error:
                raise PeerError(f"{name} cannot be started: {error}") from error
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self, seconds: float = START_SECONDS) -> Self:
        """Raises ``PeerError`` if it does not get there."""
        said = self._next(seconds)
        if said.get("ready") is not True:
            raise self._error(f'said {said!r:.200}; expected {{"ready": true}} first')
        self._signal(signal.SIGSTOP)
        return self

    def answer(self, prompt: Sequence[int], max_new_tokens: int, seconds: float = ANSWER_SECONDS) -> Outcome:
        """Its greedy answer to one prompt, in the time that it took by its own clock.

        Raises:
            PeerError: if it has ended, is silent for ``seconds``, or says something else than an answer.
        """
        said = self._ask({"prompt_ids": list(prompt), "max_new_tokens": max_new_tokens}, seconds)
        ids, took = said.get("ids"), said.get("seconds")
        if not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
            raise self._error(f"said {said!r:.200}; expected 'ids', a non-empty list of token ids")
        if not (isinstance(took, int | float) and took > 0):
            raise self._error(f"gave {took!r:.50} as its seconds; expected a number above 0")
        return Outcome([Answer(up_to_end(ids, self.end_tokens))], float(took), stats=self._stats(said))

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return self._next(seconds)
        except (OSError, ValueError) as error:
            raise self._error("takes no more prompts") from error
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, what: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, which is noticed elsewhere
            os.killpg(self.process.pid, what)

    def _stats(self, said: dict[str, Any]) -> AcceptanceStats | None:
        rounds, drafted, accepted = (said.get(name, 0) for name in ("rounds", "drafted", "accepted"))
        if not all(type(count) is int for count in (rounds, drafted, accepted)) or not 0 <= accepted <= drafted:
            raise self._error(f"counted {said!r:.200}; expected 0 <= accepted <= drafted")
        if not rounds:
            return None
        return AcceptanceStats(committed_tokens=accepted + rounds, target_passes=rounds, drafted_tokens=drafted)

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise self._error(f"was silent for {seconds:g} seconds") from None
        if line is None:
            raise self._error(f"ended with exit code {self.process.wait()}")
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise self._error(f"said {line!r:.200}; expected one JSON object a line")
        return said

    def _error(self, what: str) -> PeerError:
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        return PeerError("\n".join([f"{self.name} {what}. The end of its log ({self.log}):", *tail]))

    def close(self) -> None:
        """End it; a peer that does not go by itself is killed."""
        self._signal(signal.SIGCONT)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # it had ended before it read all
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        self._signal(signal.SIGKILL)  # with whatever it leaves behind
        self.process.wait()


def start_peers(
    commands: dict[str, list[str]], logs: Path, end_tokens: Collection[int], stack: contextlib.ExitStack
) -> dict[str, Peer]:
    """Those that come up, one after the other; one that does not is named and left out."""
    peers = {}
    for name, command in tqdm(commands.items(), desc="starting peers", unit="peer"):
        with contextlib.ExitStack() as starting:
            try:
                peer = starting.enter_context(Peer(name, command, logs / f"{name.replace(', ', '-')}.log", end_tokens))
                peers[name] = peer.wait_until_ready()
                stack.push(starting.pop_all())
            except PeerError as error:
                logger.warning("%s is left out: %s", name, error)
    return peers
