"""Synthetic: a walk through the alphabet, which a tiny random model learns within about a hundred steps.

The prompt names a rule and a letter, and the completion walks on from there: ``up c`` gives ``d e f g ...``,
``down c`` gives ``b a z y ...``, ``skip c`` gives ``e g i k ...`` and ``back c`` gives ``a y w u ...``,
sixteen letters in all. Every word is plain ASCII and stands between single spaces, so a word-level tokenizer
of thirty words is enough.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from forestream.errors import DataError
from forestream.metrics import EXACT_MATCH, exact_match
from forestream.tasks.base import Example, Task, references_of

LETTERS: Final = tuple(string.ascii_lowercase)
STEPS: Final = {"up": 1, "down": -1, "skip": 2, "back": -2}
WORDS: Final = (*STEPS, *LETTERS)
"""Every word that occurs: what a tokenizer for this task must know."""

_ROWS: Final = {"train": 2048, "validation": 64, "test": 64}


@dataclass(frozen=True)
class Synthetic(Task):
    """Rule and letter to a walk. No prompt stands in two splits.

    Attributes:
        seed: another seed draws other rows; the same one always draws the same.
        length: how many letters a completion has.
    """

    name: ClassVar[str] = "synthetic"
    metric_names: ClassVar[tuple[str, ...]] = EXACT_MATCH
    max_new_tokens: ClassVar[int] = 24

    seed: int = 0
    length: int = 16

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        """Return the rows of a split, each a function of seed, split and index alone; `data_dir` is not
        looked at.

        Raises:
            DataError: there is no such split.
        """
        if split not in _ROWS:
            raise DataError(f"found split {split!r}; expected one of {', '.join(_ROWS)}")
        return [self._draw(split, index) for index in range(_ROWS[split])]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        return exact_match(predictions, references_of(examples))

    def _draw(self, split: str, index: int) -> Example:
        # Seeded by text, so rows do not depend on each other nor on the process.
        generator = random.Random(f"{self.seed}/{split}/{index}")
        while True:
            rule, start = generator.choice(list(STEPS)), generator.randrange(len(LETTERS))
            prompt = f"{rule} {LETTERS[start]}"
            if _split_of(prompt) == split:
                break
        walk = " ".join(LETTERS[(start + STEPS[rule] * k) % len(LETTERS)] for k in range(1, self.length + 1))
        return Example(prompt, f" {walk}", (walk,))


def _split_of(prompt: str) -> str:
    return {0: "test", 1: "validation"}.get(zlib.crc32(prompt.encode()) % 10, "train")
