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


def _room(layers: int, *size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An empty store [layers, *size]."""
    # The first place of its memory stays empty: compiled code makes a store that begins its memory a case apart.
    return torch.zeros(1 + layers, *size, dtype=dtype, device=device)[1:]


class StreamCache:
    """Committed region and scratch region of every layer.

    Args:
        shapes: what every layer keeps.
        capacity: slots in all, committed text and the largest pass behind it.
        rows: B.

    Attributes:
        lengths: tokens committed, per row.
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
        self.lengths = [0] * rows
        self.value_map: ValueMap | None = None
        self.shapes = tuple(shapes)
        self._written = [0] * len(shapes)
        stacks = []
        for shape in dict.fromkeys(shapes):
            layers = tuple(i for i, kept in enumerate(shapes) if kept == shape)
            size = (len(layers), rows, shape.heads, capacity)
            keys, values = (
                _room(*size, width, dtype=dtype, device=device) for width in (shape.key_size, shape.value_size)
            )
            stacks.append(_Stack(layers, keys, values))
        self._take(stacks)

    def _take(self, stacks: Sequence[_Stack]) -> None:
        self._stacks = tuple(stacks)
        stores = {
            layer: (stack.keys[place], stack.values[place])
            for stack in stacks
            for place, layer in enumerate(stack.layers)
        }
        self._stores = [stores[layer] for layer in range(len(self.shapes))]

    @property
    def committed(self) -> int:
        """P, tokens committed in the longest row."""
        return max(self.lengths)

    @property
    def rows(self) -> int:
        """B."""
        return len(self.lengths)

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

        K reaches to the end of the longest row's pass; in a shorter row, what lies behind its own pass is stale.

        Raises:
            CacheError: the pass does not fit behind the committed text.
        """
        slots = keys.shape[2]
        end = self._end(slots)
        if self.value_map is not None:
            values = self.value_map(values)
        stored_keys, stored_values = self._stores[layer]
        if len(set(self.lengths)) == 1:
            stored_keys[:, :, end - slots : end] = keys
            stored_values[:, :, end - slots : end] = values
        else:
            for row, start in enumerate(self.lengths):
                stored_keys[row, :, start : start + slots] = keys[row]
                stored_values[row, :, start : start + slots] = values[row]
        self._written[layer] = slots
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def scratch(self, slots: int) -> Int[Tensor, " Q"] | Int[Tensor, "B Q"]:
        """Places of the slots of a pass behind the committed text, per row if there are several.

        Raises:
            CacheError: the pass does not fit behind the committed text.
        """
        device = self._stores[0][0].device
        places = torch.arange(self._end(slots) - slots, self._end(slots), device=device)
        if self.rows == 1:
            return places
        return places + (torch.tensor(self.lengths, device=device)[:, None] - self.committed)

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
    def commit(self, layers: range, path: Sequence[int], row: int = 0) -> None:
        """Keep the slots in `path` (increasing) of the pass just written by `layers` in `row`, in that order.

        `advance` follows once every layer has committed: trunk and stream layers have indices of their own when
        branches were pruned in between.
        """
        start = self.lengths[row]
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
                store[:, row, :, target] = store[:, row, :, source]

    def advance(self, tokens: int, row: int = 0) -> None:
        """Count `tokens` more of `row` as committed."""
        self.lengths[row] += tokens

    def rewind(self, committed: int, row: int = 0) -> None:
        """Forget everything behind the first `committed` tokens of `row`.

        Raises:
            CacheError: fewer tokens than that are committed.
        """
        if not 0 <= committed <= self.lengths[row]:
            raise CacheError(f"cannot rewind to {committed} tokens; {self.lengths[row]} are committed")
        self.lengths[row] = committed

    def row(self, row: int) -> StreamCache:
        """The cache of one row alone, on the same memory; its length is this one's only after `advance` or `rewind`."""
        alone = object.__new__(StreamCache)
        alone.__dict__.update(self.__dict__)
        alone.lengths = [self.lengths[row]]
        alone._written = [0] * len(self.shapes)
        alone._take(
            [
                _Stack(stack.layers, stack.keys[:, row : row + 1], stack.values[:, row : row + 1])
                for stack in self._stacks
            ]
        )
        return alone

    @torch.no_grad()
    def copy_row(self, source: int, target: int) -> None:
        """Make row `target` what row `source` is."""
        length = self.lengths[source]
        for stack in self._stacks:
            for store in (stack.keys, stack.values):
                store[:, target, :, :length] = store[:, source, :, :length]
        self.lengths[target] = length

    @torch.no_grad()
    def keep(self, rows: Sequence[int]) -> None:
        """Let go of all rows but `rows`, which are then numbered in this order."""
        stacks = []
        for stack in self._stacks:
            kept = []
            for store in (stack.keys, stack.values):
                size = (len(store), len(rows), *store.shape[2:])
                kept.append(_room(*size, dtype=store.dtype, device=store.device))
                torch.index_select(store, 1, torch.tensor(rows, device=store.device), out=kept[-1])
            stacks.append(_Stack(stack.layers, *kept))
        self._take(stacks)
        self.lengths = [self.lengths[row] for row in rows]

    @torch.no_grad()
    def adopt(self, other: StreamCache) -> None:
        """Take over what is committed in `other`, a cache of the same model and number of rows."""
        length = other.committed
        for own, theirs in zip(self._stacks, other._stacks, strict=True):
            own.keys[:, :, :, :length] = theirs.keys[:, :, :, :length]
            own.values[:, :, :, :length] = theirs.values[:, :, :, :length]
        self.lengths = list(other.lengths)

    def content(self, layer: int) -> tuple[Float[Tensor, "B h P d"], Float[Tensor, "B h P e"]]:
        """Committed keys and values of one layer, of a cache whose rows are of one length."""
        keys, values = self._stores[layer]
        return keys[:, :, : self.committed], values[:, :, : self.committed]
