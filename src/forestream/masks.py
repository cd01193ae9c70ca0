"""The predicate rendered as the additive mask that the host's attention adds to its scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.packing import Pack


def additive(
    pack: Pack,
    committed: Sequence[int],
    positions: Int[Tensor, "B Q"],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "B 1 Q K"]:
    """Mask of one layer kind over K keys: 0 where visible, the dtype's minimum elsewhere.

    A row's keys are its committed text, then its pass; K is enough for the longest row, and what lies behind a shorter
    one is visible to nobody. The minimum, not -inf: a row without any visible key must not turn into NaN. A sliding
    layer (`window` is not None) also asks for position distance < window.

    Args:
        committed: tokens committed, one number for all rows or one per row.
    """
    rows, slots = max(len(positions), len(committed)), len(pack)
    lengths = list(committed) * (rows if len(committed) == 1 else 1)
    positions, own = positions.expand(rows, -1), pack.visible.expand(rows, -1, -1)
    longest = max(lengths)
    visible = torch.zeros(rows, slots, longest + slots, dtype=torch.bool)
    for alike, length in _runs(lengths):
        visible[alike, :, :length] = True
        visible[alike, :, length : length + slots] = own[alike]
    if window is not None:
        keys = torch.arange(longest + slots).repeat(rows, 1)
        for alike, length in _runs(lengths):
            keys[alike, length : length + slots] = positions[alike]
        visible &= (positions[:, :, None] - keys[:, None, :]) < window
    mask = torch.zeros(visible.shape, dtype=dtype)
    mask.masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[:, None].to(device)


def _runs(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Neighbouring rows of one length, taken together."""
    borders = [row for row in range(len(lengths)) if row == 0 or lengths[row] != lengths[row - 1]]
    return [(slice(a, b), lengths[a]) for a, b in zip(borders, [*borders[1:], len(lengths)], strict=True)]
