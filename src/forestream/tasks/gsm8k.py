"""GSM8K: grade-school maths problems with worked answers (Cobbe and others, 2021).

There is no validation split. A worked answer ends in a line ``#### 42``; the number there is what counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from forestream.errors import DataError
from forestream.metrics import EXACT_MATCH, exact_match
from forestream.tasks.base import Example, Source, Task, references_of
from forestream.tasks.rows import rows

_MARK: Final = "####"
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class GSM8K(Task):
    """Question to worked answer; scored by its final number."""

    name: ClassVar[str] = "gsm8k"
    metric_names: ClassVar[tuple[str, ...]] = EXACT_MATCH
    max_new_tokens: ClassVar[int] = 320
    source: ClassVar[Source] = Source(
        "GSM8K",
        "openai/gsm8k",
        "mit",
        "Cobbe and others, 2021",
        "Question: Tom has 3 boxes of 12 pencils. How many pencils has he?\nAnswer:",
    )

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        if split not in ("train", "test"):
            raise DataError(f"found split {split!r} of gsm8k; expected train or test, the only ones")
        found = rows("gsm8k", self.source.hub, split, data_dir, ("question", "answer"), "main")
        return [_render(row["question"], row["answer"], number) for number, row in enumerate(found, start=1)]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        return exact_match([final_number(text) or "" for text in predictions], references_of(examples))


def final_number(text: str) -> str | None:
    """The number behind the last ``####``, or else the last number there is, in plain digits; None of no number."""
    _, mark, behind = text.rpartition(_MARK)
    behind_mark = _NUMBER.findall(behind) if mark else []
    found = behind_mark[:1] or _NUMBER.findall(text)[-1:]
    if not found:
        return None
    number = found[0].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _render(question: str, answer: str, number: int) -> Example:
    final = final_number(answer)
    if _MARK not in answer or final is None:
        raise DataError(f"row {number} of gsm8k has an answer without a number behind {_MARK}; found {answer[-40:]!r}")
    return Example(f"Question: {question.strip()}\nAnswer:", f" {answer.strip()}", (final,))
