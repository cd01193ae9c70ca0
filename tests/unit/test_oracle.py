"""The oracles against each other and by hand: they agree with what is right and notice what is not."""

from typing import Any

import pytest
import torch

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import BudgetTree, DraftTree
from forestream.model import StreamingLM
from forestream.steps import Counters, tokens_of
from forestream.topology import Topology
from oracle import (
    AlwaysDrafter,
    NeverDrafter,
    Prophet,
    SometimesDrafter,
    assert_equal_texts,
    assert_no_trace,
    assert_packed_equals_plain,
    best_paths,
    near_tie,
    plain_logits,
    prefilled,
    sees,
    slots,
    slow_tree_logits,
)
from wrapped import STREAMS, prompt, wrapped
from zoo import HOSTS

TREE = DraftTree(Topology((-1, 0, 0, 1, 1, 2)), (5, 6, 7, 8, 9, 8))
START = prompt(6)


def truth_of(model: StreamingLM, tokens: int = 40) -> tuple[int, ...]:
    return START + tokens_of(list(plain(model, START, DecodeSettings(max_new_tokens=tokens))))


# --- who sees whom --------------------------------------------------------------------------------------------


def test_who_sees_whom_by_hand() -> None:
    tree = TREE.topology
    assert sees(tree, (), (3, 0), (3, 0))
    assert sees(tree, (), (3, 0), (1, 0))
    assert sees(tree, (), (3, 0), (0, 0))
    assert not sees(tree, (), (3, 0), (2, 0))
    assert not sees(tree, (), (1, 0), (3, 0))
    assert not sees(tree, (), (3, 0), (4, 0))
    assert sees(tree, (3, 1), (3, 2), (3, 1))
    assert sees(tree, (3, 1), (3, 2), (3, 2))
    assert sees(tree, (3, 1), (3, 2), (1, 0))
    assert not sees(tree, (3, 1), (3, 1), (3, 2))
    assert not sees(tree, (3, 1), (3, 2), (1, 1))
    assert not sees(tree, (3, 1), (3, 0), (3, 1))
    assert not sees(tree, (3, 1), (1, 2), (3, 0))


def test_a_node_that_carries_no_streams_has_none_to_see() -> None:
    with pytest.raises(ValueError, match="node 2 carries no streams"):
        sees(TREE.topology, (3,), (2, 1), (0, 0))


def test_slots_by_hand() -> None:
    expected = [(0, 0), (1, 0), (1, 1, 0), (0, 1, 1), (1, 2, 0), (0, 2, 1)]
    assert slots(Topology((-1, 0)), (1, 0), 2) == expected


def test_best_paths_by_hand() -> None:
    logits = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log()
    assert best_paths(logits, 4) == [(0,), (0, 0), (1,), (1, 0)]
    assert best_paths(torch.zeros(2, 2), 4) == [(0,), (1,), (0, 0), (0, 1)]


# --- packed equals plain --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        ("llama", {}),
        ("llama", {"mode": "lossless"}),
        ("llama", {"mode": "joint", "merge": False}),
        ("llama", {"positions": "same"}),
        ("llama", {"value_rotation": True, "rotation_angle": 0.7}),
        ("llama", {"value_rotation": True, "mode": "lossless", "stream_layers": 4}),
        ("llama", {"start": "low_rank"}),
        ("opt-post", {"mode": "lossless"}),
        ("mistral-window", {}),
        ("gemma3", {"mode": "lossless"}),
        ("gpt2", {"stream_layers": 1}),
    ],
    ids=str,
)
def test_a_packed_pass_equals_ordinary_sequences(host: str, changes: dict[str, Any]) -> None:
    model = wrapped(host, **changes)
    assert_packed_equals_plain(model, prompt(7), TREE, (0, 2, 4), STREAMS)


def test_a_packed_pass_without_committed_text_equals_ordinary_sequences() -> None:
    assert_packed_equals_plain(wrapped("llama"), (), TREE, (1, 5), 2)


