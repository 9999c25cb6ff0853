"""Train every head on the same rows, measure them on the same questions, and print one table.

    python scripts/compare_heads.py --data runs/data --questions spec_bench.jsonl humaneval.jsonl --output runs/compare

A contender is a recipe, perhaps with changes: ``configs/smollm2_eagle3.yaml,optim.lr=1e-3``.  Each is trained by
``train/heads.py``, then measured by ``serve/measure.py``: acceptance with trees of a fixed size, greedy and sampled,
and speed with trees as large as pays.  A contender may also be the folder of a finished head, which is measured as it
is; ``--data`` is for training alone.  What is done is not done again: interrupted, the same command goes on, and with
other contenders it adds them.  A contender that fails is named in the end; the others go on.

Drafters that need no training are measured beside them, alone or in a mix with the first head that was trained on the
target as it is: ``--drafters ngram recycling early_exit:3,5 head+ngram``.  Some layers of the target as its assistant
are a recipe without steps: ``configs/smollm2_assistant.yaml,optim.epochs=0,features.mode=online``.  Heads that were
trained together with an adapter of the target (``configs/smollm2_medusa2.yaml``) are measured on the adapted target,
whose text it then is; the tables say which these are.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import safe_open

from mtp.checkpoint import ADAPTER, CONFIG, WEIGHTS, CheckpointError, read_config
from mtp.drafters import OWN, PlainDrafter, drafter_by_name
from mtp.errors import command_line
from mtp.files import write_json
from serve.head_tables import by_category, curves, overview
from serve.questions import read_questions

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml")
TARGET = "~/.cache/mtp/smollm2-135m-instruct"
DONE = "done.json"  # in a contender's folder: each stage's command line, once it has succeeded


@dataclass(frozen=True)
class Contender:
    """A recipe and what is changed in it, a finished head, or a drafter by name on the target of one of these.

    Attributes:
        name: of its row and its folder.
        folder: of everything that belongs to it.
        checkpoint: that is measured.
        recipe: that is followed to make it; None where there is nothing to train.
        overrides: of the recipe.
        drafter: that drafts in place of the checkpoint's head.
        head: whose parameters and training are in it; None for what needs neither.
    """

    name: str
    folder: Path
    checkpoint: Path
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    drafter: str | None = None
    head: Contender | None = None

    @classmethod
    def of(cls, text: str, output: Path) -> Contender:
        """Read ``recipe.yaml[,key=value...]`` or the folder of a finished head."""
        if (Path(text) / CONFIG).is_file():
            try:
                read_config(text)
            except CheckpointError as error:
                raise SystemExit(f"error: {error}") from error
            return cls(text, output / f"finished-{in_names(text)}", Path(text).resolve())
        recipe, *overrides = re.split(r",(?=[\w.]+=)", text)  # lists have commas too
        if not (ROOT / recipe).is_file():
            raise SystemExit(
                f"error: no recipe and no finished head at {recipe}; expected one such as configs/smollm2_eagle3.yaml"
            )
        name = " ".join([Path(recipe).stem.removeprefix("smollm2_"), *overrides])
        folder = output / in_names(name)
        return cls(name, folder, folder / "run" / "best", recipe, tuple(overrides))

    @classmethod
    def untrained(cls, drafter: str, beside: Contender, output: Path) -> Contender:
        """A drafter by the name that ``generate`` knows it by, which may be a mix with the head of ``beside``."""
        parts = drafter.split("+")
        name = "+".join(beside.name if part == OWN else part for part in parts)
        folder = output / f"drafter-{in_names(drafter)}"
        return cls(name, folder, beside.checkpoint, drafter=drafter, head=beside if OWN in parts else None)

    @property
    def is_adapted(self) -> bool:
        """Whether the target that its finished checkpoint belongs to has an adapter."""
        return bool(read_config(self.checkpoint)["target"].get("adapted"))


def in_names(text: str) -> str:
    """``text`` as part of a folder's name."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-")


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
        f"target.path={options.target or TARGET}",
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
    command = [sys.executable, "serve/measure.py", str(contender.checkpoint)]
    if contender.drafter is not None:
        command += ["--drafter", contender.drafter]
    if options.target is not None and not contender.checkpoint.is_relative_to(options.output):  # of another's making
        command += ["--target", os.path.expanduser(options.target)]
    return [*command, "--max-new-tokens", str(options.tokens)]


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


def parameters_of(checkpoint: Path) -> int:
    """Numbers in the weights of its head, and of the target's adapter where it has one."""
    count = 0
    for path in (checkpoint / WEIGHTS, *checkpoint.glob(f"{ADAPTER}/*.safetensors")):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    return count


