"""What is asked for: a prompt, how its text is drawn, where it ends, and what is reported of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
        for token in self.eos:
            whole("eos", token, 0)
        for name in ("max_new_tokens", "logprobs"):
            if (number := getattr(self, name)) is not None:
                whole(name, number, 0)
        whole("row", self.row, 0, 2**64 - 1)
        watch = () if self.watch is None else (self.watch,)
        for name, several in (("processors", self.processors), ("criteria", self.criteria), ("watch", watch)):
            for one in several:
                if not callable(one):
                    raise ConfigError(f"{name} is or holds {one!r}; expected something that can be called")

    @staticmethod
    def of(prompt: Request | Sequence[int], eos: Sequence[int] = ()) -> Request:
        """`prompt`, if it is a request already, or a request to go on from it greedily."""
        return prompt if isinstance(prompt, Request) else Request(tuple(prompt), tuple(eos))


def unpadded(ids: Int[Tensor, "B T"], mask: Int[Tensor, "B T"] | None = None) -> list[tuple[int, ...]]:
    """The prompts of a padded batch, whichever side its padding is on; without a mask nothing is padding.

    Raises:
        PromptError: ids and mask are of different shapes, or a row has padding between its tokens.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise PromptError(f"ids are {tuple(ids.shape)} and the mask {tuple(mask.shape)}; expected [B, T] for both")
    shown = mask.bool()
    for row, own in enumerate(shown):
        places = own.nonzero()[:, 0]
        if len(places) and int(places[-1] - places[0]) + 1 != len(places):
            raise PromptError(f"row {row} has padding between its tokens; expected it at one end")
    return [tuple(own[seen].tolist()) for own, seen in zip(ids, shown, strict=True)]
