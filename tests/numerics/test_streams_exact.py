"""Packed equals plain, in float32: tree passes, their streams and the cache behind them, against slow oracles.

Tolerances are shares of the largest logit. Between equal passes nothing may differ by a bit; between passes with
another number of rows kernels choose other tilings, which rounds the last places otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import Drafter, DraftTree, drafter_for
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.pruning import KeepAbove, KeepBest, edge_scores
from forestream.steps import tokens_of
from forestream.topology import Topology
from oracle import Prophet, assert_no_trace, assert_packed_equals_plain, prefilled, slow_tree_logits
from treepass import CLOSE, TOKENS, TREE, close, tree_pass
from wrapped import STREAMS, ajar, prompt, wrapped
from zoo import HOSTS, WINDOW

every_host = pytest.mark.parametrize("host", HOSTS)
both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])


def against_the_oracle(model: StreamingLM, text: Sequence[int], carriers: Sequence[int], streams: int) -> None:
    assert_packed_equals_plain(model, text, DraftTree(TREE, TOKENS), carriers, streams, CLOSE)


# --- packed equals plain ------------------------------------------------------------------------------------


@both_modes
@every_host
def test_every_node_and_every_stream_is_that_of_a_plain_sequence(host: str, mode: str) -> None:
    model = wrapped(host, mode)
    for length in (1, 2 * WINDOW + 1):
        against_the_oracle(model, prompt(length), range(7), 3)
    against_the_oracle(model, prompt(5), (1, 4, 6), STREAMS)


@pytest.mark.parametrize(
    "changes",
    [
        {"value_rotation": True, "rotation_angle": 0.7},
        {"value_rotation": True, "mode": "lossless"},
        {"start": "low_rank"},
        {"start": "low_rank", "value_rotation": True, "rotation_angle": 1.1, "positions": "same"},
        {"positions": "same", "mode": "lossless"},
        {"stream_layers": 1},
        {"stream_layers": 4, "mode": "lossless"},
        {"merge": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("host", ["llama", "opt-post", "gemma3", "gpt_neox-sequential", "gpt2"])
def test_every_kind_of_streams_is_exact(host: str, changes: dict[str, Any]) -> None:
    against_the_oracle(wrapped(host, **changes), prompt(9), (0, 2, 3, 6), 3)


@every_host
@torch.no_grad()
def test_the_prompts_last_token_carries_the_streams_of_the_oracle(host: str) -> None:
    """Prefill is a chain whose only carrier is its last token; rows of a training pass have a carrier each."""
    model, text = wrapped(host), prompt(2 * WINDOW + 2)
    ids = torch.tensor([text, text])
    carriers = torch.tensor([[len(text) - 1, 3], [0, 9]])
    output = model(ids, Pack.text(len(text), carriers, STREAMS))
    main, ahead = model.logits(output.main), model.logits(output.streams)
    for row, place in product(range(2), range(2)):
        node = int(carriers[row, place])
        slow_main, slow_ahead = slow_tree_logits(model, text[:1], text[1 : node + 1] or (), STREAMS)
        if node:
            close(main[row, 1 : node + 1], slow_main, f"main logits up to {node}")
            close(ahead[row, :, place], slow_ahead, f"streams of {node} in row {row}")


# --- streams are invisible, siblings too ----------------------------------------------------------------------


@both_modes
@every_host
def test_main_states_do_not_know_of_streams(host: str, mode: str) -> None:
    """INV. With and without streams the number of rows differs: 1e-6. What streams hold makes no bit of difference."""
    model = wrapped(host, mode)
    for text in (prompt(1), prompt(2 * WINDOW + 1)):
        alone, _, _ = tree_pass(model, text, (), 0)
        for carriers, streams in (((0,), 1), ((2, 5), 3), (range(7), STREAMS)):
            beside, ahead, _ = tree_pass(model, text, carriers, streams)
            close(beside, alone, "main logits with and without streams", 1e-6)
            assert model.start is not None
            with torch.no_grad():
                model.start.embedding.neg_()
            other, other_ahead, _ = tree_pass(model, text, carriers, streams)
            assert torch.equal(other, beside)
            assert not torch.allclose(other_ahead, ahead, atol=1e-2)


@both_modes
@every_host
def test_a_sibling_changes_nothing(host: str, mode: str) -> None:
    """Changing node 2 changes nodes 2 and 5 with their streams and no bit of the others'."""
    model, text = wrapped(host, mode), prompt(9)
    main, ahead, _ = tree_pass(model, text)
    other_main, other_ahead, _ = tree_pass(model, text, tokens=(*TOKENS[:2], 40, *TOKENS[3:]))
    below, others = [2, 5], [0, 1, 3, 4, 6]
    assert torch.equal(main[others], other_main[others])
    assert torch.equal(ahead[:, others], other_ahead[:, others])
    assert float((main[below] - other_main[below]).abs().amax(-1).min()) > 1e-2
    assert float((ahead[:, below] - other_ahead[:, below]).abs().amax(-1).min()) > 1e-3