def trained_with(contender: Contender) -> dict[str, Any]:
    """Minutes of work, trained positions, and the acceptance found on the way.

    The minutes are those of cached hidden states, the least-squares start and the optimiser's steps; evaluations are
    left out.  States that an earlier contender has cached cost nothing again.
    """
    log = [json.loads(line) for line in (contender.folder / "run" / "log.jsonl").read_text("utf-8").splitlines()]
    before, curve = 0.0, []
    for line in log:
        if line["event"] == "start":  # once more each time the run was continued
            before += line["features_seconds"] + line["warm_start_seconds"]
        elif line["event"] == "evaluation":
            curve.append(
                {
                    "positions": line["trained_positions"],
                    "minutes": round((before + line["seconds"]) / 60, 4),
                    "mean_accepted_length": line["mean_accepted_length"],
                }
            )
    return {"minutes": curve[-1]["minutes"], "positions": curve[-1]["positions"], "curve": curve}


def results_of(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is known of a contender; what has not been measured is left out."""
    head = contender if contender.drafter is None else contender.head
    found: dict[str, Any] = {"name": contender.name, "adapted": contender.is_adapted, "acceptance": {}}
    found["parameters"] = 0 if head is None else parameters_of(head.checkpoint)
    if head is None:
        found["minutes"] = 0.0
    elif head.recipe is not None:
        training = trained_with(head)
        found |= training if head is contender else {"minutes": training["minutes"]}
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "contenders", nargs="*", metavar="RECIPE[,KEY=VALUE...] or FOLDER", help="default: all recipes of configs/"
    )
    parser.add_argument("--data", type=Path, help="distilled rows to train on (train/distill.py)")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSONL files for serve/measure.py")
    parser.add_argument("--output", type=Path, default=Path("runs/compare"), help="default: %(default)s")
    parser.add_argument("--target", help=f"default: {TARGET}, or what a finished head names")
    parser.add_argument(
        "--drafters", nargs="+", default=[], metavar="NAME", help="that need no training, and mixes (head+NAME)"
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
    options.output = options.output.resolve()
    options.questions = [data.resolve() for data in options.questions]
    if len({data.stem for data in options.questions}) < len(options.questions):
        parser.error("--questions: results are kept under the files' names, and two of these are the same")
    if not options.contenders:
        options.contenders = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("smollm2_*.yaml"))
    options.contenders = [Contender.of(each, options.output) for each in options.contenders]
    if any(each.recipe is not None for each in options.contenders):
        if options.data is None:
            parser.error("recipes are trained: name distilled rows with --data")
        options.data = options.data.resolve()
    if missing := [str(path) for path in (options.data, *options.questions) if path is not None and not path.exists()]:
        parser.error(f"not found: {', '.join(missing)}")
    for name in options.drafters:
        try:
            drafter_by_name(name, own=PlainDrafter())
        except ValueError as error:
            parser.error(f"--drafters: {error}")
    return options


def untrained_beside(finished: Sequence[Contender], options: argparse.Namespace) -> list[Contender]:
    """The drafters that were asked for, beside the first finished head of the target as it is.

    Raises:
        StageError: if there is none.
    """
    beside = next((each for each in finished if not each.is_adapted), None)
    if beside is None and options.drafters:
        raise StageError(
            f"{', '.join(options.drafters)}: measured beside a finished head of the target without an adapter; there "
            "is none"
        )
    return [Contender.untrained(name, beside, options.output) for name in options.drafters if beside is not None]


def passing(
    stage: Callable[[Contender, argparse.Namespace], None],
    contenders: Sequence[Contender],
    options: argparse.Namespace,
    failures: list[StageError],
) -> list[Contender]:
    """The contenders that pass a stage; what stopped the others is added to ``failures``."""
    passed = []
    for contender in contenders:
        try:
            stage(contender, options)
        except StageError as error:
            failures.append(error)
        else:
            passed.append(contender)
    return passed


@command_line
def main() -> int:
    options = parse_arguments()
    failures: list[StageError] = []
    contenders = passing(train, options.contenders, options, failures)
    try:
        contenders += untrained_beside(contenders, options)
    except StageError as error:
        failures.append(error)
    measured = passing(measure, contenders, options, failures)
    if options.timed:
        passing(time, measured, options, failures)
    results = [results_of(each, options) for each in contenders]
    if results:
        write_json(options.output / "results.json", results)
        tables = [overview(results)]
        tables += [by_category(results, options.questions[0].stem, f"{t:g}") for t in options.temperature]
        if any("curve" in each for each in results):
            tables.append(curves(results))
        (options.output / "results.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        Console().print((options.output / "results.md").read_text(encoding="utf-8"), markup=False, soft_wrap=True)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
