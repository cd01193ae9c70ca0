"""Where texts end: ids, strings, criteria and caps, as in plain decoding and in the host library (cases E01 to E14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import MaxLengthCriteria, MinNewTokensLengthLogitsProcessor, StoppingCriteria, StoppingCriteriaList

from batch import alone, assert_as_alone, requests
from forestream.baseline import plain
from forestream.config import DecodeSettings, SamplingSettings
from forestream.decode import decode
from forestream.generation import Generation, Generator, end_tokens
from forestream.requests import Request
from forestream.steps import tokens_of
from subject import CARRIERS, lively, model_of
from writers import dictated, foreseen, of_host, writer

PROMPT = "the cat"


def both(generator: Generator, prompt: str, rate: float = 0.8, **asked: Any) -> Generation:
    """The text, checked against plain decoding's: ids, text and reason."""
    wanted = generator.collect(generator.plain_steps(prompt, **asked))
    start = generator.tokenizer(prompt)["input_ids"]
    free = generator.collect(generator.plain_steps(prompt, max_new_tokens=asked.get("max_new_tokens", 16) + 8))
    truth = free.tokens if free.tokens[: len(wanted.tokens)] == wanted.tokens else wanted.tokens
    with foreseen((*start, *truth), rate=rate):
        found = generator.generate(prompt, **asked)
    assert (found.tokens, found.text, found.finish) == (wanted.tokens, wanted.text, wanted.finish)
    return found


class Counting(StoppingCriteria):
    """True once it was called `last` times; remembers the lengths that it saw."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.lengths: list[int] = []

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"], **kwargs: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([len(self.lengths) >= self.last])


# --- end-of-text tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("carriers", CARRIERS)
def test_every_token_of_a_text_can_be_its_end_in_a_batch(carriers: Any) -> None:
    """E01: in company of texts that end elsewhere, or not at all."""
    model = model_of("llama", "joint")
    asked = requests((5, 1, 9), 12)
    ends = sorted({token for one in asked for token in tokens_of(alone(model, one))})
    for end in ends:
        found = assert_as_alone(model, [replace(one, eos=(end,)) for one in asked], DecodeSettings(carriers=carriers))
        stopped = [steps[-1].finish == "stop" for steps in found]
        assert any(stopped)
        for steps, stop in zip(found, stopped, strict=True):
            assert (end in tokens_of(steps)) == stop
            assert not any(token == end for token in tokens_of(steps)[:-1])


def test_several_ends_as_the_host_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """E09, E11: none, a number, a list; of a call, of the host's generation settings, of the tokenizer."""
    shared = writer()
    text = both(shared, PROMPT).tokens
    first, second = text[3], next(token for token in text[7:] if token not in text[:7])
    for eos, length in ((first, 4), ([first], 4), ([second, first], 4), ((second,), text.index(second) + 1)):
        assert len(both(shared, PROMPT, eos=eos).tokens) == length
    for eos in (None, [], ()):
        assert both(shared, PROMPT, eos=eos).tokens == text
    host = shared.model.port.model.generation_config
    tokenizer = shared.tokenizer.eos_token_id
    for configured, ends in ((None, {tokenizer}), (second, {second, tokenizer}), ([second, 3], {second, 3, tokenizer})):
        monkeypatch.setattr(host, "eos_token_id", configured)
        assert set(end_tokens(shared.model, shared.tokenizer)) == ends
        fresh = Generator(shared.model, shared.tokenizer, shared.settings)
        assert list(both(fresh, PROMPT).tokens) == of_host(fresh, PROMPT, 16)


@pytest.mark.parametrize("least", [0, 1, 3, 5, 9, 40])
def test_no_end_before_the_shortest_length(least: int) -> None:
    """E10: an end that would come early, is forbidden until then, and the text is the host library's."""
    shared = writer()
    start = len(shared.tokenizer(PROMPT)["input_ids"])
    end = both(shared, PROMPT).tokens[2]
    found = both(shared, PROMPT, eos=end, min_new_tokens=least)
    shortest = MinNewTokensLengthLogitsProcessor(start, least, [end])
    assert list(found.tokens) == of_host(shared, PROMPT, 16, [shortest], eos_token_id=end)
    assert end not in found.tokens[: least - 1]
    assert len(found.tokens) >= min(least, 3)


