"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """What is made once on a machine and kept: ``$MTP_CACHE``, or ``~/.cache/mtp``."""
    return Path(os.environ.get("MTP_CACHE") or Path.home() / ".cache" / "mtp")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that replaces it when the block ends well, and is removed when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield staged
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends well.

    What was there before stays until the new folder is complete, and survives a failure (disk full, an interrupt).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    retired = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        yield staged
        if path.exists():
            os.replace(path, retired)
        os.replace(staged, path)
    except BaseException:
        if retired.exists() and not path.exists():
            os.replace(retired, path)
        raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    with whole_file(path) as staged:
        staged.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
