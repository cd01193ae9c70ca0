"""Chat: instructions of public instruction sets, answered by an assistant, for the streams of a chat model.

The set is a mix of this project's own, known under no name on a hub, so it is read from a folder only. Its strictest
licence is CC BY-NC 4.0, mostly because of the answers. For lossless streams they are not needed: `forestream distill`
writes the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from forestream.metrics import ROUGE, rouge
from forestream.tasks.base import Example, Task, references_of
from forestream.tasks.rows import rows


class Chat(Task):
    """Instruction, with its input if it has one, to an assistant's answer; the category is the row's source."""

    name: ClassVar[str] = "chat"
    metric_names: ClassVar[tuple[str, ...]] = ROUGE
    max_new_tokens: ClassVar[int] = 256

    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        found = rows("instruct", None, split, data_dir, ("instruction", "input", "output", "source"))
        return [_render(row["instruction"], row["input"], row["output"], row["source"]) for row in found]

    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        return rouge(predictions, references_of(examples))


def _render(instruction: str, given: str, answer: str, source: str) -> Example:
    said = f"{instruction.strip()}\n\n{given.strip()}".strip()
    return Example(said, answer.strip(), (answer.strip(),), form="chat", category=source)
