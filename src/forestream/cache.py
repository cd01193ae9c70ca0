"""Keys and values of the committed text, with room behind it for the pass under way.

Every layer holds K and V as [B, h, capacity, d]. A pass writes all its slots behind the committed ones; nothing is
reallocated and the committed region is never copied. `commit` moves the accepted nodes' keys and values forward and
forgets the rest: streams and rejected nodes leave no trace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.errors import CacheError
from forestream.ports.base import KVShape

ValueMap = Callable[[Tensor], Tensor]


class PassCache:
    """Holds nothing: hands keys and values of the pass straight back, with the values mapped (training)."""

    def __init__(self, value_map: ValueMap) -> None:
        self.value_map = value_map

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return keys, self.value_map(values)


@dataclass(frozen=True)
class _Stack:
    """Stores of the layers that keep keys and values of one shape, in one tensor: [layers, B, h, capacity, d]."""

    layers: tuple[int, ...]
    keys: Float[Tensor, "L B h cap d"]
    values: Float[Tensor, "L B h cap e"]

    def part(self, layers: range) -> slice:
        """Where `layers` lie in the stack."""
        return slice(bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop))


class StreamCache:
    """Committed region and scratch region of every layer.

    Args:
        shapes: what every layer keeps.
        capacity: slots in all, committed text and the largest pass behind it.
        rows: B.

    Attributes:
        committed: P, tokens committed in every layer.
        value_map: applied to the values of the pass before they are stored (value rotation), or None.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rows: int = 1,
    ) -> None:
        self.capacity = capacity
        self.committed = 0
        self.value_map: ValueMap | None = None
        self.shapes = tuple(shapes)
        self._written = [0] * len(shapes)
        self._stacks: list[_Stack] = []
        stores: dict[int, tuple[Tensor, Tensor]] = {}
        for shape in dict.fromkeys(shapes):
            layers = tuple(i for i, kept in enumerate(shapes) if kept == shape)
            # The first place stays empty: compiled code takes a store that begins its memory for a special case.
            keys, values = (
                torch.zeros(1 + len(layers), rows, shape.heads, capacity, size, dtype=dtype, device=device)[1:]
                for size in (shape.key_size, shape.value_size)
            )
            self._stacks.append(_Stack(layers, keys, values))
            stores.update(zip(layers, zip(keys, values, strict=True), strict=True))
        self._stores = [stores[layer] for layer in range(len(shapes))]

    def begin(self, layers: range) -> None:
        """Open a pass through `layers`; whatever an earlier, uncommitted pass wrote there is dropped."""
        for layer in layers:
            self._written[layer] = 0

    def _end(self, slots: int) -> int:
        """Where a pass of `slots` slots ends.

        Raises:
            CacheError: the pass does not fit behind the committed text.
        """
        end = self.committed + slots
        if end > self.capacity:
            raise CacheError(f"a pass of {slots} slots does not fit: {self.committed} of {self.capacity} are committed")
        return end

    @torch.no_grad()
    def update(
        self,
        keys: Float[Tensor, "B h Q d"],
        values: Float[Tensor, "B h Q e"],
        layer: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B h K d"], Float[Tensor, "B h K e"]]:
        """Called by the host's attention: store the pass behind the committed text, return both together.

        Raises:
            CacheError: the pass does not fit behind the committed text.
        """
        end = self._end(keys.shape[2])
        if self.value_map is not None:
            values = self.value_map(values)
        stored_keys, stored_values = self._stores[layer]
        stored_keys[:, :, self.committed : end] = keys
        stored_values[:, :, self.committed : end] = values
        self._written[layer] = keys.shape[2]
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def scratch(self, slots: int) -> Int[Tensor, " Q"]:
        """Places of the slots of a pass behind the committed text.

        Raises:
            CacheError: the pass does not fit behind the committed text.
        """
        return torch.arange(self.committed, self._end(slots), device=self._stores[0][0].device)

    def store(self, layer: int, slots: int) -> tuple[Float[Tensor, "B h cap d"], Float[Tensor, "B h cap e"]]:
        """Keys and values of a layer, for a caller that writes `slots` slots of a pass there itself."""
        self._written[layer] = slots
        return self._stores[layer]

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
        for layer in layers:
            if not self._written[layer]:
                raise CacheError(f"layer {layer} is committed before any pass wrote to it")
        source = torch.tensor([start + slot for slot in path[still:]], device=self._stores[0][0].device)
        target = slice(start + still, start + len(path))
        for stack in self._stacks:
            part = stack.part(layers)
            for store in (stack.keys[part], stack.values[part]):
                store[:, :, :, target] = store[:, :, :, source]

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

    def content(self, layer: int) -> tuple[Float[Tensor, "B h P d"], Float[Tensor, "B h P e"]]:
        """Committed keys and values of one layer."""
        keys, values = self._stores[layer]
        return keys[:, :, : self.committed], values[:, :, : self.committed]
