"""Train every head on the same rows, measure them on the same questions, and print one table.

    python scripts/compare_heads.py --data runs/data --questions spec_bench.jsonl humaneval.jsonl --output runs/compare

A contender is a recipe, perhaps with changes: ``configs/smollm2_eagle3.yaml,optim.lr=1e-3``.  Each is trained by
``train/heads.py``, then measured by ``serve/measure.py``: acceptance with trees of a fixed size, greedy and sampled,
and speed with trees as large as pays.  What is done is not done again: interrupted, the same command goes on, and with
other contenders it adds them.  ``--drafters ngram head+ngram`` measures drafters that need no training beside them, on
the first contender's checkpoint.  A contender that fails is named in the end; the others go on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import safe_open

from mtp.files import write_json
from serve.questions import read_questions

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml")
DONE = "done.json"  # in a contender's folder: each stage's command line, once it has succeeded


@dataclass(frozen=True)
class Contender:
    """A recipe and what is changed in it, or a drafter by name beside a head that is trained already.

    Attributes:
        name: of its row and its folder.
        folder: of everything that belongs to it.
        checkpoint: that is measured.
        recipe: that is followed to make it; None where there is nothing to train.
        overrides: of the recipe.
    """

    name: str
    folder: Path
    checkpoint: Path
    recipe: str | None = None
    overrides: tuple[str, ...] = ()

    @classmethod
    def trained(cls, text: str, output: Path) -> Contender:
        """Read ``recipe.yaml[,key=value...]``."""
        recipe, *overrides = re.split(r",(?=[\w.]+=)", text)  # lists have commas too
        if not (ROOT / recipe).is_file():
            raise SystemExit(f"error: no recipe at {recipe}; expected one such as configs/smollm2_eagle3.yaml")
        name = " ".join([Path(recipe).stem.removeprefix("smollm2_"), *overrides])
        folder = output / re.sub(r"[^\w.=-]+", "-", name)
        return cls(name, folder, folder / "run" / "best", recipe, tuple(overrides))

    @classmethod
    def untrained(cls, drafter: str, beside: Contender, output: Path) -> Contender:
        """A drafter by the name that ``generate`` knows it by, which may be a mix with the head of ``beside``."""
        return cls(drafter.replace("head", beside.name), output / f"drafter-{drafter}", beside.checkpoint)

    @property
    def drafter(self) -> tuple[str, ...]:
        """Arguments of ``serve/measure.py``."""
        return () if self.recipe is not None else ("--drafter", self.folder.name.removeprefix("drafter-"))


class StageError(Exception):
    """A stage of a contender ended with an error."""


def run_stage(contender: Contender, stage: str, command: Sequence[str], threads: int) -> None:
    """Run a command in the project's folder, unless it has succeeded before.

    Raises:
        StageError: with the stage and its exit code.
    """
    path = contender.folder / DONE
    done: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if done.get(stage) == list(command):
        return
    print(f"\n[{contender.name}] {stage}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # it was interrupted too, and is writing its checkpoint
        raise
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code != 0:
        raise StageError(f"{contender.name}: {stage} ended with exit code {code}")
    write_json(path, {**done, stage: list(command)})


def train(contender: Contender, options: argparse.Namespace) -> None:
    if contender.recipe is None:
        return
    shared = [
        f"target.path={options.target}",
        f"data.path={options.data}",
        f"features.folder={options.output / 'features'}",
        f"optim.epochs={options.epochs}",
        f"eval.every={options.evaluate_every}",
    ]
    if options.rows:
        shared.append(f"data.limit={options.rows}")
    own = [*contender.overrides, f"output={contender.folder / 'run'}"]
    launch = [*LAUNCH, "--num_cpu_threads_per_process", str(options.threads)]
    run_stage(contender, "training", [*launch, "train/heads.py", contender.recipe, *shared, *own], options.threads)


def measuring(contender: Contender, options: argparse.Namespace) -> list[str]:
    """The beginning of a command line of ``serve/measure.py``."""
    program = [sys.executable, "serve/measure.py", str(contender.checkpoint), *contender.drafter]
    return [*program, "--max-new-tokens", str(options.tokens)]


def chosen(data: Path, limit: int | None) -> list[str]:
    """Arguments that choose about ``limit`` questions of a set, equally many of each category."""
    if limit is None:
        return ["--data", str(data)]
    categories = len({question.category for question in read_questions(data)})
    return ["--data", str(data), "--per-category", str(math.ceil(limit / categories))]


def measure(contender: Contender, options: argparse.Namespace) -> None:
    how = ["--only-acceptance", "--batch-size", "8", "--nodes", str(options.nodes)]
    how += ["--temperature", *map(str, options.temperature)]
    for data in options.questions:
        results = contender.folder / f"{data.stem}.json"
        command = [*measuring(contender, options), *how, *chosen(data, options.limit), "--output", str(results)]
        run_stage(contender, f"acceptance on {data.stem}", command, options.threads)


def time(contender: Contender, options: argparse.Namespace) -> None:
    command = [
        *measuring(contender, options),
        *chosen(options.questions[0], options.timed),
        *("--output", str(contender.folder / "speed.json")),
    ]
    run_stage(contender, "speed", command, options.threads)


# ---- what came of it ----------------------------------------------------------------------------------------------


def trained_with(contender: Contender) -> dict[str, Any]:
    """Parameters, minutes of optimiser steps, trained positions, and the acceptance found on the way."""
    with safe_open(contender.checkpoint / "heads.safetensors", framework="pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - no mapping
    log = [json.loads(line) for line in (contender.folder / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    evaluations = [line for line in log if line["event"] == "evaluation"]
    return {
        "parameters": sum(map(math.prod, sizes)),
        "minutes": evaluations[-1]["seconds"] / 60,
        "positions": evaluations[-1]["trained_positions"],
        "curve": [
            {
                "positions": line["trained_positions"],
                "minutes": round(line["seconds"] / 60, 2),
                "mean_accepted_length": line["mean_accepted_length"],
            }
            for line in evaluations
        ],
    }


def results_of(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is known of a contender; what has not been measured is left out."""
    training = trained_with(contender) if contender.recipe is not None else {}
    found: dict[str, Any] = {"name": contender.name, **training, "acceptance": {}}
    for data in options.questions:
        path = contender.folder / f"{data.stem}.json"
        if path.exists():
            found["acceptance"][data.stem] = {
                f"{result['temperature']:g}": {
                    "all": result["overall"]["mean_accepted_length"],
                    **{name: each["mean_accepted_length"] for name, each in result["categories"].items()},
                }
                for result in json.loads(path.read_text(encoding="utf-8"))["results"]
            }
    if (contender.folder / "speed.json").exists():
        overall = json.loads((contender.folder / "speed.json").read_text(encoding="utf-8"))["results"][0]["overall"]
        found["draft_milliseconds"] = 1000 * overall["seconds"]["draft"] / overall["target_passes"]
        found["tokens_per_second"] = overall["systems"]["drafted"]["tokens_per_second"]
        found["speedup_over"] = overall["speedup_over"]
    return found


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, its first row the heading."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def overview(results: Sequence[dict[str, Any]]) -> str:
    """One row a head: size, training, mean accepted length by data set and temperature, draft time, speed."""
    columns = list(dict.fromkeys((d, t) for each in results for d, taus in each["acceptance"].items() for t in taus))
    names = [f"{data}, {'greedy' if t == '0' else f'T = {t}'}" for data, t in columns]
    rows = [["head", "parameters", "minutes", *names, "draft ms a round", "tokens/s", "x plain", "x transformers"]]
    for each in sorted(results, key=lambda each: -each.get("tokens_per_second", 0.0)):
        taus = [each["acceptance"].get(data, {}).get(t, {}).get("all") for data, t in columns]
        speed = each.get("speedup_over", {})
        rows.append(
            [
                each["name"],
                f"{each['parameters'] / 1e6:.1f} M" if "parameters" in each else "-",
                text(each.get("minutes"), 1),
                *(text(tau, 2) for tau in taus),
                *(text(each.get("draft_milliseconds"), 1), text(each.get("tokens_per_second"), 1)),
                *(text(speed.get("plain"), 2), text(speed.get("transformers"), 2)),
            ]
        )
    return markdown(rows)


