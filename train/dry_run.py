"""A recipe tried out on its largest batch: what can fail late fails now, and what the run will cost is said."""

from __future__ import annotations

import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtp.checkpoint import load_head
from train.assembly import Ingredients, assemble, first_head, gather
from train.batches import BatchOrder
from train.config import ConfigError, RunConfig
from train.data import DataError, Row, length_batches
from train.estimate import FeatureEstimate, duration, target_rate
from train.loop import Trainer
from train.sources import plan_sources

STEPS = 3  # the first warms up, the others are timed
NEW_TOKENS = 8
WARM_START_POSITIONS = 2000


@dataclass(frozen=True)
class DryRun:
    """What a run will cost.

    Attributes:
        steps: of the optimiser.
        seconds: by part of the run.
        disk: bytes by what is written.
        memory: peak bytes of one process: on its accelerator where it has one, else of the process.
        features: what the hidden states take.
        checked: what was tried and worked, in words.
        took: seconds of the dry run.
    """

    steps: int
    seconds: dict[str, float]
    disk: dict[str, int]
    memory: int
    features: FeatureEstimate
    checked: tuple[str, ...]
    took: float

    def text(self) -> str:
        """For the terminal."""
        times = ", ".join(f"{name} {duration(value)}" for name, value in self.seconds.items() if value)
        sizes = ", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in self.disk.items() if value)
        return "\n".join(
            [
                f"dry run, {self.took:.0f} s: {'; '.join(self.checked)}: all in order.",
                f"time    about {duration(sum(self.seconds.values()))}: {times} ({self.steps} steps)",
                f"disk    {sum(self.disk.values()) / 1e9:.2f} GB: {sizes}",
                f"memory  {self.memory / 1e9:.2f} GB at its peak",
                self.features.sentence(),
            ]
        )


def dry_run(config: RunConfig) -> DryRun | None:
    """Check a recipe on its largest batch: a few steps, one evaluation, one checkpoint saved and read again.

    Every process must call this.  Nothing is left behind.

    Returns:
        What the run will cost; None in processes other than the main one.

    Raises:
        ConfigError: if a batch does not fit into memory.
        DataError: if a loss is not a number, no weight learns, or a checkpoint does not come back as it was.
    """
    started = time.perf_counter()
    parts = gather(config)
    accelerator = parts.accelerator
    sources = plan_sources(config, parts.target, first_head(config, parts), parts.train, parts.held_out)
    features = sources.estimate(accelerator.num_processes)
    if features.rate is None:
        features = replace(features, rate=target_rate(sources.train) * accelerator.num_processes)
    lengths = [len(row) for row in parts.train]
    batches = length_batches(lengths, config.optim.batch_positions, np.random.default_rng([config.optim.seed, 0]))
    sizes = [batch_size(parts.train, batch) for batch in batches]
    largest = batches[sizes.index(max(sizes))]
    folder = Path(config.output) / ".dry_run"
    small = _small_recipe(config, folder)
    # As many copies of the batch as there are processes, so that each has one.
    rows = [parts.train[row] for row in largest] * accelerator.num_processes
    few = replace(parts, train=rows, held_out=parts.held_out[: config.eval.batch_size])
    try:
        trainer, result = _rehearse(small, few)
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        disk = {name: _folder_bytes(folder / name) for name in ("checkpoints", "best", "last")}
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The largest batch ({len(largest)} rows, {max(lengths[row] for row in largest)} tokens each at most) does "
            f"not fit into memory: {str(error).splitlines()[0]} Lower optim.batch_positions (now "
            f"{config.optim.batch_positions}) and raise optim.accumulate in turn, or lower data.max_length."
        ) from error
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    if not accelerator.is_main_process:
        return None
    per_batch = seconds_a_batch(log) * sum(sizes) / len(sizes) / max(sizes)
    optim = config.optim
    order = BatchOrder(parts.train, optim.batch_positions, optim.epochs, optim.seed)
    steps = order.count() // (optim.accumulate * accelerator.num_processes)
    checked = (
        f"{len(parts.train)} training and {len(parts.held_out)} held-out rows",
        f"{trainer.progress.step} steps of {len(rows)} rows",
        f"an evaluation ({result['data']})",
        "a checkpoint saved, read again and continued",
    )
    return DryRun(
        steps=steps,
        seconds=_seconds(config, features, steps, per_batch, result),
        disk={
            "features": features.disk,
            "checkpoints": disk["checkpoints"] * (config.keep_checkpoints + 1),  # one more while it is written
            "heads": disk["best"] + disk["last"],
        },
        memory=peak_memory(parts.target.device),
        features=features,
        checked=checked,
        took=time.perf_counter() - started,
    )


