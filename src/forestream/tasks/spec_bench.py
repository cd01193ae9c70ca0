"""Spec-Bench: 480 prompts of six kinds for measuring speculative decoding (Xia and others, 2024).

There is a test split only, and it is not to be trained on. The rows are the lines of the benchmark's own file
``question.jsonl``, gzipped; the eighty questions of MT-bench among them have a second turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from forestream.errors import DataError
from forestream.tasks.base import Example, Task
from forestream.tasks.rows import rows

CATEGORIES: Final = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
"""What results are reported by; the eight kinds of MT-bench's questions count as one."""

_MT_BENCH: Final = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


class SpecBench(Task):
    """A user's turns, to be answered one after the other. Prompts only: speed is measured, nothing is scored."""

    name: ClassVar[str] = "spec_bench"
    metric_names: ClassVar[tuple[str, ...]] = ()
    max_new_tokens: ClassVar[int] = 256

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        if split != "test":
            raise DataError(f"found split {split!r} of spec_bench; expected test, the only one: give --split test")
        found = rows("spec_bench", None, split, data_dir, ("category",))
        return [_render(row, number) for number, row in enumerate(found, start=1)]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        """Refuse: its references, where there are any, are no measure of an answer.

        Raises:
            DataError: always.
        """
        raise DataError("spec_bench holds prompts to measure speed with and scores no texts; use `forestream bench`")


def _render(row: dict[str, Any], number: int) -> Example:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DataError(f"row {number} of spec_bench has {turns!r} as turns; expected a list of texts")
    kind = "mt_bench" if row["category"] in _MT_BENCH else row["category"]
    if kind not in CATEGORIES:
        raise DataError(f"row {number} of spec_bench is of category {kind!r}; expected {', '.join(CATEGORIES)}")
    first, *further = (turn.strip() for turn in turns)
    return Example(first, "", (), form="chat", turns=tuple(further), category=kind)
