"""Plots of records as SVG, to stand inside a page: nothing is fetched, and the same record gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from forestream.bench.results import TRAINING, Result
from forestream.bench.series import Series, call_reduction, speedup

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#595959")
"""Told apart by people of any sight."""

_STYLE: Final[Any] = {
    "svg.hashsalt": "forestream",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of methods are no formulas
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """A drawing with the line that stands below it."""

    caption: str
    svg: str


def plots_of(result: Result) -> list[Plot]:
    """What can be drawn of a result file; nothing of kinds that are tables and no more."""
    if result.kind == TRAINING:
        return [_training(result.record["lines"])]
    if result.kind == "methods":
        return [plot for draw in (_speeds, _positions, _histogram, _latency) if (plot := draw(result.record))]
    return []


def plot_of(series: Series) -> Plot:
    """Speedup and call reduction over what a sweep went over."""
    numeric = all(not isinstance(value, str) for value, _ in series.points)
    places: Sequence[Any] = [value for value, _ in series.points] if numeric else range(len(series.points))
    with _drawn((6.4, 2.8), 2) as (axes, result):
        for own, figure, name in zip(axes, (speedup, call_reduction), ("speedup", "tokens per pass"), strict=True):
            for method in series.methods:
                own.plot(places, [_gap(value) for value in series.values(method, figure)], marker="o", label=method)
            own.set_xticks(places, [_short(value) for value, _ in series.points])
            own.set_xlabel(series.axis)
            own.set_ylabel(name)
            own.set_ylim(bottom=0)
        axes[0].axhline(1.0, color="#595959", linewidth=0.8, linestyle="--")
    return Plot(f"Speedup against plain decoding (dashed: 1) and tokens per pass, by {series.axis}.", result[0])


def _speeds(record: dict[str, Any]) -> Plot | None:
    methods = record["methods"]
    speeds = [row["tokens_per_second"] for row in methods.values()]
    spreads = [row.get("over_repeats", {}).get("tokens_per_second") for row in methods.values()]
    with _drawn((6.4, 0.6 + 0.35 * len(methods))) as ((axes,), result):
        places = range(len(methods))
        axes.barh(places, speeds, color=[_colour(record, name) for name in methods])
        for place, speed, spread in zip(places, speeds, spreads, strict=True):
            if spread is not None and spread["min"] < spread["max"]:
                middle = (spread["min"] + spread["max"]) / 2
                half = (spread["max"] - spread["min"]) / 2
                axes.errorbar(middle, place, xerr=half, color="black", capsize=3)
            end = max(speed, spread["max"] if spread is not None else 0.0)
            axes.annotate(f"{speed:.1f}", (end, place), xytext=(6, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, list(methods))
        axes.invert_yaxis()
        axes.set_xlabel("tokens per second")
        axes.grid(visible=False, axis="y")
    repeats = max((row.get("over_repeats", {}).get("repeats", 1) for row in methods.values()), default=1)
    return Plot(f"Tokens per second after the prompts' passes; {_whiskers(repeats)}.", result[0])


def _colour(record: dict[str, Any], method: str) -> str:
    """The same in all plots of a record."""
    return COLOURS[list(record["methods"]).index(method) % len(COLOURS)]


def _whiskers(repeats: int) -> str:
    return "one repeat, so no spread" if repeats == 1 else f"whiskers: lowest and highest of {repeats} repeats"


def _positions(record: dict[str, Any]) -> Plot | None:
    drawn = {name: row["acceptance_by_position"] for name, row in record["methods"].items()}
    drawn = {name: shares for name, shares in drawn.items() if shares}
    if not drawn:
        return None
    with _drawn((6.4, 2.6)) as ((axes,), result):
        for name, shares in drawn.items():
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name, color=_colour(record, name))
        axes.set_xticks(range(1, max(map(len, drawn.values())) + 1))
        axes.set_xlabel("place behind the verified token")
        axes.set_ylabel("share of passes")
        axes.set_ylim(0, 1.02)
    return Plot("Passes that accepted a draft at this place, of those that had one there.", result[0])


def _histogram(record: dict[str, Any]) -> Plot | None:
    drawn = {
        name: row["accepted_histogram"]
        for name, row in record["methods"].items()
        if row.get("accepted_histogram") and row["nodes_per_pass"] > 1
    }
    if not drawn:
        return None
    with _drawn((6.4, 2.6)) as ((axes,), result):
        width = 0.8 / len(drawn)
        for number, (name, counts) in enumerate(drawn.items()):
            places = [place + (number - (len(drawn) - 1) / 2) * width for place in range(len(counts))]
            shares = [count / max(sum(counts), 1) for count in counts]
            axes.bar(places, shares, width, label=name, color=_colour(record, name))
        axes.set_xticks(range(max(map(len, drawn.values()))))
        axes.set_xlabel("accepted drafts")
        axes.set_ylabel("share of passes")
    return Plot("Accepted drafts per pass.", result[0])


def _latency(record: dict[str, Any]) -> Plot | None:
    drawn = {
        name: row["latency"]["between_passes"]
        for name, row in record["methods"].items()
        if (row.get("latency") or {}).get("between_passes")
    }
    if not drawn:
        return None
    with _drawn((6.4, 2.6)) as ((axes,), result):
        names, width = ("p50", "p95", "p99"), 0.8 / len(drawn)
        for number, (name, waits) in enumerate(drawn.items()):
            places = [place + (number - (len(drawn) - 1) / 2) * width for place in range(len(names))]
            heights = [1000 * waits[one] for one in names]
            axes.bar(places, heights, width, label=name, color=_colour(record, name))
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("milliseconds")
    return Plot("What a reader waits for between two passes that deliver tokens.", result[0])


def _training(lines: Sequence[dict[str, Any]]) -> Plot:
    logged = dict.fromkeys(name for line in lines for name in line if name.endswith("_loss"))
    names = [name for name in logged if name != "train_loss"]
    with _drawn((6.4, 3.0)) as ((axes,), result):
        for name in names or ["loss"]:
            points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
            axes.plot([x for x, _ in points], [y for _, y in points], label=name.replace("_", " "))
        axes.set_xlabel("update")
        axes.set_ylabel("loss, nats per token")
    return Plot("Losses as logged.", result[0])


@contextmanager
def _drawn(size: tuple[float, float], columns: int = 1) -> Iterator[tuple[list[Axes], list[str]]]:
    """Axes to draw on; behind the block, the list holds the SVG."""
    result: list[str] = []
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axes = list(figure.subplots(1, columns, squeeze=False)[0])
        for own in axes:
            own.set_prop_cycle(color=list(COLOURS))
        yield axes, result
        handles, labels = axes[0].get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize="small")
        buffer = io.StringIO()
        nothing: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    # The page it will stand in declares itself.
    text = buffer.getvalue()
    result.append("\n".join(line.rstrip() for line in text[text.index("<svg") :].splitlines()))


def _gap(value: float | None) -> float:
    return float("nan") if value is None else value


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"
