"""Let the target answer prompts, and record its token ids as it generated them: the data that heads are trained on.

Examples and options: ``python train/distill.py --help`` (train/distill_options.py).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable

import datasets
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from mtp.errors import INTERRUPTED, command_line
from mtp.files import write_json
from mtp.target import Target
from train.answers import answer_prompts, claim_output, count_rows, describe
from train.config import TargetConfig
from train.data import DataError, is_held_out
from train.distill_options import Options, parse_arguments
from train.endpoint import Endpoint
from train.generation import Generator, Writer
from train.prompts import Question, read_dataset, read_questions, tokenise
from train.self_prompts import PromptWriter
from train.target import load_target, load_tokenizer

logger = logging.getLogger("train.distill")


def longest_prompt(writer: Writer, max_new_tokens: int) -> int | None:
    """Most tokens of a prompt whose answer still fits into the target's positions; None without a limit."""
    if writer.max_positions is None:
        return None
    if max_new_tokens >= writer.max_positions:
        raise DataError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt: the target has {writer.max_positions} "
            "positions."
        )
    return writer.max_positions - max_new_tokens


def given_questions(options: Options) -> Iterable[Question] | None:
    """What the file or data set that the options name asks; None without either."""
    if options.prompts is not None:
        return read_questions(options.prompts)
    if options.dataset is not None:
        return read_dataset(options.dataset, options.subset, options.split, options.column)
    return None


def distill(target: Target, tokenizer: PreTrainedTokenizerBase, options: Options, origin: TargetConfig) -> str:
    """Write the data that ``options`` describe with a target that runs here; see ``write_answers``."""
    return write_answers(Generator(target, tokenizer, options.batch_size), options, origin)


def write_answers(writer: Writer, options: Options, origin: TargetConfig) -> str:
    """Write the data that ``options`` describe into ``options.output``, or what is missing of them.

    Args:
        writer: answers as the target.
        origin: the name of the target, for the record.

    Returns:
        One line of counts.

    Raises:
        DataError: for prompts that cannot be used, a target without a chat template where one is needed, or an output
            folder that was started with other settings.
    """
    tokenizer = writer.tokenizer
    longest = longest_prompt(writer, options.max_new_tokens)
    questions = given_questions(options)
    if questions is None:
        prompt_writer = PromptWriter(writer, options.own_prompts, options.seed)
        record = describe(writer, options, origin, None)
        claim_output(options.output, record)
        round_size = min(options.shard_size, options.own_count)
        questions = prompt_writer.write(options.output / "prompts.jsonl", options.own_count, round_size)
        prompts = tokenise(questions, tokenizer, False, longest)
    else:
        prompts = tokenise(questions, tokenizer, options.raw, longest, options.num_prompts)
        record = describe(writer, options, origin, prompts)
        claim_output(options.output, record)
    held_out = sum(is_held_out(prompt.ids, options.held_out_fraction) for prompt in prompts)
    logger.info("%d prompts; %d of them held out (fraction %g)", len(prompts), held_out, options.held_out_fraction)
    progress = answer_prompts(writer, prompts, options)
    counts = count_rows(options.output, prompts, options.held_out_fraction)
    write_json(options.output / "distill.json", {**record, "counts": counts})
    speed = f"{progress.tokens / progress.seconds:.0f} tokens/s" if progress.tokens else "nothing was left to answer"
    return (
        f"{counts['rows']} rows, {counts['response_tokens']} response tokens ({speed}), "
        f"{counts['finished_by_stop'] / counts['rows']:.0%} finished by the end token, {counts['held_out']} held out; "
        f"in {options.output}"
    )


def load(config: TargetConfig, device: str) -> tuple[Target, PreTrainedTokenizerBase]:
    """The target on its device, and its tokenizer."""
    if device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if found is None else found.type
    return load_target(config, torch.device(device)), load_tokenizer(config)


@command_line
def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    config, device, options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.server is not None:
            print(write_answers(Endpoint(options.server, config, load_tokenizer(config)), options, config))
        else:
            target, tokenizer = load(config, device)
            print(distill(target, tokenizer, options, config))
    except KeyboardInterrupt:
        print(f"\ninterrupted; complete shards stay in {options.output}, the same command goes on.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
