"""What a run tells: its log file, its trackers, the terminal.  Only the main process speaks."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from mtp.files import writing
from train.checkpoints import Progress
from train.tracking import flatten


@dataclass(frozen=True)
class RunLog:
    """Where a run's messages go.

    Args:
        accelerator: knows the main process and holds the trackers.
        folder: of the run; every event is a line of ``log.jsonl`` in it.
        trackers: by name; none leaves them out.
    """

    accelerator: Accelerator
    folder: Path
    trackers: Collection[str] = ()

    def event(self, values: dict[str, Any], progress: Progress) -> None:
        """Record what happened at this point of the run."""
        if not self.accelerator.is_main_process:
            return
        clock = {"step": progress.step, "seconds": round(progress.seconds, 3), "trained_positions": progress.positions}
        values = {**values, **clock}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "log.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self.trackers:
            self.accelerator.log(flatten(values), step=progress.step)

    def say(self, message: str) -> None:
        """Write a line on the terminal, above the bars."""
        if self.accelerator.is_main_process:
            tqdm.write(message)

    def bar(self, over: Sequence[Any], what: str, unit: str, done: int = 0) -> tqdm[Any]:
        """A progress bar over things to do, the first of which may be ``done``."""
        return tqdm(over, desc=what, unit=unit, initial=done, disable=not self.accelerator.is_main_process)
