"""Examples to batches: token ids, targets of the main stream and of every stream, carriers, and a fixed order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Final, Literal, TypeVar

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from forestream.errors import DataError, PromptError
from forestream.model import StreamingLM
from forestream.objective import IGNORED, TargetBatch
from forestream.tasks.base import Example, Message
from forestream.vocabulary import DraftVocabulary

Targets = Literal["completion", "all"]
"""Which tokens the loss is about: those of completions, or those of prompts too."""

Row = TypeVar("Row")

TARGETS: Final[tuple[Targets, ...]] = ("completion", "all")


@dataclass(frozen=True)
class Tokens:
    """One example as token ids; the completion ends with an end-of-text token, unless it was cut off at a cap."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def nothing(pad: int) -> Tokens:
    """An example without a completion, hence without targets: it fills up a batch and asks for nothing."""
    return Tokens((pad, pad), ())


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a prompt. The one place that decides.

    A text gets the begin-of-text token where the tokenizer has one. The messages of a chat are put into place by the
    tokenizer's own chat template, which goes as far as the opening of the assistant's answer.

    Raises:
        PromptError: the tokenizer has no chat template, or its template does not take these messages.
    """
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt)["input_ids"])
    if template_print(tokenizer) is None:
        raise PromptError(
            "found a chat and a tokenizer without a chat template; give a base model that was made for chats, or the "
            "prompt as plain text"
        )
    messages = [dict(message) for message in prompt]
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except TemplateError as error:
        raise PromptError(f"the base's chat template does not take these messages: {error}") from error
    return tuple(ids)


def prompts_of(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[tuple[int, ...]]:
    """Token ids of the prompts of `examples`, chats by the chat template. Errors as in `prompt_ids`."""
    return [prompt_ids(tokenizer, example.asked) for example in examples]


def drawn(rows: Sequence[Row], seed: int, most: int | None = None) -> list[Row]:
    """Rows in an order that depends on the seed and on their number alone, the first `most` of it: all by default."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    return order[:most]


