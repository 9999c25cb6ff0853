"""Everything that speeds a target up, side by side: the same prompts, one run, taking turns.

    python scripts/bench.py RUN/best --data questions.jsonl --output results.json [--per-category 1]
        [--drafters head ngram head+ngram] [--dtype float32 bfloat16] [--assistant FOLDER] [--memory]
        [--peer vllm=/its/own/python eagle=/its/own/python llama=/its/own/python --gguf FILE]

``transformers`` generates plainly, with its prompt lookup and, with ``--assistant``, with a smaller model; this engine
plainly and with each drafter, its trees as large as pays unless ``--nodes`` says otherwise; with ``--peer`` also, from
virtual environments of their own and with the same EAGLE-3 head, vLLM (and this plainly and with its prompt lookup) and
EAGLE's own decoder, and llama.cpp with other weights; ``scripts/peers/`` says what these need.  Decoding is greedy.

Printed: tokens a second (prompts read inside), the ratio to plain ``transformers``, the mean accepted length, and how
many answers are those of ``transformers``; the same by category, and where the time of a round goes.  ``--memory`` adds
each system's peak, from a process of its own.

``--output`` is written after every prompt, and the same command goes on where it was stopped; scripts/plots.py prints
the tables again from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from mtp import checkpoint
from mtp.checkpoint import load_target
from mtp.drafters import drafter_by_name
from mtp.errors import command_line
from mtp.files import write_json
from mtp.model import SpeculativeModel
from serve.bench_tables import show
from serve.export.vllm import ExportError, export
from serve.loading import UsageError, add_model_arguments, load_model, load_tokenizer, positive, target_options
from serve.memory import Memory, accelerator_memory, resident_memory
from serve.peers import Peer, start_peers
from serve.questions import Conversation, first_of_each, read_questions
from serve.side_by_side import (
    ASSISTED,
    FORMAT,
    OURS,
    PLAIN,
    Prompt,
    System,
    own_systems,
    read_results,
    sums_of,
    take_turns,
    transformers_systems,
)

Commands = dict[str, list[str]]

CHILDREN = Path(__file__).parent / "peers"
# What a result depends on: a file that was made under other values is not continued.
SHAPING = (
    *("folder", "target", "data", "threads", "nodes", "drafters", "assistant", "max_new_tokens"),
    *("peer", "peer_tokens", "peer_eager", "gguf"),
)


def peer_commands(model: SpeculativeModel, options: argparse.Namespace, longest: int, folder: Path) -> Commands:
    """What to run for each peer that was asked for, by the system's name; the head is exported into ``folder``.

    Args:
        longest: tokens of a prompt with its answer.

    Raises:
        UsageError: if other engines cannot load this target or this head.
    """
    if not options.peer:
        return {}
    target = model.target
    if target.model is not target.causal_lm:
        raise UsageError("--peer: the target has an adapter on it, without which a peer's text would be another.")
    try:
        draft = export(model.drafter, folder / "draft")
    except ExportError as error:
        raise UsageError(f"--peer: {error}") from error
    # A round length, so that what vLLM has compiled serves other questions too.
    length = min(1024 * -(-(longest + options.peer_tokens) // 1024), target.max_positions or sys.maxsize)
    common = [options.target or target.causal_lm.config.name_or_path]
    common += ["--dtype", str(target.dtype).removeprefix("torch."), "--threads", str(torch.get_num_threads())]
    common += ["--max-length", str(length), "--eos", *map(str, target.eos_token_ids)]
    commands: Commands = {}
    for name, python in options.peer:
        commands |= PEERS[name](python, common, str(draft), options)
    return commands


def vllm_commands(python: str, common: list[str], draft: str, options: argparse.Namespace) -> Commands:
    """vLLM plainly, with its prompt lookup and with the head, which it drafts a chain with."""
    command = [python, str(CHILDREN / "vllm_on_cpu.py"), *common, "--tokens", str(options.peer_tokens)]
    command += ["--eager"] if options.peer_eager else []
    return {
        "vllm": command,
        "vllm, prompt lookup": [*command, "--ngram"],
        "vllm, eagle3": [*command, "--draft", draft],
    }


def eagle_commands(python: str, common: list[str], draft: str, options: argparse.Namespace) -> Commands:
    """EAGLE's own decoder with the head, in trees of its default size and of one that suits a CPU better."""
    command = [python, str(CHILDREN / "eagle_on_cpu.py"), *common, "--draft", draft]
    small = ["--nodes", "16", "--depth", "5", "--width", "6"]
    return {"eagle, 60 nodes": command, "eagle, 16 nodes": [*command, *small]}


