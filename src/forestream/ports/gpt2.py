"""GPT-2: learned positions, projections stored transposed."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from forestream.errors import UnsupportedModel
from forestream.ports.base import Port


class GPT2Port(Port):
    """Positions enter at the input; the stack calls its layers `h`."""

    learned_positions = True
    lora_targets = ("c_attn", "c_proj", "c_fc")
    transposed_weights = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if self.config.add_cross_attention:
            raise UnsupportedModel(
                "gpt2 has add_cross_attention=True; a decoder that reads nothing but its own text is needed."
            )

    @property
    def decoder(self) -> Any:
        """The stack below the head."""
        return self.model.transformer

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The stock decoder layers, first to last."""
        layers: Sequence[nn.Module] = self.decoder.h
        return layers

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token plus position embedding with dropout, [B,N,D]; positions [B,N] are below `position_limit`."""
        embedded: Tensor = self.decoder.drop(self.decoder.wte(ids) + self.decoder.wpe(positions))
        return embedded

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm, [B,n,D] -> [B,n,D]."""
        finished: Tensor = self.decoder.ln_f(hidden)
        return finished
