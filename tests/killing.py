"""Starts the training program again and again and kills each start, by SIGKILL, at a moment of its own.

    python tests/killing.py RECIPE...

Each start is a forked process of its own that runs the whole program; the last one is left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator

import train.loop
from train import heads
from train.checkpoints import STATE


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, owner: Any, name: str, only: Callable[..., bool] = lambda *args: True) -> Any:
    """A patch under which the ``number``-th call of ``owner.name`` (of those that ``only`` accepts) kills instead."""
    original, calls = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += only(*args)
        if calls == number and only(*args):
            _die()
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, call)


def in_the_middle_of_a_file() -> Any:
    """Half of the optimiser's file of the second checkpoint is written."""
    original, calls = torch.save, 0

    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += "optimizer" in str(file)
        original(value, file, *args, **kwargs)
        if calls == 2:
            os.truncate(file, os.path.getsize(file) // 2)
            _die()

    return mock.patch.object(torch, "save", save)


def is_checkpoint(path: Any, *_: Any) -> bool:
    return "step-" in Path(path).name


MOMENTS: dict[str, Callable[[], Any]] = {
    "before the first checkpoint": lambda: at_call(2, Accelerator, "backward"),
    "between the gradients and the step": lambda: at_call(5, Accelerator, "clip_grad_norm_"),
    "in the middle of a checkpoint's file": in_the_middle_of_a_file,
    "before a checkpoint says that it is whole": lambda: at_call(
        2, os, "replace", lambda source, target: Path(target).name == STATE
    ),
    "before a checkpoint gets its name": lambda: at_call(
        2, os, "replace", lambda source, target: is_checkpoint(target) and not Path(target).name.endswith(".old")
    ),
    "while the oldest checkpoint is removed": lambda: at_call(
        1, shutil, "rmtree", lambda path, *_: Path(path).name.endswith(".old")
    ),
    "before the head is exported": lambda: at_call(1, train.loop, "save_checkpoint"),
    "behind the first export": lambda: at_call(2, train.loop, "save_checkpoint"),
    "while the best head takes the place of the one before": lambda: at_call(
        1, os, "replace", lambda source, target: Path(target).name == "best"
    ),
}


def main(arguments: list[str]) -> None:
    for name, moment in {**MOMENTS, "never": nullcontext}.items():
        if (child := os.fork()) == 0:
            with moment():
                heads.main(arguments)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"{name}: {-os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