def llama_commands(python: str, common: list[str], draft: str, options: argparse.Namespace) -> Commands:
    """llama.cpp plainly, with weights of its own."""
    if options.gguf is None:
        raise UsageError("--peer llama: llama.cpp reads weights in its own format; name the file with --gguf.")
    command = [python, str(CHILDREN / "llama_on_cpu.py"), *common, "--gguf", str(options.gguf)]
    return {f"llama.cpp, {options.gguf.stem.rpartition('.')[2]}": command}


PEERS = {"vllm": vllm_commands, "eagle": eagle_commands, "llama": llama_commands}


def run(options: argparse.Namespace, results: dict[str, Any], save: Callable[[], None]) -> None:
    """Measure one dtype after the other into ``results``, from where they are."""
    for dtype in options.dtypes:
        options.dtype = dtype
        model = load_model(options)
        for name in options.drafters:
            model.drafter_for(name)  # an unknown name is said before anything is measured
        prompts = prompts_of(model, options)
        here = results["dtypes"].setdefault(dtype, {"records": [], "failed": {}, "memory": {}})
        if "summary" in here and len(here["records"]) >= len(prompts) and bool(here["memory"]) >= options.memory:
            continue  # a run that went on found this dtype done
        ends = model.target.eos_token_ids
        longest = max(len(prompt.ids) for prompt in prompts) + options.max_new_tokens
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if options.output:  # a place that stays the same, by which vLLM knows what it has compiled before
                folder = options.output.with_suffix(f".{dtype}.peers")
            commands = peer_commands(model, options, longest, folder)
            peers = start_peers(commands, folder, ends, stack)
            own = transformers_systems(model, load_assistant(model, options))
            own += own_systems(model, options.drafters, options.nodes)
            systems = [*own, *(System(name, peer.answer) for name, peer in peers.items())]
            failed = take_turns(model, systems, prompts, options.max_new_tokens, here["records"], save)
            here["failed"] = {name: "did not start" for name in commands if name not in peers} | failed
            for peer in peers.values():
                peer.close()
            if options.memory:
                here["memory"] = own_memory([system.name for system in own], dtype)
                for name in (name for name in peers if name not in failed):
                    with Peer(name, commands[name], folder / "memory.log", ends) as peer:
                        peer.wait_until_ready()
                        work = partial(peer.answer, prompts[0].ids, options.max_new_tokens)
                        here["memory"][name] = vars(resident_memory(peer.process.pid, work))
        here["summary"] = {name: sums.to_dict() for name, sums in sums_of(here["records"]).items()}
        save()


def load_assistant(model: SpeculativeModel, options: argparse.Namespace) -> Any:
    if not options.assistant:
        return None
    assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=model.target.dtype)
    return assistant.to(model.device).eval()


def prompts_of(model: SpeculativeModel, options: argparse.Namespace) -> list[Prompt]:
    """The questions' first turns, those left out that would not fit in the target's positions."""
    questions = first_of_each(read_questions(options.data), options.per_category, options.limit)
    needs_text = any(question.prompt_ids is None for question in questions)
    tokenizer = load_tokenizer(model, options) if needs_text else None
    prompts = [Prompt(q.name, q.category, Conversation(q).next_prompt(tokenizer, raw=False)) for q in questions]
    limit = (model.target.max_positions or sys.maxsize) - options.max_new_tokens
    fitting = [prompt for prompt in prompts if 0 < len(prompt.ids) <= limit]
    if not fitting:
        raise UsageError(
            f"None of the {len(prompts)} prompts of {options.data} can be answered: each is empty or longer than "
            f"{limit} tokens, the target's positions less --max-new-tokens."
        )
    return fitting


