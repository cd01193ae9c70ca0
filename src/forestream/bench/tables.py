"""Markdown tables and code spans of texts that may hold anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, a line per row."""
    lines = [f"| {' | '.join(map(cell, cells))} |\n" for cells in (headings, *rows)]
    return "".join([lines[0], f"|{'---|' * len(headings)}\n", *lines[1:]])


def cell(text: str) -> str:
    """`text` in one line that neither ends its cell nor opens a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") if _SPECIAL.search(text) else text


def code(text: str) -> str:
    """`text` as a span of code, fenced so that no backtick of its own ends it."""
    line = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"


_SPECIAL = re.compile(r"[|<\n\r\t]")
