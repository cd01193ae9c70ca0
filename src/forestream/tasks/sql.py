"""SQL: ``CREATE TABLE`` statements and a question, answered by a query.

On the hub this data set (made from WikiSQL and Spider) has one split. Asked for there, ``validation`` and
``test`` are five percent each, held out by a hash of the tables' statements, so that no statement stands in
two splits. Local files have splits of their own, so figures of the two sources must not be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from forestream.errors import DataError
from forestream.metrics import EXACT_MATCH, exact_match
from forestream.tasks.base import Example, Source, Task, references_of
from forestream.tasks.rows import rows


class SQL(Task):
    """Tables and question to query."""

    name: ClassVar[str] = "sql"
    metric_names: ClassVar[tuple[str, ...]] = EXACT_MATCH
    max_new_tokens: ClassVar[int] = 128
    source: ClassVar[Source] = Source(
        "sql-create-context",
        "b-mc2/sql-create-context",
        "cc-by-4.0",
        "b-mc2, made from WikiSQL (BSD-3-Clause) and Spider (CC BY-SA 4.0)",
        "CREATE TABLE head (age INTEGER)\nHow many heads are older than 56?\nSQL:",
        "This project's own local files are not the hub's: most of their rows are rebuilt from WikiSQL and Spider in "
        "the hub's format, and 9,991 of the 86,722 are the hub's, word for word.",
    )

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        if data_dir is None and split not in ("train", "validation", "test"):
            raise DataError(f"found split {split!r}; expected train, validation or test")
        found = rows(
            "sql_create_context",
            self.source.hub,
            "train" if data_dir is None else split,
            data_dir,
            ("context", "question", "answer"),
        )
        return [
            _render(row["context"], row["question"], row["answer"])
            for row in found
            if data_dir is not None or held_out_split(row["context"]) == split
        ]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        return exact_match(predictions, references_of(examples))


def held_out_split(context: str) -> str:
    """Return the split that a row of the hub's single one belongs to, by its ``CREATE TABLE`` statements "
    "alone."""
    bucket = int.from_bytes(hashlib.sha256(context.encode()).digest()[:8], "big") % 100
    return "test" if bucket < 5 else "validation" if bucket < 10 else "train"


def _render(context: str, question: str, answer: str) -> Example:
    answer = answer.strip()
    return Example(f"{context.strip()}\n{question.strip()}\nSQL:", f" {answer}", (answer,))
