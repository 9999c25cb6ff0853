"""Everything that speeds a target up, side by side: the same prompts, one run, taking turns.

    python scripts/bench.py RUN/best --data questions.jsonl [--per-category 1] [--drafters head ngram head+ngram]
        [--dtypes float32 bfloat16] [--assistant FOLDER] [--output results.json]

``transformers`` generates plainly, with its prompt lookup and, with ``--assistant``, with a smaller model; this engine
plainly and with each drafter, its trees as large as pays.  Decoding is greedy.  Printed per category: tokens a second
(prompts read inside), the ratio to plain ``transformers``, the mean accepted length, and whether all answers are those
of ``transformers``; then where the time of a round goes.  ``--memory`` adds each system's peak, from a process of its
own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from mtp.files import write_json
from mtp.model import SpeculativeModel
from mtp.stats import AcceptanceStats
from serve.loading import add_model_arguments, load_model, load_tokenizer, pad_token_id, positive
from serve.questions import Question, first_of_each, read_questions, render
from serve.systems import Outcome, timed_call

PLAIN_TRANSFORMERS = "transformers"
PROMPT_LOOKUP = "transformers, prompt lookup"
ASSISTED = "transformers, assisted"
PLAIN = "mtp, plain"
LOOKUP_TOKENS = 10  # what Transformers' documentation uses
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class System:
    """A way to the target's text.

    Attributes:
        generate: as Transformers' ``generate``.
        options: for it, beyond those that all share.
    """

    name: str
    generate: Callable[..., Any]
    options: dict[str, Any]


@dataclass
class Sums:
    """What one system did with the prompts of one category."""

    tokens: int = 0
    seconds: float = 0.0
    equal: int = 0
    prompts: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def add(self, outcome: Outcome, expected: list[int]) -> None:
        self.prompts += 1
        self.tokens += outcome.new_tokens
        self.seconds += outcome.seconds
        self.equal += outcome.answers[0].ids == expected
        if outcome.stats is not None:
            self.stats.add(outcome.stats)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def systems_of(model: SpeculativeModel, drafters: Sequence[str], assistant: Any, max_new_tokens: int) -> list[System]:
    """Plain ``transformers`` first: the others are held against it."""
    shared = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad_token_id(model)}
    theirs = model.target.causal_lm.generate
    systems = [
        System(PLAIN_TRANSFORMERS, theirs, shared),
        System(PROMPT_LOOKUP, theirs, {**shared, "prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    ]
    if assistant is not None:
        systems.append(System(ASSISTED, theirs, {**shared, "assistant_model": assistant}))
    ours = {**shared, "return_dict_in_generate": True}
    systems.append(System(PLAIN, model.generate, {**ours, "drafter": "none"}))
    systems += [System(f"mtp, {name}", model.generate, {**ours, "drafter": name}) for name in drafters]
    return systems


def compare(
    model: SpeculativeModel, systems: Sequence[System], prompts: Sequence[tuple[str, list[int]]]
) -> dict[str, dict[str, Sums]]:
    """``prompts``: category and token ids.  Returns sums by system and category."""
    sums: dict[str, dict[str, Sums]] = {system.name: {} for system in systems}
    for system in systems:  # packs, allocates, measures costs
        few = {**system.options, "max_new_tokens": WARM_UP_TOKENS}
        timed_call(model, system.generate, few, [prompts[0][1]], seed=0)
    for at, (category, ids) in enumerate(tqdm(prompts, desc=str(model.target.dtype), unit="prompt")):
        first = at % len(systems)
        order = [*systems[first:], *systems[:first]]
        outcomes = {s.name: timed_call(model, s.generate, s.options, [ids], seed=at) for s in order}
        expected = outcomes[PLAIN_TRANSFORMERS].answers[0].ids
        for name, outcome in outcomes.items():
            sums[name].setdefault(category, Sums()).add(outcome, expected)
    return sums


def total(by_category: dict[str, Sums]) -> Sums:
    """All categories together."""
    out = Sums()
    for part in by_category.values():
        out.prompts, out.tokens, out.equal = (
            out.prompts + part.prompts,
            out.tokens + part.tokens,
            out.equal + part.equal,
        )
        out.seconds += part.seconds
        out.stats.add(part.stats)
    return out


def speed_table(sums: dict[str, dict[str, Sums]], title: str) -> Table:
    table = Table(
        "category", *sums, title=title, caption="tokens a second; ratio to transformers; mean accepted length"
    )
    categories = list(next(iter(sums.values())))
    for category in [*categories, "all"]:
        cells = []
        base = total(sums[PLAIN_TRANSFORMERS]) if category == "all" else sums[PLAIN_TRANSFORMERS][category]
        for name in sums:
            found = total(sums[name]) if category == "all" else sums[name][category]
            tau = f" {found.stats.mean_accepted_length:.2f}" if found.stats.target_passes else ""
            cells.append(f"{found.speed:.1f} {found.speed / base.speed:.2f}x{tau}")
        table.add_row(category, *cells)
    equal = [f"{total(each).equal} of {total(each).prompts}" for each in sums.values()]
    table.add_row("answers of transformers", *equal)
    return table


def stage_table(sums: dict[str, dict[str, Sums]]) -> Table:
    table = Table("share of a round", "draft", "verify", "commit", "other", title="where the time of a round goes")
    for name, by_category in sums.items():
        seconds = {stage: s for stage, s in total(by_category).stats.seconds.items() if stage != "prefill"}
        if whole := sum(seconds.values()):
            table.add_row(name, *(f"{seconds.get(s, 0.0) / whole:.1%}" for s in ("draft", "verify", "commit", "other")))
    return table


def peak_memory(system: System, model: SpeculativeModel, ids: list[int]) -> int:
    """MiB that this process held at most after one answer; on an accelerator, that it allocated there."""
    timed_call(model, system.generate, system.options, [ids], seed=0)
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated() >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def memory_of(systems: Sequence[str], arguments: Sequence[str]) -> dict[str, int]:
    """Each system's ``peak_memory``, measured in a process of its own."""
    found = {}
    for name in tqdm(systems, desc="peak memory", unit="system"):
        command = [sys.executable, __file__, *arguments, "--memory-of", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = int(done.stdout.splitlines()[-1])
    return found


def as_json(sums: dict[str, dict[str, Sums]]) -> dict[str, Any]:
    def numbers(each: Sums) -> dict[str, Any]:
        kept = {"prompts": each.prompts, "tokens": each.tokens, "seconds": each.seconds, "equal": each.equal}
        return {**kept, "tokens_per_second": each.speed, "acceptance": each.stats.to_dict()}

    return {
        name: {"all": numbers(total(parts)), **{category: numbers(part) for category, part in parts.items()}}
        for name, parts in sums.items()
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--data", type=Path, required=True, help="questions (JSONL, or a folder of distilled rows)")
    parser.add_argument("--per-category", type=positive, default=1, help="questions of each (default: %(default)s)")
    parser.add_argument("--limit", type=positive, help="the first N of these")
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--drafters", nargs="+", default=["head"], help='names; "head" is the checkpoint\'s own')
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--assistant", help="folder or Hub name of a smaller model, for transformers' assisted generation"
    )
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON of the results")
    return parser


def main() -> None:
    options = parser().parse_args()
    console = Console()
    results: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(options).items()}, "dtypes": {}}
    for dtype in options.dtypes:
        options.dtype = dtype
        model = load_model(options)
        tokenizer = load_tokenizer(model, options)
        assistant = None
        if options.assistant:
            assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=getattr(torch, dtype))
            assistant = assistant.to(model.device).eval()
        systems = systems_of(model, options.drafters, assistant, options.max_new_tokens)
        questions = first_of_each(read_questions(options.data), options.per_category, options.limit)
        prompts = [(question.category, _prompt(question, tokenizer)) for question in questions]
        if options.memory_of:
            (wanted,) = (system for system in systems if system.name == options.memory_of)
            print(peak_memory(wanted, model, prompts[0][1]))
            return
        sums = compare(model, systems, prompts)
        console.print(speed_table(sums, f"{dtype}, greedy, {options.max_new_tokens} new tokens, batch 1"))
        console.print(stage_table(sums))
        results["dtypes"][dtype] = {"systems": as_json(sums)}
        if options.memory:
            peaks = memory_of([system.name for system in systems], [*sys.argv[1:], "--dtypes", dtype])
            results["dtypes"][dtype]["peak_mib"] = peaks
            table = Table("system", "peak MiB", title="memory, one answer in a process of its own")
            for name, peak in peaks.items():
                table.add_row(name, str(peak))
            console.print(table)
    if options.output:
        write_json(options.output, results)


def _prompt(question: Question, tokenizer: Any) -> list[int]:
    if question.prompt_ids is not None:
        return list(question.prompt_ids)
    messages = [*question.context, {"role": "user", "content": question.turns[0]}]
    return render(tokenizer, messages)


if __name__ == "__main__":
    main()
