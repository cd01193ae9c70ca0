"""How texts are held against plain decoding: what counts as equal, as near, and as neither."""

import json
import math
from dataclasses import replace

import pytest
import torch

from forestream.agreement import (
    UNITS,
    Agreement,
    compare,
    first_difference,
    first_difference_margin,
    plain_logits,
    shortfall,
)
from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.errors import ForestreamError
from forestream.model import StreamingLM
from forestream.sampling import greedy
from forestream.steps import tokens_of
from wrapped import prompt, wrapped
from zoo import HOSTS

START = prompt(6)
TOKENS = 12
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture
def model() -> StreamingLM:
    return wrapped("llama")


def written(model: StreamingLM) -> tuple[int, ...]:
    return tokens_of(list(plain(model, START, DecodeSettings(max_new_tokens=TOKENS))))


def with_second_best(model: StreamingLM, place: int) -> tuple[tuple[int, ...], float]:
    """Plain decoding's text with its second choice at `place`, and by how much that falls short."""
    text = written(model)
    row = list(plain_logits(model, START, text))[place].float()
    second = row.topk(2).indices[1]
    return (*text[:place], int(second), *text[place + 1 :]), float(row.max() - row[second])


@pytest.mark.parametrize(
    ("a", "b", "place"),
    [
        ((), (), None),
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 3), 1),
        ((1,), (1, 2), 1),
        ((1, 2), (), 0),
        ((4,), (5, 6), 0),
    ],
)
def test_the_first_difference(a: tuple[int, ...], b: tuple[int, ...], place: int | None) -> None:
    assert first_difference(a, b) == first_difference(b, a) == place


@DTYPES
@pytest.mark.parametrize("host", ["llama", "gemma3"])
def test_told_what_it_wrote_plain_decoding_chooses_it_again(host: str, dtype: torch.dtype) -> None:
    model = wrapped(HOSTS[host]().to(dtype)).to(dtype)
    text = written(model)
    rows = list(plain_logits(model, START, text))
    assert greedy(torch.stack(rows)) == list(text)
    assert {row.dtype for row in rows} == {dtype}
    assert [shortfall(row, token) for row, token in zip(rows, text, strict=True)] == [0.0] * TOKENS
    assert list(plain_logits(model, START, ())) == []


def test_equal_texts_agree_without_another_look(model: StreamingLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(model)
    monkeypatch.setattr("forestream.agreement.plain_logits", None)
    found = compare(model, START, text, text, number=3)
    assert found == Agreement(3, TOKENS)
    assert found.equal
    assert found.near(0.0)
    assert first_difference_margin(model, START, text, text) == 0.0


@DTYPES
def test_a_difference_is_named_and_measured(dtype: torch.dtype) -> None:
    model = wrapped(HOSTS["llama"]().to(dtype)).to(dtype)
    text, place = written(model), 4
    other, gap = with_second_best(model, place)
    found = compare(model, START, text, other[: place + 1])
    assert (found.first_difference, found.plain, found.written) == (place, text[place], other[place])
    assert found.margin == found.worst == gap > 0
    assert found.tokens == place + 1
    assert not found.equal
    assert found.near(gap)
    assert not found.near(gap * 0.99)
    largest = max(float(row.abs().max()) for row in plain_logits(model, START, other[: place + 1]))
    assert found.unit == pytest.approx(torch.finfo(dtype).eps * largest)
    assert found.allowed() == UNITS * found.unit
    assert found.near() == (gap <= found.allowed())
    assert first_difference_margin(model, START, text, other) == gap
    assert json.loads(json.dumps(found.record()))["margin"] == gap


def test_what_comes_behind_the_first_difference_counts_as_well(model: StreamingLM) -> None:
    other, gap = with_second_best(model, 2)
    last = list(plain_logits(model, START, other))[-1]
    worst = shortfall(last, int(last.argmin()))
    found = compare(model, START, written(model), (*other[:-1], int(last.argmin())))
    assert (found.margin, found.tokens) == (gap, TOKENS)
    assert found.worst >= worst > gap
    assert not found.near(gap)


def test_a_text_that_stops_early_is_near_nothing(model: StreamingLM) -> None:
    text = written(model)
    for one, other in ((text, text[:5]), (text[:5], text), (text, ())):
        found = compare(model, START, one, other)
        assert found.first_difference == min(len(one), len(other))
        assert (found.plain is None) != (found.written is None)
        assert found.margin == math.inf
        assert not found.near(1e9)
        assert json.loads(json.dumps(found.record(), allow_nan=False))["margin"] is None
        with pytest.raises(ForestreamError, match=r"one stops after .* tokens and the other goes on"):
            first_difference_margin(model, START, one, other)


def test_logits_that_are_no_numbers_are_near_nothing() -> None:
    found = Agreement(0, 5, 2, 7, 8, margin=0.1, worst=0.1, unit=1.0)
    assert found.near()
    for name in ("margin", "worst", "unit"):
        assert not replace(found, **{name: math.nan}).near()
