"""Where a run stands, on disk: whole checkpoints, found again and continued exactly."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mtp.files import read_json, write_json, writing
from train.config import ConfigError, RunConfig, to_dict
from train.processes import engine

STATE = "trainer_state.json"
# Settings that a resumed run must share with the one it continues: they decide which batch comes when.
RESUME_KEYS = ("data", "head", "optim", "start", "target")
# Where the target is and what is kept in memory may change with the machines, and what happens behind the last step may
# be decided late.
FREE = ("placement", "activation_checkpointing", "replace", "gate_rows", "gate_tolerance")


@dataclass
class Progress:
    """Where a run stands; what a checkpoint holds besides weights and optimiser.

    The position in the data is the step: a run takes the same number of batches in every step, wherever it runs.

    Attributes:
        step: optimiser steps taken.
        best: highest mean accepted length so far.
        seconds: time spent training, evaluations left out.
        positions: trained positions seen.
    """

    step: int = 0
    best: float = 0.0
    seconds: float = 0.0
    positions: int = 0

    def rate_since(self, before: Progress) -> float:
        """Trained positions a second since ``before``."""
        return (self.positions - before.positions) / max(self.seconds - before.seconds, 1e-9)


def save_state(
    accelerator: Accelerator, output: Path, progress: Progress, config: RunConfig, step_batches: int
) -> None:
    """Write weights, optimiser, schedule and progress into ``output/checkpoints``.

    The checkpoint appears whole or not at all; the oldest ones beyond ``config.keep_checkpoints`` are removed.  Every
    process must call this, and ``output`` must be one folder for all of them.
    """
    folder = output / "checkpoints" / f"step-{progress.step:07d}"
    staged = folder.with_name(f".{folder.name}.partial")
    if accelerator.is_main_process:
        for left in folder.parent.glob(".step-*"):  # by a run that was killed while it wrote or removed a checkpoint
            shutil.rmtree(left)
        staged.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        with writing(folder):
            accelerator.save_state(str(staged), safe_serialization=True)
        if accelerator.is_main_process:
            record = {
                "progress": asdict(progress),
                "step_batches": step_batches,
                "engine": engine(accelerator),
                "processes": accelerator.num_processes,
                "recipe": to_dict(config),
            }
            write_json(staged / STATE, record)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if folder.exists():
            _remove(folder)
        os.replace(staged, folder)
        # By age and not by step: a run that began afresh in a used folder has the newest checkpoints, not the highest.
        for old in whole_checkpoints(output)[: -max(config.keep_checkpoints, 1)]:
            _remove(old)
    accelerator.wait_for_everyone()


def _remove(folder: Path) -> None:
    """Remove a checkpoint; killed on the way, it leaves nothing that looks like one."""
    hidden = folder.with_name(f".{folder.name}.old")
    os.replace(folder, hidden)
    shutil.rmtree(hidden)


def _record(folder: Path) -> dict[str, Any]:
    return read_json(folder / STATE)


def batches_per_step(checkpoint: Path | None, fresh: int, processes: int) -> int:
    """Batches of a step over all processes: those of the run that is continued, or ``fresh`` of a new one.

    Raises:
        ConfigError: if the processes cannot share them.
    """
    batches = fresh if checkpoint is None else int(_record(checkpoint)["step_batches"])
    if batches % processes:
        fitting = [str(count) for count in range(1, batches + 1) if batches % count == 0]
        raise ConfigError(
            f"{checkpoint} is of a run with {batches} batches a step, which {processes} processes cannot share evenly. "
            f"Continue it with {' or '.join(fitting)}, or pass resume=none or another output to start afresh."
        )
    return batches


def check_resumable(accelerator: Accelerator, folder: Path, config: RunConfig) -> None:
    """Refuse a checkpoint that this launch would continue as another run, or cannot read.

    Raises:
        ConfigError: naming what differs.
    """
    saved = _record(folder)
    ours, unsaid = (json.loads(json.dumps(to_dict(recipe))) for recipe in (config, RunConfig()))
    for key in RESUME_KEYS:
        # A key that there was not yet had the effect of its default.
        theirs = {**unsaid[key], **saved["recipe"].get(key, {})}
        if changed := [name for name in ours[key] if theirs[name] != ours[key][name] and name not in FREE]:
            raise ConfigError(
                f"{folder} was written with other settings ({', '.join(f'{key}.{name}' for name in changed)}); "
                "set them back to continue it, or pass resume=none or another output to start afresh."
            )
    current, processes = engine(accelerator), accelerator.num_processes
    if saved["engine"] != current or (current.startswith("DeepSpeed") and saved["processes"] != processes):
        raise ConfigError(
            f"{folder} was written by {saved['processes']} processes under {saved['engine']}; found {processes} under "
            f"{current}. Only replicated heads and FSDP2 can be continued with another number of processes, and none "
            "by another engine."
        )


def load_state(accelerator: Accelerator, folder: Path) -> Progress:
    """Continue from a checkpoint; returns where it stood."""
    accelerator.load_state(str(folder))
    accelerator.step = 0  # of an accumulation; a checkpoint is written between two, but theirs may be of other length
    return Progress(**_record(folder)["progress"])


def whole_checkpoints(output: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in (output / "checkpoints").glob("step-*") if (path / STATE).is_file()]
    return sorted(found, key=lambda path: ((path / STATE).stat().st_mtime_ns, path.name))


def find_checkpoint(output: Path, resume: str) -> Path | None:
    """The checkpoint that ``resume`` means: the newest (``auto``), nothing (``none``), or a folder by name."""
    if resume == "none":
        return None
    if resume == "auto":
        return next(reversed(whole_checkpoints(output)), None)
    if not (Path(resume) / STATE).is_file():
        raise ConfigError(
            f"resume={resume}: no {STATE} there; expected auto, none, or a folder RUN/checkpoints/step-*."
        )
    return Path(resume)
