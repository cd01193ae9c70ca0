"""What a task is: examples to train on, inputs to be judged by, and a score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from forestream.errors import DataError

Message = dict[str, str]
"""A turn of a chat as chat templates take it: its "role" and its "content"."""


@dataclass(frozen=True)
class Example:
    """One input with one wanted output.

    In the form "text", prompt and completion are tokenised on their own and then joined, so the prompt ends without
    white space and the completion begins with a space. In the form "chat" the prompt is what a user says, the model's
    own chat template puts it into place, and the completion, if there is one, begins right behind the template's
    opening of the answer. Neither holds a special token: the end of the text is added where batches are made.

    Attributes:
        prompt: what the model is given.
        completion: what it is trained to write; may be empty in a chat, where the model's own answer is what is wanted.
        references: every text that counts as right when its output is scored, without the leading space; none in a
            chat that nothing is known to be the right answer to.
        form: how the prompt is put to the model.
        turns: of a chat, what the user says next, each after the model's answer to what was said before.
        category: the part of its data set that an example belongs to, where there are parts.
    """

    prompt: str
    completion: str
    references: tuple[str, ...]
    form: Literal["text", "chat"] = "text"
    turns: tuple[str, ...] = ()
    category: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt or self.prompt[-1].isspace():
            raise DataError(f"prompt {self.prompt[-40:]!r} is empty or ends with white space; strip it first")
        if self.form == "chat":
            if self.completion != self.completion.strip():
                raise DataError(f"answer {self.completion[:40]!r} begins or ends with white space; strip it first")
            return
        if not self.completion.strip() or self.completion[:1] != " ":
            raise DataError(f"completion {self.completion[:40]!r} is empty or does not begin with a space")
        if not self.references:
            raise DataError("an example has no reference; expected one or more texts")
        if self.turns:
            raise DataError(f"found {len(self.turns)} further turns in an example of the form 'text'; chats have turns")

    @property
    def asked(self) -> str | list[Message]:
        """The prompt as `forestream.data.prompt_ids` and a `Generator` take it: a text, or the messages of a chat."""
        return [user(self.prompt)] if self.form == "chat" else self.prompt


def user(text: str) -> Message:
    """What a user says, as chat templates take it."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Source:
    """Where a task's rows come from, for the cards of models that were trained on them.

    Attributes:
        title: the data set's name for people.
        hub: its name on the hub.
        licence: of the rows, as the hub spells it.
        credit: who made it.
        prompt: a made-up input in the task's form.
        local: what has to be said of local files that stand in for the hub's.
    """

    title: str
    hub: str
    licence: str
    credit: str
    prompt: str
    local: str = ""


class Task(ABC):
    """A named source of examples with its score. Stateless; see the list in ``forestream.tasks``.

    Attributes:
        name: how the task is called on the command line.
        metric_names: the keys that `score` returns, the most important first; none where texts cannot be scored.
        max_new_tokens: a limit that leaves almost every reference whole, in tokens of a vocabulary of about
            50,000.
        source: where rows come from; None where they are made up.
    """

    name: ClassVar[str]
    metric_names: ClassVar[tuple[str, ...]]
    max_new_tokens: ClassVar[int]
    source: ClassVar[Source | None] = None

    @abstractmethod
    def examples(self, split: str, data_dir: Path | None = None) -> list[Example]:
        """Return the training form: one example for each row, in the order of the file.

        Args:
            split: ``train``, ``validation`` or ``test``.
            data_dir: the folder that holds the data sets' folders; None asks the hub.

        Raises:
            DataError: the rows are missing, unreadable or not of the expected form.
        """

    def grouped(self, split: str, data_dir: Path | None = None) -> list[Example]:
        """Return the evaluation form: one example for each distinct prompt, with the references of all its
        rows.

        Order and completion are those of each prompt's first row; repeated references are kept once.
        Arguments and errors are those of `examples`.
        """
        groups: dict[str, list[Example]] = {}
        for example in self.examples(split, data_dir):
            groups.setdefault(example.prompt, []).append(example)
        return [
            replace(rows[0], references=tuple(dict.fromkeys(text for row in rows for text in row.references)))
            for rows in groups.values()
        ]

    @abstractmethod
    def score(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
        """Return each of `metric_names` in percent for one prediction per example, in the same order.

        Raises:
            DataError: the lengths differ, or there is nothing to score.
        """

    def score_each(self, predictions: Sequence[str], examples: Sequence[Example]) -> dict[str, list[float]]:
        """Return each of `metric_names` in percent for every example alone, in the same order.

        A task's score is the mean of these; one whose score is not must not be compared example by example.

        Raises:
            DataError: the lengths differ.
        """
        if len(predictions) != len(examples):
            raise DataError(f"found {len(predictions)} predictions and {len(examples)} examples; expected one for each")
        alone = [self.score([text], [example]) for text, example in zip(predictions, examples, strict=True)]
        return {name: [scores[name] for scores in alone] for name in self.metric_names}


def references_of(examples: Sequence[Example]) -> list[tuple[str, ...]]:
    """Return the references alone, in the order of the examples."""
    return [example.references for example in examples]
