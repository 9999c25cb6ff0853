"""A contender's process: a request a line on standard input, an answer a line on standard output.

    python -m scripts.training_contenders NAME FOLDER        (scripts/bench_training.py starts it)

ready       how many steps there are, how many weights are trained, and what went before the first step, in seconds
warm up     one step, which does not count
step        the next batch: seconds, trained tokens, accuracy of the first unrolled step's guesses
peak        most bytes in use beyond those before the first step
acceptance  of what was trained, by this library's evaluation on held-out rows
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.training_contenders.contender import Contender
from scripts.training_contenders.ours import Ours, OursWithStart
from scripts.training_contenders.plain import Plain, PlainOverDraftVocabulary
from scripts.training_contenders.shop import Shop, device_at_hand
from scripts.training_contenders.theirs import Speculators, SpeculatorsWithOutput
from train.batches import training_batch
from train.data import length_batches
from train.evaluate import decode_acceptance, held_out_metrics
from train.features import OnlineFeatures

CONTENDERS: dict[str, Callable[[Shop], Contender]] = {
    "ours": Ours,
    "ours+start": OursWithStart,
    "plain": Plain,
    "plain+draft": PlainOverDraftVocabulary,
    "speculators": Speculators,
    "speculators+output": SpeculatorsWithOutput,
}


class Peak:
    """How much more memory was in use at its peak than when this was made: of the accelerator, or of this process.

    What loading took at its own peak does not count: Linux forgets it on demand.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")
        else:
            torch.accelerator.reset_peak_memory_stats()
        self.before = self._now()

    def _now(self) -> int:
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated()
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def grown(self) -> int:
        """Bytes."""
        return self._now() - self.before


def acceptance(contender: Contender, shop: Shop) -> dict[str, Any]:
    """Of held-out rows, by labels and by the decoder; the same for all contenders."""
    head, settings = contender.trained().eval(), shop.settings
    features = OnlineFeatures(contender.target, shop.held_out, head.taps)
    batches = length_batches([len(row) for row in shop.held_out], settings["positions"], generator=None)
    counted = held_out_metrics(head, (training_batch(features, batch) for batch in batches), settings["steps"])
    decoded = decode_acceptance(
        contender.target,
        head,
        shop.held_out,
        max_new_tokens=settings["new_tokens"],
        batch_size=8,
        nodes=settings["nodes"],
        progress=False,
    )
    return {**counted, "mean_accepted_length": decoded["mean_accepted_length"]}


def main(name: str, folder: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed does not belong between answers
    shop = Shop(Path(folder))
    contender = CONTENDERS[name](shop)
    device, left = device_at_hand(), list(contender.batches)
    peak = Peak(device)

    def timed(batch: list[int]) -> dict[str, Any]:
        started = time.perf_counter()
        tokens, accuracy = contender.step(batch)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return {"seconds": time.perf_counter() - started, "tokens": tokens, "accuracy": accuracy}

    for request in sys.stdin:
        match request.strip():
            case "ready":
                answer: dict[str, Any] = {
                    "batches": len(contender.batches),
                    "parameters": contender.parameters,
                    "start_seconds": contender.start_seconds,
                }
            case "warm up":
                answer = timed(contender.batches[0])
            case "step":
                answer = timed(left.pop(0))
            case "peak":
                answer = {"bytes": peak.grown()}
            case _:
                answer = acceptance(contender, shop)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
