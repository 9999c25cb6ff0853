"""What scripts/bench.py prints: rich tables of records of many systems (``serve/side_by_side.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from serve.side_by_side import Sums, categories_of, sums_of

ROUND_STAGES = ("draft", "verify", "commit", "other")
SUMMARY_CAPTION = (
    "tau: committed tokens a pass of the target. equal: answers that are those of transformers; near-ties: others that "
    "leave them where rounding decides. MiB: the most held while one answer was made, in a process of its own."
)
CATEGORY_CAPTION = "tokens a second; ratio to transformers on the same prompts; mean accepted length"


def show(results: dict[str, Any], console: Console) -> None:
    """Print everything that ``scripts/bench.py`` measured."""
    for dtype, here in results["dtypes"].items():
        records = here["records"]
        if not records:
            continue
        title = f"{dtype}, greedy, {results['settings']['max_new_tokens']} new tokens"
        console.print(summary_table(records, here["memory"], title))
        console.print(category_table(records))
        console.print(stage_table(records))
        for name, why in here["failed"].items():
            console.print(f"{name} did not answer all: {why}", markup=False, highlight=False)


def summary_table(records: Sequence[dict[str, Any]], memory: dict[str, dict[str, int]], title: str) -> Table:
    """One row a system, over all records."""
    table = Table(title=title, caption=SUMMARY_CAPTION, caption_justify="left")
    table.add_column("system")
    for heading in ("tokens/s", "x transformers", "tau", "prompts", "equal", "near-ties", "MiB"):
        table.add_column(heading, justify="right")
    for name, sums in sums_of(records).items():
        peak = str(memory[name]["peak"]) if name in memory else "-"
        tau = "-" if sums.tau is None else f"{sums.tau:.2f}"
        counts = (sums.prompts, sums.equal, sums.near_ties)
        table.add_row(name, f"{sums.speed:.1f}", f"{sums.speedup:.2f}", tau, *map(str, counts), peak)
    return table


def category_table(records: Sequence[dict[str, Any]]) -> Table:
    """One row a category."""
    names = list(sums_of(records))
    table = Table("category", *names, title="by category", caption=CATEGORY_CAPTION, caption_justify="left")
    for category in categories_of(records):
        found = sums_of(records, category)
        table.add_row(category, *(_speed_cell(found.get(name)) for name in names))
    return table


def _speed_cell(sums: Sums | None) -> str:
    if sums is None:
        return "-"
    return f"{sums.speed:.1f} {sums.speedup:.2f}x" + ("" if sums.tau is None else f" {sums.tau:.2f}")


def stage_table(records: Sequence[dict[str, Any]]) -> Table:
    """Only this engine's rounds are known by stage."""
    known = [name for name, sums in sums_of(records).items() if sums.shares()]
    table = Table("category", *known, title="time of a round: draft / verify / commit / other, %")
    for category in [*categories_of(records), None]:
        found = sums_of(records, category)
        shares = [found[name].shares() or {} for name in known if name in found]
        cells = [" / ".join(f"{100 * share.get(stage, 0.0):.0f}" for stage in ROUND_STAGES) for share in shares]
        table.add_row(category or "all", *cells)
    return table