def template_print(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """64 hexadecimal digits that tell a tokenizer's chat template, or its several, from others; None of none."""
    if not tokenizer.chat_template:
        return None
    return sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def template_of(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> str | None:
    """Print of the chat template that the prompts of `examples` depend on; None if they are plain texts."""
    return template_print(tokenizer) if any(example.form == "chat" for example in examples) else None


def tokenize(tokenizer: PreTrainedTokenizerBase, example: Example) -> Tokens:
    """Prompt and completion are tokenised apart, so that training and generation see the same prompt ids.

    Raises:
        DataError: the tokenizer has no end-of-text token, the prompt is empty, or a chat has no answer to learn.
        PromptError: the example is a chat and the tokenizer has no chat template.
    """
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise DataError("the tokenizer has no end-of-text token (eos_token_id is None); set one before training")
    if not example.completion:
        raise DataError(
            f"an example has no answer to learn (its prompt begins {example.prompt[:40]!r}); have the model write its "
            "own with `forestream distill`, and train on them with --answers"
        )
    prompt = prompt_ids(tokenizer, example.asked)
    if not prompt:
        raise DataError(f"an example has an empty prompt; its completion begins {example.completion[:40]!r}")
    completion = tokenizer(example.completion, add_special_tokens=False)["input_ids"]
    return Tokens(prompt, (*completion, end))


def restrict_drafts(model: StreamingLM, examples: Sequence[Tokens], end: int, size: int) -> None:
    """Let streams of `model` draft the `size` most frequent tokens of completions, `end` of text among them, only.

    With a size of 0 the model stays as it is, and so does one without streams.
    """
    if size and model.stream_config.streams:
        completions = (example.completion for example in examples)
        model.restrict(DraftVocabulary.counted(completions, end, model.port.head_size, size))


class TokenDataset(Dataset[Tokens]):
    """Examples in the order in which training will meet them, all epochs included.

    The order depends on lengths and seed only, never on the model: a twin sees the same examples in the same order,
    and resuming is skipping.
    """

    def __init__(self, examples: Sequence[Tokens], order: Sequence[int]) -> None:
        self.examples = examples
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Tokens:
        return self.examples[self.order[place]]


def grouped_order(lengths: Sequence[int], batch_size: int, epochs: int, seed: int) -> list[int]:
    """Indices for `epochs` passes over the data: batches of similar length, in random order of batches.

    Similar lengths are found inside pools of 50 batches, so that batches stay random; all epochs keep every index
    once.
    """
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    rest: list[int] = []
    for _ in range(epochs):
        shuffled = iter(torch.randperm(len(lengths), generator=generator).tolist())
        batches: list[list[int]] = []
        while pool := list(islice(shuffled, 50 * batch_size)):
            pool.sort(key=lambda i: lengths[i])
            batches += [pool[at : at + batch_size] for at in range(0, len(pool), batch_size)]
        # What fills no batch goes to the very end: in the middle it would shift the borders of all batches behind it.
        rest += [i for batch in batches if len(batch) < batch_size for i in batch]
        whole = [batch for batch in batches if len(batch) == batch_size]
        for place in torch.randperm(len(whole), generator=generator).tolist():
            order += whole[place]
    return order + rest


@dataclass(frozen=True)
class Collator:
    """Tokens to a TargetBatch, padded at the right end, where causal rows never look.

    Attributes:
        streams: G.
        pad: id that fills the right end of `ids`; its value is never seen by any target.
        share: share of the possible carriers that get streams, at random but fixed for a text.
        seed: of that choice.
        targets: "completion" asks for the tokens of completions only, "all" for every token but a text's first one.
    """

    streams: int
    pad: int
    share: float = 1.0
    seed: int = 0
    targets: Targets = "completion"

    def __call__(self, examples: Sequence[Tokens]) -> dict[str, Tensor]:
        return vars(self.batch(examples))

    def batch(self, examples: Sequence[Tokens]) -> TargetBatch:
        # The last token is a target only: nothing comes after it.
        inputs = [(*e.prompt, *e.completion)[:-1] for e in examples]
        rows = [range(self._first(e), len(e) - 1) for e in examples]
        carriers = [self._carriers(e) for e in examples]
        texts = [(*e.prompt, *e.completion) for e in examples]
        # A carrier at least, even if it asks for nothing: gradients reach the same weights in every process.
        least = 1 if self.streams else 0
        return TargetBatch(
            ids=_padded(inputs, self.pad),
            rows=_padded(rows, 0),
            targets=_padded([text[self._first(e) + 1 :] for e, text in zip(examples, texts, strict=True)], IGNORED),
            carriers=_padded(carriers, 0, least),
            stream_targets=torch.stack(
                [
                    _padded(
                        [[_at(text, t + 1 + j) for t in own] for text, own in zip(texts, carriers, strict=True)],
                        IGNORED,
                        least,
                    )
                    for j in range(1, self.streams + 1)
                ],
                dim=1,
            )
            if self.streams
            else torch.empty(len(examples), 0, 0, dtype=torch.long),
        )

    def _first(self, example: Tokens) -> int:
        """The first position whose next token is a target."""
        return 0 if self.targets == "all" else len(example.prompt) - 1

    def _carriers(self, example: Tokens) -> list[int]:
        """Positions with a target for stream 1 at least, thinned to the share."""
        possible = range(self._first(example), len(example) - 2) if self.streams else range(0)
        if self.share >= 1.0:
            return list(possible)
        generator = torch.Generator().manual_seed(self.seed + hash((example.prompt, example.completion)) % 2**31)
        return [t for t in possible if float(torch.rand((), generator=generator)) < self.share]


def _at(text: Sequence[int], place: int) -> int:
    return text[place] if place < len(text) else IGNORED


def _padded(rows: Sequence[Sequence[int]], fill: int, least: int = 0) -> Tensor:
    width = max(least, *map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.long)
