"""From logits to the main stream's choice of token: the most probable one, or one drawn by its place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.config import SamplingSettings


class Processor(Protocol):
    """Changes the logits of the next token by the text before it: a `LogitsProcessor` of the host library is one.

    It is called once for each token of the text, in order, and never for a draft that is rejected.
    """

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"], /) -> Float[Tensor, "1 V"]: ...


def greedy(logits: Float[Tensor, "N V"]) -> list[int]:
    """The most probable token of each row; exact ties go to the lowest id."""
    # max names the first of equal values, as argmax does, and is several times as fast on half-precision rows.
    choices: list[int] = logits.max(dim=-1).indices.tolist()
    return choices


def draw(scores: Float[Tensor, " V"], seed: int, row: int, place: int) -> int:
    """A token from the law softmax(scores); the randomness depends on (seed, row, place in the text) alone.

    Every token waits for an exponential time of its own, at the rate of its probability, and the first one comes. A
    rounding of the logits can change the outcome only where the first two come at the same time up to that rounding,
    so that the same text is drawn by passes of any shape; with a sum over the vocabulary it would be felt far more
    often.
    """
    counter = np.array([0, 0, row, place], dtype=np.uint64)  # by default large rows would become floats
    generator = np.random.Generator(np.random.Philox(key=seed, counter=counter))
    times = torch.from_numpy(generator.standard_exponential(len(scores)))
    return int((scores.double().cpu() - times.log()).argmax())


def acceptable(scores: Float[Tensor, " V"], drafts: Sequence[int], settings: SamplingSettings) -> int | None:
    """The most probable of `drafts` that the lossy rule of `settings` lets pass, or None. Not exact."""
    law = scores.double().softmax(dim=-1)
    threshold = settings.threshold or 0.0
    best = float(law.max())
    if settings.accept == "typical":
        entropy = float(-(law * law.clamp_min(1e-300).log()).sum())
        least = min(threshold, sqrt(threshold) * exp(-entropy))
    elif settings.accept == "top_k":
        least = float(law.topk(min(int(threshold), len(law))).values[-1])
    else:
        least = threshold * best
    probability, draft = max(((float(law[draft]), -draft) for draft in drafts), default=(-1.0, 0))
    return -draft if probability >= least and probability > 0 else None
