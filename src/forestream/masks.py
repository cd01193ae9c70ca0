"""The predicate rendered as the additive mask that the host's attention adds to its scores."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.packing import Pack


def additive(
    pack: Pack,
    committed: int,
    positions: Int[Tensor, "B Q"],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "B 1 Q K"]:
    """Mask of one layer kind over K = committed + Q keys: 0 where visible, the dtype's minimum elsewhere.

    The minimum, not -inf: a row without any visible key must not turn into NaN. A sliding layer (`window` is not
    None) also asks for position distance < window.
    """
    rows, slots = pack.nodes.shape
    visible = torch.ones(rows, slots, committed + slots, dtype=torch.bool)
    visible[:, :, committed:] = pack.visible
    if window is not None:
        keys = torch.cat([torch.arange(committed).expand(rows, -1), positions], dim=1)
        visible &= (positions[:, :, None] - keys[:, None, :]) < window
    mask = torch.zeros(visible.shape, dtype=dtype)
    mask.masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[:, None].to(device)
