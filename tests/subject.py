"""A model, a prompt and what plain decoding writes after it: what the equality tests run speculation against.

Random hosts' streams know nothing, so a drafter that mixes the truth into their logits sees to it that drafts are
accepted at every depth, and refused at every depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import drafter_for
from forestream.model import StreamingLM
from forestream.steps import Counters, Step, tokens_of
from oracle import Prophet, first_difference
from wrapped import prompt, wrapped

PRUNINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "off": ({},),
    # Random scorers are sure of nearly everything they say: this drops most edges and keeps some.
    "mild": ({"prune_below": 1e-4}, {"prune_to": 9}),
    "extreme": ({"prune_below": 1.0}, {"prune_to": 2}),
}
CARRIERS = ("deferred", "fused")
WHO: tuple[dict[str, Any], ...] = (
    {"carriers": "deferred"},
    {"carriers": "fused"},
    {"carriers": "fused", "carried": 1},
    {"carriers": "fused", "carried": 3},
)
"""Who carries streams."""


@dataclass
class Subject:
    """A model with a prompt and the text that plain decoding writes after it; counts what its runs accepted."""

    model: StreamingLM
    start: tuple[int, ...]
    text: tuple[int, ...]
    counters: Counters = field(default_factory=Counters)
    offered: int = 0

    def check(self, tokens: int, rate: float = 0.7, **settings: Any) -> list[Step]:
        """Decode under `settings`, with a prophet that is right at `rate`, and compare."""
        chosen = DecodeSettings(max_new_tokens=tokens, **settings)
        drafter = Prophet(drafter_for(chosen), self.start + self.text, rate)
        steps = list(decode(self.model, self.start, chosen, drafter=drafter))
        found, wanted = tokens_of(steps), self.text[:tokens]
        place = first_difference(found, wanted)
        assert found == wanted, f"{chosen} differs at {place}: {found[place:]}, {wanted[place:]} by plain decoding"
        assert steps[-1].finish == "length"
        self.counters.extend(steps)
        self.offered += sum(len(step.tree.topology) for step in steps if step.tree is not None)
        return steps


def subject(model: StreamingLM, start: Sequence[int], tokens: int) -> Subject:
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=tokens))))
    return Subject(model, tuple(start), text)


def lively(model: StreamingLM, tokens: int = 12) -> Subject:
    """A text that does not repeat itself: comparing one that does would be weak."""
    texts = (subject(model, prompt(6, seed=seed), tokens) for seed in range(40))
    return next(here for here in texts if len(set(here.text)) >= 5)


@cache
def model_of(host: str, mode: str) -> StreamingLM:
    """Decoding leaves nothing behind (tested below), so tests share models."""
    return wrapped(host, mode)


@torch.no_grad()
def stock_text(model: StreamingLM, start: Sequence[int], tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([list(start)])
    out = model.port.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return tuple(out[0, len(start) :].tolist())
