"""Where a run stands, on disk: whole checkpoints, found again and continued exactly."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from mtp.files import write_json
from train.config import ConfigError, RunConfig, to_dict

STATE = "trainer_state.json"
# Settings that a resumed run must share with the one it continues: they decide which batch comes when.
RESUME_KEYS = ("data", "head", "optim", "target")


@dataclass
class Progress:
    """Where a run stands; what a checkpoint holds besides weights and optimiser.

    Attributes:
        step: optimiser steps taken.
        epoch: passes over the data completed.
        batch: batches of the current pass already used, per process.
        best: highest mean accepted length so far.
        seconds: time spent training, evaluations left out.
        positions: trained positions seen.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = 0.0
    seconds: float = 0.0
    positions: int = 0

    def rate_since(self, before: Progress) -> float:
        """Trained positions a second since ``before``."""
        return (self.positions - before.positions) / max(self.seconds - before.seconds, 1e-9)


def save_state(accelerator: Accelerator, output: Path, progress: Progress, config: RunConfig) -> None:
    """Write weights, optimiser, schedule, random states and progress into ``output/checkpoints``.

    The checkpoint appears whole or not at all; the oldest ones beyond ``config.keep_checkpoints`` are removed.  Every
    process must call this.
    """
    folder = output / "checkpoints" / f"step-{progress.step:07d}"
    staged = folder.with_name(f".{folder.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(staged), safe_serialization=True)
        if accelerator.is_main_process:
            write_json(staged / STATE, {"progress": progress.__dict__, "recipe": to_dict(config)})
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staged, folder)
        # By age and not by step: a run that began afresh in a used folder has the newest checkpoints, not the highest.
        for old in whole_checkpoints(output)[: -max(config.keep_checkpoints, 1)]:
            shutil.rmtree(old)


def load_state(accelerator: Accelerator, folder: Path, config: RunConfig) -> Progress:
    """Continue from a checkpoint; returns where it stood.

    Raises:
        ConfigError: if it was written under settings that would make the continuation another run.
    """
    saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
    ours = json.loads(json.dumps(to_dict(config)))
    for key in RESUME_KEYS:
        if (theirs := saved["recipe"][key]) != ours[key]:
            changed = [name for name in ours[key] if theirs.get(name) != ours[key][name]]
            raise ConfigError(
                f"{folder} was written with other settings ({', '.join(f'{key}.{name}' for name in changed)}); "
                "set them back to continue it, or pass resume=none or another output to start afresh."
            )
    accelerator.load_state(str(folder))
    return Progress(**saved["progress"])


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
