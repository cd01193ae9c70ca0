"""The prompts that methods are run on: a task's, all turns of its chats, of one length where that is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forestream.data import prompts_of
from forestream.errors import ConfigError
from forestream.evaluation import prompts_of_turns
from forestream.generation import Generator
from forestream.tasks.base import Example


@dataclass(frozen=True)
class Asked:
    """Prompts as token ids, with what is known of each.

    Attributes:
        categories: the part of the data set that each is of; None where the task has no parts.
        turns: the turn of its chat that each is, from 1; None where no chat has a second one.
        examples: what texts are scored by, one for each; None where the prompts are not the examples' own.
    """

    prompts: tuple[tuple[int, ...], ...]
    categories: tuple[str | None, ...] | None = None
    turns: tuple[int, ...] | None = None
    examples: tuple[Example, ...] | None = None


def evenly(examples: Sequence[Example], most: int | None = None) -> list[Example]:
    """The first `most` examples, as many of every category as there are of the others; in their order."""
    met = Counter[str | None]()
    turns = []
    for place, one in enumerate(examples):
        turns.append((met[one.category], place))
        met[one.category] += 1
    return [examples[place] for place in sorted(place for _, place in sorted(turns)[:most])]


def asked(
    generator: Generator,
    examples: Sequence[Example],
    length: int | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Asked:
    """The prompts of `examples`; a chat's later turns come behind plain decoding's answers to the earlier ones.

    Args:
        length: tokens of every prompt: other examples stand in front of it, or it is cut at its beginning.
        advance: called with the number of examples done since the last call, for a progress bar.

    Raises:
        ConfigError: a length is asked for, and prompts are chats.
        PromptError: the model has no chat template, or a chat outgrows its context.
    """
    parts = tuple(one.category for one in examples)
    categories = parts if any(parts) else None
    if length is not None:
        return Asked(_lengthened(generator, examples, length), categories)
    if not any(one.turns for one in examples):
        prompts = tuple(prompts_of(generator.tokenizer, examples))
        return Asked(prompts, categories, examples=tuple(examples))
    found: list[tuple[tuple[int, ...], str | None, int]] = []
    for one in examples:
        turns = prompts_of_turns(generator, one)
        found += [(prompt, one.category, turn) for turn, prompt in enumerate(turns, start=1)]
        advance(1)
    categories = tuple(category for _, category, _ in found) if categories else None
    return Asked(tuple(prompt for prompt, _, _ in found), categories, tuple(turn for _, _, turn in found))


def _lengthened(generator: Generator, examples: Sequence[Example], length: int) -> tuple[tuple[int, ...], ...]:
    if any(one.form == "chat" for one in examples):
        raise ConfigError(
            "a length of prompts is asked for and the task's prompts are chats; take a task of plain texts"
        )
    tokenizer = generator.tokenizer
    whole = [f"{one.prompt}{one.completion}\n" for one in examples]
    texts = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in whole]
    found = []
    for number, prompt in enumerate(prompts_of(tokenizer, examples)):
        first = prompt[:1] if prompt[0] == tokenizer.bos_token_id else ()
        rest, place = prompt[len(first) :], number
        while len(first) + len(rest) < length:
            place -= 1
            rest = texts[place % len(texts)] + rest
        found.append(first + rest[len(rest) - (length - len(first)) :])
    return tuple(found)