def own_memory(systems: Sequence[str], dtype: str) -> dict[str, dict[str, int]]:
    """Each system's memory, measured in a process of its own that loads nothing but what this system needs."""
    found = {}
    for name in tqdm(systems, desc="memory", unit="system"):
        command = [sys.executable, __file__, *sys.argv[1:], "--dtype", dtype, "--memory-of", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"Measuring the memory of {name!r} failed:\n{done.stderr[-2000:]}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory_of(name: str, options: argparse.Namespace) -> Memory:
    """That of one answer to the first prompt, in this process."""
    (options.dtype,) = options.dtypes
    if name.startswith(OURS) and name != PLAIN:
        model = load_model(options)
    else:  # no head
        target = load_target(options.folder, options.target, **target_options(options))
        tokenizer = checkpoint.load_tokenizer(options.folder, target)
        model = SpeculativeModel(target, drafter_by_name("none"), tokenizer)
    assistant = load_assistant(model, options) if name == ASSISTED else None
    systems = [*transformers_systems(model, assistant), *own_systems(model, options.drafters, options.nodes)]
    (system,) = (each for each in systems if each.name == name)
    ids = prompts_of(model, options)[0].ids

    def answer() -> None:
        system.answer(ids, options.max_new_tokens)

    if model.device.type != "cpu":
        return accelerator_memory(model.device, answer)
    return resident_memory(os.getpid(), answer)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve"
    )
    add_model_arguments(parser)
    parser.add_argument("--data", type=Path, required=True, help="questions (JSONL, or a folder of distilled rows)")
    parser.add_argument("--per-category", type=positive, default=1, help="questions of each (default: %(default)s)")
    parser.add_argument("--limit", type=positive, help="the first N of these")
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="default: %(default)s")
    parser.add_argument(
        "--drafters", "--drafter", nargs="+", default=["head"], help='names; "head" is the checkpoint\'s own'
    )
    parser.add_argument(
        "--dtype", dest="dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument(
        "--assistant", help="folder or Hub name of a smaller model, for transformers' assisted generation"
    )
    parser.add_argument(
        "--peer",
        type=peer,
        nargs="+",
        default=[],
        metavar="NAME=PYTHON",
        help="vllm, eagle or llama, and a Python in which it can be imported",
    )
    parser.add_argument("--gguf", type=Path, help="weights for --peer llama, of the same model")
    parser.add_argument("--peer-tokens", type=positive, default=3, help="vLLM drafts a round (default: %(default)s)")
    parser.add_argument("--peer-eager", action="store_true", help="vLLM does not compile: quick to start, and slower")
    parser.add_argument("--memory", action="store_true", help="measure each system's memory too")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON of the results")
    parser.set_defaults(drafter=None)
    return parser.parse_args(arguments)


def peer(text: str) -> tuple[str, str]:
    """``NAME=PYTHON``, for argparse."""
    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME=PYTHON with NAME one of {', '.join(PEERS)}")
    return name, python


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """The results so far: what ``--output`` holds, or nothing yet.

    Raises:
        UsageError: if the file holds something else, or was measured under other settings.
    """
    settings = {
        name: value if value is None else str(value) for name, value in vars(options).items() if name in SHAPING
    }
    machine = {"name": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    fresh = {"format": FORMAT, "settings": settings, "machine": machine, "dtypes": {}}
    if options.output is None or not options.output.exists():
        return fresh
    found = read_results(options.output)
    if different := [name for name in SHAPING if found["settings"].get(name) != settings[name]]:
        raise UsageError(
            f"{options.output} was measured with another {', '.join(different)}. Name another --output, or delete it."
        )
    return found


@command_line
def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.memory_of:
        print(json.dumps(vars(memory_of(options.memory_of, options))))
        return
    results = begin(options)
    run(options, results, lambda: write_json(options.output, results) if options.output else None)
    show(results, Console())


if __name__ == "__main__":
    main()
