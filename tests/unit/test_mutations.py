"""One thing wrong at a time: the oracles notice, so a test that compares with them can fail."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from forestream.attention import GROUPED, grouped_attention
from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.drafting import BudgetTree, DraftTree, FullTree
from forestream.masks import additive
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.steps import Counters, Step, tokens_of
from forestream.streams import SlotGate, StreamStart, rotate_values
from forestream.topology import Topology, chain
from forestream.verify import Verdict, verify
from oracle import (
    Prophet,
    assert_equal_texts,
    assert_no_trace,
    assert_packed_equals_plain,
    best_paths,
    prefilled,
    slow_tree_logits,
    visible,
)
from strategies import paths_of
from wrapped import ajar, prompt, wrapped

TREE = DraftTree(Topology((-1, 0, 0, 1)), (5, 6, 7, 8))
CARRIERS, STREAMS = (1, 3), 2
SLOTS = 4 + STREAMS * len(CARRIERS)
TEXT = prompt(5)


@pytest.fixture(scope="module")
def model() -> StreamingLM:
    return wrapped("llama")


def packed(model: StreamingLM) -> float:
    return assert_packed_equals_plain(model, TEXT, TREE, CARRIERS, STREAMS)


def test_unchanged_nothing_is_noticed(model: StreamingLM) -> None:
    assert packed(model) < 1e-5


# --- the predicate and its mask -------------------------------------------------------------------------------


def test_one_flipped_entry_of_the_predicate_is_noticed() -> None:
    right = Pack.tree(TREE.topology, CARRIERS, STREAMS).visible[0]
    wanted = visible(TREE.topology, CARRIERS, STREAMS)
    assert torch.equal(right, wanted)
    for q, k in product(range(SLOTS), repeat=2):
        wrong = right.clone()
        wrong[q, k] ^= True
        assert not torch.equal(wrong, wanted)


@pytest.mark.parametrize("query", range(SLOTS))
def test_one_wrong_edge_in_the_mask_changes_the_logits(
    model: StreamingLM, query: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every edge there is, one at a time: hidden where it should be seen, or seen where it should not be."""

    def flipping(key: int) -> Callable[..., Tensor]:
        def wrong(pack: Pack, committed: int, *rest: Any) -> Tensor:
            mask = additive(pack, committed, *rest)
            if committed and len(pack) == SLOTS:
                edge = mask[0, 0, query, key]
                mask[0, 0, query, key] = torch.finfo(mask.dtype).min if edge == 0 else 0.0
            return mask

        return wrong

    for key in range(len(TEXT) + SLOTS):
        monkeypatch.setattr("forestream.model.additive", flipping(key))
        with pytest.raises(AssertionError, match="logits differ"):
            packed(model)


def test_a_window_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    host = wrapped("mistral-window")
    tree = DraftTree(chain(3), (5, 6, 7))
    text = prompt(10)
    assert_packed_equals_plain(host, text, tree, (2,), 2)
    for shift in (-1, 1):

        def wrong(pack: Pack, committed: int, positions: Any, window: int, *rest: Any, by: int = shift) -> Tensor:
            return additive(pack, committed, positions, window + by if any(committed) else window, *rest)

        monkeypatch.setattr("forestream.model.additive", wrong)
        with pytest.raises(AssertionError, match="main of node 0"):
            assert_packed_equals_plain(host, text, tree, (2,), 2)


# --- positions and starts -------------------------------------------------------------------------------------


