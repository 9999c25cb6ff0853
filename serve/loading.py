"""What every program here needs before it starts: the augmented checkpoint, with the person's choice of target."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

import mtp
from mtp.checkpoint import read_config
from mtp.errors import ExplainedError
from mtp.padding import padding_token

COMPILE = True  # unless asked not to
DTYPES = ("auto", "float32", "bfloat16", "float16")


class UsageError(ExplainedError):
    """Something the person asked for cannot be done; the message says what was found and what to do."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that choose the model and where it runs."""
    parser.add_argument("folder", help="the augmented checkpoint (RUN/best of train/heads.py)")
    parser.add_argument("--target", help="load the target from here instead of from where the checkpoint says")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the target; auto is float32 on a CPU")
    parser.add_argument("--device", help="default: the accelerator if there is one, else the CPU")
    parser.add_argument("--threads", type=positive, help="CPU threads of torch")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow code that comes with the target")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=COMPILE,
        help="the target's layers, on a CPU: shorter passes, for some seconds once (default: %(default)s)",
    )
    parser.add_argument(
        "--drafter",
        help='another drafter than the checkpoint\'s head, or several joined by + ("head+ngram"); none decodes plainly',
    )
    parser.add_argument("--nodes", type=positive, help="most nodes of a draft tree, the root included")


def load_model(arguments: argparse.Namespace) -> mtp.SpeculativeModel:
    """The checkpoint with its target.

    Raises:
        UsageError: with the library's own message, if the folder is no checkpoint or the target does not fit it.
    """
    options = target_options(arguments)
    try:
        # A wrong folder is said before the target, which may be large, is read.
        read_config(arguments.folder)
        model = mtp.load(arguments.folder, arguments.target, **options)
        model.drafter_for(arguments.drafter)  # an unknown name is said before anything is decoded
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if arguments.compile and model.device.type == "cpu":
        report = model.compile()
        if report.reasons:
            print(f"note: {report}", file=sys.stderr)
    return model


def target_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """How the target is to be loaded; threads and messages are set on the way."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device or default_device())
    dtype: Any = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    if dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    options = {"dtype": dtype, "trust_remote_code": arguments.trust_remote_code}
    if device.type != "cpu":
        options["device_map"] = str(device)
    return options


def load_tokenizer(model: mtp.SpeculativeModel, arguments: argparse.Namespace) -> Any:
    """The checkpoint's tokenizer; the target's where the checkpoint holds none."""
    if model.tokenizer is not None:
        return model.tokenizer
    name = arguments.target or read_config(arguments.folder)["target"]["name_or_path"]
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)
    except (ValueError, OSError) as error:
        raise UsageError(f"{arguments.folder} holds no tokenizer, and {name!r} gives none: {error}") from error


def default_device() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def pad_token_id(model: mtp.SpeculativeModel) -> int:
    """What fills up rows that end early: the target's own choice, else its end token, else 0."""
    config = model.target.causal_lm.generation_config
    found = padding_token(config) if config is not None else None
    return next(iter(model.target.eos_token_ids), 0) if found is None else found


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}, expected 1 or more")
    return value


def temperature(text: str) -> float:
    """A temperature, for argparse; 0 is greedy decoding."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text}, expected 0 (greedy) or more")
    return value
