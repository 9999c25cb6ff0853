"""Measure acceptance and speed on questions, against the plain target.

    python serve/measure.py runs/smollm2-eagle3/best --data questions.jsonl

Every prompt is answered with drafting, by the same engine without drafting, and by ``transformers``' own ``generate``;
who goes first changes from prompt to prompt.  Counts and seconds are summed before any ratio is taken.

The questions: a JSONL file with ``{"turns": [...]}`` (Spec-Bench), ``{"messages": [...]}``, ``{"prompt": "..."}`` or
``{"prompt_ids": [...]}`` a line, and perhaps a ``category``; or a folder that train/distill.py wrote.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import mtp
from mtp.errors import INTERRUPTED, command_line
from mtp.files import check_writable, write_json
from mtp.model import SpeculativeModel
from mtp.rules import AUTO, available_rules
from serve.comparison import Comparison
from serve.divergence import compare_answers
from serve.loading import UsageError, add_model_arguments, load_model, load_tokenizer, positive, temperature
from serve.questions import Conversation, Question, first_of_each, read_questions
from serve.systems import DRAFTED, PLAIN, SYSTEMS, Decoding
from serve.tables import (
    acceptance_table,
    divergence_table,
    equality_headline,
    rules_table,
    speed_table,
    stages_table,
)
from train.data import DataError

FORMAT = 1


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    data = parser.add_argument_group("questions")
    data.add_argument("--data", type=Path, required=True, help="a JSONL file, or a folder of distilled rows")
    data.add_argument("--held-out-fraction", type=float, metavar="F", help="of distilled rows, those training held out")
    data.add_argument("--limit", type=positive, metavar="N", help="the first N questions")
    data.add_argument("--per-category", type=positive, metavar="N", help="the first N questions of each category")
    data.add_argument("--raw", action="store_true", help="no chat template")
    data.add_argument("--all-turns", action="store_true", help="all turns, each behind the model's own answers")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="default: %(default)s")
    decoding.add_argument(
        "--temperature", type=temperature, nargs="+", default=[0.0], metavar="T", help="0 is greedy; several are a list"
    )
    decoding.add_argument("--seed", type=int, default=0, help="of the draws when sampling (default: %(default)s)")
    decoding.add_argument(
        "--rule",
        choices=available_rules(),
        nargs="+",
        default=[AUTO],
        help="of acceptance, when sampling; several, with several temperatures, make a table (default: auto)",
    )
    what = parser.add_argument_group("what to measure")
    mode = what.add_mutually_exclusive_group()
    mode.add_argument("--only-acceptance", action="store_true", help="drafting alone, compared with nothing: quick")
    mode.add_argument(
        "--compare",
        action="store_true",
        help="only compare greedy answers with transformers'; exit code 1 if one differs by more than rounding",
    )
    what.add_argument(
        "--batch-size", type=positive, nargs="+", metavar="B", help="for --only-acceptance (1) and --compare (1 4)"
    )
    what.add_argument("--output", type=Path, help="JSON of the results (default: FOLDER/measure-DATA.json)")
    options = parser.parse_args(arguments)
    refuse_contradictions(parser, options)
    if options.batch_size is None:
        options.batch_size = [1, 4] if options.compare else [1]
    if options.output is None:
        kind = "compare" if options.compare else "measure"
        options.output = Path(options.folder) / f"{kind}-{options.data.name.split('.')[0]}.json"
    return options


def refuse_contradictions(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a message for options that would otherwise be ignored."""
    sizes = options.batch_size or [1]
    if not options.compare and len(sizes) > 1:
        parser.error("--batch-size takes several values only with --compare")
    if not (options.compare or options.only_acceptance) and sizes != [1]:
        parser.error("speed is compared one prompt at a time; --batch-size goes with --only-acceptance or --compare")
    if options.compare and options.temperature != [0.0]:
        parser.error("--compare compares greedy answers; leave --temperature out")
    if options.compare and options.all_turns:
        parser.error("--compare compares first turns; leave --all-turns out")
    if options.rule != [AUTO] and not any(options.temperature):
        parser.error("--rule goes with sampling, greedy text has only one; name a --temperature above 0")
    if options.held_out_fraction is not None and not 0 < options.held_out_fraction <= 1:
        parser.error(f"--held-out-fraction {options.held_out_fraction:g}: expected a number above 0, at most 1")


def load_questions(options: argparse.Namespace) -> list[Question]:
    questions = read_questions(options.data, options.held_out_fraction)
    return first_of_each(questions, options.per_category, options.limit)


def check_ids(questions: Sequence[Question], vocab_size: int) -> None:
    """Raise ``DataError`` for prompts in token ids that the target does not have."""
    for question in questions:
        if question.prompt_ids is not None and max(question.prompt_ids) >= vocab_size:
            raise DataError(
                f"{question.name}: token id {max(question.prompt_ids)}, but the target has {vocab_size} tokens; these "
                "prompts were made for another target."
            )


def description(model: SpeculativeModel, options: argparse.Namespace) -> dict[str, Any]:
    """On what, with what and how it was measured."""
    device = model.target.device
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "format": FORMAT,
        "checkpoint": str(options.folder),
        "data": str(options.data),
        "versions": {
            "mtp": mtp.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "device": str(device),
            "name": name,
            "dtype": str(model.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        },
        "settings": {
            "drafter": options.drafter or getattr(model.drafter, "family", type(model.drafter).__name__),
            "nodes": options.nodes or "auto",
            "max_new_tokens": options.max_new_tokens,
            "batch_size": options.batch_size,
            "seed": options.seed,
            "raw": options.raw,
            "all_turns": options.all_turns,
            "held_out_fraction": options.held_out_fraction,
        },
    }


