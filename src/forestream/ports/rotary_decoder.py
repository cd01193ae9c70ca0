"""Hosts of the Llama build: embedding, rotary layers, one final norm. Llama, Mistral, Phi-3, Qwen2, Qwen3."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from forestream.ports.base import Port, Rotary


class RotaryDecoderPort(Port):
    """`embed_tokens`, `layers`, `rotary_emb` and `norm` of `model.model`; full attention in every layer."""

    lora_targets: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    shared_inputs: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

    @property
    def decoder(self) -> Any:
        """The stack below the head."""
        return self.model.model

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The stock decoder layers, first to last."""
        layers: Sequence[nn.Module] = self.decoder.layers
        return layers

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token embedding [B,N,D] of ids [B,N]; positions enter in the layers."""
        embedded: Tensor = self.decoder.embed_tokens(ids)
        return embedded

    def rotary_kind(self, i: int) -> str:
        """One table for all layers."""
        return "rotary"

    def rotary(self, hidden: Tensor, positions: Tensor, i: int) -> Rotary | None:
        """Cosine and sine [B,n,d] for positions [B,n]."""
        tables: Rotary = self.decoder.rotary_emb(hidden, position_ids=self._settled(positions, i))
        return tables

    def rope(self, i: int) -> dict[str, Any]:
        """The rotary settings of layer i, as the config holds them."""
        settings: dict[str, Any] = self.config.rope_parameters
        return settings

    def _settled(self, positions: Tensor, i: int) -> Tensor:
        # "dynamic" tables grow, and stay grown, once a call reaches past the limit. Main positions never
        # do; a stream's may, near the end, and must not disturb the next call.
        if self.rope(i)["rope_type"] != "dynamic":
            return positions
        return positions.clamp(max=self.position_limit - 1)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Text lengths behind which "longrope" takes other frequencies."""
        ropes = map(self.rope, range(self.num_layers))
        return tuple(
            {int(rope["original_max_position_embeddings"]) for rope in ropes if rope["rope_type"] == "longrope"}
        )

    def room(self, prompt: int) -> int:
        """`position_limit`; for prompts below the border of "longrope" frequencies, that border."""
        return min((border for border in self.borders if prompt <= border), default=self.position_limit)

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm, [B,n,D] -> [B,n,D]."""
        finished: Tensor = self.decoder.norm(hidden)
        return finished


class MistralPort(RotaryDecoderPort):
    """One optional window for all layers."""

    def window(self, i: int) -> int | None:
        """`config.sliding_window`, the same in every layer."""
        window: int | None = self.config.sliding_window
        return window


class Phi3Port(MistralPort):
    """Mistral's windows; fused projections."""

    lora_targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


class QwenPort(RotaryDecoderPort):
    """Windows in the layers that `config.layer_types` names."""

    def window(self, i: int) -> int | None:
        """`config.sliding_window` in sliding layers, None in the others."""
        if self.config.layer_types[i] != "sliding_attention":
            return None
        window: int | None = self.config.sliding_window
        return window
