"""Streams on vLLM: the drafts are those of our own engine, and the texts those of vLLM without speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from forced import Forced
from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.steps import tokens_of
from forestream.vllm.exported import KEY
from forestream.vllm.models import Streaming
from forestream.vllm.server import options
from served import FORCED, HOSTS, STREAMS, chains, counted, exported, texts
from wrapped import prompt

TOKENS = 70  # over two borders of 32 slots
PROMPTS = [prompt(length, 90, seed=length) for length in (1, 5, 20, 31, 32, 33, 64, 90)]
VOCABULARY, BLOCK = 98, 32

Truth = tuple[Sequence[int], Sequence[int]]


def assert_same_drafts(model: StreamingLM, truths: Sequence[Truth]) -> int:
    """Every draft that vLLM's streams made is our own; returns how many were cut short at a block's end."""
    wanted = {}
    for start, text in truths:
        wanted |= chains(model, start, text)
    compared = short = 0
    for text, drafts in Forced.seen.items():
        if text not in wanted:  # the step that ended a text may have gone beyond its cap
            assert len(text) > min(len(start) + len(found) for start, found in truths)
            continue
        assert drafts == tuple(wanted[text][: len(drafts)]), f"behind {len(text)} tokens"
        compared += 1
        if len(drafts) < STREAMS:
            # The anchor is the token before the last one; slots end with its block, or a later draft's.
            assert (len(text) - 2) % BLOCK > BLOCK - 1 - STREAMS
            short += 1
    assert compared >= sum(len(text) for _, text in truths) // (2 * (STREAMS + 1))
    return short


def expect(truths: Sequence[Truth]) -> None:
    """Have drafts of these texts accepted in part."""
    Forced.expect([(*start, *text) for start, text in truths], VOCABULARY)


def told(model: StreamingLM, prompts: Sequence[Sequence[int]], tokens: int) -> list[Truth]:
    """Prompts, each with what our own engine writes by plain decoding."""
    return [(one, tokens_of(list(plain(model, one, DecodeSettings(max_new_tokens=tokens))))) for one in prompts]


def written(truths: Sequence[Truth]) -> list[tuple[int, ...]]:
    return [tuple(text) for _, text in truths]


@pytest.mark.parametrize("host", HOSTS)
def test_drafts_are_our_own_engines_and_texts_those_without_speculation(host: str, tmp_path: Path, engine: Any) -> None:
    folder, model = exported(tmp_path, host)
    truths = told(model, PROMPTS, TOKENS)
    assert texts(engine(folder), PROMPTS, TOKENS) == written(truths)
    assert sum(len(set(text)) > 3 for text in written(truths)) > len(truths) // 2
    streaming = engine(folder, STREAMS, FORCED)
    expect([])
    assert texts(streaming, PROMPTS, TOKENS) == written(truths)  # drafts as they are: hardly any is right
    assert assert_same_drafts(model, truths) > 0
    expect(truths)
    assert texts(streaming, PROMPTS, TOKENS) == written(truths)
    assert_same_drafts(model, truths)
    places = counted(streaming, "spec_decode_num_accepted_tokens_per_pos")
    assert len(places) == STREAMS
    assert places == sorted(places, reverse=True)
    assert places[-1] > 20
    assert sum(places) == counted(streaming, "spec_decode_num_accepted_tokens")[0]
    assert places[0] < counted(streaming, "spec_decode_num_drafts")[0]  # some are rejected


SHAPES: list[tuple[dict[str, Any], int]] = [
    ({"positions": "same", "start": "low_rank", "start_rank": 4}, STREAMS),
    ({"stream_layers": 4}, 2),  # all of them, and fewer drafts than streams
    ({"mode": "lossless"}, STREAMS),
]


@pytest.mark.parametrize(("changes", "drafts"), SHAPES)
def test_every_shape_of_streams(changes: dict[str, Any], drafts: int, tmp_path: Path, engine: Any) -> None:
    folder, model = exported(tmp_path, **changes)
    truths = told(model, PROMPTS[1:5], 24)
    streaming = engine(folder, drafts, FORCED)
    expect(truths)
    assert texts(streaming, PROMPTS[1:5], 24) == written(truths)
    assert max(map(len, Forced.seen.values())) == drafts
    wanted = {text: own for start, found in truths for text, own in chains(model, start, found).items()}
    for text, own in Forced.seen.items():
        assert list(own) == wanted.get(text, list(own))[: len(own)]


SOME = range(2, VOCABULARY, 3)
TOLD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"sampler": True}),
    ("llama-tied", {"sampler": True, "vocabulary": SOME}),
    ("opt-post", {"sampler": True, "vocabulary": SOME}),  # its embeddings are narrower than its states
    ("qwen2", {"vocabulary": SOME}),
    ("llama", {"sampler": True, "vocabulary": SOME, "mode": "lossless"}),
]


@pytest.mark.parametrize(("host", "changes"), TOLD)
def test_path_sampler_and_draft_vocabulary(host: str, changes: dict[str, Any], tmp_path: Path, engine: Any) -> None:
    folder, model = exported(tmp_path, host, **changes)
    some = PROMPTS[1:5]
    truths = told(model, some, 40)
    streaming = engine(folder, STREAMS, FORCED)
    for known in ([], truths):  # drafts as they are, and drafts that are accepted in part
        expect(known)
        assert texts(streaming, some, 40) == written(truths)
        assert_same_drafts(model, truths)
    places = counted(streaming, "spec_decode_num_accepted_tokens_per_pos")
    assert places == sorted(places, reverse=True)
    assert places[-1] > 5
    assert sum(places) == counted(streaming, "spec_decode_num_accepted_tokens")[0]
    if "vocabulary" in changes:
        assert {token for own in Forced.seen.values() for token in own} <= set(SOME)
    # The comparison can fail: without the one or the other our own engine drafts something else.
    if model.sampler is not None:
        kept, model.sampler = model.sampler, None
        with pytest.raises(AssertionError, match="behind"):
            assert_same_drafts(model, truths)
        model.sampler = kept
    if model.vocabulary is not None:
        model.restrict(None)
        with pytest.raises(AssertionError, match="behind"):
            assert_same_drafts(model, truths)


def test_a_head_whose_rows_cannot_be_taken_is_asked_whole(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Streaming, "restrict", lambda self: None)  # as where it is parted among processes
    folder, model = exported(tmp_path, sampler=True, vocabulary=SOME)
    truths = told(model, PROMPTS[1:3], 24)
    streaming = engine(folder, STREAMS, FORCED)
    expect(truths)
    assert texts(streaming, PROMPTS[1:3], 24) == written(truths)
    assert_same_drafts(model, truths)


def test_prompts_read_in_pieces_and_texts_up_to_the_last_place_there_is(tmp_path: Path, engine: Any) -> None:
    folder, model = exported(tmp_path)
    long = [prompt(length, 90, seed=length) for length in (170, 150, 140, 10)]
    truths = [one for start in long for one in told(model, [start], min(TOKENS, 192 - len(start)))]
    streaming = engine(folder, STREAMS, FORCED, max_num_batched_tokens=64, max_model_len=192)
    expect(truths)
    assert texts(streaming, long, TOKENS) == written(truths)
    assert_same_drafts(model, truths)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_a_compiled_target_hands_out_its_trunk_and_its_streams_are_compiled_too(
    mode: str, tmp_path: Path, engine: Any
) -> None:
    folder, model = exported(tmp_path, mode=mode)
    truths = told(model, PROMPTS[1:5], 24)
    streaming = engine(folder, STREAMS, FORCED, enforce_eager=False)
    assert streaming.llm_engine.vllm_config.compilation_config.mode.name != "NONE"
    target = Forced.latest.target

    def eager(*given: Any) -> None:
        raise AssertionError("the streams run eagerly")

    target.run_streams = eager  # compiled code calls it no more
    expect(truths)
    assert texts(streaming, PROMPTS[1:5], 24) == written(truths)
    assert_same_drafts(model, truths)
    config = streaming.llm_engine.vllm_config
    named = config.compute_hash()
    del getattr(config.model_config.hf_config, KEY)["hands_out_trunk"]
    assert config.compute_hash() != named  # that of a target which hands out nothing


def test_the_more_requests_run_the_fewer_tokens_each_drafts(tmp_path: Path, engine: Any) -> None:
    folder, model = exported(tmp_path)
    speculative = options(folder, rows=8)["speculative_config"] | {"model": FORCED}
    assert speculative["num_speculative_tokens_per_batch_size"] == [(1, 2, 3), (3, 4, 1), (5, 8, 0)]
    streaming = engine(folder, speculative_config=speculative)
    truths = told(model, [PROMPTS[1]] * 8, 24)  # texts that go along side by side, and end in one step
    drafted: dict[int, set[int]] = {}
    for requests in (8, 4, 2, 8, 1):
        expect([])
        assert texts(streaming, PROMPTS[1:2] * requests, 24) == written(truths)[:requests]
        drafted[requests] = {len(own) for own in Forced.seen.values()}
        wanted = chains(model, *truths[0])
        assert all(own == tuple(wanted[text][: len(own)]) for text, own in Forced.seen.items() if text in wanted)
    assert drafted[8] == set()
    assert drafted[4] == {1}
    assert max(drafted[2]) == max(drafted[1]) == STREAMS


# --- one engine, asked in many ways ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, engine: Any) -> tuple[Any, StreamingLM]:
    """vLLM with streams, and our own engine, on one model."""
    folder, model = exported(tmp_path_factory.mktemp("llama"))
    return engine(folder, STREAMS, FORCED), model


@pytest.mark.parametrize("batch", [1, 4])
def test_batches_write_what_texts_alone_do(batch: int, llama: tuple[Any, StreamingLM]) -> None:
    streaming, model = llama
    truths = told(model, PROMPTS[:4], 36)
    expect(truths)
    assert texts(streaming, PROMPTS[:4], 36, batch) == written(truths)
    assert_same_drafts(model, truths)


def test_other_streams_would_be_noticed(llama: tuple[Any, StreamingLM]) -> None:
    """The comparison can fail: streams that start elsewhere, or stand elsewhere, draft something else."""
    streaming, model = llama
    expect([])
    some = PROMPTS[2:4]
    truths = list(zip(some, texts(streaming, some, 40), strict=True))
    assert_same_drafts(model, truths)
    assert model.start is not None
    assert model.start.embedding is not None
    kept, config = model.start.embedding.data.clone(), model.stream_config
    try:
        model.start.embedding.data = kept.flip(0)
        with pytest.raises(AssertionError, match="behind"):
            assert_same_drafts(model, truths)
        model.start.embedding.data = kept
        model.stream_config = replace(config, positions="same")
        with pytest.raises(AssertionError, match="behind"):
            assert_same_drafts(model, truths)
    finally:
        model.start.embedding.data, model.stream_config = kept, config


def test_cached_prefixes_hold_no_trace_of_streams(llama: tuple[Any, StreamingLM]) -> None:
    """Streams write into slots behind the text; blocks that other requests find in the cache hold text alone."""
    streaming, model = llama
    whole = prompt(128, 90, seed=7)
    first = [whole[:length] for length in (95, 96, 97, 128)]
    truths = told(model, first, TOKENS)
    hits = counted(streaming, "prefix_cache_hits")[0]
    expect(truths)
    for batch in (1, 4):
        assert texts(streaming, first, TOKENS, batch) == written(truths)
    # Texts that go on from what was written, in blocks that streams wrote into before the text did.
    further = [(*start, *text[:50]) for start, text in truths]
    assert texts(streaming, further, TOKENS - 50) == [tuple(text[50:]) for _, text in truths]
    assert_same_drafts(model, truths)
    assert counted(streaming, "prefix_cache_hits")[0] > hits + 4 * 96


def test_a_request_that_is_aborted_leaves_the_others_alone(llama: tuple[Any, StreamingLM]) -> None:
    streaming, model = llama
    truths = told(model, PROMPTS[:4], 50)
    expect(truths)
    inner = streaming.llm_engine
    law = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    # vLLM adds to the names that requests are given and aborted by.
    names = [inner.add_request(f"text {n}", {"prompt_token_ids": list(one)}, law) for n, one in enumerate(PROMPTS[:4])]
    finished: dict[str, tuple[int, ...]] = {}
    steps = 0
    while inner.has_unfinished_requests():
        for output in inner.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                finished[output.request_id] = tuple(output.outputs[0].token_ids)
        steps += 1
        if steps == 5:
            inner.abort_request([names[1]], internal=True)
    assert finished == {f"text {n}": written(truths)[n] for n in (0, 2, 3)}
    assert texts(streaming, PROMPTS[:4], 50) == written(truths)  # the aborted one too, in blocks used before
    assert_same_drafts(model, truths)


def test_draws_follow_the_law(llama: tuple[Any, StreamingLM]) -> None:
    """Of a law with one possible token every draw is that token, whatever is drafted.

    With top_k alone vLLM 0.32 fails on a CPU in every step without drafts, such as the first (docs/vllm.md).
    """
    streaming, model = llama
    truths = told(model, PROMPTS[:4], 30)
    expect(truths)
    assert texts(streaming, PROMPTS[:4], 30, temperature=1.0, top_k=1, top_p=0.99, seed=1) == written(truths)


def test_draws_are_as_likely_as_the_model_says(llama: tuple[Any, StreamingLM]) -> None:
    """The second token of many draws, some of them drafts that were accepted: a chi-squared test with a fixed seed."""
    streaming, model = llama
    draws, temperature = 400, 1.5
    (truth,) = told(model, PROMPTS[2:3], 12)
    expect([truth])
    found = texts(streaming, PROMPTS[2:3] * draws, 3, temperature=temperature, top_p=0.9999)
    first, count = Counter(text[0] for text in found).most_common(1)[0]
    assert count > 20
    seen = Counter(text[1] for text in found if text[0] == first)
    law = probabilities(model, (*PROMPTS[2], first), temperature)
    # Tokens that are hardly expected are counted together.
    likely = [token for token in range(len(law)) if count * law[token] >= 5]
    expected = [count * law[token] for token in likely] + [count * (1 - sum(law[token] for token in likely))]
    observed = [seen[token] for token in likely]
    observed.append(count - sum(observed))
    statistic = sum((a - b) ** 2 / b for a, b in zip(observed, expected, strict=True) if b > 1e-6)
    assert statistic < 3 * len(expected) + 12  # beyond the 99.9th percentile for any number of classes here


def probabilities(model: StreamingLM, text: Sequence[int], temperature: float) -> list[float]:
    """The law of the next token behind `text`, by our own engine."""
    states = model(torch.tensor([text]), Pack.text(len(text), torch.zeros(1, 0, dtype=torch.long), 0)).main
    law: list[float] = (model.logits(states[0, -1:]).float()[0] / temperature).softmax(-1).tolist()
    return law