@torch.no_grad()
def test_the_slow_main_logits_are_those_of_plain_decoding_in_any_mode() -> None:
    for mode in ("joint", "lossless"):
        model = wrapped("llama", mode)
        mains, streams = slow_tree_logits(model, START, (5, 6, 7), 2)
        assert streams.shape == (2, mains.shape[1])
        # What plain decoding says before a fourth token, whichever it is.
        wanted = plain_logits(model, START, (5, 6, 7, 0))[1:]
        torch.testing.assert_close(mains, wanted, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_the_slow_oracle_leaves_a_lossless_model_as_it_was() -> None:
    model = wrapped("llama", "lossless")
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    first = slow_tree_logits(model, START, (5, 6), 3)
    second = slow_tree_logits(model, START, (5, 6), 3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted


# --- drafters that know ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("carriers", ["deferred", "fused"])
@pytest.mark.parametrize("host", ["llama", "opt-pre"])
def test_drafters_that_never_always_and_sometimes_hit(host: str, carriers: Any) -> None:
    model = wrapped(host)
    truth = truth_of(model, 40)
    settings = DecodeSettings(max_new_tokens=21, carriers=carriers)
    never = assert_equal_texts(model, START, settings, drafter=NeverDrafter(truth))
    assert [step.accepted for step in never] == [0] * 21
    always = assert_equal_texts(model, START, settings, drafter=AlwaysDrafter(truth))
    assert [len(step.tokens) for step in always] == [1, 5, 5, 5, 5]
    sometimes = assert_equal_texts(model, START, settings, drafter=SometimesDrafter(truth))
    written, hits = len(START), []
    for step in sometimes:
        if step.tree is not None:
            depth = min(STREAMS, len(START) + 21 - written - 1)
            assert step.accepted == written % (depth + 1)
            hits.append(step.accepted)
        written += len(step.tokens)
    assert 0 < sum(hits) < STREAMS * len(hits)


def test_a_prophet_is_right_as_often_as_asked() -> None:
    model = wrapped("llama")
    truth, settings = truth_of(model, 60), DecodeSettings(max_new_tokens=60)
    lengths = []
    for rate in (0.0, 0.5, 1.0):
        counters = Counters()
        counters.extend(assert_equal_texts(model, START, settings, drafter=Prophet(BudgetTree(8), truth, rate)))
        lengths.append(counters.mean_acceptance_length)
    assert lengths[0] < lengths[1] < lengths[2] == pytest.approx(5.0, abs=0.2)


def test_a_prophet_depends_on_its_seed_and_the_place_alone() -> None:
    truth = tuple(range(40))
    logits = torch.zeros(3, 40)
    trees = [
        [Prophet(BudgetTree(6), truth, 0.5, seed)(truth[:n], logits).tokens for n in order]
        for seed, order in ((0, range(1, 30)), (0, range(29, 0, -1)), (1, range(1, 30)))
    ]
    assert trees[0] == trees[1][::-1] != trees[2]
    assert not logits.any(), "the stream's own logits are left alone"


# --- EQ, NT, INV ----------------------------------------------------------------------------------------------


def test_equality_reports_the_first_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = wrapped("llama"), DecodeSettings(max_new_tokens=10)
    truth = truth_of(model, 10)
    broken = list(decode(model, START, settings))
    monkeypatch.setattr("oracle.decode", lambda *args: iter(broken[:-1]))
    place = len(tokens_of(broken[:-1]))
    with pytest.raises(AssertionError, match=f"differ at token {place}: .*{truth[len(START) + place]}"):
        assert_equal_texts(model, START, settings)


def test_equality_looks_at_the_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped("llama")
    last = truth_of(model, 8)[-1]
    settings = DecodeSettings(max_new_tokens=8)
    monkeypatch.setattr("oracle.decode", lambda m, p, s, eos, drafter: decode(m, p, s, (), drafter))
    with pytest.raises(AssertionError, match="other reason"):
        assert_equal_texts(model, START, settings, (last,))


def test_near_ties_of_a_plain_text_are_none_at_all() -> None:
    model = wrapped("llama")
    text = truth_of(model, 20)[len(START) :]
    assert near_tie(model, START, text, margin=0.0) == [0.0] * 20
    assert near_tie(model, START, (), margin=0.0) == []


def test_near_ties_report_what_is_off_and_where() -> None:
    model = wrapped("llama")
    text = list(truth_of(model, 12)[len(START) :])
    second = plain_logits(model, START, text)[7].topk(2)
    text[7] = int(second.indices[1])
    gap = float(second.values[0] - second.values[1])
    with pytest.raises(AssertionError, match=f"first divergence at token 7: {text[7]} written"):
        near_tie(model, START, text[:8], margin=gap * 0.99)
    assert near_tie(model, START, text[:8], margin=gap * 1.01) == pytest.approx([0.0] * 7 + [gap])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("host", ["llama", "opt-pre"])
def test_in_half_precision_every_token_is_nearly_plain_decodings_choice(host: str, dtype: torch.dtype) -> None:
    """The margin: four units in the last place of the largest logit."""
    model = wrapped(HOSTS[host]().to(dtype)).to(dtype)
    truth, settings = truth_of(model, 60), DecodeSettings(max_new_tokens=60, nodes=12)
    steps = list(decode(model, START, settings, drafter=Prophet(BudgetTree(12), truth, 0.8)))
    text = tokens_of(steps)
    largest = float(plain_logits(model, START, text).abs().max())
    margins = near_tie(model, START, text, margin=4 * torch.finfo(dtype).eps * largest)
    assert len(margins) == 60
    assert sum(step.accepted for step in steps) > 5


def test_traces_are_noticed() -> None:
    model = wrapped("llama")
    for other, message in (((1, 2, 4), "keys of layer 0 differ"), ((1, 2), "lengths differ")):
        with pytest.raises(AssertionError, match=message):
            assert_no_trace(prefilled(model, (1, 2, 3)), prefilled(model, other))
    cache = prefilled(model, (1, 2, 3))
    cache.content(3)[1][0, 1, 2, 5] += 1e-3
    with pytest.raises(AssertionError, match="values of layer 3 differ"):
        assert_no_trace(cache, prefilled(model, (1, 2, 3)))
    assert_no_trace(prefilled(model, (1, 2, 3)), prefilled(model, (1, 2, 3), spare=9))
