"""Let the target answer prompts, and record its token ids as it generated them: the data that heads are trained on.

    python train/distill.py --target TARGET --output runs/data                              # it writes its own prompts
    python train/distill.py --target TARGET --output runs/data --prompts prompts.jsonl
    python train/distill.py --target TARGET --output runs/data --dataset NAME --split train --column messages

The output is a folder of parquet shards and distill.json.  An interrupted run goes on with the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from mtp.files import whole_file, write_json
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from train.config import TargetConfig
from train.data import DataError, is_held_out
from train.generation import Generator, Progress, Sampling, derived_seed
from train.prompts import Prompt, Question, read_dataset, read_questions, tokenise
from train.self_prompts import PromptWriter
from train.target import load_target, load_tokenizer

logger = logging.getLogger("train.distill")

SELF_WRITTEN_COUNT = 2000
HELD_OUT_RULE = "sha256 of prompt_ids below the fraction (train.data.is_held_out)"
TOKEN_IDS = datasets.List(datasets.Value("int32"))
TEXT = datasets.Value("string")
FEATURES = datasets.Features(
    {"prompt_ids": TOKEN_IDS, "response_ids": TOKEN_IDS, "category": TEXT, "source": TEXT, "finish_reason": TEXT}
)


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

    @property
    def answers(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_p)

    @property
    def own_prompts(self) -> Sampling:
        return Sampling(self.max_prompt_tokens, self.prompt_temperature, self.prompt_top_p)

    @property
    def own_count(self) -> int:
        return self.num_prompts or SELF_WRITTEN_COUNT


def longest_prompt(target: Target, max_new_tokens: int) -> int | None:
    """Most tokens of a prompt whose answer still fits into the target's positions; None without a limit."""
    if target.max_positions is None:
        return None
    if max_new_tokens >= target.max_positions:
        raise DataError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt: the target has {target.max_positions} "
            "positions."
        )
    return target.max_positions - max_new_tokens


def given_questions(options: Options) -> Iterable[Question] | None:
    """What the file or data set that the options name asks; None without either."""
    if options.prompts is not None:
        return read_questions(options.prompts)
    if options.dataset is not None:
        return read_dataset(options.dataset, options.subset, options.split, options.column)
    return None


def describe(
    generator: Generator, options: Options, origin: TargetConfig, prompts: Sequence[Prompt] | None
) -> dict[str, Any]:
    """What goes into ``distill.json``; everything under ``settings`` has to be the same when a run is resumed."""
    asked: dict[str, Any]
    if prompts is None:
        asked = {"from": "the target", "count": options.own_count, **asdict(options.own_prompts)}
    else:
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(np.asarray([*prompt.ids, -1], dtype=np.int64).tobytes())
        asked = {"from": str(options.prompts or options.dataset), "count": len(prompts), "sha256": digest.hexdigest()}
    return {
        "name": origin.path,
        "revision": origin.revision,
        "fingerprint": generator.target.fingerprint(),
        "settings": {
            "dtype": str(generator.target.dtype).removeprefix("torch."),
            "prompts": asked,
            "answers": asdict(options.answers),
            "seed": options.seed,
            "shard_size": options.shard_size,
            "held_out": {"fraction": options.held_out_fraction, "rule": HELD_OUT_RULE},
        },
    }


