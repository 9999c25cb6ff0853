"""What the programs print: rich tables of what ``serve/measure.py`` found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from serve.questions import UNNAMED
from serve.systems import SYSTEMS

POSITIONS = 4
ACCEPTANCE_CAPTION = (
    "tau: committed tokens per pass of the target, its own included (plain decoding: 1.00). The last columns: share of "
    "rounds that kept so many guessed tokens."
)
SPEED_CAPTION = (
    "Tokens per second of wall time on the same prompts, one at a time, reading the prompt inside. plain: the same "
    "engine without drafting. "
)
RULES_CAPTION = "Mean accepted length: committed tokens per pass of the target (plain decoding: 1.00)."
DIVERGENCE_CAPTION = (
    "The first token that differs, by its id. margin: by how much the plain target prefers the expected one, in one "
    "pass over the text before; rounding: what the target's dtype can turn around."
)
SAME_TOKENS = "All give the same tokens, so a speed-up is also the ratio of wall times."
OTHER_DRAWS = "Answers are other draws and differ in length, so a speed-up is no ratio of wall times."


def acceptance_table(result: dict[str, Any]) -> Table:
    """How many guessed tokens were kept, by category and over all."""
    temperature = result["temperature"]
    title = "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}, rule {result['rule']}"
    headings = ["prompts", "tau", *(f"{at} or more" for at in range(1, POSITIONS + 1))]
    return _by_category(result, headings, _acceptance_cells, title, ACCEPTANCE_CAPTION)


def speed_table(result: dict[str, Any]) -> Table:
    """How fast each system was, by category and over all."""
    equality = result["equality"]
    greedy_equal = equality is not None and equality["drafted"]["equal"] == equality["plain"]["equal"]
    greedy_equal = greedy_equal and equality["drafted"]["equal"] == equality["compared"]
    caption = SPEED_CAPTION + (SAME_TOKENS if greedy_equal else OTHER_DRAWS if result["temperature"] > 0 else "")
    headings = ["drafted", "plain", "transformers", "x plain", "x transformers"]
    return _by_category(result, headings, _speed_cells, "tokens per second, and speed-up", caption)


def _by_category(
    result: dict[str, Any], headings: list[str], cells: Callable[[dict[str, Any]], list[str]], title: str, caption: str
) -> Table:
    """One row a category and one for all; where nothing has a category, only the latter."""
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("category")
    for heading in headings:
        table.add_column(heading, justify="right")
    if set(result["categories"]) != {UNNAMED}:
        for name, values in result["categories"].items():
            table.add_row(escape(name), *cells(values))
        table.add_section()
    table.add_row("all", *cells(result["overall"]), style="bold")
    return table


def _acceptance_cells(values: dict[str, Any]) -> list[str]:
    shares = [*values["acceptance_by_position"], *[0.0] * POSITIONS][:POSITIONS]
    return [str(values["prompts"]), f"{values['mean_accepted_length']:.2f}", *(f"{share:.0%}" for share in shares)]


def _speed_cells(values: dict[str, Any]) -> list[str]:
    speeds = [f"{values['systems'][system]['tokens_per_second']:.1f}" for system in SYSTEMS]
    ratios = [values["speedup_over"][system] for system in SYSTEMS[1:]]
    return [*speeds, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def stages_table(result: dict[str, Any], accelerator: bool = False) -> Table:
    """Where the rounds' time goes, and how long the first token takes."""
    overall = result["overall"]
    caption = "Share of the rounds' time; reading the prompt is no part of a round."
    if accelerator:
        caption += " Stages are clocked on the host: what one leaves running on the accelerator counts for the next."
    table = Table(title="time", caption=caption, caption_justify="left")
    cells = []
    for stage, share in overall["stage_shares"].items():
        table.add_column(stage, justify="right")
        cells.append(f"{share:.0%}")
    for system, numbers in overall["systems"].items():
        if "mean_time_to_first_token" in numbers:
            table.add_column(f"first token, {system}", justify="right")
            cells.append(f"{1000 * numbers['mean_time_to_first_token']:.0f} ms")
    table.add_row(*cells)
    return table


def rules_table(results: Sequence[dict[str, Any]], title: str) -> Table:
    """Mean accepted length by rule and temperature; a rule that was not measured at a temperature shows a dash."""
    table = Table(title=title, caption=RULES_CAPTION, caption_justify="left")
    table.add_column("rule")
    temperatures = list(dict.fromkeys(result["temperature"] for result in results))
    for temperature in temperatures:
        table.add_column("greedy" if temperature == 0 else f"T = {temperature:g}", justify="right")
    taus = {(each["rule"], each["temperature"]): each["overall"]["mean_accepted_length"] for each in results}
    for rule in dict.fromkeys(result["rule"] for result in results):
        cells = [taus.get((rule, temperature)) for temperature in temperatures]
        table.add_row(rule, *("-" if tau is None else f"{tau:.2f}" for tau in cells))
    return table


def equality_headline(compared: int, different: Sequence[dict[str, Any]], what: str) -> str:
    """How many answers are ``transformers``' own, and how many of the others rounding explains."""
    line = f"{what}: {compared - len(different)} of {compared} greedy answers are the ones transformers gives"
    if different:
        ties = sum(entry["within_rounding"] for entry in different)
        line += f"; of the others {ties} part at a near-tie, {len(different) - ties} do not"
    return line


def divergence_table(different: Sequence[dict[str, Any]]) -> Table:
    """Where answers leave those of ``transformers``."""
    table = Table(caption=DIVERGENCE_CAPTION, caption_justify="left")
    for heading in ("prompt", "batch", "new token", "expected", "found", "margin", "rounding", "near-tie"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for entry in different:
        turn = f", turn {entry['turn']}" if entry.get("turn", 1) > 1 else ""
        tokens = ("end" if entry[key] is None else str(entry[key]) for key in ("expected", "found"))
        sizes = ("-" if entry[key] is None else f"{entry[key]:.2g}" for key in ("logit_margin", "rounding"))
        table.add_row(
            escape(entry["name"] + turn),
            str(entry.get("batch_size", 1)),
            str(entry["position"]),
            *tokens,
            *sizes,
            "yes" if entry["within_rounding"] else "no",
            style=None if entry["within_rounding"] else "bold red",
        )
    return table
