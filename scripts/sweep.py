"""Everything that is measured of a head, in one command: trees of several sizes, passes, systems side by side, plots.

    python scripts/sweep.py RUN/best --data questions.jsonl --output FOLDER [--dtype float32 bfloat16]
        [--nodes 2 4 8 16 32 64] [--per-category 1] [--max-new-tokens 128] [-- ARGUMENTS OF scripts/bench.py]

Into FOLDER go ``passes-DTYPE.json`` (scripts/bench_passes.py), ``measure-DTYPE-NODES.json`` (serve/measure.py, trees
of each size and as large as pays), ``side_by_side.json`` (scripts/bench.py) and ``plots/`` (scripts/plots.py).
Interrupt it at any point: the same command goes on, and what is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp.checkpoint import read_config
from mtp.errors import command_line
from serve.loading import positive

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Step:
    """One program to run; ``output`` is there, and complete, when it has been."""

    arguments: list[str]
    output: Path | None = None

    def is_done(self) -> bool:
        if self.output is None or not self.output.exists():
            return False
        found: dict[str, object] = json.loads(self.output.read_text(encoding="utf-8"))
        return found.get("complete", True) is True


def steps(options: argparse.Namespace) -> list[Step]:
    """What is to be run, in order; scripts/bench.py sees for itself what it has done."""
    folder: Path = options.output
    reference = read_config(options.folder)["target"]
    bundled = str(Path(options.folder) / "target")
    target = options.target or (bundled if reference["bundled"] else reference["name_or_path"])
    common = ["--data", str(options.data), "--per-category", str(options.per_category)]
    common += ["--max-new-tokens", str(options.max_new_tokens)]
    chosen = ["--target", options.target] if options.target else []
    nodes = list(map(str, options.nodes))
    planned = []
    for dtype in options.dtype:
        passes = folder / f"passes-{dtype}.json"
        arguments = ["scripts/bench_passes.py", target, "--compile", "--head", options.folder, "--dtype", dtype]
        planned.append(Step([*arguments, "--nodes", "1", *nodes, "--output", str(passes)], passes))
        for count in [*nodes, "auto"]:
            measured = folder / f"measure-{dtype}-{count}.json"
            arguments = ["serve/measure.py", options.folder, *chosen, *common, "--dtype", dtype]
            arguments += [] if count == "auto" else ["--nodes", count]
            planned.append(Step([*arguments, "--output", str(measured)], measured))
    beside = ["scripts/bench.py", options.folder, *chosen, *common, "--output", str(folder / "side_by_side.json")]
    planned.append(Step([*beside, "--dtype", *options.dtype, *options.bench]))
    planned.append(Step(["scripts/plots.py", str(folder)]))
    return planned


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What stands behind ``--`` is for scripts/bench.py."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the augmented checkpoint (RUN/best of train/heads.py)")
    parser.add_argument("--data", type=Path, required=True, help="questions (JSONL, or a folder of distilled rows)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--target", help="load the target from here instead of from where the checkpoint says")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"], help="of the target"
    )
    parser.add_argument("--nodes", type=positive, nargs="+", default=[2, 4, 8, 16, 32, 64], help="of the trees")
    parser.add_argument("--per-category", type=positive, default=1, help="questions of each (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="(default: %(default)s)")
    options = parser.parse_args(given[:at])
    options.bench = given[at + 1 :]
    return options


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the first program that failed, which ends it."""
    options = parse_arguments(arguments)
    planned = steps(options)
    options.output.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(planned, start=1):
        done = step.is_done()
        name = step.output.name if step.output else Path(step.arguments[0]).stem
        print(f"[{number}/{len(planned)}] {name}{': there already' if done else ''}", flush=True)
        if done:
            continue
        program, *rest = step.arguments
        code = subprocess.run([sys.executable, str(ROOT / program), *rest], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