def test_streams_differ_from_each_other_and_from_their_carrier() -> None:
    """Else the comparisons above would show little."""
    for host in HOSTS:
        main, ahead, _ = tree_pass(wrapped(host, "lossless"), prompt(9))
        rows = torch.cat([main[None], ahead])
        for a, b in ((0, 1), (1, 2), (2, 3)):
            assert float((rows[a] - rows[b]).abs().amax(-1).min()) > 1e-2, host


# --- fused is deferred ----------------------------------------------------------------------------------------


@dataclass
class Listener:
    """Notes what the streams say before a drafter makes a tree of it."""

    inner: Drafter
    heard: list[Tensor] = field(default_factory=list)

    def __call__(self, text: Sequence[int], logits: Tensor) -> DraftTree:
        self.heard.append(logits)
        return self.inner(text, logits)


@both_modes
@every_host
def test_fused_and_deferred_streams_say_the_same(host: str, mode: str) -> None:
    model = wrapped(host, mode)
    text = tokens_of(list(plain(model, prompt(6), DecodeSettings(max_new_tokens=16))))
    for tree in ({"nodes": 12}, {"tree": "full", "k": 2}, {"tree": "full", "k": 2, "prune_to": 6}):
        heard, drafts = [], []
        for carriers in ("fused", "deferred"):
            settings = DecodeSettings(max_new_tokens=16, carriers=carriers, **tree)
            inner = drafter_for(settings)
            # a budget tree of prophecies would rank exact ties by rounding
            listener = Listener(Prophet(inner, prompt(6) + text, 0.5) if "k" in tree else inner)
            steps = list(decode(model, prompt(6), settings, drafter=listener))
            drafts.append([(step.tree, step.kept, step.path) for step in steps])
            heard.append(listener.heard)
        for fused, deferred in zip(*heard, strict=True):
            assert fused.shape == deferred.shape
            if len(fused):  # none where the cap leaves no room for drafts
                close(deferred, fused, "deferred and fused streams")
        assert drafts[0] == drafts[1]


@both_modes
@every_host
@torch.no_grad()
def test_streams_behind_the_committed_text_are_those_of_the_pass(host: str, mode: str) -> None:
    model, text = wrapped(host, mode), prompt(11)
    cache = prefilled(model, text, spare=40)
    output = model(torch.tensor([TOKENS]), Pack.tree(TREE, range(7), STREAMS), cache)
    path = TREE.path(6)
    cache.commit(range(4), path)
    cache.advance(len(path))
    behind = model.streams_behind(output.trunk[:, 6:7], STREAMS, cache)
    close(model.logits(behind[0]), model.logits(output.streams[0, :, 6]), "deferred and fused streams")


# --- pruning ----------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("host", HOSTS)
def test_survivors_are_as_if_nothing_had_been_pruned(host: str, mode: str) -> None:
    model, text = wrapped(host, mode), prompt(WINDOW + 3)
    main, ahead, kept = tree_pass(model, text)
    assert kept == tuple(range(7))
    for survivors in ((0,), (0, 1, 4, 6), (0, 2, 5), (0, 1, 2, 3, 4, 5)):
        pruned_main, pruned_ahead, kept = tree_pass(model, text, prune=lambda _, keep=survivors: keep)
        assert kept == survivors
        close(pruned_main, main[list(survivors)], f"main logits of {survivors}")
        close(pruned_ahead, ahead[:, list(survivors)], f"streams of {survivors}")


@both_modes
@torch.no_grad()
def test_survivors_with_as_many_slots_as_the_tree_had_nodes(mode: str) -> None:
    """Two of six nodes with two streams each: the masks of the one pass are not those of the other."""
    model, text, tokens = wrapped("llama", mode), prompt(9), (11, 5, 6, 7, 8, 9)
    tree = Topology((-1, 0, 0, 0, 2, 4))
    pruned = tree_pass(model, text, range(6), 2, tokens, tree, prune=lambda trunk: (0, 2))
    alone = tree_pass(model, text, range(2), 2, (11, 6), Topology((-1, 0)))
    for what, found, wanted in zip(("main", "stream"), pruned, alone, strict=False):
        close(found, wanted, f"{what} logits of survivors")


@pytest.mark.parametrize("host", ["llama", "opt-post", "gemma3"])
@torch.no_grad()
def test_edges_are_scored_by_the_exit_at_the_parent(host: str) -> None:
    """p(child | parent), from the parent's state on its way into the stream layers, scorer, final norm and head."""
    model, text = wrapped(host), prompt(7)
    seen: list[list[float]] = []

    def prune(trunk: Tensor) -> tuple[int, ...]:
        seen.append(edge_scores(TREE, TOKENS, model.exit_logits(trunk[0])))
        return KeepBest(4)(TREE, seen[0])

    _, _, kept = tree_pass(model, text, prune=prune)
    assert model.scorer is not None
    wanted = [1.0]
    for node in range(1, 7):
        path = [*text, *(TOKENS[n] for n in TREE.path(TREE.parents[node]))]
        entered = model.port.model(torch.tensor([path]), output_hidden_states=True, use_cache=False).hidden_states
        last = entered[len(model.trunk_layers)][0, -1]
        adapted = last + last @ model.scorer.down @ model.scorer.up
        wanted.append(float(model.port.head(model.port.finish(adapted)).softmax(-1)[TOKENS[node]]))
    assert seen[0] == pytest.approx(wanted, rel=1e-3, abs=1e-7)
    assert len(kept) == 4
    threshold = sorted(wanted)[3]
    assert set(KeepAbove(threshold)(TREE, wanted)) >= {0, 1, 3}


