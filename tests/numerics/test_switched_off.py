"""Drafting that is switched off costs what plain decoding costs (K09); switching to and fro changes nothing (K10)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from batch import alone, requests, together
from forestream.baseline import plain
from forestream.compiled import EagerLayers
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.model import StreamingLM
from forestream.schedule import Schedule
from forestream.steps import Step, tokens_of
from subject import model_of
from wrapped import prompt

OFF: list[dict[str, Any]] = [{"nodes": 1}, {"streams": 0}, {"streams": 0, "carriers": "fused"}]


def calls(model: StreamingLM, monkeypatch: pytest.MonkeyPatch, settings: DecodeSettings, speculative: bool) -> Any:
    """Everything that multiplies: passes by layers, slots and streams, rows of the head."""
    seen: list[tuple[Any, ...]] = []
    layers, logits, forward = EagerLayers.__call__, StreamingLM.logits, StreamingLM.forward
    behind = StreamingLM.streams_behind

    def note(name: str, right: Any, about: Any) -> Any:
        return lambda *given, **named: (seen.append((name, about(*given))), right(*given, **named))[1]

    with monkeypatch.context() as patch:
        patch.setattr(EagerLayers, "__call__", note("layers", layers, lambda own, span, x, *_: (span, x.shape)))
        patch.setattr(StreamingLM, "logits", note("head", logits, lambda own, x: x.shape[:-1].numel()))
        slots = note("pass", forward, lambda own, ids, pack, *_: (len(pack), pack.streams))
        patch.setattr(StreamingLM, "forward", slots)
        patch.setattr(StreamingLM, "streams_behind", note("streams", behind, lambda *_: ()))
        text = tokens_of(list((decode if speculative else plain)(model, prompt(6), settings)))
    return text, [one for one in seen if one[0] != "head" or one[1]]


@pytest.mark.parametrize("mode", ["joint", "lossless"])
@pytest.mark.parametrize("settings", OFF, ids=str)
def test_switched_off_it_makes_the_calls_of_plain_decoding(
    settings: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", mode)
    off, usual = DecodeSettings(max_new_tokens=8, **settings), DecodeSettings(max_new_tokens=8)
    expected = calls(model, monkeypatch, usual, speculative=False)
    assert calls(model, monkeypatch, off, speculative=True) == expected
    assert len(expected[1]) > 8
    assert calls(model, monkeypatch, usual, speculative=True)[1] != expected[1], "drafting would be noticed"


def test_switched_off_nothing_is_drafted_at_all() -> None:
    model = model_of("llama", "joint")
    for settings in OFF:
        steps = list(decode(model, prompt(6), DecodeSettings(max_new_tokens=8, **settings)))
        assert all(len(step.kept) <= 1 and step.accepted == 0 for step in steps)


@pytest.mark.parametrize("off_from", [2, 3])
def test_going_to_and_fro_over_a_threshold_stalls_nothing(off_from: int) -> None:
    """Sizes of batches swing around the schedule's threshold: each run is what it is the first time."""
    model = model_of("llama", "joint")
    deep = DecodeSettings(tree="full", k=1)
    schedule = Schedule(((1, deep), (off_from, DecodeSettings(nodes=1))))
    asked = requests((4, 5, 6), (14, 9, 6))
    truths = [tokens_of(alone(model, one)) for one in asked]
    first: dict[int, list[list[tuple[int, int, int]]]] = {}
    for size in (off_from, off_from - 1) * 4:
        found = together(model, asked[:size], schedule, truths[:size], rate=1.0)
        assert [tokens_of(steps) for steps in found] == truths[:size]
        shapes = [[_shape(step) for step in steps] for steps in found]
        assert shapes == first.setdefault(size, shapes)
        assert all(tokens > 0 for steps in shapes for tokens, _, _ in steps), "a pass brought nothing"
    drafted = [nodes > 1 for _, _, nodes in first[off_from][0][1:]]
    # Off while all texts are under way; on behind the last of those that end first, and never off again.
    assert drafted.index(True) >= min(map(len, truths[:off_from])) - 1
    assert not any(on and not later for on, later in pairwise(drafted[:-1]))


def _shape(step: Step) -> tuple[int, int, int]:
    return len(step.tokens), step.accepted, len(step.kept)