def by_category(results: Sequence[dict[str, Any]], data: str, temperature: str) -> str:
    """Mean accepted length, one row a head and one column a category."""
    measured = [each for each in results if temperature in each["acceptance"].get(data, {})]
    names = list(dict.fromkeys(name for each in measured for name in each["acceptance"][data][temperature]))
    rows = [["head", *names]]
    for each in measured:
        taus = each["acceptance"][data][temperature]
        rows.append([each["name"], *(text(taus.get(name), 2) for name in names)])
    return markdown(rows)


def curves(results: Sequence[dict[str, Any]]) -> str:
    """Mean accepted length on held-out rows against trained positions and minutes, for those evaluated on the way."""
    rows = [["head", "trained positions", "minutes", "mean accepted length, held-out rows"]]
    for each in results:
        for point in each.get("curve", []):
            position, minutes = f"{point['positions']:,}", text(point["minutes"], 1)
            rows.append([each["name"], position, minutes, text(point["mean_accepted_length"], 2)])
    return markdown(rows)


def text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", metavar="RECIPE[,KEY=VALUE...]", help="default: all of configs/")
    parser.add_argument("--data", type=Path, required=True, help="distilled rows (train/distill.py)")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSONL files for serve/measure.py")
    parser.add_argument("--output", type=Path, default=Path("runs/compare"), help="default: %(default)s")
    parser.add_argument("--target", default="~/.cache/mtp/smollm2-135m-instruct", help="default: %(default)s")
    parser.add_argument(
        "--drafters", nargs="+", default=[], help="that need no training, and mixes with the first head"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--rows", type=int, help="the first so many rows (default: all)")
    training.add_argument("--epochs", type=int, default=2, help="passes over them (default: %(default)s)")
    training.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS", help="for curves of acceptance")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--nodes", type=int, default=16, help="of the trees (default: %(default)s)")
    measuring.add_argument("--tokens", type=int, default=128, help="new tokens an answer (default: %(default)s)")
    measuring.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="default: 0 1")
    measuring.add_argument("--limit", type=int, help="about so many questions of each set, evenly over its categories")
    measuring.add_argument("--timed", type=int, default=13, help="questions of the first set to time; 0 for none")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    options = parser.parse_args()
    for name in ("data", "output"):
        setattr(options, name, getattr(options, name).resolve())
    options.questions = [data.resolve() for data in options.questions]
    if missing := [str(path) for path in (options.data, *options.questions) if not path.exists()]:
        parser.error(f"not found: {', '.join(missing)}")
    if not options.contenders:
        options.contenders = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("smollm2_*.yaml"))
    return options


def main() -> int:
    options = parse_arguments()
    contenders = [Contender.trained(each, options.output) for each in options.contenders]
    contenders += [Contender.untrained(name, contenders[0], options.output) for name in options.drafters]
    failures: dict[Contender, StageError] = {}
    for stage in (train, measure, time) if options.timed else (train, measure):
        for contender in contenders:
            if contender not in failures:
                try:
                    stage(contender, options)
                except StageError as error:
                    failures[contender] = error
    results = [results_of(each, options) for each in contenders if (each.checkpoint / "config.json").exists()]
    if results:
        write_json(options.output / "results.json", results)
        tables = [overview(results)]
        tables += [by_category(results, options.questions[0].stem, f"{t:g}") for t in options.temperature]
        tables.append(curves(results))
        (options.output / "results.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        Console().print((options.output / "results.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    for failure in failures.values():
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on from here") from None
