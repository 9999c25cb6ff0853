"""What ``train/distill.py`` is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from train.config import TargetConfig
from train.endpoint import Server
from train.generation import Sampling

SELF_WRITTEN_COUNT = 2000
DESCRIPTION = "Let the target answer prompts, and record its token ids as it generated them."
EXAMPLES = """\
    python train/distill.py --target TARGET --output runs/data                              # it writes its own prompts
    python train/distill.py --target TARGET --output runs/data --prompts prompts.jsonl
    python train/distill.py --target TARGET --output runs/data --dataset NAME --split train --column messages
    python train/distill.py --target TARGET --output runs/data --prompts prompts.jsonl --endpoint http://HOST:8000/v1

The output is a folder of parquet shards and distill.json.  An interrupted run goes on with the same command.
"""


@dataclass(frozen=True)
class Options:
    """What to distil; the fields are documented at the program's options of the same names."""

    output: Path
    prompts: Path | None = None
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "messages"
    raw: bool = False
    num_prompts: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_prompt_tokens: int = 64
    prompt_temperature: float = 1.0
    prompt_top_p: float = 0.95
    batch_size: int = 64
    shard_size: int = 256
    held_out_fraction: float = 0.05
    server: Server | None = None

    @property
    def answers(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_p)

    @property
    def own_prompts(self) -> Sampling:
        return Sampling(self.max_prompt_tokens, self.prompt_temperature, self.prompt_top_p)

    @property
    def own_count(self) -> int:
        return self.num_prompts or SELF_WRITTEN_COUNT


def at_least(smallest: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least ``smallest``."""

    def parse(text: str) -> int:
        if (value := int(text)) < smallest:
            raise argparse.ArgumentTypeError(f"found {value}, expected {smallest} or more")
        return value

    parse.__name__ = "whole number"  # argparse puts the name into its message
    return parse


def between(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number from ``low`` to ``high``."""

    def parse(text: str) -> float:
        if not low <= (value := float(text)) <= high:
            raise argparse.ArgumentTypeError(f"found {value:g}, expected {low:g} to {high:g}")
        return value

    parse.__name__ = "number"
    return parse


def parse_arguments(arguments: Sequence[str]) -> tuple[TargetConfig, str, Options]:
    """The target, the device and the options that the command line names."""
    parser = argparse.ArgumentParser(
        prog="distill.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="the data; an interrupted run resumes here")
    add("--batch-size", type=at_least(1), default=64, help="rows generated together (%(default)s)")
    add("--shard-size", type=at_least(1), default=256, help="prompts a parquet file (%(default)s)")
    add("--seed", type=int, default=0, help="of everything sampled (%(default)s)")
    add(
        "--held-out-fraction",
        type=between(0, 1),
        default=0.05,
        help="share of the prompts, by hash, kept out of training (%(default)s); use the same in the recipe",
    )
    add_target_arguments(parser)
    add_server_arguments(parser)
    add_prompt_arguments(parser)
    add_answer_arguments(parser)
    args = parser.parse_args(arguments)
    if args.raw and not (args.prompts or args.dataset):
        parser.error("--raw answers plain prompts: name some with --prompts or --dataset")
    if args.top_p < 1 and args.temperature == 0:
        parser.error("--top-p has no effect on greedy answers; add --temperature")
    args.server = None
    if args.endpoint:
        name = args.served_as or args.target
        args.server = Server(args.endpoint, name, args.concurrency, args.retries, args.timeout)
    target = TargetConfig(args.target, args.revision, args.dtype, args.trust_remote_code)
    return target, args.device, Options(**{field.name: getattr(args, field.name) for field in fields(Options)})


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the target").add_argument
    add("--target", required=True, metavar="PATH", help="Hub name or folder of a Transformers causal LM")
    add("--revision", help="of a Hub model")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", default="auto", choices=dtypes, help="auto: the checkpoint's own, float32 on a CPU")
    add("--device", default="auto", help="auto: the accelerator where there is one, else cpu")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a target that runs elsewhere", "Its tokenizer and config are read from --target, its weights are not."
    )
    add = group.add_argument
    add(
        "--endpoint", metavar="URL", help="OpenAI-compatible server that gives token ids, for example up to /v1 of vLLM"
    )
    add("--served-as", metavar="NAME", help="the target's name there (--target); $OPENAI_API_KEY is sent if set")
    add("--concurrency", type=at_least(1), default=32, help="requests at a time (%(default)s)")
    add("--retries", type=at_least(0), default=8, help="further attempts when the server fails (%(default)s)")
    add("--timeout", type=between(1, 86400), default=600.0, help="seconds an answer may take (%(default)s)")


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "Without --prompts and --dataset an instruct target writes its own.")
    add, either = group.add_argument, group.add_mutually_exclusive_group().add_argument
    either("--prompts", type=Path, metavar="FILE", help='JSONL of {"prompt": text} or {"messages": [...]}')
    either("--dataset", metavar="NAME", help="Hub name or local folder, for datasets.load_dataset")
    add("--subset", help="configuration of the data set")
    add("--split", default="train", help="of the data set (%(default)s)")
    add("--column", default="messages", help="holds texts or conversations (%(default)s)")
    add("--raw", action="store_true", help="give plain prompts to the target as they are, without its chat template")
    count = f"at most so many; or so many self-written ones ({SELF_WRITTEN_COUNT})"
    add("--num-prompts", type=at_least(1), metavar="N", help=count)
    add("--max-prompt-tokens", type=at_least(1), default=64, help="longest self-written prompt (%(default)s)")
    add("--prompt-temperature", type=between(0.01, 10), default=1.0, help="of self-written prompts (%(default)s)")
    add("--prompt-top-p", type=between(0.01, 1), default=0.95, help="of self-written prompts (%(default)s)")


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("answers").add_argument
    add("--max-new-tokens", type=at_least(1), default=256, help="longest answer (%(default)s)")
    add("--temperature", type=between(0, 10), default=0.0, help="0 takes the likeliest token (%(default)s)")
    add("--top-p", type=between(0.01, 1), default=1.0, help="nucleus to sample from (%(default)s)")
