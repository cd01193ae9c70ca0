"""From logits to the main stream's choice of token."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def greedy(logits: Float[Tensor, "N V"]) -> list[int]:
    """The most probable token of each row; exact ties go to the lowest id."""
    choices: list[int] = logits.argmax(dim=-1).tolist()
    return choices