def test_an_end_that_was_drafted_is_the_last_token() -> None:
    """C13: the end lies inside an accepted path, with right drafts behind it."""
    shared, inside = writer(), 0
    text = both(shared, PROMPT).tokens
    for place, end in enumerate(text):
        if end in text[:place]:
            continue
        found = both(shared, PROMPT, rate=1.0, eos=end)
        assert found.tokens == text[: place + 1]
        inside += found.steps[-1].accepted == len(found.steps[-1].tokens)
    assert inside > 3


# --- strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["characters", "bytes"])
def test_every_part_of_a_text_can_be_a_stop_string(tokens: str) -> None:
    """E02: of one token and of several, inside an accepted path too: the host library's ids and ours are equal."""
    shared, inside = writer(tokens), 0
    asked: dict[str, Any] = {"max_new_tokens": 14, "eos": None}
    if tokens == "bytes":
        asked["processors"] = [dictated(shared, PROMPT, "abcd the äbc")]
    text = both(shared, PROMPT, **asked).text[:14]
    for place, length in ((place, length) for place in range(len(text)) for length in (1, 2, 3)):
        stop = text[place : place + length]
        found = both(shared, PROMPT, rate=1.0, **asked, stop=stop)
        by_host = of_host(
            shared,
            PROMPT,
            14,
            asked.get("processors", ()),
            eos_token_id=None,
            stop_strings=stop,
            tokenizer=shared.tokenizer,
        )
        assert list(found.tokens) == by_host, stop
        assert stop in found.text
        inside += found.steps[-1].accepted == len(found.steps[-1].tokens)
    assert inside > 5


def test_several_strings_and_one_that_never_comes() -> None:
    shared = writer()
    text = both(shared, PROMPT).text
    for stop in ([text[9:11], text[4:6]], ["never"], ["never", text[12:]], (text[5],), [], None):
        by_host = of_host(
            shared, PROMPT, 16, **({"stop_strings": list(stop), "tokenizer": shared.tokenizer} if stop else {})
        )
        assert list(both(shared, PROMPT, stop=stop).tokens) == by_host


def test_a_string_that_begins_in_the_prompt() -> None:
    """E05: the host library looks at prompt and text together, and so do we."""
    shared = writer()
    text = both(shared, PROMPT).text
    stop = PROMPT[-2:] + text[:1]
    found = both(shared, PROMPT, stop=stop)
    assert list(found.tokens) == of_host(shared, PROMPT, 16, stop_strings=stop, tokenizer=shared.tokenizer)
    assert len(found.tokens) == 1


def test_a_string_inside_at_and_behind_the_cap() -> None:
    """E03: reason and ids are plain decoding's, whichever comes first."""
    shared = writer()
    text = both(shared, PROMPT).text
    place = next(i for i in range(6, 14) if text[i - 1 : i + 1] not in text[:i])
    for cap, reason in ((place, "length"), (place + 1, "stop"), (place + 3, "stop")):
        for rate in (0.0, 0.7, 1.0):
            found = both(shared, PROMPT, rate=rate, stop=text[place - 1 : place + 1], max_new_tokens=cap)
            assert (found.finish, len(found.tokens)) == (reason, min(cap, place + 1))


# --- criteria --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_a_criterion_with_a_state_is_called_once_for_every_token(rate: float) -> None:
    """Also where drafts behind the end were right, where it is true in the middle of a path, and beside others."""
    shared = writer()
    start = len(shared.tokenizer(PROMPT)["input_ids"])
    text = shared.collect(shared.plain_steps(PROMPT)).tokens
    for last in range(1, 18):
        ours, theirs, host = Counting(last), Counting(last), Counting(last)
        with foreseen((*shared.tokenizer(PROMPT)["input_ids"], *text), rate=rate):
            found = shared.generate(PROMPT, criteria=[ours])
        wanted = shared.collect(shared.plain_steps(PROMPT, criteria=theirs))
        assert found.tokens == wanted.tokens == text[:last]
        assert found.finish == wanted.finish == ("stop" if last <= 16 else "length")
        assert ours.lengths == theirs.lengths == [start + 1 + i for i in range(min(last, 16))]
        assert of_host(shared, PROMPT, 16, stopping_criteria=StoppingCriteriaList([host])) == list(found.tokens)
        assert host.lengths == ours.lengths


