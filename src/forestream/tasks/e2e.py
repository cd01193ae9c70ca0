"""E2E NLG: a restaurant's meaning representation, written out as a sentence or two.

The rows are crowd-written (Novikova, Dušek and Rieser, 2017). Several share one meaning representation, and
they are scored together: 630 distinct ones in the test split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from forestream.metrics import ROUGE, rouge
from forestream.tasks.base import Example, Source, Task, references_of
from forestream.tasks.rows import rows


class E2E(Task):
    """Meaning representation to text."""

    name: ClassVar[str] = "e2e"
    metric_names: ClassVar[tuple[str, ...]] = ROUGE
    max_new_tokens: ClassVar[int] = 96
    source: ClassVar[Source] = Source(
        "E2E NLG",
        "tuetschek/e2e_nlg",
        "cc-by-sa-4.0",
        "Novikova, Dušek and Rieser, 2017",
        "name[Blue Spice], eatType[coffee shop], area[city centre] ->",
    )

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        fields = ("meaning_representation", "human_reference")
        return [
            _render(row["meaning_representation"], row["human_reference"])
            for row in rows("e2e_nlg", self.source.hub, split, data_dir, fields)
        ]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        return rouge(predictions, references_of(examples))


def _render(meaning: str, text: str) -> Example:
    # An arrow is one token in the usual vocabularies, where a line break and a label are three.
    text = text.strip()
    return Example(f"{meaning.strip()} ->", f" {text}", (text,))
