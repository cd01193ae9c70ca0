"""Phi (1, 1.5, 2): parallel residual, partly rotated heads, dropout on the embedding."""

from torch import Tensor

from forestream.ports.rotary_decoder import RotaryDecoderPort


class PhiPort(RotaryDecoderPort):
    """The Llama build with other names."""

    lora_targets = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token embedding with its dropout, [B,N,D] for ids [B,N]."""
        embedded: Tensor = self.decoder.embed_dropout(self.decoder.embed_tokens(ids))
        return embedded

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm, [B,n,D] -> [B,n,D]."""
        finished: Tensor = self.decoder.final_layernorm(hidden)
        return finished
