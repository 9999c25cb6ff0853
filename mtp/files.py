"""Files and folders that appear whole or not at all, and errors that say which could not be written."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mtp.errors import ExplainedError


def cache_folder() -> Path:
    """What is made once on a machine and kept: ``$MTP_CACHE``, or ``~/.cache/mtp``."""
    return Path(os.environ.get("MTP_CACHE") or Path.home() / ".cache" / "mtp")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the operating system refuses while ``path`` is written is an ``OSError`` that names it.

    Python's own names no file when a disk is full, and safetensors and torch raise errors of other types.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    except (SafetensorError, RuntimeError) as error:
        if (number := _number_of(error)) is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _number_of(error: Exception) -> int | None:
    """The operating system's number for what ended a write of safetensors or torch; None for other errors."""
    if isinstance(error, SafetensorError):
        found = re.search(r"\(os error (\d+)\)", str(error))
        return int(found[1]) if found else None
    # torch's writer of archives keeps the number to itself: it finds fewer bytes written than it wrote.
    return errno.ENOSPC if "inline_container" in str(error) else None


def check_writable(folder: Path) -> None:
    """Make ``folder``, to which results of long work are to go.

    Raises:
        OSError: if it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that replaces it when the block ends well, and is removed when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            yield staged
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: str | Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary folder that takes the place of ``path`` when the block ends well.

    What was there before stays until the new folder is complete, and survives a failure (disk full, an interrupt); for
    what a kill leaves see ``restore_folder``.

    Args:
        is_ours: whether a folder is of the kind that may be replaced; one that holds other things is not.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    restore_folder(path)
    if path.exists() and any(path.iterdir()) and not is_ours(path):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    retired = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        with writing(path):
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


def restore_folder(path: Path) -> None:
    """Clear up behind a process that was killed while it replaced ``path``.

    No call of the system replaces a folder in one step: for a moment there is none, and what was there has another
    name.  It gets its own back; half a new folder is removed.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        process, kind = left.name.removeprefix(f".{path.name}.").partition(".")[::2]
        if kind not in ("old", "partial") or not process.isdecimal() or _is_running(int(process)):
            continue
        if kind == "old" and not path.exists():
            os.replace(left, path)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return process != os.getpid()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ExplainedError: if it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExplainedError(f"{path} is damaged ({error}); expected JSON. Copy it again, or remove it.") from error
    if not isinstance(value, dict):
        raise ExplainedError(f"{path} holds a {type(value).__name__}; expected a JSON object. Remove it.")
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    with whole_file(path) as staged:
        staged.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
