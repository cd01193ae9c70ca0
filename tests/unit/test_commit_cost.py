"""What a commit moves depends on the path alone, and nothing is reallocated during a text (case D07)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.ports.base import KVShape
from forestream.steps import tokens_of
from subject import model_of
from wrapped import prompt
from writers import foreseen

SHAPES = (KVShape(2, 8, 8), KVShape(2, 8, 8), KVShape(1, 4, 6), KVShape(2, 8, 8))
LAYERS = range(len(SHAPES))
PATHS = ((0,), (0, 1, 2), (0, 2, 5), (0, 1, 4), (0, 6), (0, 3, 4, 5, 6))
SLOTS = 7


class Moved(TorchDispatchMode):
    """Counts the bytes of all that operations make or write; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(one.nbytes for one in tree_leaves(found) if isinstance(one, Tensor))
        return found


def bytes_of_a_commit(committed: int, path: Sequence[int], rows: int = 1) -> int:
    cache = StreamCache(SHAPES, committed + SLOTS, rows=rows)
    cache.lengths = [committed] * rows
    cache.begin(LAYERS)
    for layer, shape in enumerate(SHAPES):
        keys, values = (torch.rand(rows, shape.heads, SLOTS, width) for width in (shape.key_size, shape.value_size))
        cache.update(keys, values, layer)
    with Moved() as moved:
        cache.commit(LAYERS, path)
        cache.advance(len(path))
    return moved.bytes


def by_hand(path: Sequence[int]) -> int:
    """Each key and value of a node that is not in its place is gathered, copied and written back, 4 bytes a number."""
    still = next((place for place, slot in enumerate(path) if place != slot), len(path))
    numbers = sum(shape.heads * (shape.key_size + shape.value_size) for shape in SHAPES)
    return 4 * numbers * (len(path) - still)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("path", PATHS)
def test_a_commit_costs_the_same_behind_any_text(path: tuple[int, ...], rows: int) -> None:
    """At 16 and at 4,000 committed tokens, and no more than a few times what has to move."""
    short, long = bytes_of_a_commit(16, path, rows), bytes_of_a_commit(4000, path, rows)
    assert short == long
    assert short <= 3 * by_hand(path) + 8 * 8 * len(path)
    assert (short == 0) == (by_hand(path) == 0), "what is in place already stays where it is"


def test_the_count_notices_a_copy_of_the_text() -> None:
    cache = StreamCache(SHAPES, 100)
    with Moved() as moved:
        cache.keep([0])
    assert moved.bytes > 100 * 4 * sum(shape.heads * (shape.key_size + shape.value_size) for shape in SHAPES)


@pytest.mark.parametrize("carriers", ["deferred", "fused"])
def test_a_text_stays_in_the_stores_it_began_in(carriers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, start, places = model_of("llama", "joint"), prompt(5), []
    settings = DecodeSettings(max_new_tokens=60, nodes=8, carriers=carriers)
    advance = StreamCache.advance

    def watched(cache: StreamCache, tokens: int, row: int = 0) -> None:
        stores = [cache.store(layer, cache._written[layer]) for layer in range(4)]
        places.append((cache.capacity, tuple(one.untyped_storage().data_ptr() for pair in stores for one in pair)))
        advance(cache, tokens, row)

    truth = tokens_of(list(plain(model, start, settings)))
    monkeypatch.setattr(StreamCache, "advance", watched)
    with foreseen(start + truth, rate=0.7):
        assert tokens_of(list(decode(model, start, settings))) == truth
    assert len(places) > 15
    assert len(set(places)) == 1