def test_every_criterion_sees_every_token() -> None:
    """One that is true, or an end-of-text token, does not keep the others from counting, as in the host library."""
    shared = writer()
    end = both(shared, PROMPT).tokens[5]
    for asked in ({"criteria": [Counting(6), Counting(99)]}, {"criteria": [Counting(99)], "eos": end}):
        found = shared.generate(PROMPT, **asked)
        assert [len(one.lengths) for one in asked["criteria"]] == [len(found.tokens)] * len(asked["criteria"])


def test_what_a_criterion_may_answer() -> None:
    """A plain truth value, a tensor, the host library's own, a list of them."""
    shared = writer()
    start = len(shared.tokenizer(PROMPT)["input_ids"])
    for criteria in (
        lambda ids, scores: ids.shape[1] >= start + 5,
        [lambda ids, scores: torch.tensor(ids.shape[1] >= start + 5)],
        [lambda ids, scores: int(ids.shape[1] >= start + 5)],
        StoppingCriteriaList([MaxLengthCriteria(start + 5)]),
    ):
        assert len(both(shared, PROMPT, criteria=criteria).tokens) == 5


def test_scores_that_a_criterion_sees_are_those_of_the_choice() -> None:
    shared, seen = writer(), []
    found = shared.generate(PROMPT, criteria=lambda ids, scores: seen.append((int(ids[0, -1]), scores.clone())))
    assert [token for token, _ in seen] == list(found.tokens)
    assert [int(scores.argmax()) for _, scores in seen] == list(found.tokens)


# --- lengths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", range(1, 21))
def test_what_was_delivered_is_what_was_counted(tokens: int) -> None:
    """E06, E07: ids, text, scores, steps and counters agree for every cap."""
    shared = writer()
    found = both(shared, PROMPT, max_new_tokens=tokens, logprobs=2, eos=None)
    counted = found.counters
    assert len(found.tokens) == tokens == counted.generated == len(found.scores)
    assert len(found.text) == sum(token not in shared.tokenizer.all_special_ids for token in found.tokens)
    assert counted.generated == counted.prompts + counted.passes + counted.accepted
    assert counted.decoded == tokens - 1
    assert sum(len(step.tokens) for step in found.steps) == tokens
    assert found.steps[-1].finish == "length"
    assert "".join(piece.text for piece in shared.pieces(PROMPT, max_new_tokens=tokens, eos=None)) == found.text


def test_lengths_agree_where_the_end_was_drafted() -> None:
    """E06: the end is the last of a path's drafts: no token of the main stream comes behind it."""
    shared = writer()
    text = both(shared, PROMPT).tokens
    for end in sorted(set(text)):
        found = both(shared, PROMPT, rate=1.0, eos=end, logprobs=0)
        counted = found.counters
        assert len(found.tokens) == counted.generated == len(found.scores) == text.index(end) + 1
        drafted_end = found.steps[-1].accepted == len(found.steps[-1].tokens)
        assert counted.generated == counted.prompts + counted.passes + counted.accepted - drafted_end
        assert len(found.text) == counted.generated - (end == shared.eos[0])


@pytest.mark.parametrize("law", [{}, {"temperature": 1.1, "seed": 4}], ids=["greedy", "sampled"])
def test_a_tree_is_never_deeper_than_what_may_still_be_written(law: dict[str, Any]) -> None:
    """C13, of texts in a batch that have different caps."""
    caps = (1, 2, 5, 9, 16)
    asked = requests((4,) * len(caps), caps, sampling=SamplingSettings(**law))
    found = assert_as_alone(lively(model_of("gpt2", "joint")).model, asked, DecodeSettings(tree="full", k=1), rate=1.0)
    for steps, cap in zip(found, caps, strict=True):
        written = 0
        for step in steps:
            assert step.offered_depth <= max(cap - written - 1, 0)
            written += len(step.tokens)
        assert written == cap


def outline(steps: Sequence[Any]) -> tuple[Any, ...]:
    return tokens_of(steps), steps[-1].finish


def test_sampled_texts_end_as_plain_decoding_ends_them() -> None:
    """Ends of every token of a drawn text."""
    model, law = model_of("llama", "joint"), SamplingSettings(temperature=1.0, seed=7)
    asked, settings = Request((3, 1, 4), sampling=law), DecodeSettings(max_new_tokens=14)
    text = tokens_of(list(plain(model, asked, settings)))
    for end in sorted(set(text)):
        ended = replace(asked, eos=(end,))
        with foreseen((3, 1, 4, *text), rate=0.9):
            assert outline(list(decode(model, ended, settings))) == outline(list(plain(model, ended, settings)))
