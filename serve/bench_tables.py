"""What scripts/bench.py prints: rich tables of records of many systems (``serve/side_by_side.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from serve.side_by_side import Sums, categories_of, sums_of

ROUND_STAGES = ("draft", "verify", "commit", "other")
SPEED_CAPTION = "tokens a second; ratio to transformers on the same prompts; mean accepted length"


def show(results: dict[str, Any], console: Console) -> None:
    for dtype, here in results["dtypes"].items():
        records = here["records"]
        if not records:
            continue
        console.print(speed_table(records, f"{dtype}, greedy, {results['settings']['max_new_tokens']} new tokens"))
        console.print(stage_table(records))
        if here["memory"]:
            table = Table("system", "loaded", "at most", title="MiB, one answer in a process of its own")
            for name, memory in here["memory"].items():
                table.add_row(name, str(memory["before"]), str(memory["peak"]))
            console.print(table)
        for name, why in here["failed"].items():
            console.print(f"{name} did not answer all: {why}", markup=False, highlight=False)


def speed_table(records: Sequence[dict[str, Any]], title: str) -> Table:
    whole = sums_of(records)
    table = Table("category", *whole, title=title, caption=SPEED_CAPTION)
    for category in [*categories_of(records), None]:
        found = sums_of(records, category)
        table.add_row(category or "all", *(_speed_cell(found.get(name)) for name in whole))
    table.add_row("prompts", *(str(sums.prompts) for sums in whole.values()))
    table.add_row("answers of transformers", *(str(sums.equal) for sums in whole.values()))
    table.add_row("others, parting at a near-tie", *(str(sums.near_ties) for sums in whole.values()))
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
