"""Draw what was measured of heads, and print the tables of a run side by side.

    python scripts/plots.py FOLDER [--format svg]

FOLDER is one that scripts/sweep.py filled: ``measure-DTYPE-NODES.json`` of serve/measure.py, ``passes-DTYPE.json`` of
scripts/bench_passes.py, ``side_by_side.json`` of scripts/bench.py; or the output of scripts/compare_heads.py, of which
the curves of training are drawn.  What is not there is not drawn.  Needs matplotlib (``pip install -e '.[plots]'``).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from mtp.errors import command_line
from serve.bench_tables import show
from serve.loading import UsageError
from serve.side_by_side import PLAIN_TRANSFORMERS, categories_of, read_results, sums_of
from serve.systems import DRAFTED, PLAIN, TRANSFORMERS

AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
# Okabe and Ito's colours, told apart by people who see few of them; dtypes differ in line style besides.
BLACK, ORANGE, SKY = "#000000", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILION = "#009E73", "#0072B2", "#D55E00"
LINE_STYLES = ("-", "--", ":")
BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mtp",  # the same figures give the same file
    "savefig.bbox": "tight",
}


Plot = Callable[["Sweep", Axes], None]


@dataclass
class Sweep:
    """What was measured.

    Attributes:
        sized: by dtype and number of nodes, the greedy result of serve/measure.py.
        planned: by dtype, that with trees as large as pays.
        passes: by dtype, what scripts/bench_passes.py wrote.
        side_by_side: what scripts/bench.py wrote.
        training: what scripts/compare_heads.py wrote of heads that were evaluated on the way.
    """

    sized: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    planned: dict[str, dict[str, Any]] = field(default_factory=dict)
    passes: dict[str, dict[str, Any]] = field(default_factory=dict)
    side_by_side: dict[str, Any] | None = None
    training: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Raises ``UsageError`` if the folder holds none of it."""
        found = cls()
        for path in sorted(folder.glob("measure-*.json")):
            _, dtype, nodes = path.stem.split("-")
            results = _load(path).get("results")
            if not results:
                continue
            if nodes == AUTO:
                found.planned[dtype] = results[0]
            else:
                found.sized.setdefault(dtype, {})[int(nodes)] = results[0]
        found.sized = {dtype: dict(sorted(found.sized[dtype].items())) for dtype in DTYPES if dtype in found.sized}
        paths = {dtype: folder / f"passes-{dtype}.json" for dtype in DTYPES}
        found.passes = {dtype: _load(path) for dtype, path in paths.items() if path.exists()}
        if (path := folder / "side_by_side.json").exists():
            found.side_by_side = read_results(path)
        if (path := folder / "results.json").exists():
            found.training = [each for each in _load(path) if len(each.get("curve", [])) > 1]
        if not (found.sized or found.passes or found.side_by_side or found.training):
            raise UsageError(
                f"{folder} holds no measurements; expected a folder that scripts/sweep.py filled, or that of "
                "scripts/compare_heads.py with --evaluate-every."
            )
        return found


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}); delete it and measure again.") from error


