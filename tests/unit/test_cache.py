"""Commit equals replay, rewinding, refusals, and that nothing rejected or interrupted is left behind."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forestream.baseline import plain
from forestream.cache import PassCache, StreamCache
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import BudgetTree, DraftTree
from forestream.errors import CacheError
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.ports import KVShape
from forestream.pruning import KeepBest
from forestream.steps import tokens_of
from forestream.topology import Topology, chain
from oracle import Prophet, assert_no_trace, prefilled
from passes import check, prompt_pass, stream_logits
from wrapped import prompt, wrapped

# Layers of two shapes take turns, as where windows or key sizes do.
SHAPES = (KVShape(2, 4, 4), KVShape(1, 4, 6), KVShape(2, 4, 4), KVShape(1, 4, 6), KVShape(2, 4, 4))
TRUNK, STREAM, ALL = range(3), range(3, 5), range(5)


def states(layer: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Made-up keys and values [1,h,Q,d] that tell every token, head and layer apart."""
    shape = SHAPES[layer]
    base = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None] + 1000 * (layer + 1)
    heads = torch.arange(1, 1 + shape.heads)[None, :, None, None] / 4
    return (base + heads).expand(-1, -1, -1, shape.key_size), -(base + heads).expand(-1, -1, -1, shape.value_size)


def write(cache: StreamCache, tokens: Sequence[int], layers: range = ALL) -> None:
    cache.begin(layers)
    for layer in layers:
        cache.update(*states(layer, tokens), layer)


def replay(text: Sequence[int], capacity: int = 20) -> StreamCache:
    cache = StreamCache(SHAPES, capacity)
    write(cache, text)
    cache.advance(len(text))
    return cache


# --- commit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [(0,), (0, 1, 2), (0, 2), (0, 1, 4), (0, 3, 5), (0, 1, 2, 3, 4, 5), (2, 4)])
def test_commit_equals_replay(path: tuple[int, ...]) -> None:
    cache = replay((1, 2, 3))
    write(cache, (10, 11, 12, 13, 14, 15))
    cache.commit(ALL, path)
    cache.advance(len(path))
    assert_no_trace(cache, replay((1, 2, 3, *(10 + slot for slot in path))), tolerance=0)


def test_layers_may_have_different_slots_for_the_same_nodes() -> None:
    """Pruned in between, stream layers have written fewer slots than trunk layers."""
    cache = replay((1, 2))
    write(cache, (10, 11, 12, 13, 14), TRUNK)
    write(cache, (10, 12, 14), STREAM)
    cache.commit(TRUNK, (0, 2, 4))
    cache.commit(STREAM, (0, 1, 2))
    cache.advance(3)
    assert_no_trace(cache, replay((1, 2, 10, 12, 14)), tolerance=0)


def test_what_was_not_committed_leaves_no_trace() -> None:
    """Rejected nodes and streams lie behind the text; the next pass overwrites or never sees them."""
    cache = replay((1, 2))
    write(cache, (10, 11, 12, 13, 14))
    cache.commit(ALL, (0, 3))
    cache.advance(2)
    keys, values = (torch.cat(parts, 2) for parts in zip(cache.content(0), states(0, (20, 21)), strict=True))
    cache.begin(ALL)
    for layer in ALL:
        found = cache.update(*states(layer, (20, 21)), layer)
        if layer == 0:
            assert torch.equal(found[0], keys)
            assert torch.equal(found[1], values)
    cache.commit(ALL, (0, 1))
    cache.advance(2)
    assert_no_trace(cache, replay((1, 2, 10, 13, 20, 21)), tolerance=0)


def test_a_path_that_is_in_place_moves_nothing() -> None:
    cache = replay((1, 2))
    write(cache, (10, 11, 12, 13))
    stores = [store for layer in ALL for store in cache.content(layer)]
    before = [store._version for store in stores]
    cache.commit(ALL, (0, 1, 2))
    assert [store._version for store in stores] == before
    cache.commit(ALL, (0, 1, 3))
    assert [store._version for store in stores] == [version + 1 for version in before]
    cache.advance(3)
    assert_no_trace(cache, replay((1, 2, 10, 11, 13)), tolerance=0)


