"""What commands that train share: their usual options, and the examples that they learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forestream.data import Tokens
    from forestream.distillation import AnswerSettings
    from forestream.tasks.base import Example

Task = Annotated[str, typer.Option(help="Whose texts: e2e, sql, dialogsum or synthetic.")]
Answers = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="Learn the base's own answers to the task's prompts, out of this file of `forestream distill`.",
    ),
]
Examples = Annotated[int | None, typer.Option(min=1, help="How many examples to use; all by default.")]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the examples.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples per forward pass.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Forward passes per update.")]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
Seed = Annotated[int, typer.Option(help="Of the choice and the order of examples.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Updates between checkpoints.")]
Resume = Annotated[bool, typer.Option(help="Continue the last checkpoint of an interrupted run.")]


def rows_of(task: str, data_dir: Path | None, answers: Path | None) -> tuple[list[Example], AnswerSettings | None]:
    """The rows to learn from, of the training split or of that which a file of answers has, and the file's settings."""
    from forestream.distillation import AnswerSettings
    from forestream.tasks import get_task

    told = None if answers is None else AnswerSettings.read(answers, task)
    return get_task(task).examples("train" if told is None else told.split, data_dir), told


def tokens_of(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Any],
    answers: Path | None,
    base_print: str,
    seed: int,
    examples: int | None,
) -> list[Tokens]:
    """What is trained on, in an order drawn by `seed`: the rows, or the base's own answers to them."""
    from forestream.data import drawn, tokenize
    from forestream.distillation import read_answers

    if answers is not None:
        return drawn(read_answers(answers, rows, tokenizer, base_print), seed, examples)
    return [tokenize(tokenizer, row) for row in drawn(rows, seed, examples)]