def decodings(options: argparse.Namespace) -> list[Decoding]:
    """One for each temperature and rule; greedy text has one rule."""
    return [
        Decoding(options.max_new_tokens, value, options.seed, options.nodes, rule, options.drafter)
        for value in options.temperature
        for rule in (dict.fromkeys(options.rule) if value > 0 else [AUTO])
    ]


def measure(
    model: SpeculativeModel, tokenizer: Any, questions: Sequence[Question], options: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    """The results as they go into the file, and the exit code.  An interrupt ends it early, with what there is."""
    comparisons: list[Comparison] = []
    complete = False
    try:
        for decoding in decodings(options):
            comparisons.append(Comparison(model, decoding, (DRAFTED,) if options.only_acceptance else SYSTEMS))
            comparisons[-1].run(
                questions, tokenizer, batch_size=options.batch_size[0], raw=options.raw, all_turns=options.all_turns
            )
        complete = True
    except KeyboardInterrupt:
        pass
    results = [comparison.to_dict() for comparison in comparisons if comparison.records]
    if complete and not results:
        raise UsageError(no_prompt_fits(questions, options, comparisons[0].longest_prompt))
    return {"complete": complete, **description(model, options), "results": results}, 0 if complete else INTERRUPTED


def no_prompt_fits(questions: Sequence[Question], options: argparse.Namespace, limit: int | None) -> str:
    return (
        f"None of the {len(questions)} prompts of {options.data} can be answered: each is empty or longer than {limit} "
        f"tokens, the target's positions less --max-new-tokens {options.max_new_tokens}."
    )


def measure_comparison(
    model: SpeculativeModel, tokenizer: Any, questions: Sequence[Question], options: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    """As ``measure``, for ``--compare``; the exit code is 1 where an answer differs by more than rounding explains."""
    comparison = Comparison(model, decodings(options)[0])
    prompts = [(question.name, Conversation(question).next_prompt(tokenizer, options.raw)) for question in questions]
    prompts = [
        (name, ids)
        for (name, ids), question in zip(prompts, questions, strict=True)
        if comparison.fits(question, 1, ids)
    ]
    if not prompts:
        raise UsageError(no_prompt_fits(questions, options, comparison.longest_prompt))
    answers = compare_answers(model, prompts, comparison.decoding, options.batch_size)
    report = {"complete": True, **description(model, options), "answers": answers, "skipped": comparison.skipped}
    return report, 0 if all(entry["within_rounding"] for entry in different_answers(report)) else 1


def different_answers(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a report's answers that are not ``transformers``' own, with where they leave it."""
    return [
        {"name": answer["name"], "batch_size": answer["batch_size"], **answer["divergence"]}
        for answer in report["answers"]
        if answer["divergence"] is not None
    ]


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report's tables, what was skipped and what differed."""
    skipped = {(entry["name"], entry["turn"]): entry for entry in report.get("skipped", [])}
    if "answers" in report:
        sizes = ", ".join(map(str, report["settings"]["batch_size"]))
        show_equality(len(report["answers"]), different_answers(report), f"drafted, batches of {sizes}", console)
    for result in report.get("results", []):
        console.print(acceptance_table(result))
        if len(result["overall"]["systems"]) > 1:
            console.print(speed_table(result))
        console.print(stages_table(result, accelerator=not report["machine"]["device"].startswith("cpu")))
        for system in (DRAFTED, PLAIN):
            if result["equality"] is not None:
                different = result["equality"][system]["different"]
                show_equality(result["equality"]["compared"], different, system, console)
        skipped.update({(entry["name"], entry["turn"]): entry for entry in result["skipped"]})
    if len(report.get("results", [])) > 1:
        settings = report["settings"]
        title = f"{settings['drafter']}, {settings['nodes']} nodes: mean accepted length"
        console.print(rules_table(report["results"], title))
    for entry in skipped.values():
        why = f"{entry['prompt_tokens']} tokens, at most {entry['limit']} fit" if entry["prompt_tokens"] else "empty"
        console.print(f"skipped {entry['name']}, turn {entry['turn']}: {why}", markup=False, highlight=False)
    if skipped:
        console.print(f"{len(skipped)} prompts skipped in all", highlight=False)
    if not report["complete"]:
        console.print("interrupted: these are the results so far", style="bold red")


def show_equality(compared: int, different: list[dict[str, Any]], what: str, console: Console) -> None:
    console.print(equality_headline(compared, different, what), markup=False, highlight=False)
    if different:
        console.print(divergence_table(different))


def run(options: argparse.Namespace) -> int:
    questions = load_questions(options)
    model = load_model(options)
    if options.output.is_dir():
        raise UsageError(f"--output {options.output} is a folder; expected a file for the results.")
    check_writable(options.output.parent)
    check_ids(questions, model.target.vocab_size)
    needs_text = any(question.prompt_ids is None for question in questions)
    tokenizer = load_tokenizer(model, options) if needs_text else None
    report, code = (measure_comparison if options.compare else measure)(model, tokenizer, questions, options)
    console = Console()
    show(report, console)
    if report.get("results") or "answers" in report:
        write_json(options.output, report)
        console.print(f"written to {options.output}", markup=False, highlight=False, soft_wrap=True)
    return code


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return run(parse_arguments(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
