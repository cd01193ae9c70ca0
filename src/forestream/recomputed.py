"""Layers that run again when gradients are wanted, instead of keeping what they would be taken through."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from forestream.cache import PassCache, StreamCache
from forestream.compiled import EagerLayers
from forestream.ports import LayerInputs


class RecomputedLayers(EagerLayers):
    """Layers whose activations are not kept: each runs again when its gradients are wanted."""

    def __call__(
        self,
        layers: range,
        states: Float[Tensor, "B Q D"],
        inputs: Mapping[int, LayerInputs],
        cache: StreamCache | PassCache | None,
    ) -> Float[Tensor, "B Q D"]:
        """As they are where no gradients are taken."""
        if not torch.is_grad_enabled():
            return super().__call__(layers, states, inputs, cache)
        for i in layers:
            # Not the host's own switch: it drops the cache, which maps values where they are rotated.
            states = recomputed(self.port.run, i, states, inputs[i], cache, use_reentrant=False)
        return states
