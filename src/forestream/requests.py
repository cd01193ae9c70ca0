"""What is asked for: a prompt, how its text is drawn, where it ends, and what is reported of its tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import StopStringCriteria

from forestream.config import SamplingSettings, whole
from forestream.errors import ConfigError, PromptError
from forestream.sampling import Processor

GREEDY: Final = SamplingSettings()

# Called with a token, the logits [V] it came from, and what the processors made of them.
Watch = Callable[[int, Tensor, Tensor], None]


class Criterion(Protocol):
    """Whether a text ends: a `StoppingCriteria` of the host library is one. Called once for each token written."""

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"], /) -> Any: ...


@dataclass(frozen=True)
class Request:
    """One text that is asked for.

    Attributes:
        prompt: token ids, at least one.
        eos: ids that end the text; they are written.
        sampling: the law that tokens are drawn from.
        processors: change the logits of every token, behind the penalties and before temperature and cuts.
        criteria: end the text behind the token at which one of them is true.
        max_new_tokens: cap on tokens; None leaves it to the settings.
        row: keys the draws, beside the seed: texts of one prompt differ by it.
        logprobs: report every token's log-probability, and those of so many most probable tokens; None reports none.
            They are the model's own, before processors and temperature.
        history: what processors and criteria see in front of the text; None is the prompt.
        watch: told of every token, in order.

    Raises:
        ConfigError: a value is out of range, or what should be called cannot be.
    """

    prompt: tuple[int, ...]
    eos: tuple[int, ...] = ()
    sampling: SamplingSettings = GREEDY
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    max_new_tokens: int | None = None
    row: int = 0
    logprobs: int | None = None
    history: tuple[int, ...] | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", whole_ids(self.prompt))
        for name in ("eos", "processors", "criteria"):
            object.__setattr__(self, name, several(getattr(self, name)))
        for token in self.eos:
            whole("eos", token, 0)
        for name in ("max_new_tokens", "logprobs"):
            if (number := getattr(self, name)) is not None:
                whole(name, number, 0)
        whole("row", self.row, 0, 2**64 - 1)
        watch = () if self.watch is None else (self.watch,)
        for name, given in (("processors", self.processors), ("criteria", self.criteria), ("watch", watch)):
            for one in given:
                if not callable(one):
                    raise ConfigError(f"{name} is or holds {one!r}; expected something that can be called")

    @staticmethod
    def of(prompt: Request | Sequence[int], eos: Sequence[int] = ()) -> Request:
        """`prompt`, if it is a request already, or a request to go on from it greedily."""
        return prompt if isinstance(prompt, Request) else Request(tuple(prompt), tuple(eos))


def several(given: Any) -> tuple[Any, ...]:
    """What was given as a tuple: one thing, several of them, or None."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def each_its_own(requests: Sequence[Request]) -> list[Request]:
    """The same requests, with processors and criteria that they share with an earlier one copied.

    What cannot be copied, such as a switch that another thread turns, is shared.
    """
    seen: set[int] = set()
    found = []
    for request in requests:
        changed: dict[str, Any] = {}
        for name in ("processors", "criteria"):
            given = getattr(request, name)
            changed[name] = tuple(_copied(one) if id(one) in seen else one for one in given)
            seen.update(map(id, given))
        found.append(replace(request, **changed))
    return found


def _copied(one: Any) -> Any:
    try:
        # One of these has no state, and a table of the whole vocabulary.
        return one if isinstance(one, StopStringCriteria) else deepcopy(one)
    except TypeError:
        return one


def whole_ids(prompt: Any) -> tuple[int, ...]:
    """Token ids in any usual form, a sequence, an array or a tensor of one text, as a tuple.

    Raises:
        PromptError: they are of another form, or no whole numbers.
    """
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, list | tuple) and len(prompt) == 1 and isinstance(prompt[0], list | tuple):
        prompt = prompt[0]
    try:
        if any(isinstance(token, bool) for token in prompt):
            raise TypeError
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        shown = repr(prompt)
        raise PromptError(
            f"the prompt is {shown[:60]}{'...' if len(shown) > 60 else ''}; expected a text, or token ids of one"
        ) from None


def padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Prompts in one batch, filled up on the left as the host library wants it, and the mask that tells."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def unpadded(ids: Any, mask: Any = None) -> list[tuple[int, ...]]:
    """The prompts of a padded batch, whichever side its padding is on; without a mask nothing is padding.

    Args:
        ids: [B, T], a tensor, an array or lists, whose rows may then differ in length.
        mask: of the same shape, 0 at padding.

    Raises:
        PromptError: ids and mask are of different shapes, or a row has padding between its tokens.
    """
    rows, shown = _rows(ids), None if mask is None else _rows(mask)
    if rows is None or (mask is not None and (shown is None or [*map(len, rows)] != [*map(len, shown)])):
        raise PromptError("ids and mask are of different shapes, or no rows of numbers; expected [B, T] for both")
    prompts = []
    for number, row in enumerate(rows):
        places = [place for place in range(len(row)) if shown is None or shown[number][place]]
        if places and places[-1] - places[0] + 1 != len(places):
            raise PromptError(f"row {number} has padding between its tokens; expected it at one end")
        prompts.append(whole_ids([row[place] for place in places]))
    return prompts


def _rows(numbers: Any) -> list[list[Any]] | None:
    found = numbers.tolist() if isinstance(numbers, Tensor | np.ndarray) else numbers
    if isinstance(found, list | tuple) and found and not isinstance(found[0], list | tuple):
        found = [found]  # what a tokenizer makes of a single text
    if not isinstance(found, list | tuple) or not all(isinstance(row, list | tuple) for row in found):
        return None
    return [list(row) for row in found]
