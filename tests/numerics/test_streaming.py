"""Texts as they are streamed: whole, in order, and stopped at any place without a trace (cases L01 to L07)."""

from __future__ import annotations

from typing import Any

import pytest

from forestream.errors import ConfigError, PromptError
from forestream.generation import Generator
from forestream.memory import Memory
from subject import CARRIERS
from writers import dictated, foreseen, writer

HOLE = "\N{REPLACEMENT CHARACTER}"
PROMPT = "the cat"
TEXT = "Grüße: 🙂🙃 abcd the 日本 👩‍👧 end"


def said(shared: Generator, text: str, **asked: Any) -> dict[str, Any]:
    """What has to be asked for to have `text` written."""
    return {"processors": [dictated(shared, PROMPT, text)], "max_new_tokens": 80, **asked}


def whole(shared: Generator, text: str) -> tuple[int, ...]:
    """Prompt, text and its end."""
    return *shared.tokenizer(PROMPT)["input_ids"], *shared.tokenizer(text)["input_ids"], *shared.eos


@pytest.mark.parametrize("carriers", CARRIERS)
@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_a_stream_is_the_text(rate: float, carriers: Any) -> None:
    """L01, L02: joined it is what `generate` gives; no piece holds half a character."""
    shared = writer("bytes")
    with foreseen(whole(shared, TEXT), rate=rate):
        asked = said(shared, TEXT, carriers=carriers)
        found, streamed = shared.generate(PROMPT, **asked), list(shared.stream(PROMPT, **asked))
        listed = list(shared.pieces(PROMPT, **asked))
    assert "".join(streamed) == found.text == TEXT
    assert all(streamed)
    assert not any(HOLE in piece for piece in streamed)
    assert "".join(piece.text for piece in listed) == TEXT
    # L03: a piece for each token, drafted or not as the steps say.
    assert tuple(piece.token for piece in listed) == found.tokens
    assert sum(piece.drafted for piece in listed) == found.counters.accepted
    assert (found.counters.accepted > 10) == (rate > 0)


def test_random_bytes_are_streamed_as_they_are_decoded() -> None:
    shared = writer("bytes")
    for start in ("a", "the", "🙂", "ab cd"):
        for law in ({}, {"temperature": 1.0, "seed": 2}):
            found = shared.generate(start, max_new_tokens=40, **law)
            assert "".join(shared.stream(start, max_new_tokens=40, **law)) == found.text


@pytest.mark.parametrize("stop", ["🙂", "ße", "abcd", "bc", "the 日", "end", "never"])
def test_a_stop_string_ends_a_stream(stop: str) -> None:
    """L05: behind the token that completes it, which may hold more than the string."""
    shared = writer("bytes")
    asked = said(shared, TEXT, stop=stop)
    with foreseen(whole(shared, TEXT), rate=0.9):
        found, streamed = shared.generate(PROMPT, **asked), "".join(shared.stream(PROMPT, **asked))
    assert streamed == found.text == shared.collect(shared.plain_steps(PROMPT, **asked)).text
    assert found.finish == "stop"
    if stop == "never":
        assert streamed == TEXT
    else:
        behind = TEXT.index(stop) + len(stop)
        assert TEXT[:behind] in (streamed, streamed[:behind])
        assert len(streamed) - behind <= 1


def test_pieces_come_while_the_text_is_written() -> None:
    """L06: a piece is there before the next pass runs."""
    shared, passes = writer(), []
    embed = shared.model.port.embed
    shared.model.port.embed = lambda *args: (passes.append(1), embed(*args))[1]  # type: ignore[method-assign]
    try:
        seen = [(piece, len(passes)) for piece in shared.stream(PROMPT, max_new_tokens=12, nodes=1)]
    finally:
        del shared.model.port.embed
    assert [count for _, count in seen] == list(range(1, 13))


@pytest.mark.parametrize("mode", ["joint", "lossless"])
@pytest.mark.parametrize("kind", ["stream", "pieces", "steps"])
def test_a_stream_closed_anywhere_leaves_no_trace(kind: str, mode: str) -> None:
    """L07: what is asked for next is what a fresh generator writes, with and without a memory."""
    shared, untouched = writer.__wrapped__(mode=mode), writer.__wrapped__(mode=mode)
    law = {"temperature": 0.9, "seed": 1}
    wanted = [untouched.generate(start, **law) for start in ("other", PROMPT)]
    length = len(list(getattr(shared, kind)(PROMPT, **law)))
    for cut in range(length + 1):
        memory = Memory(shared.model)
        run = getattr(shared, kind)(PROMPT, memory=memory, stop="zz", **law)
        for _ in range(cut):
            next(run)
        run.close()
        found = [shared.generate("other", **law), shared.generate(PROMPT, memory=memory, **law)]
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
        assert [[s.tree for s in one.steps] for one in found] == [[s.tree for s in one.steps] for one in wanted]


def test_a_stream_left_open_runs_beside_others() -> None:
    shared = writer()
    alone = shared.generate(PROMPT).text
    begun = shared.stream(PROMPT)
    first = next(begun)
    assert shared.generate("other").text == shared.generate("other").text
    beside = shared.stream(PROMPT)
    assert next(beside) + "".join(beside) == alone
    assert first + "".join(begun) == alone


@pytest.mark.parametrize("kind", ["stream", "pieces", "steps", "plain_steps"])
def test_errors_surface_when_the_first_piece_is_asked_for(kind: str) -> None:
    shared = writer()
    for error, start, asked in ((PromptError, "", {}), (ConfigError, "a", {"node": 3}), (ConfigError, "a", {"k": 0})):
        run = getattr(shared, kind)(start, **asked)
        with pytest.raises(error):
            next(run)


def test_no_text_is_an_empty_stream() -> None:
    shared = writer()
    assert not list(shared.stream(PROMPT, max_new_tokens=0))
    assert not list(shared.pieces(PROMPT, max_new_tokens=0))
    end = shared.generate(PROMPT).tokens[0]
    assert "".join(shared.stream(PROMPT, eos=end)) == shared.text([end])
