"""Attention that folds grouped query heads into the query axis, instead of copying keys and values to every head.

Hosts call it through the host library's own registry of attention functions, under the name `GROUPED`.
"""

from __future__ import annotations

from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from forestream.ports import Port
from forestream.ports.parity import TOLERANCE, probe

GROUPED: Final = "forestream_grouped"
"""Name of `grouped_attention` in the host library's registry, for `model.set_attn_implementation`."""


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "B H Q d"],
    key: Float[Tensor, "B h K d"],
    value: Float[Tensor, "B h K e"],
    attention_mask: Float[Tensor, "B 1 Q K"] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B Q H e"], None]:
    """Softmax attention of H query heads over h key heads, H a multiple of h, under an additive mask.

    The H / h query heads of a group become further queries of their key head. The mask is the same for all heads.
    """
    rows, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], groups * queries, query.shape[3])
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, dropout_p=dropout if module.training else 0.0, scale=scaling
    )
    return out.reshape(rows, heads, queries, value.shape[3]).transpose(1, 2).contiguous(), None


def group_heads(port: Port) -> None:
    """Let the host attend by `grouped_attention`, if it uses the stock function for masks of any kind.

    A family whose attention does more than the stock function (caps, sinks) shows in its logits and stays as it is.
    """
    if port.attention != "sdpa":
        return
    before = probe(port)
    port.model.config._attn_implementation = GROUPED
    difference = float((probe(port) - before).abs().max())
    if not difference <= TOLERANCE[next(port.model.parameters()).dtype] * float(before.abs().max()):
        port.model.config._attn_implementation = port.attention


def _every_mask(*args: Any, **keywords: Any) -> Tensor | None:
    """The host's own forward leaves causal masks to sdpa where it can; here a mask is always needed."""
    mask: Tensor | None = sdpa_mask(*args, **{**keywords, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, _every_mask)