# --- commit is replay -------------------------------------------------------------------------------------------


@both_modes
@every_host
def test_after_every_step_the_cache_is_a_fresh_prefill(host: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, start = wrapped(host, mode), prompt(WINDOW - 2)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=14))))
    caches: list[StreamCache] = []
    make = model.new_cache

    def watched(capacity: int, rows: int = 1) -> StreamCache:
        caches.append(make(capacity, rows))
        return caches[-1]

    for choices in (
        {"nodes": 12, "carriers": "fused"},
        {"nodes": 12, "prune_to": 6, "carriers": "deferred"},
        {"tree": "full", "k": 2, "prune_below": 1e-4, "carriers": "fused"},
    ):
        settings = DecodeSettings(max_new_tokens=14, **choices)
        drafter = Prophet(drafter_for(settings), start + text, 0.7)
        monkeypatch.setattr(model, "new_cache", watched)
        run = decode(model, start, settings, drafter=drafter)
        written: list[int] = []
        accepted = 0
        for step in run:
            monkeypatch.setattr(model, "new_cache", make)
            written += step.tokens
            accepted += step.accepted
            # the last token is the next root: it is not in the cache yet
            known = [*start, *written[:-1]]
            assert caches[-1].committed == len(known)
            assert_no_trace(caches[-1], prefilled(model, known))
        assert accepted >= 2
        assert tuple(written) == text


def test_the_comparison_of_caches_notices_a_shifted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = wrapped("llama"), prompt(8)
    for shift in (0, 1):
        with torch.no_grad():
            cache = prefilled(model, text, spare=40)
            model(torch.tensor([TOKENS]), Pack.tree(TREE, range(7), 2), cache)
            cache.commit(range(4), [0, 1, 4 - shift])
            cache.advance(3)
        replayed = prefilled(model, [*text, TOKENS[0], TOKENS[1], TOKENS[4]])
        if shift:
            with pytest.raises(AssertionError, match="keys of layer 0"):
                assert_no_trace(cache, replayed)
        else:
            assert_no_trace(cache, replayed)


# --- the oracle notices ---------------------------------------------------------------------------------------------


def _edge(query: int, key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Pack.visible.func  # type: ignore[attr-defined]

    def wrong(pack: Pack) -> Tensor:
        seen: Tensor = right(pack).clone()
        if len(pack) > max(query, key) and pack.mains == len(TREE):
            seen[:, query, key] ^= True
        return seen

    monkeypatch.setattr(Pack, "visible", property(wrong))


def _stream_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Pack.positions
    monkeypatch.setattr(Pack, "positions", lambda pack, *a: right(pack, *a) + (pack.indices > 0))


def _starts_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from forestream.streams import StreamStart

    right = StreamStart.forward

    def wrong(start: StreamStart, mains: Tensor, streams: int) -> Tensor:
        states = right(start, mains, streams).unflatten(1, (streams, -1))
        return states.flip(1).flatten(1, 2)

    monkeypatch.setattr(StreamStart, "forward", wrong)


def _gate_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from forestream.streams import SlotGate

    right = SlotGate._gate

    def wrong(gate: SlotGate, *rest: Any) -> Tensor:
        gate.opened, kept = ajar(gate), gate.opened
        outcome = right(gate, *rest)
        gate.opened = kept
        return outcome

    monkeypatch.setattr(SlotGate, "_gate", wrong)


def _no_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forestream.model.rotate_values", lambda values, indices, angle: values)


FAULTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sibling": (partial(_edge, 4, 3), {}),
    "ancestor": (partial(_edge, 6, 1), {}),
    # 7 mains, then stream 1 of the seven nodes, then stream 2
    "foreign stream": (partial(_edge, 8, 7), {}),
    "later stream": (partial(_edge, 7, 14), {}),
    "earlier stream": (partial(_edge, 15, 8), {}),
    "main sees stream": (partial(_edge, 3, 9), {}),
    "positions": (_stream_positions, {}),
    "starts": (_starts_swapped, {}),
    "gate": (_gate_off_by_one, {"mode": "lossless"}),
    "rotation": (_no_rotation, {"value_rotation": True, "rotation_angle": 0.7}),
}


@pytest.mark.parametrize(("fault", "changes"), FAULTS.values(), ids=FAULTS)
def test_the_oracle_notices(fault: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    against_the_oracle(wrapped("llama", **changes), prompt(9), range(7), 2)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="differ by"):
        against_the_oracle(wrapped("llama", **changes), prompt(9), range(7), 2)
