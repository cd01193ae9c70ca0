"""GPT-NeoX and Pythia: fused projections, parallel or sequential residual, a cache called `layer_past`."""

from typing import Any

from torch import Tensor

from forestream.ports.rotary_decoder import RotaryDecoderPort


class GPTNeoXPort(RotaryDecoderPort):
    """The Llama build with other names."""

    lora_targets = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")

    @property
    def decoder(self) -> Any:
        """The stack below the head."""
        return self.model.gpt_neox

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token embedding with its dropout, [B,N,D] for ids [B,N]."""
        embedded: Tensor = self.decoder.emb_dropout(self.decoder.embed_in(ids))
        return embedded

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm, [B,n,D] -> [B,n,D]."""
        finished: Tensor = self.decoder.final_layer_norm(hidden)
        return finished
