"""What a pass costs: plain steps and tree verification, beside a decode step of ``transformers``, as ratios of one run.

    python scripts/bench_passes.py TARGET [--head RUN/best] [--context 256] [--nodes 1 4 8 16 32] [--dtype bfloat16]
        [--compile] [--output passes.json]

All variants take turns, round after round, so that a change of the machine's speed meets each of them; medians are
printed, and ratios to the median of ``transformers``' own decode step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import trange
from transformers import AutoModelForCausalLM, DynamicCache

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.checkpoint import load_head
from mtp.compat import cache_argument
from mtp.cost import synchronise
from mtp.drafters import Budget, Drafter, TargetStates
from mtp.errors import command_line
from mtp.files import write_json
from mtp.target import Target
from mtp.tree import TokenTree


def random_tree(nodes: int, vocab_size: int, device: torch.device) -> TokenTree:
    """A tree of random shape: what it holds does not change what it costs."""
    parents = [-1] + [int(torch.randint(max(0, n - 6), n, ())) for n in range(1, nodes)]
    tokens = torch.randint(0, vocab_size, (1, nodes), device=device)
    return TokenTree.from_parents(tokens, torch.tensor([parents], device=device))


def verify(target: Target, cache: TreeCache, tree: TokenTree, taps: tuple[int, ...]) -> None:
    target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start), taps)
    cache.discard()


@torch.no_grad()
def transformers_step(target: Target, cache: DynamicCache, token: torch.Tensor) -> None:
    model = target.causal_lm
    model(token, **{cache_argument(type(model)): cache})
    cache.crop(-1)


def draft(drafter: Drafter, states: TargetStates, pending: torch.Tensor, nodes: int) -> None:
    drafter.observe(states)
    drafter.propose(pending, Budget(nodes))


def variants(target: Target, head: Drafter | None, context: int, nodes: list[int]) -> dict[str, Callable[[], None]]:
    """The things to time, by name, over a context of random tokens."""
    ids = torch.randint(0, target.vocab_size, (1, context), device=target.device)
    taps = head.taps if head is not None else ()
    cache = target.new_cache(1, context + max(nodes) + 8)
    output = target.forward(ids, cache, AttentionPass.over_chain(context, cache.lengths, 0), taps)
    cache.commit(None, torch.tensor([context], device=ids.device), context)
    plain = DynamicCache(config=target.causal_lm.config)
    with torch.no_grad():
        target.causal_lm(ids, **{cache_argument(type(target.causal_lm)): plain})
    timed: dict[str, Callable[[], None]] = {"transformers step": partial(transformers_step, target, plain, ids[:, :1])}
    for count in nodes:
        name = "plain step" if count == 1 else f"verify {count} nodes"
        timed[name] = partial(verify, target, cache, random_tree(count, target.vocab_size, ids.device), taps)
    if head is not None:
        states = TargetStates(ids, output.hidden, output.taps, torch.tensor([context], device=ids.device))
        head.start(states, context + 4096)
        head.propose(ids[:, 0], Budget(max(nodes)))
        taps_tail = None if output.taps is None else output.taps[:, -2:]
        tail = TargetStates(ids[:, -2:], output.hidden[:, -2:], taps_tail, torch.tensor([2], device=ids.device))
        for count in nodes[1:]:
            timed[f"draft {count} nodes"] = partial(draft, head, tail, ids[:, 0], count)
    return timed


def measure(timed: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every run of each variant, the variants taking turns; three runs of each are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for at in trange(rounds + 3, desc="measuring", unit="round"):
        for name, run in timed.items():
            synchronise(device)
            start = time.perf_counter()
            run()
            synchronise(device)
            if at >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table_of(seconds: dict[str, list[float]], title: str, base: str = "transformers step") -> Table:
    """Medians, and their ratios to the median of ``base``."""
    table = Table("pass", "median ms", "fastest", f"of a {base}", title=title)
    unit = statistics.median(seconds[base])
    for name, values in seconds.items():
        median = statistics.median(values)
        table.add_row(name, f"{median * 1e3:.1f}", f"{min(values) * 1e3:.1f}", f"{median / unit:.2f}")
    return table


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="Hub name or folder")
    parser.add_argument("--head", help="an augmented checkpoint, to time its drafting too")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache (default: %(default)s)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="tree sizes, root included")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--compile", action="store_true", help="the target's layers, as serve/ does by default")
    parser.add_argument("--output", type=Path, help="JSON of all measurements, for scripts/plots.py")
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_pretrained(options.target, dtype=getattr(torch, options.dtype)))
    if options.compile:
        print(target.compile())
    head = load_head(options.head, target, dtype=target.dtype) if options.head else None
    timed = variants(target, head, options.context, options.nodes)
    seconds = measure(timed, options.rounds, target.device)
    Console().print(table_of(seconds, f"context {options.context}, batch 1, {options.dtype}"))
    if options.output:
        settings = {
            name: getattr(options, name)
            for name in ("target", "head", "context", "dtype", "compile", "nodes", "rounds")
        }
        write_json(options.output, {**settings, "threads": torch.get_num_threads(), "seconds": seconds})


if __name__ == "__main__":
    main()
