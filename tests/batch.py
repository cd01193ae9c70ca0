"""Batches of requests, and drafters that know each text: what tests of several texts at once share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from forestream.baseline import plain, plain_batch
from forestream.config import DecodeSettings, SamplingSettings
from forestream.decode import decode_batch
from forestream.drafting import DraftTree, drafter_for
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.schedule import Schedule
from forestream.steps import Step, tokens_of
from oracle import Prophet
from wrapped import prompt


@dataclass(frozen=True)
class Prophets:
    """A prophet for each text, told apart by what is written so far."""

    prophets: tuple[Prophet, ...]

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        own = next(one for one in self.prophets if one.truth[: len(text)] == tuple(text))
        return own(text, logits)


def requests(lengths: Sequence[int], tokens: int | Sequence[int] = 12, **asked: Any) -> list[Request]:
    """Random prompts of these lengths; row numbers and seeds of prompts are their places."""
    caps = [tokens] * len(lengths) if isinstance(tokens, int) else tokens
    return [
        Request(prompt(length, seed=row), max_new_tokens=cap, **{"row": row, **asked})
        for row, (length, cap) in enumerate(zip(lengths, caps, strict=True))
    ]


def sampled(request: Request, **law: Any) -> Request:
    return replace(request, sampling=SamplingSettings(**law))


def alone(model: StreamingLM, request: Request) -> list[Step]:
    """The text by plain decoding, without company."""
    return list(plain(model, request, DecodeSettings()))


def together(
    model: StreamingLM,
    asked: Sequence[Request],
    settings: DecodeSettings | Schedule | None,
    truths: Sequence[tuple[int, ...]] = (),
    rate: float = 0.7,
) -> list[list[Step]]:
    """Steps of each request of a batch; `settings` None decodes plainly. With truths, drafts are right at `rate`."""
    if settings is None:
        run = plain_batch(model, asked, DecodeSettings())
    else:
        first = Schedule.of(settings).steps[0][1]
        prophets = tuple(
            Prophet(drafter_for(first), one.prompt + truth, rate, seed=one.row)
            for one, truth in zip(asked, truths, strict=False)
        )
        run = decode_batch(model, asked, settings, Prophets(prophets) if truths else None)
    steps: list[list[Step]] = [[] for _ in asked]
    for outcome in run:
        for number, step in outcome:
            steps[number].append(step)
    return steps


def assert_as_alone(
    model: StreamingLM, asked: Sequence[Request], settings: DecodeSettings | Schedule, rate: float = 0.7
) -> list[list[Step]]:
    """EQ and COUPLE: every text of a batch is the one that plain decoding writes alone, and ends the same way."""
    single = [alone(model, one) for one in asked]
    truths = [tokens_of(steps) for steps in single]
    found = together(model, asked, settings, truths, rate)
    for number, (steps, truth) in enumerate(zip(found, truths, strict=True)):
        assert tokens_of(steps) == truth, f"text {number} of {len(asked)} differs"
        assert [s.finish for s in steps[-1:]] == [s.finish for s in single[number][-1:]]
    for steps, truth in zip(together(model, asked, None), truths, strict=True):
        assert tokens_of(steps) == truth, "plain decoding of a batch differs"
    return found


def accepted(steps: Sequence[Sequence[Step]]) -> int:
    return sum(step.accepted for own in steps for step in own)