def test_a_commit_never_touches_committed_text_and_moves_as_little_as_the_path_needs() -> None:
    """What a step moves does not grow with the text before it."""
    cache = replay(range(12))
    write(cache, (20, 21, 22, 23, 24))
    stores = [store for layer in ALL for store in cache.store(layer, 5)]
    before = [store.clone() for store in stores]
    cache.commit(ALL, (0, 1, 3, 4))
    for store, old in zip(stores, before, strict=True):
        assert (store != old).any(dim=(0, 1, 3)).nonzero().flatten().tolist() == [14, 15]


@pytest.mark.parametrize("layers", [range(1), range(1, 2), TRUNK, STREAM, range(1, 4), range(2, 2), ALL], ids=str)
def test_a_commit_moves_the_layers_it_names_and_no_other(layers: range) -> None:
    """All layers of one shape lie in one tensor and move at once."""
    cache = replay((1, 2))
    write(cache, (10, 11, 12))
    stores = [cache.store(layer, 3) for layer in ALL]
    before = [[part.clone() for part in store] for store in stores]
    cache.commit(layers, (0, 2))
    for layer, (store, old) in enumerate(zip(stores, before, strict=True)):
        for found, part in zip(store, old, strict=True):
            wanted = part.clone()
            if layer in layers:
                wanted[:, :, 3] = part[:, :, 4]
            assert torch.equal(found, wanted)


def test_committing_before_any_pass_is_an_error() -> None:
    with pytest.raises(CacheError, match="layer 0 is committed before any pass wrote to it"):
        StreamCache(SHAPES, 5).commit(ALL, (0, 2))
    cache = StreamCache(SHAPES, 5)
    write(cache, (1, 2, 3), TRUNK)
    with pytest.raises(CacheError, match="layer 3 is committed before any pass wrote to it"):
        cache.commit(ALL, (0, 2))


# --- rewinding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(6))
def test_rewinding_to_any_length_is_as_if_the_rest_had_never_been(length: int) -> None:
    cache = replay((1, 2, 3, 4, 5))
    cache.rewind(length)
    assert cache.committed == length
    assert_no_trace(cache, replay((1, 2, 3, 4, 5)[:length]), tolerance=0)
    write(cache, (7, 8))
    cache.advance(2)
    assert_no_trace(cache, replay((*(1, 2, 3, 4, 5)[:length], 7, 8)), tolerance=0)


@pytest.mark.parametrize("length", [-1, -3, 4, 100])
def test_rewinding_beyond_either_end_is_an_error(length: int) -> None:
    cache = replay((1, 2, 3))
    with pytest.raises(CacheError, match=f"cannot rewind to {length} tokens; 3 are committed"):
        cache.rewind(length)
    assert cache.committed == 3


# --- refusals -------------------------------------------------------------------------------------------------


def test_a_pass_that_does_not_fit_is_an_error_and_writes_nothing() -> None:
    cache = replay((1, 2, 3), capacity=5)
    with pytest.raises(CacheError, match="a pass of 3 slots does not fit: 3 of 5 are committed"):
        write(cache, (7, 8, 9))
    assert_no_trace(cache, replay((1, 2, 3)), tolerance=0)
    write(cache, (7, 8))
    cache.advance(2)
    assert_no_trace(cache, replay((1, 2, 3, 7, 8)), tolerance=0)


