"""The log of answers that a program keeps where a person asks for it (mtp/traffic.py): arguments, and opening it."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mtp.model import SpeculativeModel
from mtp.traffic import TrafficError, TrafficLog
from serve.loading import UsageError, positive


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Where answers are kept, how many of them, and whether with prompts."""
    parser.add_argument(
        "--log", type=Path, metavar="FOLDER", help="keep the answers there, to align the head with them"
    )
    parser.add_argument(
        "--log-bytes",
        type=positive,
        default=50_000_000,
        metavar="N",
        help="what the log may take (default: %(default)s)",
    )
    parser.add_argument(
        "--log-prompts",
        type=logged_tokens,
        default=0,
        metavar="N",
        help='keep so many tokens of each prompt too, counted from its end, or "all" (default: none)',
    )


def logged_tokens(text: str) -> int | None:
    """How much of a prompt is logged: a number of tokens, or None for all."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'found {text!r}, expected a number of tokens, or "all"')
    return int(text)


def check_log_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with its usage if prompts are to be kept and no answers are."""
    if options.log is None and options.log_prompts != 0:
        parser.error("--log-prompts says what a log keeps; name one with --log FOLDER")


def open_log(model: SpeculativeModel, options: argparse.Namespace) -> AbstractContextManager[TrafficLog | None]:
    """The log that was asked for; None where none was.

    Raises:
        UsageError: for a folder that cannot be written, or holds another target's answers.
    """
    if options.log is None:
        return nullcontext()
    try:
        return TrafficLog(options.log, model.target, max_bytes=options.log_bytes, context=options.log_prompts)
    except (TrafficError, OSError) as error:
        raise UsageError(f"--log: {error}") from error
