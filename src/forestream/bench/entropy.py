"""How certain the model is of its own text: what decides how much of it can be foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from forestream.model import StreamingLM
from forestream.packing import Pack

ROWS: Final = 128
"""Logits held at a time."""


@torch.inference_mode()
def mean_entropy(model: StreamingLM, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Entropy of the model's law of the next token, in nats, mean over the places of `text`.

    The law is the model's own, before temperature and cuts. One pass over prompt and text.
    """
    read = [*prompt, *text[:-1]]
    cache = model.new_cache(len(read))
    ids = torch.tensor([read], device=model.device)
    states = model(ids, Pack.text(len(read), torch.empty(1, 0, dtype=torch.long), 0), cache).main[0, len(prompt) - 1 :]
    total = 0.0
    for rows in states.split(ROWS):
        law = model.logits(rows[None])[0].float().log_softmax(dim=-1)
        # A token that cannot come has no part in it: 0 * log 0 is 0.
        total -= float((law.exp() * law).nan_to_num(0.0).sum())
    return total / len(states)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's: the correlation of the ranks, from -1 to 1; None where either does not vary. Ties share a rank."""
    ranks = np.stack([_ranks(np.asarray(values, dtype=float)) for values in (x, y)])
    if len(x) < 2 or not ranks.std(axis=1).all():
        return None
    matrix: NDArray[np.float64] = np.asarray(np.corrcoef(ranks))
    return round(float(matrix[0, 1]), 4)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[place]
