"""HumanEval: 164 Python functions to complete from signature and docstring (Chen and others, 2021).

There is a test split only, and it is not to be trained on. Prompts only: whether a function is right shows when it is
run, and code that a model wrote is not run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from forestream.errors import DataError
from forestream.tasks.base import Example, Source, Task
from forestream.tasks.rows import rows


class HumanEval(Task):
    """The beginning of a function to the rest of it. Speed is measured, nothing is scored."""

    name: ClassVar[str] = "humaneval"
    metric_names: ClassVar[tuple[str, ...]] = ()
    max_new_tokens: ClassVar[int] = 256
    source: ClassVar[Source] = Source(
        "HumanEval",
        "openai/openai_humaneval",
        "mit",
        "Chen and others, 2021",
        'def double(x: int) -> int:\n    """Twice x."""',
    )

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        if split != "test":
            raise DataError(f"found split {split!r} of humaneval; expected test, the only one: give --split test")
        found = rows("humaneval", self.source.hub, split, data_dir, ("prompt", "canonical_solution"))
        return [_render(row["prompt"], row["canonical_solution"]) for row in found]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        """Refuse: code is not run.

        Raises:
            DataError: always.
        """
        raise DataError("humaneval's score needs code of the model to be run, which is not done; use bench")


def _render(prompt: str, solution: str) -> Example:
    # Prompts end without white space, completions begin with a space: the line break between them is left out.
    return Example(prompt.rstrip(), f" {solution.strip()}", (solution.strip(),))
