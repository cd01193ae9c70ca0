"""OPT: learned positions, norms before or after each block, embeddings that may be narrow."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from forestream.errors import UnsupportedModel
from forestream.ports.base import Port


class OPTPort(Port):
    """Positions enter at the input; projections lead from and to the embedding width."""

    learned_positions = True
    lora_targets = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    shared_inputs = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if self.config.layerdrop > 0:
            raise UnsupportedModel(
                f"opt has layerdrop={self.config.layerdrop}: the packed pass cannot skip layers at random in "
                "training. Set config.layerdrop = 0."
            )

    @property
    def decoder(self) -> Any:
        """The stack below the head."""
        model: Any = self.model
        return model.model.decoder

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The stock decoder layers, first to last."""
        layers: Sequence[nn.Module] = self.decoder.layers
        return layers

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Projected token plus position embedding, [B,N,D]; positions [B,N] are below `position_limit`."""
        decoder = self.decoder
        embedded: Tensor = decoder.embed_tokens(ids)
        if decoder.project_in is not None:
            embedded = decoder.project_in(embedded)
        # the module itself skips the table's two extra rows; its mask argument only serves to guess positions
        table: Tensor = decoder.embed_positions(None, position_ids=positions)
        return embedded + table

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm where there is one, then the projection to the embedding width: [B,n,D] -> [B,n,E]."""
        decoder = self.decoder
        if decoder.final_layer_norm is not None:
            hidden = decoder.final_layer_norm(hidden)
        if decoder.project_out is not None:
            hidden = decoder.project_out(hidden)
        return hidden
