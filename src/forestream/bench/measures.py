"""What a reader of a text waits for, how much repeats differ, and which passes had drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from forestream.config import DecodeSettings, JsonConfig
from forestream.steps import Counters, Step


def arrivals(texts: Sequence[Sequence[Step]]) -> list[float]:
    """Seconds from the start at which each pass of texts that are decoded together delivers its tokens.

    Steps hold a text's share of a pass; all of the shares are the pass, and everybody waits for it.
    """
    now, found = 0.0, []
    for number in range(max(map(len, texts), default=0)):
        now += sum(steps[number].seconds for steps in texts if len(steps) > number)
        found.append(now)
    return found


@dataclass
class Latency:
    """Waits of a reader, in seconds, of all texts and repeats.

    Attributes:
        first: from the start to a text's first token, whichever token that is.
        passes: from one pass that delivered tokens to the next, once each.
        tokens: from token to token: the first one of a pass has waited for the pass, the others arrive with it and have
            waited 0.
    """

    first: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def add(self, texts: Sequence[Sequence[Step]]) -> None:
        """Texts that were decoded together."""
        times = arrivals(texts)
        for steps in texts:
            self.first += times[:1] if steps else []
            for number, step in enumerate(steps[1:], start=1):
                gap = times[number] - times[number - 1]
                self.passes.append(gap)
                self.tokens += [gap, *[0.0] * (len(step.tokens) - 1)]

    def record(self) -> dict[str, Any]:
        """Percentiles, JSON-ready; null where nobody waited."""
        return {
            "first_token": percentiles(self.first, (50, 95)),
            "between_tokens": percentiles(self.tokens, (50, 95, 99)),
            "between_passes": percentiles(self.passes, (50, 95, 99)),
        }


def percentiles(values: Sequence[float], which: Sequence[int]) -> dict[str, float] | None:
    """Percentiles of `values` by name ("p50"), on the line between the two nearest values; None of no values."""
    if not values:
        return None
    found = np.percentile(values, list(which))
    return {f"p{one}": round(float(value), 6) for one, value in zip(which, found, strict=True)}


def over_repeats(totals: Sequence[Counters]) -> dict[str, Any]:
    """The spread of whole runs.

    Args:
        totals: of each repeat, the counters of all its prompts together.
    """
    seconds, speeds = [one.decode_seconds for one in totals], [one.tokens_per_second for one in totals]
    return {
        "repeats": len(totals),
        "decode_seconds": {name: round(value, 4) for name, value in _spread(seconds).items()},
        "tokens_per_second": {name: round(value, 3) for name, value in _spread(speeds).items()},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def drafts_of(texts: Iterable[Sequence[Step]], settings: JsonConfig | None) -> dict[str, Any]:
    """How many passes had drafts to check, and why the others had none.

    Reasons: `settings` ask for none; every draft was `pruned`; it was the `last_token` that the cap allows; there was
    `nothing_to_draft`, by the drafter, a grammar or a schedule.
    """
    found, passes, reasons = list(texts), 0, Counter[str]()
    # Methods without settings of trees may draft all the same, in ways of their own.
    asked = _asks(settings) or any(len(step.kept) > 1 for steps in found for step in steps)
    cap = settings.max_new_tokens if isinstance(settings, DecodeSettings) else None
    for steps in found:
        written = 0
        for step in steps:
            if step.tree is not None:
                passes += 1
                if len(step.kept) < 2:
                    reasons[_why_none(step, written, cap) if asked else "settings"] += 1
            written += len(step.tokens)
    return {"passes_with_drafts": passes - reasons.total(), "passes_without": dict(sorted(reasons.items()))}


def _asks(settings: JsonConfig | None) -> bool:
    """Whether settings of draft trees ask for any."""
    if not isinstance(settings, DecodeSettings):
        return False
    if settings.lookup_beside or settings.lookup_behind:
        return True
    return settings.streams != 0 and (settings.tree != "budget" or settings.nodes > 1)


def _why_none(step: Step, written: int, cap: int | None) -> str:
    assert step.tree is not None
    if len(step.tree.tokens) > 1:
        return "pruned"
    if step.finish == "length" or written + 1 == cap:
        return "last_token"
    return "nothing_to_draft"
