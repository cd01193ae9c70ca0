"""Commit = replay: after any sequence of passes the cache is what one pass over the accepted text would leave."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, DrawFn
from torch import Tensor

from forestream.cache import StreamCache
from forestream.errors import CacheError
from forestream.ports import KVShape
from oracle import assert_no_trace
from strategies import draft_trees

CAPACITY = 200
ROWS = 2
SHAPES = (KVShape(2, 3, 3), KVShape(1, 4, 2), KVShape(2, 3, 3), KVShape(2, 3, 3), KVShape(1, 4, 2))
LAYERS = len(SHAPES)
TRUNK, STREAM = range(3), range(3, LAYERS)
NOISE = 10_000


@dataclass(frozen=True)
class Pass:
    """A tree's tokens, its survivors, stream slots behind them, and the accepted path among the survivors."""

    tokens: tuple[int, ...]
    kept: tuple[int, ...]
    streams: int
    path: tuple[int, ...]

    @property
    def text(self) -> list[int]:
        return [self.tokens[self.kept[node]] for node in self.path]


@st.composite
def passes(draw: DrawFn) -> Pass:
    tree = draw(draft_trees(most=12))
    parents = tree.topology.parents
    kept = [0]
    for node in range(1, len(parents)):
        if parents[node] in kept and draw(st.integers(0, 3)):
            kept.append(node)
    end = draw(st.sampled_from(kept))
    path = tuple(kept.index(node) for node in tree.topology.path(end))
    return Pass(tree.tokens, tuple(kept), draw(st.integers(0, 4)), path)


def states(layer: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A fake writer: keys and values [2,h,Q,d] that tell rows, heads, layers and tokens apart."""
    shape = SHAPES[layer]
    token = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None]
    keys, values = (
        torch.arange(2 * shape.heads * size, dtype=torch.float32).view(2, shape.heads, 1, size) / 16
        for size in (shape.key_size, shape.value_size)
    )
    return token + keys + 100 * layer, -(token + values + 100 * layer)


def write(cache: StreamCache, layers: range, tokens: Sequence[int], before: Sequence[int]) -> None:
    """Write one pass and look at what each layer is handed back: the committed text and the pass, nothing else."""
    cache.begin(layers)
    for layer in layers:
        found = cache.update(*states(layer, tokens), layer)
        for got, wanted in zip(found, states(layer, [*before, *tokens]), strict=True):
            assert torch.equal(got, wanted)
    cache.expect(layers, len(tokens))


def run(cache: StreamCache, one: Pass, before: Sequence[int]) -> None:
    write(cache, TRUNK, one.tokens, before)
    mains = [one.tokens[node] for node in one.kept]
    write(cache, STREAM, [*mains, *range(NOISE, NOISE + one.streams)], before)
    for row in range(ROWS):
        cache.commit(TRUNK, [one.kept[node] for node in one.path], row)
        cache.commit(STREAM, one.path, row)
        cache.advance(len(one.path), row)


def replay(text: Sequence[int]) -> StreamCache:
    cache = StreamCache(SHAPES, CAPACITY, rows=ROWS)
    write(cache, range(LAYERS), text, ())
    for row in range(ROWS):
        cache.advance(len(text), row)
    return cache


@given(st.lists(passes(), min_size=1, max_size=8))
def test_commit_equals_replay_after_every_pass(sequence: list[Pass]) -> None:
    cache, text = StreamCache(SHAPES, CAPACITY, rows=ROWS), []
    for one in sequence:
        run(cache, one, text)
        text += one.text
        assert_no_trace(cache, replay(text), tolerance=0)


@given(st.data())
def test_deferred_streams_and_abandoned_passes_leave_no_trace(data: DataObject) -> None:
    """Between two passes: streams of the last token, or a pass that stopped after some of the layers."""
    cache, text = StreamCache(SHAPES, CAPACITY, rows=ROWS), []
    for one in data.draw(st.lists(passes(), min_size=1, max_size=6)):
        run(cache, one, text)
        text += one.text
        if streams := data.draw(st.integers(0, 4)):
            write(cache, STREAM, range(NOISE, NOISE + streams), text)
        if layers := data.draw(st.integers(0, LAYERS - 1)):
            write(cache, range(layers), range(NOISE, NOISE + 7), text)
        assert_no_trace(cache, replay(text), tolerance=0)


@given(st.data())
def test_rewinding_equals_a_replay_of_less_text(data: DataObject) -> None:
    cache, text = StreamCache(SHAPES, CAPACITY, rows=ROWS), []
    for one in data.draw(st.lists(passes(), min_size=1, max_size=6)):
        run(cache, one, text)
        text += one.text
        text = text[: data.draw(st.integers(0, len(text)))]
        for row in range(ROWS):
            cache.rewind(len(text), row)
        assert_no_trace(cache, replay(text), tolerance=0)


@given(st.integers(0, 30), st.integers(1, 12))
def test_a_pass_fits_up_to_the_capacity_and_no_further(committed: int, slots: int) -> None:
    cache = StreamCache(SHAPES, 30, rows=ROWS)
    write(cache, range(LAYERS), range(committed), ())
    for row in range(ROWS):
        cache.advance(committed, row)
    if committed + slots <= 30:
        write(cache, range(LAYERS), range(slots), range(committed))
    else:
        with pytest.raises(CacheError, match="does not fit"):
            write(cache, range(LAYERS), range(slots), range(committed))
    assert cache.committed == committed
