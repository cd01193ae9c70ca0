"""The shortest and longest prompts and texts, read whole and in pieces (cases D18, D19, E14, E15)."""

from __future__ import annotations

from typing import Any

import pytest

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.decode import decode, decode_batch
from forestream.errors import PromptError
from forestream.memory import Memory
from forestream.requests import Request
from forestream.steps import tokens_of
from oracle import NeverDrafter
from stretched import BORDER, stretched
from subject import CARRIERS, model_of, stock_text, subject
from wrapped import STREAMS, prompt, wrapped
from writers import foreseen, writer
from zoo import POSITIONS, WINDOW, custom

CHUNKS = (1, 3, POSITIONS)
"""Tokens of a prompt in one pass; the last one reads it whole."""


# --- the context limit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("room", [1, 2, STREAMS, STREAMS + 1])
@pytest.mark.parametrize(("host", "carriers"), [("llama", "fused"), ("gpt2", "deferred"), ("mistral-window", "fused")])
def test_prompts_right_below_the_context_limit(host: str, carriers: Any, room: int, chunk: int) -> None:
    """D19: the text ends where the context does, by plain decoding, by drafts that are right and by wrong ones."""
    here = subject(model_of(host, "joint"), prompt(POSITIONS - room), 30)
    assert len(here.text) == room
    assert here.text == stock_text(here.model, here.start, room)
    for rate in (0.0, 0.7, 1.0):
        here.check(30, rate, nodes=12, carriers=carriers, prompt_chunk=chunk)
    settings = DecodeSettings(max_new_tokens=30, carriers=carriers, prompt_chunk=chunk)
    steps = list(decode(here.model, here.start, settings, drafter=NeverDrafter(here.start + here.text)))
    assert (tokens_of(steps), steps[-1].finish) == (here.text, "length")


def test_texts_at_the_limit_beside_short_ones() -> None:
    """D19 in a batch: places behind the limit of one row are not needed for another."""
    model = model_of("gpt2", "joint")
    starts = [prompt(POSITIONS - 2), prompt(3), prompt(POSITIONS - STREAMS)]
    settings = DecodeSettings(max_new_tokens=20, nodes=12, carriers="fused")
    texts: list[tuple[int, ...]] = [()] * 3
    for outcome in decode_batch(model, [Request(start) for start in starts], settings):
        for number, step in outcome:
            texts[number] += step.tokens
    assert [len(text) for text in texts] == [2, 20, STREAMS]
    assert texts == [tokens_of(list(plain(model, start, settings))) for start in starts]


# --- prompts in pieces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 7, WINDOW, 3 * WINDOW + 1, 200])
@pytest.mark.parametrize("host", ["llama", "opt-pre", "mistral-window", "gemma3", "gpt_neox-parallel"])
def test_a_prompt_in_pieces_is_the_prompt(host: str, chunk: int) -> None:
    """D18: every size of pieces, in front of, at and beyond the window."""
    model, start = model_of(host, "lossless"), prompt(3 * WINDOW + 2)
    whole = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=10))))
    settings = DecodeSettings(max_new_tokens=10, prompt_chunk=chunk)
    assert tokens_of(list(plain(model, start, settings))) == whole
    with foreseen(start + whole, rate=0.7):
        assert tokens_of(list(decode(model, start, settings))) == whole


def test_streams_of_a_prompt_in_pieces_are_those_of_the_prompt() -> None:
    """The drafts behind the prompt, too: the last piece carries the streams."""
    model, start = model_of("llama", "joint"), prompt(20)
    trees = []
    for chunk in (1, 3, 19, 20):
        run = decode(model, start, DecodeSettings(nodes=8, prompt_chunk=chunk))
        next(run)
        trees.append(next(run).tree)
    assert trees == [trees[0]] * 4


def test_a_long_prompt() -> None:
    """D18: thousands of tokens in pieces of the usual size."""
    model = wrapped(custom("llama", num_key_value_heads=2, max_position_embeddings=3000))
    start, settings = prompt(2500), DecodeSettings(max_new_tokens=12, prompt_chunk=512)
    whole = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=12, prompt_chunk=2500))))
    assert tokens_of(list(plain(model, start, settings))) == whole
    with foreseen(start + whole, rate=0.7):
        steps = list(decode(model, start, settings))
    assert tokens_of(steps) == whole
    assert len(steps) < 12


@pytest.mark.parametrize("length", [BORDER - 2, BORDER + 3])
def test_pieces_of_prompts_of_a_stretched_host(length: int) -> None:
    """A prompt beyond the border is read whole: pieces below it would be turned otherwise."""
    model, start = stretched("longrope"), prompt(length)
    whole = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=6))))
    for chunk, memory in ((1, None), (5, None), (5, Memory(model))):
        settings = DecodeSettings(max_new_tokens=6, prompt_chunk=chunk)
        assert tokens_of(list(decode(model, start, settings, memory=memory))) == whole


# --- the shortest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carriers", CARRIERS)
@pytest.mark.parametrize("cap", [0, 1, 2, STREAMS, STREAMS + 1])
def test_the_cap_is_met_exactly_from_a_single_token(cap: int, carriers: Any) -> None:
    """E14, E15: with drafts that are all right, the last pass would have more to give."""
    model, start = model_of("llama", "joint"), prompt(1)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=12))))
    settings = DecodeSettings(max_new_tokens=cap, carriers=carriers)
    with foreseen(start + text, rate=1.0):
        steps = list(decode(model, start, settings))
    assert tokens_of(steps) == tokens_of(list(plain(model, start, settings))) == text[:cap]
    assert [step.finish for step in steps[-1:]] == ["length"] * bool(cap)
    assert len(steps) == (0 if cap == 0 else 1 if cap == 1 else 2)


@pytest.mark.parametrize("empty", ["", [], ()])
def test_an_empty_prompt_is_an_error_that_says_so(empty: Any) -> None:
    """E15."""
    shared = writer()
    for run in (
        shared.generate,
        lambda start: shared.generate_batch(["the", start]),
        lambda start: list(shared.stream(start)),
    ):
        with pytest.raises(PromptError, match="the prompt is empty"):
            run(empty)


def test_a_prompt_that_leaves_no_room_is_an_error_that_says_so() -> None:
    shared = writer()
    with pytest.raises(PromptError, match="the prompt has 512 tokens and the model's context ends at 512"):
        shared.generate("a" * 512)
    with pytest.raises(PromptError, match="600 tokens"):
        shared.generate_batch(["a", "a" * 600])
    assert len(shared.generate("a" * 511).tokens) == 1


def test_ids_that_the_model_does_not_know_are_named() -> None:
    model = model_of("llama", "joint")
    for stranger in (-1, 89, 10**6):
        for run in (decode, plain):
            with pytest.raises(PromptError, match=f"holds the id {stranger}; this model knows ids from 0 to 88"):
                next(iter(run(model, (3, stranger), DecodeSettings())))
