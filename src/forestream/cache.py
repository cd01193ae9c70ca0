"""Keys and values of the committed text, with room behind it for the pass under way.

Every layer holds K and V as [B, h, capacity, d]. A pass writes all its slots behind the committed ones; nothing is
reallocated and the committed region is never copied. `commit` moves the accepted nodes' keys and values forward and
forgets the rest: streams and rejected nodes leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.errors import CacheError

ValueMap = Callable[[Tensor], Tensor]


class PassCache:
    """Holds nothing: hands keys and values of the pass straight back, with the values mapped (training)."""

    def __init__(self, value_map: ValueMap) -> None:
        self.value_map = value_map

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return keys, self.value_map(values)


class StreamCache:
    """Committed region and scratch region of every layer.

    Attributes:
        committed: P, tokens committed in every layer.
        value_map: applied to the values of the pass before they are stored (value rotation), or None.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        self.value_map: ValueMap | None = None
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._written = [0] * layers

    def begin(self, layers: range) -> None:
        """Open a pass through `layers`; whatever an earlier, uncommitted pass wrote there is dropped."""
        for layer in layers:
            self._written[layer] = 0

    @torch.no_grad()
    def update(
        self,
        keys: Float[Tensor, "B h Q d"],
        values: Float[Tensor, "B h Q d"],
        layer: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B h K d"], Float[Tensor, "B h K d"]]:
        """Called by the host's attention: store the pass behind the committed text, return both together.

        Raises:
            CacheError: the pass does not fit behind the committed text.
        """
        start, end = self.committed, self.committed + keys.shape[2]
        if end > self.capacity:
            raise CacheError(f"a pass of {keys.shape[2]} slots does not fit: {start} of {self.capacity} are committed")
        if self.value_map is not None:
            values = self.value_map(values)
        stored_keys, stored_values = self._store(self._keys, layer, keys), self._store(self._values, layer, values)
        stored_keys[:, :, start:end] = keys
        stored_values[:, :, start:end] = values
        self._written[layer] = keys.shape[2]
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def _store(self, stores: list[Tensor | None], layer: int, like: Tensor) -> Tensor:
        store = stores[layer]
        if store is None:
            store = like.new_zeros(like.shape[0], like.shape[1], self.capacity, like.shape[3])
            stores[layer] = store
        return store

    def expect(self, layers: range, slots: int) -> None:
        """Check that each of `layers` wrote `slots` slots.

        Raises:
            CacheError: one did not, as happens when a host swallows an unknown cache keyword.
        """
        for layer in layers:
            if self._written[layer] != slots:
                raise CacheError(f"layer {layer} wrote {self._written[layer]} slots; the pass has {slots}")

    @torch.no_grad()
    def commit(self, layers: range, path: Sequence[int]) -> None:
        """Keep the slots in `path` (increasing) of the pass just written by `layers`, in that order.

        `advance` follows once every layer has committed: trunk and stream layers have indices of their own when
        branches were pruned in between.
        """
        start = self.committed
        # A path that starts 0, 1, ... is in place already; only what lies behind that prefix moves.
        still = next((i for i, slot in enumerate(path) if i != slot), len(path))
        if still == len(path):
            return
        source = torch.tensor(path[still:]) + start
        target = slice(start + still, start + len(path))
        for layer in layers:
            for store in (self._keys[layer], self._values[layer]):
                if store is None:
                    raise CacheError(f"layer {layer} is committed before any pass wrote to it")
                store[:, :, target] = store[:, :, source.to(store.device)]

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as committed."""
        self.committed += tokens

    def rewind(self, committed: int) -> None:
        """Forget everything behind the first `committed` tokens.

        Raises:
            CacheError: fewer tokens than that are committed.
        """
        if not 0 <= committed <= self.committed:
            raise CacheError(f"cannot rewind to {committed} tokens; {self.committed} are committed")
        self.committed = committed

    def content(self, layer: int) -> tuple[Float[Tensor, "B h P d"], Float[Tensor, "B h P d"]]:
        """Committed keys and values of one layer.

        Raises:
            CacheError: nothing was written yet.
        """
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise CacheError(f"layer {layer} holds nothing yet")
        return keys[:, :, : self.committed], values[:, :, : self.committed]
