"""Whole passes of a small model over random trees: packed = plain, siblings do not meet, greedy text is the same."""

from functools import cache
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import DraftTree, FullTree, drafter_for
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.pruning import KeepAbove, KeepBest
from forestream.steps import tokens_of
from oracle import Prophet, assert_packed_equals_plain, prefilled
from passes import check
from passes import stream_logits as decode_streams
from strategies import carriers_in, draft_trees
from wrapped import STREAMS, prompt, wrapped


@cache
def model_of(host: str, mode: str) -> StreamingLM:
    return wrapped(host, mode)


HOSTS = st.sampled_from([("llama", "joint"), ("llama", "lossless"), ("mistral-window", "joint")])


@settings(max_examples=20)
@given(st.data())
def test_any_tree_gives_the_logits_of_ordinary_sequences(data: DataObject) -> None:
    model = model_of(*data.draw(HOSTS))
    tree = data.draw(draft_trees(most=8))
    carriers = data.draw(carriers_in(tree.topology))
    text = prompt(data.draw(st.integers(0, 12)), seed=data.draw(st.integers(0, 99)))
    assert_packed_equals_plain(model, text, tree, carriers, data.draw(st.integers(1, STREAMS)) if carriers else 0)


@torch.no_grad()
def states(model: StreamingLM, tree: DraftTree) -> tuple[Tensor, Tensor]:
    """Main [N,D] and stream [N,G,D] states where every node carries two streams."""
    nodes = range(len(tree.topology))
    pack = Pack.tree(tree.topology, nodes, 2)
    cached = prefilled(model, (3, 1, 4), spare=len(pack))
    output = model(torch.tensor([tree.tokens]), pack, cached)
    return output.main[0], output.streams[0].transpose(0, 1)


@settings(max_examples=30)
@given(st.data())
def test_changing_a_token_changes_its_own_branch_and_no_other(data: DataObject) -> None:
    model = model_of("llama", "lossless")
    tree = data.draw(draft_trees(most=12))
    changed = data.draw(st.integers(0, len(tree.topology) - 1))
    tokens = list(tree.tokens)
    tokens[changed] = 71 + data.draw(st.integers(0, 9))
    before, after = states(model, tree), states(model, DraftTree(tree.topology, tuple(tokens)))
    for node in range(len(tree.topology)):
        behind = changed in tree.topology.path(node)
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[node], b[node]) == (not behind)


@settings(max_examples=25)
@given(st.data())
def test_fused_and_deferred_streams_say_the_same(data: DataObject) -> None:
    """Of whichever node was accepted, after whatever pruning."""
    model = model_of(*data.draw(HOSTS))
    text = prompt(data.draw(st.integers(1, 12)), seed=data.draw(st.integers(0, 99)))
    truth = text + tokens_of(list(plain(model, text, DecodeSettings(max_new_tokens=4))))
    keep = data.draw(st.sampled_from([None, KeepBest(4), KeepAbove(0.5)]))
    logits = torch.zeros(3, model.port.config.vocab_size)
    tree = Prophet(FullTree(2), truth, rate=0.8, seed=data.draw(st.integers(0, 99)))(truth[: len(text) + 1], logits)
    found = []
    few = {"carriers": "fused", "carried": data.draw(st.integers(1, 9))}
    for who in ({"carriers": "deferred"}, {"carriers": "fused"}, few):
        cached = prefilled(model, text, spare=5 * len(tree.tokens))
        checked = check(model, tree, cached, STREAMS, DecodeSettings(**who), keep)
        if who != few:  # of few carriers none may survive
            assert checked.streams.shape[1] == (STREAMS if who["carriers"] == "fused" else 0)
        found.append((checked.verdict, decode_streams(model, checked, STREAMS, cached)))
    (verdict, streams), *others = found
    for own, ahead in others:
        assert own == verdict
        assert float((ahead - streams).abs().max()) <= 2e-5 * float(streams.abs().max())


@settings(max_examples=25)
@given(st.data())
def test_random_settings_never_change_the_text(data: DataObject) -> None:
    model = model_of(*data.draw(HOSTS))
    chosen = DecodeSettings(
        tree=data.draw(st.sampled_from(["budget", "full"])),
        nodes=data.draw(st.integers(1, 20)),
        k=data.draw(st.integers(1, 3)),
        streams=data.draw(st.integers(0, 3)),
        carriers=data.draw(st.sampled_from(["deferred", "fused"])),
        carried=data.draw(st.sampled_from([None, 1, 2, 5])),
        prune_below=data.draw(st.sampled_from([0.0, 0.0, 1e-4, 0.1])),
        max_new_tokens=data.draw(st.integers(1, 14)),
    )
    start = prompt(data.draw(st.integers(1, 12)), seed=data.draw(st.integers(0, 99)))
    wanted = tokens_of(list(plain(model, start, chosen)))
    drafter = Prophet(drafter_for(chosen), start + wanted, data.draw(st.floats(0.0, 1.0)))
    steps = list(decode(model, start, chosen, drafter=drafter))
    assert tokens_of(steps) == wanted
    # Every step is made of accepted drafts and one token of the main stream, and starts where the last one ended.
    lengths = list(accumulate(len(step.tokens) for step in steps))
    assert [len(step.tokens) for step in steps] == [1 + step.accepted for step in steps]
    roots = [step.tree.tokens[0] for step in steps if step.tree is not None]
    assert roots == [wanted[length - 1] for length in lengths[:-1]]