def test_a_layer_that_wrote_another_number_of_slots_is_an_error() -> None:
    cache = StreamCache(SHAPES, 20)
    write(cache, (1, 2, 3))
    cache.expect(ALL, 3)
    with pytest.raises(CacheError, match="layer 0 wrote 3 slots; the pass has 2"):
        cache.expect(ALL, 2)
    cache.begin(STREAM)
    cache.expect(TRUNK, 3)
    with pytest.raises(CacheError, match="layer 3 wrote 0 slots; the pass has 3"):
        cache.expect(ALL, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_cache_has_room_for_every_layer_and_holds_nothing(dtype: torch.dtype) -> None:
    cache = StreamCache(SHAPES, 20, dtype, rows=3)
    for layer, shape in enumerate(SHAPES):
        for room, held, size in zip(
            cache.store(layer, 0), cache.content(layer), (shape.key_size, shape.value_size), strict=True
        ):
            assert room.shape == (3, shape.heads, 20, size)
            assert held.shape == (3, shape.heads, 0, size)
            assert room.dtype == dtype
            assert not room.any()
    cache.expect(ALL, 0)


# --- a caller that writes by itself ---------------------------------------------------------------------------


def test_writing_to_the_store_at_the_scratch_places_is_an_update() -> None:
    caches = replay((1, 2, 3)), replay((1, 2, 3))
    write(caches[0], (10, 11, 12, 13))
    where = caches[1].scratch(4)
    assert where.tolist() == [3, 4, 5, 6]
    caches[1].begin(ALL)
    for layer in ALL:
        for store, part in zip(caches[1].store(layer, 4), states(layer, (10, 11, 12, 13)), strict=True):
            store.index_copy_(2, where, part)
    for cache in caches:
        cache.expect(ALL, 4)
        cache.commit(ALL, (0, 2, 3))
        cache.advance(3)
    assert_no_trace(*caches, tolerance=0)


def test_scratch_places_for_a_pass_that_does_not_fit_are_an_error() -> None:
    cache = replay((1, 2, 3), capacity=5)
    assert cache.scratch(2).tolist() == [3, 4]
    with pytest.raises(CacheError, match="a pass of 3 slots does not fit: 3 of 5 are committed"):
        cache.scratch(3)


@torch.no_grad()
def test_a_host_that_swallows_the_cache_keyword_is_noticed() -> None:
    model = wrapped("llama")
    model.port.cache_keyword = "layer_past"
    with pytest.raises(CacheError, match="layer 0 wrote 0 slots; the pass has 3"):
        prefilled(model, (1, 2, 3))


# --- value maps -----------------------------------------------------------------------------------------------


def test_values_are_mapped_before_they_are_stored_and_keys_are_not() -> None:
    cache = StreamCache(SHAPES, 20)
    cache.value_map = lambda values: values * 2
    keys, values = states(0, (1, 2))
    found = cache.update(keys, values, 0)
    cache.advance(2)
    for got, wanted in zip((*found, *cache.content(0)), (keys, values * 2) * 2, strict=True):
        assert torch.equal(got, wanted)
    got = PassCache(lambda values: values * 3).update(keys, values, 0)
    assert torch.equal(got[0], keys)
    assert torch.equal(got[1], values * 3)


@torch.no_grad()
def test_a_pass_without_rotated_streams_stores_values_as_they_are() -> None:
    """A value map left over from the streams before must not reach the main slots of the next pass."""
    model = wrapped("llama", value_rotation=True, rotation_angle=0.7)
    cache = prefilled(model, (1, 2, 3), spare=8)
    model.streams_behind(torch.randn(1, 1, model.port.hidden_size), 4, cache)
    model(torch.tensor([[4]]), Pack.tree(chain(1)), cache)
    cache.advance(1)
    assert_no_trace(cache, prefilled(model, (1, 2, 3, 4)))


# --- in a model: INV after every step ------------------------------------------------------------------------


@pytest.mark.parametrize("carriers", ["deferred", "fused"])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("mode", ["joint", "lossless"])
@torch.no_grad()
def test_after_every_step_the_cache_is_that_of_a_fresh_prefill(mode: str, pruned: bool, carriers: Any) -> None:
    model, start = wrapped("llama", mode), prompt(5)
    settings = DecodeSettings(max_new_tokens=30, carriers=carriers)
    truth = start + tokens_of(list(plain(model, start, settings)))
    draft = Prophet(BudgetTree(10), truth, rate=0.8)
    cache = model.new_cache(len(truth) + 60)
    token, logits = prompt_pass(model, start, 4, cache)
    text, accepted = [*start], []
    while len(text) < len(start) + 20:
        assert_no_trace(cache, prefilled(model, text))
        tree = draft([*text, token], logits)
        checked = check(model, tree, cache, 4, settings, KeepBest(6) if pruned else None)
        assert (len(checked.kept) < len(tree.tokens)) == pruned
        logits = stream_logits(model, checked, 4, cache)
        text += [checked.tree.tokens[node] for node in checked.verdict.path]
        token = checked.verdict.next_token
        accepted.append(len(checked.verdict.path) - 1)
        assert cache.committed == len(text)
    assert_no_trace(cache, prefilled(model, text))
    assert (*text, token) == truth[: len(text) + 1]
    assert sum(accepted) >= 4
    assert min(accepted) < max(accepted)


@torch.no_grad()
def test_pruned_nodes_in_front_of_the_accepted_ones_shift_no_layer() -> None:
    """Trunk layers have written all nodes, stream layers the survivors: each commits by its own numbers."""
    model, start = wrapped("llama"), prompt(5)
    settings = DecodeSettings(max_new_tokens=4)
    truth = tokens_of(list(plain(model, start, settings)))
    wrong = [(token + 1) % 70 for token in truth]
    tree = DraftTree(Topology((-1, 0, 0, 2, 2, 4)), (truth[0], wrong[1], truth[1], wrong[2], truth[2], truth[3]))
    cache = prefilled(model, start, spare=6)
    checked = check(model, tree, cache, 0, settings, lambda topology, edges: (0, 2, 4, 5))
    assert checked.kept == (0, 2, 4, 5)
    assert checked.verdict.path == (0, 1, 2, 3)
    assert_no_trace(cache, prefilled(model, (*start, *truth)))


class Interrupted(Exception):
    """Injected into the middle of a pass."""


def interrupt(model: StreamingLM, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the `at`-th call of a layer fail after it has written, once."""
    run, calls = model.port.run, []

    def failing(*args: Any) -> Tensor:
        result = run(*args)
        calls.append(1)
        if len(calls) == at:
            raise Interrupted
        return result

    monkeypatch.setattr(model.port, "run", failing)


@pytest.mark.parametrize("carriers", ["deferred", "fused"])
@pytest.mark.parametrize("at", range(1, 7))
@torch.no_grad()
def test_an_exception_in_the_middle_of_a_pass_leaves_a_usable_cache(
    at: int, carriers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 1 to 4 of the pass over the tree, and 5 and 6: the deferred streams or the next pass."""
    model, start = wrapped("llama"), prompt(5)
    settings = DecodeSettings(max_new_tokens=12, carriers=carriers)
    wanted = tokens_of(list(plain(model, start, settings)))
    cache = model.new_cache(100)
    token, logits = prompt_pass(model, start, 4, cache)
    draft = Prophet(BudgetTree(8), start + wanted, rate=0.7)
    interrupt(model, monkeypatch, at)
    text, interruptions = [*start, token], 0
    while len(text) < len(start) + 8:
        held = cache.committed
        try:
            checked = check(model, draft(text, logits), cache, 4, settings, None)
        except Interrupted:
            interruptions += 1
            assert cache.committed == held == len(text) - 1
            assert_no_trace(cache, prefilled(model, text[:-1]))
            continue
        text += [checked.tree.tokens[node] for node in checked.verdict.path[1:]]
        try:
            logits = stream_logits(model, checked, 4, cache)
        except Interrupted:
            interruptions += 1
            assert_no_trace(cache, prefilled(model, text))
            logits = stream_logits(model, checked, 4, cache)
        text.append(checked.verdict.next_token)
    assert interruptions == 1
    assert tuple(text[len(start) :]) == wanted[: len(text) - len(start)]


def test_two_different_requests_on_one_model_do_not_meet() -> None:
    model, settings = wrapped("llama", "lossless"), DecodeSettings(max_new_tokens=10)
    first, second = prompt(7, seed=1), prompt(4, seed=2)
    alone = [(s.tokens, s.tree) for s in decode(wrapped("llama", "lossless"), second, settings)]
    list(decode(model, first, settings))
    assert [(s.tokens, s.tree) for s in decode(model, second, settings)] == alone
