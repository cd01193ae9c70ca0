"""Bench records that differ in one setting, put side by side: what a sweep shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forestream.bench import PLAIN
from forestream.bench.results import Result
from forestream.bench.tables import cell, table

Value = float | str


def _precision(settings: dict[str, Any]) -> Value:
    held = settings.get("quantise", "off")
    return str(settings["dtype"]) if held == "off" else f"{settings['dtype']}, {held} weights"


AXES: Final[dict[str, Callable[[dict[str, Any]], Value | None]]] = {
    "precision": _precision,
    "batch size": lambda settings: settings.get("batch_size", 1),
    "temperature": lambda settings: settings.get("temperature", 0.0),
    "streams": lambda settings: _first(settings["decode"].get("streams"), settings.get("trained_streams")),
    "prompt tokens": lambda settings: settings.get("prompt_tokens"),
}
"""What a sweep may go over, as read off the settings of a bench record; None is a value like any other."""

_ELSEWHERE: Final = ("dtype", "quantise", "batch_size", "temperature", "trained_streams", "prompt_tokens", "warm_up")


@dataclass(frozen=True)
class Series:
    """Records that agree in everything but one setting.

    Attributes:
        axis: what they differ in.
        points: its values in order, each with its record.
        left_out: records whose value another one had already, with that one's name.
    """

    axis: str
    points: tuple[tuple[Value, Result], ...]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def methods(self) -> list[str]:
        """Those that all records have, plain decoding aside."""
        names = [set(result.record["methods"]) for _, result in self.points]
        return [
            name for name in self.points[0][1].record["methods"] if name != PLAIN and all(name in own for own in names)
        ]

    def values(self, method: str, figure: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
        """A figure of a method's entries, point by point."""
        return [figure(result.record["methods"][method]) for _, result in self.points]


def speedup(entry: dict[str, Any]) -> float | None:
    """Of a method's entry, in total; None where nothing was decoded."""
    found = entry["speedup"]
    return None if found["median"] is None else float(found["of_totals"])


def call_reduction(entry: dict[str, Any]) -> float | None:
    """Of a method's entry."""
    return float(entry["call_reduction"])


def series_of(results: Sequence[Result]) -> list[Series]:
    """Every set of two bench records or more that differ in one of `AXES` and in nothing else that matters."""
    benches = [
        one for one in results if one.kind == "methods" and isinstance(one.record["settings"].get("decode"), dict)
    ]
    found = []
    for axis in AXES:
        groups: dict[str, list[tuple[Value, Result]]] = {}
        for result in benches:
            value = AXES[axis](result.record["settings"])
            if value is not None:
                groups.setdefault(_rest(result, axis), []).append((value, result))
        found += [one for group in groups.values() if (one := _series(axis, group)) is not None]
    return found


def _series(axis: str, group: Sequence[tuple[Value, Result]]) -> Series | None:
    points: dict[Value, Result] = {}
    left_out = []
    for value, result in group:
        if (first := points.setdefault(value, result)) is not result:
            left_out.append((result.name, first.name))
    if len(points) < 2:
        return None
    ordered = sorted(points.items(), key=lambda point: (isinstance(point[0], str), point[0]))
    series = Series(axis, tuple(ordered), tuple(left_out))
    return series if series.methods else None


def _rest(result: Result, axis: str) -> str:
    """All that must be the same: the other axes, and every setting that is none."""
    settings = result.record["settings"]
    rest = {name: value for name, value in settings.items() if name not in _ELSEWHERE}
    rest["sampling"] = {name: value for name, value in settings.get("sampling", {}).items() if name != "temperature"}
    rest["decode"] = {name: value for name, value in settings["decode"].items() if name != "streams"}
    if axis == "streams":
        del rest["adapter"]  # each number of streams is trained into an adapter of its own
    rest["axes"] = {name: read(settings) for name, read in AXES.items() if name != axis}
    rest["processor"] = result.record["provenance"].get("machine", {}).get("processor")
    return json.dumps(rest, sort_keys=True)


def markdown(series: Series) -> str:
    """A row for every point."""
    rows = []
    for place, (value, result) in enumerate(series.points):
        cells = [str(value) if isinstance(value, str) else f"{value:g}"]
        for name in series.methods:
            cells += [_told(series.values(name, figure)[place]) for figure in (speedup, call_reduction)]
        rows.append((*cells, result.name))
    headings = [heading for name in series.methods for heading in (f"{name}, speedup", "tokens per pass")]
    lines = [f"\n{cell(f'{own} is left out: {first} has the same settings.')}\n" for own, first in series.left_out]
    return "".join([table([series.axis, *headings, "record"], rows), *lines])


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
