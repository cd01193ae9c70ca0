"""A draft model reads the accepted text and nothing else, and its calls are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from batch import alone, requests
from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings, SamplingSettings
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.rivals.loop import drafted, drafted_batch
from forestream.rivals.two_model import TwoModel, TwoModelDrafts, TwoModelSettings, check_same_tokens
from forestream.rows import Row
from forestream.steps import Counters, Step, by_text, tokens_of
from oracle import assert_no_trace, prefilled
from rival import FAMILIES, assert_as_plain, draft_model, two_model
from subject import model_of
from tiny import tiny_tokenizer
from wrapped import prompt, wrapped
from zoo import custom


def foretold(draft: StreamingLM, request: Request, steps: list[Step]) -> bool:
    """Whether every draft is what the draft model would write by itself behind the text of that moment."""
    text = list(request.prompt)
    for step in steps:
        if step.tree is not None and len(step.tree.tokens) > 1:
            own = Request(tuple(text), sampling=request.sampling, row=request.row)
            wanted = tokens_of(list(plain(draft, own, DecodeSettings(max_new_tokens=len(step.tree.tokens) - 1))))
            if step.tree.tokens[1:] != wanted:
                return False
        text += step.tokens
    return True


@pytest.mark.parametrize(
    "law", [SamplingSettings(), SamplingSettings(temperature=0.8, seed=3)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("host", FAMILIES)
def test_drafts_are_what_the_draft_model_writes_by_itself(host: str, law: SamplingSettings) -> None:
    """Also behind drafts that were refused, or accepted whole: its cache is that of the accepted text."""
    source, request = two_model(host, noise=0.08), Request(prompt(7), sampling=law, row=2)
    steps = assert_as_plain(model_of(host, "joint"), request, source, 24)
    assert foretold(source.draft, request, steps)
    accepted = {step.accepted for step in steps[1:-1]}
    assert len(accepted) > 1, "drafts fared alike all the time: this was no test"


def test_a_cache_that_is_not_rewound_would_be_noticed() -> None:
    source, request = two_model("llama", noise=0.08), Request(prompt(7))
    model, settings = model_of("llama", "joint"), DecodeSettings(max_new_tokens=24)
    wanted = tokens_of(list(plain(model, request, settings)))
    roomy, lengths = StreamingLM.new_cache, []

    def kept(self: StreamCache, committed: int, row: int = 0) -> None:
        lengths.append(self.lengths[row] - committed)

    with (
        patch.object(StreamCache, "rewind", kept),
        patch.object(StreamingLM, "new_cache", lambda self, capacity, rows=1: roomy(self, 4 * capacity, rows)),
    ):
        steps = list(drafted(model, request, settings, source))
    assert tokens_of(steps) == wanted, "drafts change no text, whatever they are"
    assert any(lengths), "there was nothing to rewind: this was no test"
    assert not foretold(source.draft, request, steps)


@pytest.mark.parametrize("host", FAMILIES)
def test_the_draft_models_cache_is_a_fresh_one(host: str) -> None:
    source, start, seen = two_model(host, noise=0.08), prompt(9), []
    unread = TwoModelDrafts._unread

    def rolled_back(self: TwoModelDrafts, place: int, row: Row) -> list[int]:
        left = unread(self, place, row)
        known = row.text[: len(row.text) - len(left)]
        assert self._held[place] == known
        assert_no_trace(self.cache, prefilled(self.model, known))
        seen.append(len(left))
        return left

    with patch.object(TwoModelDrafts, "_unread", rolled_back):
        steps = list(drafted(model_of(host, "joint"), start, DecodeSettings(max_new_tokens=24), source))
    assert len(seen) >= len(steps) - 2
    assert set(seen) <= {1, 2}
    whole = [step.accepted == len(step.tree.tokens) - 1 for step in steps[1:] if step.tree is not None]
    # the first time, one token is unread; later, two where the whole draft was accepted
    assert seen == [1, *(1 + one for one in whole)][: len(seen)]


def test_the_model_itself_as_its_draft_model_is_always_right() -> None:
    source = TwoModel(draft_model("gpt2", 0.0), TwoModelSettings(3))
    counters = Counters.of(assert_as_plain(model_of("gpt2", "joint"), Request(prompt(5)), source, 21))
    assert (counters.passes, counters.accepted, counters.draft_calls) == (5, 15, 15)
    drawn = Request(prompt(5), sampling=SamplingSettings(temperature=1.0, seed=9))
    counters = Counters.of(assert_as_plain(model_of("gpt2", "joint"), drawn, source, 21))
    assert (counters.passes, counters.accepted) == (5, 15), "drawn by the same numbers, the same tokens come"


def test_no_draft_is_written_that_could_not_be_used() -> None:
    source = TwoModel(draft_model("llama", 0.0), TwoModelSettings(4))
    steps = assert_as_plain(model_of("llama", "joint"), Request(prompt(5)), source, 8)
    assert [step.draft_calls for step in steps] == [0, 4, 1]
    assert [len(step.tokens) for step in steps] == [1, 5, 2]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [6, 15, 16, 30])
def test_a_draft_model_with_a_shorter_context_falls_silent(family: str, length: int) -> None:
    """At its end the text goes on without drafts; a prompt that does not fit is never read."""
    small = wrapped(custom(family, max_position_embeddings=16))
    source = TwoModel(small, TwoModelSettings(4))
    steps = assert_as_plain(model_of("llama", "joint"), Request(prompt(length)), source, 30)
    calls = [step.draft_calls for step in steps[1:]]
    assert (sum(calls) > 0) == (length < 15)
    assert calls[-1] == 0


def test_the_prompt_of_a_draft_model_counts_to_the_prompt_pass() -> None:
    class Slow(TwoModel):
        def begin(self, model: StreamingLM, rows: Any, chunk: int) -> TwoModelDrafts:
            drafts = super().begin(model, rows, chunk)
            assert drafts.cache.lengths == [len(row.request.prompt) for row in rows]
            return drafts

    source = Slow(draft_model("llama", 0.1), TwoModelSettings(2))
    first = next(drafted(model_of("llama", "joint"), prompt(9), DecodeSettings(max_new_tokens=4), source))
    assert 0 < first.draft_seconds < first.seconds
    assert first.draft_calls == 0


def test_other_vocabularies_are_refused() -> None:
    def generator(size: int, tokenizer: Any) -> Any:
        return SimpleNamespace(host=SimpleNamespace(config=SimpleNamespace(vocab_size=size)), tokenizer=tokenizer)

    own, other = tiny_tokenizer(), tiny_tokenizer()
    check_same_tokens(generator(99, own), generator(99, other))
    with pytest.raises(ConfigError, match="the draft model knows 98 ids and the model 99; expected one vocabulary"):
        check_same_tokens(generator(99, own), generator(98, other))
    other.add_tokens(["more"])
    with pytest.raises(ConfigError, match="has 98 as the id of 'more' and the model's has None"):
        check_same_tokens(generator(99, own), generator(99, other))

    with pytest.raises(ConfigError, match="the draft model knows 73 ids and the model 89"):
        list(drafted(model_of("llama", "joint"), prompt(4), DecodeSettings(), TwoModel(model_of("gpt2", "joint"))))


def test_gamma_has_a_range() -> None:
    with pytest.raises(ConfigError, match="gamma is 0"):
        TwoModelSettings(0)


def test_in_a_batch_some_texts_have_outgrown_the_draft_models_context() -> None:
    """Of learned positions there are no more than so many: others' passes must not ask for one behind the last."""
    model, settings = model_of("llama", "joint"), DecodeSettings(max_new_tokens=12)
    vocabulary = model.port.config.vocab_size
    small = wrapped(custom("gpt2", max_position_embeddings=16, vocab_size=vocabulary))
    asked = requests((2, 9, 14, 15, 16, 40))
    found = by_text(drafted_batch(model, asked, settings, TwoModel(small)), len(asked))
    assert [tokens_of(own) for own in found] == [tokens_of(alone(model, one)) for one in asked]
    assert [sum(step.draft_calls for step in own) > 0 for own in found] == [True, True, True, False, False, False]