def _small_recipe(config: RunConfig, folder: Path) -> RunConfig:
    """The recipe with as little of everything as shows whether it works."""
    whole = config.target.placement != "sharded" and config.target.adapter.rank == 0  # else states are not cached
    return replace(
        config,
        output=str(folder),
        resume="auto",
        checkpoint_every=10**9,
        keep_checkpoints=1,
        log_every=1,
        report_to=(),
        bundle_target=False,
        features=replace(config.features, mode="cached" if whole else "online", folder=None, budget_gb=None),
        head=replace(config.head, warm_start_positions=min(config.head.warm_start_positions, WARM_START_POSITIONS)),
        optim=replace(config.optim, epochs=STEPS, accumulate=1),
        eval=replace(config.eval, every=0, samples=1, max_new_tokens=min(config.eval.max_new_tokens, NEW_TOKENS)),
    )


def _rehearse(config: RunConfig, parts: Ingredients) -> tuple[Trainer, dict[str, Any]]:
    """Train, evaluate and save; then continue from what was saved, and load the head as a user would."""
    shutil.rmtree(config.output, ignore_errors=True)
    trainer = assemble(config, parts)
    result = trainer.run()
    for line in (Path(config.output) / "log.jsonl").read_text(encoding="utf-8").splitlines():
        check_step(json.loads(line))
    if any(weight.grad is not None for weight in parts.target.causal_lm.parameters()):
        raise DataError("The target received gradients, so that it is not frozen; this must not happen.")
    parts.accelerator.free_memory()  # or it would look for the first trainer's state in the checkpoint, too
    again = assemble(config, parts)
    again.run()
    loaded = load_head(Path(config.output) / "last", parts.target)
    for name, weight in trainer.head.state_dict().items():
        for where, copy in (("the checkpoint", again.head), ("the exported head", loaded)):
            if not torch.equal(weight.cpu(), copy.state_dict()[name].cpu()):
                raise DataError(f"{name} came back from {where} with other values than it was saved with.")
    if again.progress.step != trainer.progress.step:
        raise DataError(f"Saved at step {trainer.progress.step}, but resumed at step {again.progress.step}.")
    return trainer, result


def check_step(line: dict[str, Any]) -> None:
    """Raise ``DataError`` for a step that teaches nothing."""
    if line.get("event") != "step":
        return
    if not math.isfinite(line["loss"]) or not math.isfinite(line["gradient_norm"] or 0.0):
        raise DataError(
            f"Step {line['step']}: loss {line['loss']}, gradient norm {line['gradient_norm']}. With "
            "mixed_precision=fp16 use bf16; otherwise lower optim.lr."
        )
    if line["positions"] == 0 or line["gradient_norm"] == 0:
        raise DataError(
            f"Step {line['step']} trained {line['positions']} positions with a gradient norm of "
            f"{line['gradient_norm']}: the loss mask selects nothing, or no weight of the head is trained."
        )


def batch_size(rows: Sequence[Row], batch: Sequence[int]) -> int:
    """What a batch costs in memory and time, roughly: padded positions, and trained ones, which have logits."""
    padded = len(batch) * max(len(rows[row]) for row in batch)
    return padded + sum(len(rows[row].response_ids) for row in batch)


def seconds_a_batch(log: list[dict[str, Any]]) -> float:
    """Seconds of one batch's forward and backward pass, the first step's left out where there are others."""
    times = [float(line["seconds"]) for line in log if line["event"] == "step"]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0]


def _seconds(
    config: RunConfig, features: FeatureEstimate, steps: int, per_batch: float, evaluation: dict[str, Any]
) -> dict[str, float]:
    """What each part of the run will take."""
    assert features.rate is not None
    evaluations = 1 + (steps // config.eval.every if config.eval.every else 0)
    decoding = sum(evaluation["seconds"].values()) / max(evaluation["committed_tokens"], 1)
    return {
        "hidden states": features.missing / features.rate,
        "training": steps * config.optim.accumulate * per_batch
        + config.optim.epochs * features.recomputed / features.rate,
        "evaluation": evaluations * config.eval.rows * config.eval.max_new_tokens * decoding,
    }


def peak_memory(device: torch.device) -> int:
    """Most bytes that were in use so far: of an accelerator, or of this process."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
