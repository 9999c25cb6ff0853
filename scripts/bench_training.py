"""Training EAGLE-3 in several ways, side by side: trained tokens a second, peak memory, and what was learnt.

    python scripts/bench_training.py --target FOLDER --data rows.jsonl [--rows 64] [--passes 1] [--steps 3]
        [--positions 2048] [--speculators FOLDER] [--output results.json]

    ours          the step of train/heads.py, from random weights, as all others but the next
    ours+start    the same from the least-squares start that recipes have; what that took is in its tokens a second
    plain         what one would write first: rows padded as they come, an L x L mask a step, logits of all positions
                  over the whole vocabulary
    plain+draft   the same over the draft vocabulary of the others
    speculators   that package's own EAGLE-3 model and loss, with ``--speculators FOLDER``:
                  pip install --no-deps --target FOLDER speculators==0.9.0 hs-connectors==0.9.0 openai loguru
                  pydantic pydantic-settings python-dotenv distro jiter typer (what it imports, without its engines)
    speculators+output   the same with its output matrix trained, as ours is

Each runs in a process of its own (``scripts/training_contenders/``) and takes one optimiser step when it is its turn,
on the same rows, states, sizes, positions a step and optimiser, in float32, until it has seen all rows.  The target's
states are computed once, before, and read from memory: all need the same ones.  *Trained tokens* are those of answers,
not of prompts or padding.  At the end the same evaluation of this library measures every head on the same held-out
rows: speculators' weights have the same names and meaning, its key-value heads being shared by several queries (with
SmolLM2 its layer has 0.9 M weights less).  On a CPU speculators runs with ``--attention eager`` and its eager loss: its
own choice of attention is compiled for GPUs, and its fused losses are Triton's.  Its rows are packed, as its collator
packs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from mtp.errors import command_line
from mtp.files import write_json
from mtp.target import Target
from train.data import draft_vocabulary, load_rows
from train.features import pad_rows

ROOT = Path(__file__).parents[1]
SHARED = ("positions", "passes", "steps", "lr", "attention", "new_tokens", "nodes")  # options that contenders read
OURS, THEIRS = ("ours", "ours+start", "plain", "plain+draft"), ("speculators", "speculators+output")


@dataclass
class Contender:
    """One way of training, in a process that takes a step when it is told to.

    Attributes:
        ready: what it said of itself: ``batches`` of all passes, trained ``parameters``, ``start_seconds``.
        steps: what it said of each step: ``seconds``, trained ``tokens``, ``accuracy`` of the first unrolled step.
        peak: bytes at its peak beyond what was in use before its first step.
        acceptance: of what it trained.
    """

    name: str
    process: subprocess.Popen[str]
    ready: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    peak: int = 0
    acceptance: dict[str, Any] = field(default_factory=dict)

    def ask(self, request: str) -> dict[str, Any]:
        """One line out, one line back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: {self.name} ended with status {self.process.wait()}; what it said is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def left(self) -> int:
        return int(self.ready["batches"]) - len(self.steps)

    @property
    def speed(self) -> float:
        """Trained tokens a second, what went before the first step included."""
        seconds = float(self.ready["start_seconds"]) + sum(step["seconds"] for step in self.steps)
        return float(sum(step["tokens"] for step in self.steps) / seconds)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of a Llama or Qwen3 causal LM")
    parser.add_argument("--data", required=True, help="distilled rows, as train/heads.py takes them")
    parser.add_argument("--rows", type=int, default=64, help="rows to train on (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=1, help="over these rows (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=8, help="rows to evaluate on (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer there (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=16, help="of the trees there (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=512, help="longer rows are left out (default: %(default)s)")
    parser.add_argument(
        "--positions", type=int, default=2048, help="of a step, padding included (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=3, help="unrolled steps (default: %(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="of ours and speculators (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-4, help="of AdamW, for all (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", choices=(*OURS, *THEIRS), help="default: all there are")
    parser.add_argument("--speculators", type=Path, metavar="FOLDER", help="where that package is installed")
    parser.add_argument("--attention", default="eager", help="of speculators: eager, sdpa or simple_flex_attention")
    parser.add_argument("--output", type=Path, help="write all figures there as JSON")
    return parser.parse_args(arguments)


@torch.no_grad()
def write_states(options: argparse.Namespace, folder: Path) -> None:
    """Rows with the target's states, for all contenders: ``states.safetensors`` and ``settings.json``."""
    target = Target(AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval())
    short = [row for row in load_rows(options.data) if len(row) <= options.max_length]
    rows, held_out = short[options.held_out :][: options.rows], short[: options.held_out]
    if not rows or not held_out:
        raise SystemExit(
            f"error: {len(short)} rows of {options.data} have at most {options.max_length} tokens; expected more than "
            f"--held-out {options.held_out}, and that at least 1."
        )
    taps = target.default_taps()
    tensors = {}
    for at, row in enumerate(rows):
        tokens, _ = pad_rows([row.ids], target.device)
        hidden, tapped = target.encode(tokens, taps)
        assert tapped is not None
        tensors |= {f"tokens.{at}": tokens[0], f"hidden.{at}": hidden[0].clone(), f"taps.{at}": tapped[0].clone()}
    vocabulary = draft_vocabulary(rows, options.draft_vocab, target.vocab_size, target.eos_token_ids)
    save_file({**tensors, "draft_ids": vocabulary}, folder / "states.safetensors")
    settings = {
        "target": str(Path(options.target).expanduser().resolve()),
        "prompts": [len(row.prompt_ids) for row in rows],
        "held_out": [{"prompt_ids": row.prompt_ids, "response_ids": row.response_ids} for row in held_out],
        "taps": taps,
        **{name: getattr(options, name) for name in SHARED},
    }
    write_json(folder / "settings.json", settings)


def start(name: str, folder: Path, options: argparse.Namespace) -> Contender:
    """A contender that has loaded what it needs."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if name in THEIRS:
        path.append(str(options.speculators.resolve()))  # last: what it would shadow is taken from here
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "scripts.training_contenders", name, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    contender = Contender(name, process)
    contender.ready = contender.ask("ready")
    return contender


def take_turns(contenders: Sequence[Contender]) -> None:
    """A step of each in turn until all have seen all rows, after one to warm up; then what each has learnt."""
    for contender in contenders:
        contender.ask("warm up")
    with tqdm(total=sum(contender.left for contender in contenders), desc="steps of all", unit="step") as bar:
        while any(contender.left for contender in contenders):
            for contender in contenders:
                if contender.left:
                    contender.steps.append(contender.ask("step"))
                    bar.update()
    for contender in contenders:
        contender.peak = contender.ask("peak")["bytes"]
    for contender in tqdm(contenders, desc="acceptance", unit="head"):
        contender.acceptance = contender.ask("acceptance")


def table(contenders: Sequence[Contender]) -> Table:
    """What there is to compare: trained tokens a second, peak memory, trained weights; what was learnt, held out."""
    result = Table()
    for column in ("", "tokens/s", "ours is", "memory", "weights", "accuracy", "tau"):
        name = max(len(each.name) for each in contenders) if not column else None
        result.add_column(column, justify="left" if not column else "right", min_width=name)
    ours = next((each.speed for each in contenders if each.name == "ours"), None)
    for each in contenders:
        result.add_row(
            each.name,
            f"{each.speed:.0f}",
            "" if ours is None or each.name == "ours" else f"{ours / each.speed:.2f}x",
            f"{each.peak / 1e9:.2f} GB",
            f"{each.ready['parameters'] / 1e6:.1f} M",
            f"{each.acceptance['accuracy'][0]:.3f}",
            f"{each.acceptance['mean_accepted_length']:.2f}",
        )
    return result


@command_line
def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    names = options.only or [*OURS, *(THEIRS if options.speculators else ())]
    if set(names) & set(THEIRS) and options.speculators is None:
        raise SystemExit("error: name the folder in which speculators is installed: --speculators FOLDER")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_states(options, Path(folder))
        contenders = []
        for name in names:
            contenders.append(start(name, Path(folder), options))
            stack.callback(contenders[-1].process.kill)
        take_turns(contenders)
    Console().print(table(contenders))
    if options.output is not None:
        figures = {
            each.name: {
                "tokens_per_second": each.speed,
                "peak_bytes": each.peak,
                **each.ready,
                "steps": each.steps,
                "held_out": each.acceptance,
            }
            for each in contenders
        }
        write_json(options.output, figures)


if __name__ == "__main__":
    main()
