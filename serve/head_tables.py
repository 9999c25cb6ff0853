"""What scripts/compare_heads.py writes: tables in Markdown of what heads came to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ADAPTED = "\\*"  # escaped: Markdown would take a bare one for emphasis


def named(result: dict[str, Any]) -> str:
    """A result's name, marked where the target has an adapter."""
    return result["name"] + (ADAPTED if result["adapted"] else "")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, its first row the heading."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def overview(results: Sequence[dict[str, Any]]) -> str:
    """One row a drafter: size, training, mean accepted length by data set and temperature, draft time, speed.

    Those of an adapted target are marked, since the text and the plain decoding that they are held against are its own.
    """
    columns = list(dict.fromkeys((d, t) for each in results for d, taus in each["acceptance"].items() for t in taus))
    names = [f"{data}, {'greedy' if t == '0' else f'T = {t}'}" for data, t in columns]
    rows = [["head", "parameters", "minutes", *names, "draft ms a round", "tokens/s", "x plain", "x transformers"]]
    for each in sorted(results, key=lambda each: -each.get("tokens_per_second", 0.0)):
        taus = [each["acceptance"].get(data, {}).get(t, {}).get("all") for data, t in columns]
        speed = each.get("speedup_over", {})
        rows.append(
            [
                named(each),
                f"{each['parameters'] / 1e6:.1f} M" if each["parameters"] else "0",
                text(each.get("minutes"), 1),
                *(text(tau, 2) for tau in taus),
                *(text(each.get("draft_milliseconds"), 1), text(each.get("tokens_per_second"), 1)),
                *(text(speed.get("plain"), 2), text(speed.get("transformers"), 2)),
            ]
        )
    note = f"\n\n{ADAPTED} decodes the target with an adapter that was trained along; the text is that target's."
    return markdown(rows) + (note if any(each["adapted"] for each in results) else "")


def by_category(results: Sequence[dict[str, Any]], data: str, temperature: str) -> str:
    """Mean accepted length, one row a head and one column a category."""
    measured = [each for each in results if temperature in each["acceptance"].get(data, {})]
    names = list(dict.fromkeys(name for each in measured for name in each["acceptance"][data][temperature]))
    rows = [["head", *names]]
    for each in measured:
        taus = each["acceptance"][data][temperature]
        rows.append([named(each), *(text(taus.get(name), 2) for name in names)])
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
