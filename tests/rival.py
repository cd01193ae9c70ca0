"""What tests of the rival methods share: sources of drafts, draft models that agree more or less, one comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings, StreamConfig
from forestream.model import StreamingLM
from forestream.prefill import Begun, begin
from forestream.requests import Request
from forestream.rivals import loop
from forestream.rivals.lookup import line
from forestream.rivals.loop import Offer, Source, drafted
from forestream.rivals.two_model import TwoModel, TwoModelSettings
from forestream.rows import Row
from forestream.steps import Step, tokens_of
from wrapped import wrapped
from zoo import HOSTS

FAMILIES = ("llama", "gpt2", "mistral-window", "gemma2")


def draft_model(host: str, noise: float, mode: str = "joint") -> StreamingLM:
    """What writes the text of `model_of(host, mode)`, with `noise` on its weights: at 0 it is the target itself."""
    model = wrapped(host) if mode == "joint" else StreamingLM(HOSTS[host](), StreamConfig(streams=0, stream_layers=1))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.eval().parameters():
            parameter.add_(noise * parameter.std().nan_to_num() * torch.randn(parameter.shape, generator=generator))
    return model


def two_model(host: str, gamma: int = 4, noise: float = 0.15) -> TwoModel:
    return TwoModel(draft_model(host, noise), TwoModelSettings(gamma))


@dataclass(frozen=True)
class Scripted:
    """Drafts of a known text: its next tokens, of which the first len(text) % (gamma + 1) are right."""

    truth: tuple[int, ...]
    gamma: int = 3
    calls: int = 0

    @property
    def passes(self) -> set[int]:
        return {1 + self.gamma}

    def begin(self, model: StreamingLM, rows: Sequence[Row], chunk: int) -> Scripted:
        return self

    def offer(self, rows: Sequence[Row]) -> list[Offer]:
        return [Offer(line(row.text[-1], self.drafts(row)), self.calls) for row in rows]

    def drafts(self, row: Row) -> list[int]:
        place = len(row.text)
        depth, right = min(self.gamma, row.left - 1), place % (self.gamma + 1)
        return [self.truth[place + i] if i < right else (self.truth[place + i] + 1) % 70 for i in range(depth)]

    def learn(self, logits: Sequence[Float[Tensor, "asked V"]]) -> None: ...

    def keep(self, places: Sequence[int]) -> None: ...


def outline(steps: Sequence[Step]) -> tuple[Any, ...]:
    return tokens_of(steps), [step.finish for step in steps[-1:]]


def assert_as_plain(model: StreamingLM, request: Request, source: Source, tokens: int, chunk: int = 512) -> list[Step]:
    """The same tokens, ended for the same reason, as by plain decoding. Returns the source's steps."""
    settings = DecodeSettings(max_new_tokens=tokens, prompt_chunk=chunk)
    found, wanted = list(drafted(model, request, settings, source)), list(plain(model, request, settings))
    assert outline(found) == outline(wanted)
    for step in found[1:]:
        assert step.tree is not None
        assert step.accepted == len(step.path) - 1 <= len(step.tree.tokens) - 1
    return found


@contextmanager
def caches() -> Iterator[list[StreamCache]]:
    """Caches of the texts that rivals begin in here."""
    seen: list[StreamCache] = []

    def begun(*given: Any, **named: Any) -> Begun | None:
        outcome = begin(*given, **named)
        if outcome is not None:
            seen.append(outcome.cache)
        return outcome

    with patch.object(loop, "begin", begun):
        yield seen
