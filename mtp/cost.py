"""What a round costs on the machine at hand: measured once, kept on disk.

A pass of the target over n nodes is no free lunch on a CPU, and nearly one on a GPU; only measuring tells.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from mtp.attention import AttentionPass
from mtp.drafters.base import Budget, Drafter, RoundCosts, TargetStates
from mtp.files import cache_folder, write_json
from mtp.target import Target
from mtp.tree import TokenTree

logger = logging.getLogger(__name__)

FORMAT = 5
NODES = (1, 2, 4, 6, 8, 12, 16, 32, 64)
CONTEXTS = (64, 1024)
REPEATS = 3
PATIENCE = 15.0  # seconds after which nothing is measured again: large targets on a CPU are measured once
PROBE_LEVELS = 4
# Of a round, what is neither target nor drafter (0.6 % was measured on a CPU); rounds that are timed correct it.
OTHER_SHARE = 0.01


@dataclass(frozen=True)
class CostTable:
    """Seconds of the passes of one target and one drafter, for one size of batch.

    Attributes:
        contexts: lengths of the committed text at which ``verify`` was measured.
        nodes: sizes of tree.
        verify: ``[contexts][nodes]`` seconds of a pass of the target.
        first: seconds of a drafter's first pass.
        level: of each further one.
    """

    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    first: float
    level: float

    def of_round(self, context: int, largest: int) -> RoundCosts:
        """Costs of trees up to ``largest`` nodes behind a text of ``context`` tokens (to the nearest 64)."""
        return _of_round(self, round(context / 64) * 64, largest)


@lru_cache(maxsize=256)
def _of_round(table: CostTable, context: int, largest: int) -> RoundCosts:
    sizes = range(1, largest + 1)
    rows = [[_between(table.nodes, row, size) for size in sizes] for row in table.verify]
    columns = [_between(table.contexts, [row[at] for row in rows], context) for at in range(largest)]
    return RoundCosts((0.0, *columns), table.first, table.level, OTHER_SHARE * columns[0])


def _between(places: Sequence[int], values: Sequence[float], at: float) -> float:
    """Piecewise linear through the measured points, and along the last piece beyond them; never below the smallest."""
    if len(places) == 1:
        return values[0]
    pieces = list(pairwise(zip(places, values, strict=True)))
    (x0, y0), (x1, y1) = next((piece for piece in pieces if at <= piece[1][0]), pieces[-1])
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(values))


class Costs:
    """Cost tables of a target and a drafter by batch size, measured when first needed.

    Args:
        target: verifies.
        drafter: guesses.
        folder: where tables are kept; by default ``$MTP_CACHE/costs``, or ``~/.cache/mtp/costs``.
    """

    def __init__(self, target: Target, drafter: Drafter, folder: str | Path | None = None):
        self.target = target
        self.drafter = drafter
        self.folder = Path(folder) if folder is not None else cache_folder() / "costs"
        self._tables: dict[int, CostTable] = {}

    def prepare(self, batch: int) -> None:
        """Know the table for ``batch`` rows (rounded up to a power of two): from disk, or by measuring it now.

        Measuring uses the drafter, so it must not happen inside a generation.
        """
        batch = _power_of_two(batch)
        if batch not in self._tables:
            self._tables[batch] = self._read(batch) or self._measure(batch)

    def table(self, batch: int) -> CostTable:
        """For ``batch`` rows; when rows have ended and nothing that small is known, the next larger one."""
        wanted = _power_of_two(batch)
        known = sorted(size for size in self._tables if size >= wanted)
        if not known:
            raise RuntimeError(f"Costs of {batch} rows are not known; call prepare({batch}) first.")
        if known[0] != wanted and (found := self._read(wanted)) is not None:
            self._tables[wanted] = found
            return found
        return self._tables[known[0]]

    def path(self, batch: int) -> Path:
        """The file of a table, named by everything that the seconds depend on."""
        what = [
            FORMAT,
            NODES,
            batch,
            self.target.fingerprint(),
            str(self.target.dtype),
            self.target.runs_as,
            device_name(self.target.device),
            torch.get_num_threads(),
            torch.__version__,
            transformers.__version__,
            repr(getattr(self.drafter, "config", type(self.drafter).__name__)),
            self.drafter.runs_as,
        ]
        return self.folder / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}.json"

    def _read(self, batch: int) -> CostTable | None:
        try:
            found = json.loads(self.path(batch).read_text(encoding="utf-8"))
            return CostTable(
                tuple(found["contexts"]),
                tuple(found["nodes"]),
                tuple(tuple(row) for row in found["verify"]),
                found["first"],
                found["level"],
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("cost table %s cannot be read (%s): measuring again", self.path(batch), error)
            return None

    def _measure(self, batch: int) -> CostTable:
        table = measure(self.target, self.drafter, batch)
        try:
            write_json(self.path(batch), asdict(table))
        except OSError as error:  # a read-only home costs a few seconds at every start, and nothing else
            logger.warning("cost table cannot be kept in %s: %s", self.folder, error)
        return table


@torch.no_grad()
def measure(target: Target, drafter: Drafter, batch: int) -> CostTable:
    """Time passes of the target over trees of several sizes, and of the drafter; some seconds."""
    limit = target.max_positions or max(CONTEXTS) + max(NODES) + 1
    contexts = [context for context in CONTEXTS if context + PROBE_LEVELS + 1 < limit] or [1]
    seconds: dict[tuple[int, int], list[float]] = {(c, n): [] for c in contexts for n in NODES}
    draft: dict[int, list[float]] = {1: [], PROBE_LEVELS: []}
    with tqdm(total=len(seconds) * REPEATS, desc="measuring what a round costs", unit="pass", leave=False) as bar:
        passes = {context: _target_passes(target, drafter, batch, context) for context in contexts}
        propose = _draft_passes(target, drafter, batch, contexts[0])
        for context in contexts:  # the first of each kind allocates and packs
            passes[context](max(NODES))
            for nodes in NODES if target.is_replayed else ():  # or records
                passes[context](nodes)
        propose(PROBE_LEVELS)
        # In turn, so that what else happens on the machine does not fall on one size alone.
        started = time.perf_counter()
        for repeat in range(REPEATS):
            if repeat > 0 and time.perf_counter() - started > PATIENCE:
                break
            for (context, nodes), taken in seconds.items():
                taken.append(_timed(target.device, lambda c=context, n=nodes: passes[c](n)))  # type: ignore[misc]
                bar.update()
            for levels, taken in draft.items():
                taken.append(_timed(target.device, lambda k=levels: propose(k)))  # type: ignore[misc]
    first, several = min(draft[1]), min(draft[PROBE_LEVELS])
    rows = [[min(seconds[context, nodes]) for nodes in NODES] for context in contexts]
    return CostTable(
        contexts=tuple(contexts),
        nodes=NODES,
        verify=tuple(_rising(row) for row in rows),
        first=first,
        level=max(several - first, 0.0) / (PROBE_LEVELS - 1),
    )


def _target_passes(target: Target, drafter: Drafter, batch: int, context: int) -> Callable[[int], None]:
    """A function that verifies a tree of n nodes behind ``context`` tokens (whose keys are zeros: time is the same)."""
    cache = target.new_cache(batch, context + max(NODES))
    cache.crop(context)
    pending = torch.zeros(batch, dtype=torch.long, device=target.device)

    def verify(nodes: int) -> None:
        tree = TokenTree.root_only(pending)
        if nodes > 1:  # a star: one level of siblings
            parents = torch.tensor([-1, *[0] * (nodes - 1)], device=target.device).expand(batch, -1)
            tree = TokenTree.from_parents(pending[:, None].expand(-1, nodes), parents)
        target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start), drafter.taps)
        cache.discard()

    return verify


def _draft_passes(target: Target, drafter: Drafter, batch: int, context: int) -> Callable[[int], None]:
    """A function that lets the drafter propose a large tree in at most so many passes."""
    # Many different ones: a head that takes up tokens of the text has more to guess from.
    tokens = (torch.arange(batch * context, device=target.device) * 97 % target.vocab_size).view(batch, context)
    counts = torch.full((batch,), context, device=target.device)
    hidden, taps = target.encode(tokens, drafter.taps)
    cache = target.new_cache(batch, context + 2 * max(NODES))
    cache.crop(context)
    drafter.share(cache)
    drafter.start(TargetStates(tokens, hidden, taps, counts), context + 64)
    last = TargetStates(tokens[:, :2], hidden[:, :2], None if taps is None else taps[:, :2], counts.clamp_max(2))
    pending = tokens[:, 0]
    drafter.propose(pending, Budget(2))

    def propose(levels: int) -> None:
        drafter.observe(last)
        drafter.propose(pending, Budget(max(NODES), levels))

    return propose


def _power_of_two(batch: int) -> int:
    return 1 << (batch - 1).bit_length()


def _timed(device: torch.device, action: Callable[[], None]) -> float:
    synchronise(device)
    start = time.perf_counter()
    action()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait for an accelerator's queue; a CPU has none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """More nodes never cost less: what was measured lower is noise."""
    out: list[float] = []
    for value in values:
        out.append(max(value, out[-1] if out else 0.0))
    return tuple(out)


def device_name(device: torch.device) -> str:
    """What a device is called by its maker."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {_cpu_model() if device.type == 'cpu' else ''}".strip()


def _cpu_model() -> str:
    try:
        lines: list[Any] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