def nodes_axis(axes: Axes, nodes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.minorticks_off()
    axes.set_xlabel("nodes of a tree, K (the root included)")


def acceptance(sweep: Sweep, axes: Axes) -> None:
    """Mean accepted length against the size of trees, over all questions and from the worst to the best category."""
    for (dtype, results), style in zip(sweep.sized.items(), LINE_STYLES, strict=False):
        nodes = list(results)
        if style == LINE_STYLES[0]:
            categories = [
                [values["mean_accepted_length"] for values in result["categories"].values()]
                for result in results.values()
            ]
            low, high = [min(each) for each in categories], [max(each) for each in categories]
            axes.fill_between(nodes, low, high, color=SKY, alpha=0.3, lw=0, label=f"worst to best category, {dtype}")
        overall = [result["overall"]["mean_accepted_length"] for result in results.values()]
        axes.plot(nodes, overall, style, marker="o", color=BLUE, label=f"all questions, {dtype}")
    nodes_axis(axes, sorted({count for results in sweep.sized.values() for count in results}))
    axes.set_ylabel("mean accepted length (tokens a pass)")
    axes.set_ylim(bottom=1)
    axes.legend(loc="upper left")


def speed(sweep: Sweep, axes: Axes) -> None:
    """Tokens per second against the size of trees; the systems that know no trees are level lines."""
    for (dtype, results), style in zip(sweep.sized.items(), LINE_STYLES, strict=False):
        nodes = list(results)
        systems = [result["overall"]["systems"] for result in results.values()]
        for system, label, color, marker in (
            (DRAFTED, "drafted", BLUE, "o"),
            (PLAIN, "this engine, plain", ORANGE, "s"),
            (TRANSFORMERS, "transformers", BLACK, "^"),
        ):
            values = [each[system]["tokens_per_second"] for each in systems]
            axes.plot(nodes, values, style, marker=marker, color=color, label=f"{label}, {dtype}")
        if dtype in sweep.planned:
            planned = sweep.planned[dtype]["overall"]["systems"][DRAFTED]["tokens_per_second"]
            axes.axhline(planned, ls=style, lw=1.2, color=GREEN, label=f"drafted, as large as pays, {dtype}")
    nodes_axis(axes, sorted({count for results in sweep.sized.values() for count in results}))
    axes.set_ylabel("tokens per second (prompt read inside)")
    axes.set_ylim(bottom=0)
    axes.legend(**BESIDE)


def speedup(sweep: Sweep, axes: Axes) -> None:
    """Each answer's speed-up over plain decoding against its mean accepted length.

    On a line through the origin all rounds cost the same: as many plain steps as the line says.
    """
    dtype, results = next(iter(sweep.sized.items()))
    colors = mpl.colormaps["viridis"]
    most = 1.0
    for at, (nodes, result) in enumerate(results.items()):
        points = [
            (
                record["committed_tokens"] / record["target_passes"],
                record["seconds"][PLAIN] / record["seconds"][DRAFTED],
            )
            for record in result["records"]
            if record["target_passes"] and "seconds" in record
        ]
        most = max([most, *(tau for tau, _ in points)])
        color = colors(at / max(len(results) - 1, 1) * 0.9)
        axes.scatter(*zip(*points, strict=True), s=12, color=color, lw=0, alpha=0.8, label=str(nodes))
    for cost in (1, 1.5, 2, 3):
        axes.plot([0, most], [0, most / cost], color="#999999", lw=0.7, zorder=0)
        axes.annotate(
            f"{cost:g}", (most, most / cost), xytext=(3, 0), textcoords="offset points", color="#666666", va="center"
        )
    axes.axhline(1, color=BLACK, lw=0.7)
    axes.set_xlim(1, most)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("mean accepted length of an answer (tokens a pass)")
    axes.set_ylabel(f"speed-up over plain decoding, {dtype}")
    axes.legend(title="nodes K", loc="center left", bbox_to_anchor=(1.1, 0.5))
    axes.set_title("grey: what a round costs, in plain steps", fontsize=8, color="#666666", loc="right")


def cost(sweep: Sweep, axes: Axes) -> None:
    """What a pass over n nodes costs, drafted and verified, beside a decode step of transformers."""
    seen: set[int] = set()
    for (dtype, found), style in zip(sweep.passes.items(), LINE_STYLES, strict=False):
        for kind, label, color, marker in (
            ("verify", "verify n nodes", BLUE, "o"),
            ("draft", "draft n nodes", VERMILION, "s"),
        ):
            runs = {1: found["seconds"]["plain step"]} if kind == "verify" else {}
            runs |= {int(n.split()[1]): each for n, each in found["seconds"].items() if n.startswith(kind)}
            if not runs:
                continue
            seen |= set(runs)
            median = [1e3 * statistics.median(each) for each in runs.values()]
            axes.plot(list(runs), median, style, marker=marker, color=color, label=f"{label}, {dtype}")
        step = 1e3 * statistics.median(found["seconds"]["transformers step"])
        axes.axhline(step, ls=style, lw=1.2, color=BLACK, label=f"a step of transformers, {dtype}")
    nodes_axis(axes, sorted(seen))
    axes.set_xlabel("nodes n (the root included)")
    axes.set_ylabel("milliseconds a pass (median)")
    axes.set_ylim(bottom=0)
    axes.legend(**BESIDE)


def training(unit: str, label: str) -> Plot:
    """Mean accepted length on held-out rows against what was put into training, in ``unit`` of a curve's points."""

    def plot(sweep: Sweep, axes: Axes) -> None:
        colors = (BLUE, VERMILION, GREEN, ORANGE, SKY, BLACK)
        for at, head in enumerate(sweep.training):
            color, style = colors[at % len(colors)], LINE_STYLES[at // len(colors) % len(LINE_STYLES)]
            points = [(point[unit], point["mean_accepted_length"]) for point in head["curve"]]
            axes.plot(*zip(*points, strict=True), style, marker="o", color=color, label=head["name"])
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylabel("mean accepted length, held-out rows")
        axes.legend(**BESIDE)

    return plot


def systems(sweep: Sweep, axes: Axes) -> None:
    """Speed-up of every system over plain transformers: over all questions, and each category as a dot."""
    assert sweep.side_by_side is not None
    measured = {dtype: here["records"] for dtype, here in sweep.side_by_side["dtypes"].items() if here["records"]}
    names = list(dict.fromkeys(name for records in measured.values() for name in sums_of(records)))
    names.remove(PLAIN_TRANSFORMERS)
    height = 0.8 / len(measured)
    for at, ((dtype, records), color) in enumerate(zip(measured.items(), (BLUE, ORANGE, GREEN), strict=False)):
        whole = sums_of(records)
        rows = [row for row, name in enumerate(names) if name in whole]
        y = [row + (at - (len(measured) - 1) / 2) * height for row in rows]
        axes.barh(y, [whole[names[row]].speedup for row in rows], height * 0.9, color=color, alpha=0.6, label=dtype)
        for category in categories_of(records):
            part = sums_of(records, category)
            dots = [(part[names[row]].speedup, place) for row, place in zip(rows, y, strict=True) if names[row] in part]
            axes.scatter(*zip(*dots, strict=True), s=6, color=BLACK, alpha=0.7, lw=0, zorder=3)
    axes.axvline(1, color=BLACK, lw=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)
    axes.set_xlabel("speed-up over transformers' generate\n(bars: all questions; dots: categories)")
    if len(measured) > 1:
        axes.legend(loc="lower right")


PLOTS: dict[str, tuple[Plot, Callable[[Sweep], object], tuple[float, float]]] = {
    "acceptance": (acceptance, lambda sweep: sweep.sized, (4.6, 3.2)),
    "speed": (speed, lambda sweep: sweep.sized, (4.6, 3.2)),
    "speedup": (speedup, lambda sweep: sweep.sized, (4.6, 3.2)),
    "cost": (cost, lambda sweep: sweep.passes, (4.6, 3.2)),
    "training-positions": (training("positions", "trained positions"), lambda sweep: sweep.training, (4.6, 3.2)),
    "training-minutes": (training("minutes", "minutes of training"), lambda sweep: sweep.training, (4.6, 3.2)),
    "systems": (systems, lambda sweep: sweep.side_by_side and sweep.side_by_side["dtypes"], (5.2, 3.6)),
}


def draw(sweep: Sweep, folder: Path, suffix: str) -> list[Path]:
    """Every plot for which something was measured; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, (plot, measured, size) in PLOTS.items():
            if not measured(sweep):
                continue
            figure = Figure(figsize=size)
            plot(sweep, figure.add_subplot())
            paths.append(folder / f"{name}.{suffix}")
            # Without its date the same figures give the same file.
            figure.savefig(paths[-1], dpi=200, metadata={"Date": None} if suffix == "svg" else None)
    return paths


@command_line
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what scripts/sweep.py measured")
    parser.add_argument("--output", type=Path, help="where the plots go (default: FOLDER/plots)")
    parser.add_argument("--format", choices=["svg", "png", "pdf"], default="svg", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    sweep = Sweep.read(options.folder)
    for path in draw(sweep, options.output or options.folder / "plots", options.format):
        console.print(f"written to {path}", markup=False, highlight=False, soft_wrap=True)
    if sweep.side_by_side is not None:
        show(sweep.side_by_side, console)


if __name__ == "__main__":
    main()
