"""Errors that a person can mend, and the one place where command lines say them: a line, and no traceback."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

INTERRUPTED = 130  # 128 + SIGINT, as shells have it

P = ParamSpec("P")
R = TypeVar("R")

# What was expected where the operating system found otherwise, and what to do.
_NAME_ANOTHER = "name another place"
_ADVICE = {
    errno.ENOENT: "Expected it to be there: check the name.",
    errno.ENOTDIR: f"A part of this path is a file where a folder was expected: {_NAME_ANOTHER}, or move the file.",
    errno.EISDIR: f"Found a folder where a file was expected: {_NAME_ANOTHER}.",
    errno.EEXIST: f"Expected a folder, or nothing there yet: {_NAME_ANOTHER}, or move what is there.",
    errno.EACCES: f"Expected to be allowed: change its permissions, or {_NAME_ANOTHER}.",
    errno.EPERM: f"Expected to be allowed: change its permissions, or {_NAME_ANOTHER}.",
    errno.EROFS: f"Expected a disk that can be written: {_NAME_ANOTHER}.",
    errno.ENOSPC: f"Expected room on the disk: free some, or {_NAME_ANOTHER}.",
    errno.EDQUOT: f"Expected room within the quota: free some, or {_NAME_ANOTHER}.",
    errno.EFBIG: f"Expected files of that size to be allowed: raise the limit (ulimit -f), or {_NAME_ANOTHER}.",
    errno.EMFILE: "Expected to open one more file: raise the limit (ulimit -n).",
    errno.ENOTEMPTY: f"It holds other things than what would be replaced: {_NAME_ANOTHER}.",
    errno.ENAMETOOLONG: f"Expected a shorter name: {_NAME_ANOTHER}.",
}


class ExplainedError(ValueError):
    """A message made for the person who reads it: what was found, what was expected and what to do."""


def explain(error: OSError) -> str:
    """What the operating system refused, in a line: the place, what was found, what was expected and what to do."""
    if error.errno is None:  # raised by a library, with words of its own
        return " ".join(str(error).split())
    place = error.filename2 or error.filename  # the second is where a file was to be moved
    found = error.strerror or os.strerror(error.errno)
    sentence = f"{found}." if place is None else f"{os.fspath(place)}: {found}."
    return f"{sentence} {_ADVICE[error.errno]}" if error.errno in _ADVICE else sentence


def command_line(main: Callable[P, R]) -> Callable[P, R]:
    """``main`` of a program, ending as programs do on what a person can mend.

    ``ExplainedError`` and errors of the operating system become ``error: ...`` on standard error and exit code 1, an
    interrupt exit code 130.  Everything else is a fault of the program and keeps its traceback.
    """

    @functools.wraps(main)
    def program(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except ExplainedError as error:
            raise SystemExit(f"error: {error}") from error
        except OSError as error:
            raise SystemExit(f"error: {explain(error)}") from error
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None

    return program


def first_line(error: Exception) -> str:
    """An error of the compiler's, some of which fill pages."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"
