"""EQ where texts begin and end: prompts of all lengths, caps, ends of text, the position limit and the window."""

from itertools import product
from typing import Any

import pytest

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import drafter_for
from forestream.errors import PromptError
from forestream.steps import tokens_of
from oracle import Prophet, assert_equal_texts
from subject import CARRIERS, model_of, stock_text, subject
from wrapped import STREAMS, prompt
from zoo import HOSTS, POSITIONS, WINDOW

every_host = pytest.mark.parametrize("host", HOSTS)
both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])


# --- lengths ------------------------------------------------------------------------------------------------


@every_host
def test_prompts_of_all_lengths_up_to_the_position_limit(host: str) -> None:
    model = model_of(host, "lossless" if len(host) % 2 else "joint")
    for length in (1, 2, 20, POSITIONS - STREAMS, POSITIONS - 2, POSITIONS - 1):
        room = POSITIONS - length
        here = subject(model, prompt(length), 10)
        assert len(here.text) == min(10, room)
        for carriers, rate in product(CARRIERS, (0.5, 1.0)):
            # asked for more than there is room for, both stop at the limit
            here.check(10, rate, nodes=12, carriers=carriers)


@pytest.mark.parametrize("host", ["llama", "gpt2"])
def test_prompts_without_room_are_refused_by_both(host: str) -> None:
    model = model_of(host, "joint")
    for run in (decode, plain):
        with pytest.raises(PromptError, match="empty"):
            next(iter(run(model, (), DecodeSettings())))
        for length in (POSITIONS, POSITIONS + 3):
            with pytest.raises(PromptError, match=f"{length} tokens.*{POSITIONS}"):
                next(iter(run(model, prompt(length), DecodeSettings())))


@pytest.mark.parametrize("host", ["llama", "opt-pre", "gemma3"])
def test_the_whole_context_is_written_to_its_end(host: str) -> None:
    here = subject(model_of(host, "lossless"), prompt(3), POSITIONS)
    assert len(here.text) == POSITIONS - 3
    here.check(POSITIONS - 3, nodes=10)
    here.check(POSITIONS - 3, nodes=10, carriers="fused", prune_below=1e-4)
    here.check(POSITIONS - 3, nodes=4, lookup_beside=6, lookup_behind=6)
    assert here.counters.mean_acceptance_length > 1.5


@pytest.mark.parametrize("host", ["mistral-window", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 3])
def test_prompts_around_and_beyond_the_window(host: str, length: int) -> None:
    here = subject(model_of(host, "joint"), prompt(length), 2 * WINDOW)
    assert here.text == stock_text(here.model, here.start, 2 * WINDOW)
    for carriers, tree in product(CARRIERS, ({"nodes": 16}, {"tree": "full", "k": 2})):
        here.check(2 * WINDOW, carriers=carriers, **tree)
    assert here.counters.mean_acceptance_length > 1.5


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("host", ["llama", "opt-pre", "mistral-window", "gpt2"])
def test_the_cap_is_met_exactly(host: str, rate: float) -> None:
    model = model_of(host, "joint")
    text = tokens_of(list(plain(model, prompt(5), DecodeSettings(max_new_tokens=30))))
    for cap, carriers in product((0, 1, 2, 3, STREAMS, STREAMS + 1, STREAMS + 2, 11), CARRIERS):
        settings = DecodeSettings(max_new_tokens=cap, carriers=carriers)
        drafter = Prophet(drafter_for(settings), prompt(5) + text, rate)
        steps = assert_equal_texts(model, prompt(5), settings, drafter=drafter)
        assert tokens_of(steps) == text[:cap]
        assert [step.finish for step in steps] == [None] * (len(steps) - 1) + ["length"] * bool(cap)
        # never a draft that there is no room for
        written = 0
        for step in steps:
            assert step.offered_depth <= max(cap - written - 1, 0)
            written += len(step.tokens)


# --- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize(("host", "carriers"), [("llama", "fused"), ("opt-pre", "deferred"), ("gemma3", "fused")])
def test_every_token_of_a_text_can_be_its_end(host: str, carriers: Any, rate: float) -> None:
    model, start = model_of(host, "lossless"), prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=14))))
    settings = DecodeSettings(max_new_tokens=14, carriers=carriers)
    drafter = Prophet(drafter_for(settings), start + text, rate)
    for end in sorted(set(text)):
        steps = assert_equal_texts(model, start, settings, (end,), drafter)
        found = tokens_of(steps)
        assert found == text[: text.index(end) + 1]
        assert steps[-1].finish == "stop"
        assert all(step.finish is None for step in steps[:-1])
        assert sum(step.accepted for step in steps) <= len(found)


def test_several_ends_and_ends_that_never_come() -> None:
    model, start = model_of("llama", "joint"), prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=14))))
    settings = DecodeSettings(max_new_tokens=14)
    drafter = Prophet(drafter_for(settings), start + text, 0.9)
    absent = next(token for token in range(80) if token not in text)
    for first, second in product(text[::3], text[1::3]):
        steps = assert_equal_texts(model, start, settings, (second, absent, first), drafter)
        assert len(tokens_of(steps)) == min(text.index(first), text.index(second)) + 1
    steps = assert_equal_texts(model, start, settings, (absent,), drafter)
    assert (tokens_of(steps), steps[-1].finish) == (text, "length")


def test_an_end_at_the_cap_is_an_end() -> None:
    """Stop and cap in one place: the reason is that of plain decoding; behind the cap, the end does not count."""
    model, start = model_of("llama", "joint"), prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=14))))
    place = next(i for i in range(5, 14) if text[i] not in text[:i])
    for cap, reason in ((place, "length"), (place + 1, "stop"), (place + 2, "stop")):
        settings = DecodeSettings(max_new_tokens=cap)
        drafter = Prophet(drafter_for(settings), start + text, 1.0)
        steps = assert_equal_texts(model, start, settings, (text[place],), drafter)
        assert (tokens_of(steps)[-1] == text[place]) == (reason == "stop")
        assert steps[-1].finish == reason
