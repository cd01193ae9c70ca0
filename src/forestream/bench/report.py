"""Recorded runs as Markdown: tables in the documents are generated from JSON, never typed.

A document holds a pair of markers, `<!-- results: NAME -->` and `<!-- end -->`; between them stands the table of
the record NAME.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from forestream.errors import DataError

_BLOCK = re.compile(r"(<!-- results: (?P<name>[\w./-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_BENCH_HEAD = (
    "| method | tokens per pass | mean acceptance length | nodes per pass | ms per pass | tokens/s "
    "| speedup, median (min to max) | equal texts |\n|---|---|---|---|---|---|---|---|\n"
)


def refresh(text: str, records: Path) -> str:
    """`text` with every block between markers replaced by the table of its record in the folder `records`.

    Raises:
        DataError: a marker names a record that is not there.
    """

    def block(match: re.Match[str]) -> str:
        path = records / f"{match['name']}.json"
        if not path.is_file():
            raise DataError(f"the document asks for the record {path}, which does not exist; run it or mend the marker")
        return f"{match[1]}{markdown(json.loads(path.read_text()))}{match[3]}"

    return _BLOCK.sub(block, text)


def markdown(record: dict[str, Any]) -> str:
    """The table of one bench or evaluation record, with a line that says how it came about."""
    body = _bench(record) if "methods" in record else _scores(record)
    made, settings = record["provenance"], record["settings"]
    machine = made["machine"]
    return (
        f"{body}\n{settings['task']} {settings['split']} split, {settings['dtype']}, "
        f"{machine['processor']}, {settings.get('threads', machine['threads'])} threads, "
        f"{made['date'][:10]}, commit {made['commit']}: `{made['command']}`\n"
    )


def _bench(record: dict[str, Any]) -> str:
    rows = []
    for name, row in record["methods"].items():
        speedup = row["speedup"]
        rows.append(
            f"| {name} | {row['call_reduction']:.2f} | {row['mean_acceptance_length']:.2f} "
            f"| {row['nodes_per_pass']:.1f} | {1000 * row['seconds_per_pass']:.1f} | {row['tokens_per_second']:.1f} "
            f"| {_spread(speedup)} "
            f"| {row['equal_outputs']} of {row['prompts']} |\n"
        )
    return _BENCH_HEAD + "".join(rows)


def _spread(speedup: dict[str, Any]) -> str:
    if speedup["median"] is None:
        return "nothing was decoded"
    return f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})"


def _scores(record: dict[str, Any]) -> str:
    scores, settings = record["scores"], record["settings"]
    head = "| adapter | inputs | " + " | ".join(scores) + " |\n|---|---|" + "---|" * len(scores) + "\n"
    return (
        head
        + f"| {settings['adapter']} | {settings['inputs']} | "
        + " | ".join(f"{score:.2f}" for score in scores.values())
        + " |\n"
    )
