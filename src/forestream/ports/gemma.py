"""Gemma hosts: scaled embedding, soft-capped head, layers of two kinds from the second generation on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forestream.errors import UnsupportedModel
from forestream.ports.base import Rotary
from forestream.ports.rotary_decoder import QwenPort, RotaryDecoderPort


class GemmaPort(RotaryDecoderPort):
    """First generation. The embedding module itself multiplies by the square root of the width."""


class _SoftcappedPort(QwenPort):
    """Windows by layer type, and a head that may squash its logits."""

    def head(self, finished: Tensor, rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """LM head, then cap * tanh(logits / cap) where the config sets a cap: [B,n,E] -> [B,n,V], or [B,n,K]."""
        logits = super().head(finished, rows)
        cap: float | None = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class Gemma2Port(_SoftcappedPort):
    """Attention scores are soft-capped too, which the host library computes in eager attention only."""

    implementations = ("eager",)


class Gemma3Port(_SoftcappedPort):
    """Text-only third generation: sliding and full layers rotate by different tables."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if self.config.use_bidirectional_attention:
            raise UnsupportedModel(
                "gemma3_text has use_bidirectional_attention=True; drafting ahead needs causal attention."
            )

    def rotary_kind(self, i: int) -> str:
        """The layer's attention type."""
        kind: str = self.config.layer_types[i]
        return kind

    def rotary(self, hidden: Tensor, positions: Tensor, i: int) -> Rotary | None:
        """Cosine and sine [B,n,d] of layer i's type for positions [B,n]."""
        tables: Rotary = self.decoder.rotary_emb(hidden, self._settled(positions, i), self.rotary_kind(i))
        return tables

    def rope(self, i: int) -> dict[str, Any]:
        """The rotary settings of layer i's type."""
        settings: dict[str, Any] = self.config.rope_parameters[self.rotary_kind(i)]
        return settings
