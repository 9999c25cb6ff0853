"""How much memory a process holds at most while it does something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Memory:
    """MiB of resident memory, pages of mapped files included; on an accelerator, MiB allocated there.

    Attributes:
        before: held before, with the model loaded.
        peak: the most that was held while an answer was made.
    """

    before: int
    peak: int


def resident_memory(pid: int, run: Callable[[], object]) -> Memory:
    """Memory of the process ``pid``, which may be this one, while ``run()`` makes it work.

    Raises:
        OSError: where the system keeps no such record (it is Linux's).
    """
    folder = Path(f"/proc/{pid}")
    before = _status(folder, "VmRSS")
    (folder / "clear_refs").write_text(
        "5"
    )  # the highest so far is forgotten: loading a model takes more than having it
    run()
    return Memory(before, _status(folder, "VmHWM"))


def accelerator_memory(device: torch.device, run: Callable[[], object]) -> Memory:
    """Memory allocated on ``device`` by this process while ``run()`` works."""
    before = torch.accelerator.memory_allocated(device) >> 20
    torch.accelerator.reset_peak_memory_stats(device)
    run()
    return Memory(before, torch.accelerator.max_memory_allocated(device) >> 20)


def _status(folder: Path, key: str) -> int:
    for line in (folder / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) >> 10
    raise OSError(f"{folder / 'status'} has no {key}.")
