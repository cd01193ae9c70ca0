"""DialogSum: an everyday dialogue and a summary of it (Chen, Liu, Chen and Zhang, 2021).

The test split has three summaries for each of its 500 dialogues. Local files may give them in one row
(``summary1`` to ``summary3``); the hub has a row for each. The evaluation form is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from forestream.errors import DataError
from forestream.metrics import ROUGE, rouge
from forestream.tasks.base import Example, Source, Task, references_of
from forestream.tasks.rows import rows


class DialogSum(Task):
    """Dialogue to summary."""

    name: ClassVar[str] = "dialogsum"
    metric_names: ClassVar[tuple[str, ...]] = ROUGE
    max_new_tokens: ClassVar[int] = 128
    source: ClassVar[Source] = Source(
        "DialogSum",
        "knkarthick/dialogsum",
        "cc-by-nc-sa-4.0",
        "Chen, Liu, Chen and Zhang, 2021",
        "#Person1#: Shall we meet at eight?\n#Person2#: Nine would suit me better.\nSummary:",
    )

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        found = rows("dialogsum", self.source.hub, split, data_dir, ("dialogue",))
        return [_render(row["dialogue"], _summaries(row, split, index)) for index, row in enumerate(found)]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        return rouge(predictions, references_of(examples))


def _summaries(row: dict[str, Any], split: str, index: int) -> tuple[str, ...]:
    keys = ("summary",) if "summary" in row else ("summary1", "summary2", "summary3")
    summaries = tuple(row[key].strip() for key in keys if isinstance(row.get(key), str))
    if len(summaries) != len(keys):
        raise DataError(
            f"row {index + 1} of split {split!r} of dialogsum has the fields {', '.join(sorted(row))}; "
            "expected text in summary, or in all of summary1, summary2, summary3"
        )
    return summaries


def _render(dialogue: str, summaries: tuple[str, ...]) -> Example:
    return Example(f"{dialogue.strip()}\nSummary:", f" {summaries[0]}", summaries)