def shifted_positions(which: Callable[[Pack], Tensor], by: int) -> Callable[..., Tensor]:
    right = Pack.positions

    def wrong(pack: Pack, committed: int, rule: Any) -> Tensor:
        places = right(pack, committed, rule)
        return places + by * which(pack) if committed else places

    return wrong


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("host", ["llama", "opt-pre"])
def test_a_wrong_main_position_is_noticed(host: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if all are wrong by the same amount: the committed text is where it was."""
    wrong = shifted_positions(lambda pack: (pack.indices == 0).long(), by)
    monkeypatch.setattr(Pack, "positions", wrong)
    with pytest.raises(AssertionError, match="main of node 0"):
        packed(wrapped(host))


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_wrong_stream_position_is_noticed(
    model: StreamingLM, stream: int, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = shifted_positions(lambda pack: (pack.indices == stream).long(), by)
    monkeypatch.setattr(Pack, "positions", wrong)
    with pytest.raises(AssertionError, match=f"stream {stream} of node"):
        packed(model)


def test_streams_in_the_wrong_order_are_noticed(model: StreamingLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Carrier by carrier in place of stream by stream."""
    right = StreamStart.forward

    def wrong(start: StreamStart, mains: Tensor, streams: int) -> Tensor:
        return right(start, mains, streams).unflatten(1, (streams, -1)).transpose(1, 2).flatten(1, 2)

    monkeypatch.setattr(StreamStart, "forward", wrong)
    with pytest.raises(AssertionError, match=r"stream \d of node"):
        packed(model)


@pytest.mark.parametrize("host", ["llama", "opt-pre"])
def test_a_gate_that_lets_the_adapter_through_is_noticed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lossless = wrapped(host, "lossless")
    packed(lossless)
    gate = SlotGate._gate

    def leaking(self: SlotGate, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """The last main slot passes for a stream."""
        right = self.opened
        self.opened = ajar(self)
        gated = gate(self, module, inputs, output)
        self.opened = right
        return gated

    monkeypatch.setattr(SlotGate, "_gate", leaking)
    lossless = wrapped(host, "lossless")
    with pytest.raises(AssertionError, match="logits differ"):
        packed(lossless)


def test_values_rotated_the_other_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rotated = wrapped("llama", value_rotation=True, rotation_angle=0.7)
    packed(rotated)
    monkeypatch.setattr(
        "forestream.model.rotate_values", lambda values, indices, angle: rotate_values(values, indices, -angle)
    )
    with pytest.raises(AssertionError, match="stream 1 of node 1"):
        packed(rotated)


# --- attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["heads", "mask", "back"])
def test_heads_folded_the_wrong_way_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads of other groups, masks of other queries, or results handed back to other heads."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *args: Any, **rest: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        if wrong == "heads":
            query = query.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
        elif wrong == "mask":
            mask = mask.repeat_interleave(groups, 2)[:, :, : query.shape[2]]
        out, _ = grouped_attention(module, query, key, value, mask, *args, **rest)
        return (out.unflatten(2, (groups, -1)).transpose(2, 3).flatten(2, 3) if wrong == "back" else out), None

    prepared = wrapped("llama")
    prepared.prepare()
    packed(prepared)
    monkeypatch.setitem(AttentionInterface._global_mapping, GROUPED, attention)
    slow = wrapped("llama")  # attends by the stock function
    monkeypatch.setattr("oracle.slow_tree_logits", lambda model, *rest: slow_tree_logits(slow, *rest))
    with pytest.raises(AssertionError, match="logits differ"):
        packed(prepared)


# --- the cache ------------------------------------------------------------------------------------------------


def after_commit(model: StreamingLM, trunk: Sequence[int], stream: Sequence[int], tokens: int) -> StreamCache:
    cache = prefilled(model, TEXT, spare=SLOTS)
    with torch.no_grad():
        model(torch.tensor([TREE.tokens]), Pack.tree(TREE.topology, CARRIERS, STREAMS), cache)
    cache.commit(model.trunk_layers, trunk)
    cache.commit(model.stream_layers, stream)
    cache.advance(tokens)
    return cache


def test_every_wrong_path_of_a_commit_is_noticed(model: StreamingLM) -> None:
    fresh = prefilled(model, (*TEXT, 5, 6, 8))
    right = (0, 1, 3)
    assert_no_trace(after_commit(model, right, right, 3), fresh)
    for wrong in combinations(range(SLOTS), 3):
        for trunk, stream in ((wrong, right), (right, wrong)):
            if wrong == right or max(trunk) >= 4:  # the trunk has no stream slots
                continue
            with pytest.raises(AssertionError, match=r"layer \d differ"):
                assert_no_trace(after_commit(model, trunk, stream, 3), fresh)


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("wrong", ["source", "layers"])
def test_a_commit_that_is_off_by_one_is_noticed(
    model: StreamingLM, wrong: str, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves the slots beside the accepted ones, or those of the layers above or below."""
    right = StreamCache.commit

    def commit(cache: StreamCache, layers: range, path: Sequence[int]) -> None:
        if wrong == "layers":
            right(cache, range(max(layers.start + by, 0), min(layers.stop + by, 4)), path)
        else:
            # the place of the root is right; what moves behind it comes from one slot further
            right(cache, layers, [path[0], *(slot + by for slot in path[1:])])

    monkeypatch.setattr(StreamCache, "commit", commit)
    fresh = prefilled(model, (*TEXT, 5, 6, 8))
    with pytest.raises(AssertionError, match=r"layer \d differ"):
        assert_no_trace(after_commit(model, (0, 1, 3), (0, 1, 3), 3), fresh)


@pytest.mark.parametrize("tokens", [0, 1, 2, 4])
def test_a_wrong_count_of_committed_tokens_is_noticed(model: StreamingLM, tokens: int) -> None:
    """Rejected nodes are still there behind the text: counting one token too many would let them in."""
    with pytest.raises(AssertionError, match="committed lengths differ"):
        assert_no_trace(after_commit(model, (0, 1, 3), (0, 1, 3), tokens), prefilled(model, (*TEXT, 5, 6, 8)))
    with pytest.raises(AssertionError, match="differ"):
        assert_no_trace(after_commit(model, (0, 1, 3), (0, 1, 3), 4), prefilled(model, (*TEXT, 5, 6, 8, 7)))


# --- decisions ------------------------------------------------------------------------------------------------


Choose = Callable[[int], int]
Over = Callable[[], bool]


def accept_a_first_child(tree: DraftTree, choose: Choose, over: Over) -> Verdict:
    """Whatever the main stream says."""
    if not (children := tree.topology.children[0]):
        return verify(tree, choose, over)
    choose(0)
    return Verdict((0, children[0]), choose(children[0]))


def go_on_from_the_wrong_node(tree: DraftTree, choose: Choose, over: Over) -> Verdict:
    said = []

    def noted(node: int) -> int:
        said.append(choose(node))
        return said[-1]

    return Verdict(verify(tree, noted, over).path, said[0])


def ignore_who_is_whose_parent(tree: DraftTree, choose: Choose, over: Over) -> Verdict:
    """Any node one level deeper that carries the right token will do."""
    path, depths = [0], tree.topology.depths
    wanted = choose(0)
    for depth in range(1, max(depths) + 1):
        match = [n for n, at in enumerate(depths) if at == depth and tree.tokens[n] == wanted]
        if not match:
            break
        path.append(match[-1])
        wanted = choose(path[-1])
    return Verdict(tuple(path), wanted)


@pytest.mark.parametrize("wrong", [accept_a_first_child, go_on_from_the_wrong_node, ignore_who_is_whose_parent])
def test_a_wrong_rule_of_acceptance_is_noticed(
    model: StreamingLM, wrong: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DecodeSettings(max_new_tokens=20, tree="full", k=2, streams=3)
    truth = TEXT + tokens_of(list(plain(model, TEXT, settings)))
    drafter = Prophet(FullTree(2), truth, rate=0.7)
    assert_equal_texts(model, TEXT, settings, drafter=drafter)
    monkeypatch.setattr("forestream.rows.verify", wrong)
    with pytest.raises(AssertionError, match="texts differ at token"):
        assert_equal_texts(model, TEXT, settings, drafter=drafter)


def test_a_tree_with_the_second_best_in_the_place_of_the_best_is_noticed() -> None:
    logits = torch.randn(2, 5)
    right = BudgetTree(8)([9], logits)
    wanted = best_paths(logits, 7)
    assert set(paths_of(right)) == set(wanted)
    spare = best_paths(logits, 8)[-1]
    leaves = [node for node, children in enumerate(right.topology.children) if node and not children]
    for leaf in leaves:
        paths = set(paths_of(right)) - {paths_of(right)[leaf - 1]} | {spare}
        assert paths != set(wanted)


# --- counters -------------------------------------------------------------------------------------------------


def test_counting_the_prompt_pass_or_leaving_out_its_token_changes_the_numbers() -> None:
    steps = [Step((1,), 0, 1.0), Step((2, 3), 1, 1.0, DraftTree(chain(2), (1, 2)), (0, 1), (0, 1))]
    right, with_prompt, without_token = Counters(), Counters(), Counters()
    right.extend(steps)
    with_prompt.extend([Step((1,), 0, 1.0, DraftTree(chain(1), (0,)), (0,), (0,)), steps[1]])
    without_token.extend(steps[1:])
    found = [(c.call_reduction, c.mean_acceptance_length) for c in (right, with_prompt, without_token)]
    assert found == [(3.0, 2.0), (1.5, 1.5), (2.0, 2.0)]