def claim_output(output: Path, record: dict[str, Any]) -> None:
    """Start ``output``, or make sure that it was started with the same target and settings.

    Raises:
        DataError: saying what differs; or if the folder holds data of unknown origin.
    """
    path = output / "distill.json"
    data = [*output.glob("*.parquet"), *output.glob("prompts.jsonl")]
    if not data:
        write_json(path, record)
        return
    if not path.exists():
        raise DataError(f"{output} holds {data[0].name} but no distill.json that says whose; choose an empty --output.")
    before = json.loads(path.read_text(encoding="utf-8"))
    ours, theirs = (flatten({k: r.get(k) for k in ("fingerprint", "settings")}) for r in (record, before))
    differences = [
        f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} now"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and key != "settings.prompts.from"
    ]
    if differences:
        raise DataError(
            f"{output} was started with other settings; mixing them would give data that nobody can describe.\n  "
            + "\n  ".join(differences)
            + "\nRepeat the settings of then to go on with it, or choose another --output."
        )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``{"answers.temperature": 0.0, ...}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def answer_prompts(generator: Generator, prompts: Sequence[Prompt], options: Options) -> Progress:
    """Write the shards that are not there yet, each whole."""
    size = options.shard_size
    paths = [options.output / f"answers-{at:05d}.parquet" for at in range(-(-len(prompts) // size))]
    missing = [at for at, path in enumerate(paths) if not path.exists()]
    left = sum(len(prompts[at * size : (at + 1) * size]) for at in missing)
    if left < len(prompts):
        logger.info("%d of %d prompts are answered already", len(prompts) - left, len(prompts))
    progress = Progress(len(prompts), len(prompts) - left, "answers")
    end_ids = set(generator.target.eos_token_ids)
    for at in missing:
        shard = prompts[at * size : (at + 1) * size]
        seed = derived_seed(options.seed, "answers", at)
        responses = generator([prompt.ids for prompt in shard], options.answers, seed, end_ids, progress)
        rows = [answer_row(prompt, ids, end_ids) for prompt, ids in zip(shard, responses, strict=True)]
        with whole_file(paths[at]) as staged:
            datasets.Dataset.from_list(rows, features=FEATURES).to_parquet(staged)
    progress.bar.close()
    return progress


def answer_row(prompt: Prompt, response: list[int], end_ids: set[int]) -> dict[str, Any]:
    """One row of a shard."""
    return {
        "prompt_ids": list(prompt.ids),
        "response_ids": response,
        "category": prompt.category,
        "source": prompt.source,
        "finish_reason": "stop" if response[-1] in end_ids else "length",
    }


def count_rows(output: Path, prompts: Sequence[Prompt], fraction: float) -> dict[str, int]:
    """Counts over all shards of a complete folder."""
    counts = {"rows": 0, "response_tokens": 0, "finished_by_stop": 0}
    for path in sorted(output.glob("answers-*.parquet")):
        table = pyarrow.parquet.read_table(path, columns=["response_ids", "finish_reason"])
        counts["rows"] += table.num_rows
        counts["response_tokens"] += sum(len(ids) for ids in table["response_ids"])
        counts["finished_by_stop"] += table["finish_reason"].to_pylist().count("stop")
    counts["held_out"] = sum(is_held_out(prompt.ids, fraction) for prompt in prompts)
    return counts


def distill(target: Target, tokenizer: PreTrainedTokenizerBase, options: Options, origin: TargetConfig) -> str:
    """Write the data that ``options`` describe into ``options.output``, or what is missing of them.

    Args:
        origin: the name of the target, for the record.

    Returns:
        One line of counts.

    Raises:
        DataError: for prompts that cannot be used, a target without a chat template where one is needed, or an output
            folder that was started with other settings.
    """
    generator = Generator(target, tokenizer, options.batch_size)
    longest = longest_prompt(target, options.max_new_tokens)
    questions = given_questions(options)
    if questions is None:
        writer = PromptWriter(generator, options.own_prompts, options.seed)
        record = describe(generator, options, origin, None)
        claim_output(options.output, record)
        round_size = min(options.shard_size, options.own_count)
        questions = writer.write(options.output / "prompts.jsonl", options.own_count, round_size)
        prompts = tokenise(questions, tokenizer, False, longest)
    else:
        prompts = tokenise(questions, tokenizer, options.raw, longest, options.num_prompts)
        record = describe(generator, options, origin, prompts)
        claim_output(options.output, record)
    held_out = sum(is_held_out(prompt.ids, options.held_out_fraction) for prompt in prompts)
    logger.info("%d prompts; %d of them held out (fraction %g)", len(prompts), held_out, options.held_out_fraction)
    progress = answer_prompts(generator, prompts, options)
    counts = count_rows(options.output, prompts, options.held_out_fraction)
    write_json(options.output / "distill.json", {**record, "counts": counts})
    speed = f"{progress.tokens / progress.seconds:.0f} tokens/s" if progress.tokens else "nothing was left to answer"
    return (
        f"{counts['rows']} rows, {counts['response_tokens']} response tokens ({speed}), "
        f"{counts['finished_by_stop'] / counts['rows']:.0%} finished by the end token, {counts['held_out']} held out; "
        f"in {options.output}"
    )


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
    lines = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        prog="distill.py",
        description=lines[0],
        epilog=lines[1],
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
    add_prompt_arguments(parser)
    add_answer_arguments(parser)
    args = parser.parse_args(arguments)
    if args.raw and not (args.prompts or args.dataset):
        parser.error("--raw answers plain prompts: name some with --prompts or --dataset")
    if args.top_p < 1 and args.temperature == 0:
        parser.error("--top-p has no effect on greedy answers; add --temperature")
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


def load(config: TargetConfig, device: str) -> tuple[Target, PreTrainedTokenizerBase]:
    """The target on its device, and its tokenizer.

    Raises:
        DataError: if they cannot be loaded.
    """
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if found is None else found.type
    try:
        return load_target(config, torch.device(device)), load_tokenizer(config)
    except OSError as error:
        raise DataError(f"Cannot load the target {config.path}: {error}") from error


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    config, device, options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        target, tokenizer = load(config, device)
        print(distill(target, tokenizer, options, config))
    except (DataError, UnsupportedTargetError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        print(f"\ninterrupted; complete shards stay in {options.output}, the same command goes on.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
