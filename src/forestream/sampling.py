"""From logits to the main stream's choice of token."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def greedy(logits: Float[Tensor, "N V"]) -> list[int]:
    """The most probable token of each row; exact ties go to the lowest id."""
    # max names the first of equal values, as argmax does, and is several times as fast on half-precision rows.
    choices: list[int] = logits.max(dim=-1).indices.tolist()
    return choices
