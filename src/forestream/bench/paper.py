"""The paper's tables, filled with records of ours.

A document holds a pair of markers, `<!-- paper: table 1 of e2e, sql -->` and `<!-- end -->`; between them stands the
table, made of the records that the tasks have in the folder: TASK-test-float32 and, where they exist,
TASK-quality-joint and TASK-quality-guard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from forestream.bench import PLAIN
from forestream.bench.report import spread
from forestream.bench.tables import table
from forestream.errors import DataError

_BLOCK: Final = re.compile(r"(<!-- paper: table 1 of (?P<tasks>[\w, ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def filled(text: str, records: Path) -> str:
    """`text` with every table of the paper made of the records in the folder `records`.

    Raises:
        DataError: a task has no record of its test split.
    """

    def block(match: re.Match[str]) -> str:
        tasks = [task.strip() for task in match["tasks"].split(",")]
        return f"{match[1]}{table_1(records, tasks)}{match['end']}"

    return _BLOCK.sub(block, text)


def table_1(records: Path, tasks: Sequence[str]) -> str:
    """Speed, call reduction, score and extra parameters of every method, task by task.

    Methods on the same model in float32 write the same text, so they share its score; the twin's stands beside it.
    """
    rows = []
    for task in tasks:
        bench = _record(records / f"{task}-test-float32.json")
        if bench is None:
            raise DataError(f"table 1 asks for {task}, of which {records} holds no {task}-test-float32.json")
        score = _score(records, task)
        for name, row in bench["methods"].items():
            extra = row.get("extra_parameters")
            rows.append(
                (
                    task,
                    name,
                    spread(row["speedup"]),
                    f"{row['call_reduction']:.2f}",
                    score if name == PLAIN else "the same",
                    "0" if not extra else f"{extra:,}",
                )
            )
    headings = ["task", "method", "speedup, median (min to max)", "tokens per pass", "score", "extra parameters"]
    return table(headings, rows)


def _score(records: Path, task: str) -> str:
    """The adapter's scores and its twin's with their intervals, as far as they were measured."""
    guard, joint = (_record(records / f"{task}-quality-{kind}.json") for kind in ("guard", "joint"))
    if guard is not None:
        return "; ".join(
            f"{name} {row['joint']:.1f}, twin {row['twin']:.1f} "
            f"({row['twin_interval']['low']:.1f} to {row['twin_interval']['high']:.1f})"
            for name, row in guard["guard"].items()
        )
    return "-" if joint is None else "; ".join(f"{name} {score:.1f}" for name, score in joint["scores"].items())


def _record(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found
