"""Decoding with drafts of any source: the text is plain decoding's, the cache holds nothing else, all is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batch import alone, requests
from forestream.baseline import plain
from forestream.config import DecodeSettings, SamplingSettings
from forestream.errors import ConfigError
from forestream.requests import Request
from forestream.rivals.lookahead import Lookahead, LookaheadSettings
from forestream.rivals.lookup import Lookup, LookupSettings, line
from forestream.rivals.loop import Beside, Offer, Source, check, drafted, drafted_batch
from forestream.steps import Counters, by_text, tokens_of
from oracle import assert_no_trace, prefilled, slow_tree_logits
from rival import FAMILIES, Scripted, assert_as_plain, caches, outline, two_model
from subject import lively, model_of
from wrapped import prompt
from zoo import POSITIONS

GAMMA = 4
SOURCES = ("lookup", "draft-model", "lookahead")
LAWS = (SamplingSettings(), SamplingSettings(temperature=0.4, top_k=20, seed=5))
every_host = pytest.mark.parametrize("host", FAMILIES)
every_source = pytest.mark.parametrize("kind", SOURCES)
every_law = pytest.mark.parametrize("law", LAWS, ids=["greedy", "sampled"])


def source(kind: str, host: str) -> Source:
    if kind == "draft-model":
        return two_model(host, GAMMA)
    return Lookup(LookupSettings(GAMMA)) if kind == "lookup" else Lookahead(LookaheadSettings(4, 4, 3))


@every_law
@every_source
@every_host
def test_text_is_that_of_plain_decoding(host: str, kind: str, law: SamplingSettings) -> None:
    model, counters = model_of(host, "joint"), Counters()
    for seed in range(4):
        asked = Request(prompt(5 + 7 * seed, seed=seed), sampling=law, row=seed)
        counters.extend(assert_as_plain(model, asked, source(kind, host), 30, chunk=8))
    assert counters.drafting > 0
    if kind == "draft-model" or law.greedy:  # what is drawn seldom repeats itself
        assert counters.accepted > 0, "no draft was accepted: this was no test"
    assert counters.accepted < counters.nodes - counters.passes, "no draft was refused: this was no test"


@every_source
@pytest.mark.parametrize("host", ["llama", "gemma2"])
def test_every_token_can_be_the_end(host: str, kind: str) -> None:
    """Inside an accepted block too, where nothing behind it may be written."""
    model, inside = model_of(host, "joint"), 0
    own = two_model(host, GAMMA, noise=0.0) if kind == "draft-model" else source(kind, host)
    start = prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=24))))
    for end in dict.fromkeys(text):
        steps = assert_as_plain(model, Request(start, (end,)), own, 24)
        assert tokens_of(steps) == text[: text.index(end) + 1]
        inside += steps[-1].accepted == len(steps[-1].tokens)
    assert inside > 0 or kind != "draft-model"


@every_source
@every_host
def test_texts_end_where_the_context_does(host: str, kind: str) -> None:
    model = model_of(host, "joint")
    for room in (1, 2, GAMMA, GAMMA + 1, GAMMA + 2):
        steps = assert_as_plain(model, Request(prompt(POSITIONS - room)), source(kind, host), 40)
        assert len(tokens_of(steps)) == room
        assert steps[-1].finish == "length"


@every_source
@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
def test_short_texts(kind: str, tokens: int) -> None:
    steps = assert_as_plain(model_of("llama", "joint"), Request(prompt(6)), source(kind, "llama"), tokens)
    assert len(tokens_of(steps)) == tokens
    assert Counters.of(steps).prompts == min(tokens, 1)


@every_source
@every_host
def test_the_cache_holds_the_text_and_nothing_else(host: str, kind: str) -> None:
    """Commit = replay: after every pass, the cache is that of a fresh reading of the text but its last token."""
    model, start = model_of(host, "joint"), prompt(9)
    own = two_model(host, GAMMA, noise=0.05) if kind == "draft-model" else source(kind, host)
    written: list[int] = list(start)
    with caches() as seen:
        for step in drafted(model, start, DecodeSettings(max_new_tokens=24), own):
            written += step.tokens
            assert_no_trace(seen[0], prefilled(model, written[:-1]))
    assert len(written) == 9 + 24


@every_law
@every_source
@pytest.mark.parametrize("host", ["llama", "gpt2", "gemma2"])
def test_texts_written_together_are_what_they_are_alone(host: str, kind: str, law: SamplingSettings) -> None:
    """Of different lengths and caps, so that they end one after the other."""
    model, own = model_of(host, "joint"), source(kind, host)
    asked = requests((5, 1, 9, 5), (3, 14, 1, 20), sampling=law)
    found = by_text(drafted_batch(model, asked, DecodeSettings(), own), len(asked))
    assert [outline(steps) for steps in found] == [outline(alone(model, one)) for one in asked]
    singly = [list(drafted(model, one, DecodeSettings(), source(kind, host))) for one in asked]
    for together, single in zip(found, singly, strict=True):
        assert [step.tree for step in together] == [step.tree for step in single], "another draft in company"
        assert [step.draft_calls for step in together] == [step.draft_calls for step in single]


def test_counters_of_a_scripted_run() -> None:
    """Right drafts by place: 6 % 4 = 2 behind a text of 6, then 9 % 4 = 1, 11 % 4 = 3, 15 % 4 = 3, 19 % 4 = 3."""
    here = lively(model_of("llama", "joint"), 24)
    start = here.start[:5]
    truth = (*start, *tokens_of(list(plain(here.model, start, DecodeSettings(max_new_tokens=24)))))
    steps = assert_as_plain(here.model, Request(start), Scripted(truth, calls=3), 18)
    assert [step.accepted for step in steps] == [0, 2, 1, 3, 3, 3]
    counters = Counters.of(steps)
    assert (counters.generated, counters.prompts, counters.passes) == (18, 1, 5)
    assert (counters.accepted, counters.draft_calls, counters.decoded) == (12, 15, 17)
    assert counters.nodes == 5 * 4
    assert counters.call_reduction == 18 / 5
    assert counters.mean_acceptance_length == 1 + 12 / 5
    assert 0 < counters.draft_seconds < counters.decode_seconds
    twice = Counters.of(steps)
    twice.merge(counters)
    assert (twice.draft_calls, twice.decoded) == (30, 34)
    assert twice.draft_seconds == pytest.approx(2 * counters.draft_seconds)


def test_scores_and_processors_are_those_of_plain_decoding() -> None:
    model = model_of("llama", "joint")
    law = SamplingSettings(repetition_penalty=1.3, min_new_tokens=4)
    asked = Request(prompt(8), eos=(3,), sampling=law, logprobs=2)
    settings = DecodeSettings(max_new_tokens=16)
    found = list(drafted(model, asked, settings, two_model("llama", noise=0.05)))
    wanted = list(plain(model, asked, settings))
    assert outline(found) == outline(wanted)
    scores, theirs = ([score for step in steps for score in step.scores] for steps in (found, wanted))
    assert [score.logprob for score in scores] == pytest.approx([score.logprob for score in theirs], abs=1e-4)


@every_host
def test_nodes_beside_the_tree_see_their_ancestors_and_change_nothing(host: str) -> None:
    """What is asked beside a tree is what ordinary text says; the tree's own logits are as without it."""
    model, text = model_of(host, "joint"), prompt(12)
    tree = line(7, (8, 9))
    # a chain of three behind the root, and a branch behind its second node
    beside = Beside((0, 3, 4, 4, 6), (8, 1, 2, 3, 4), (2, 4))
    cache = prefilled(model, text, spare=8)
    checked, (asked,) = check(model, [Offer(tree, beside=beside)], cache)
    alone, _ = check(model, [Offer(tree)], prefilled(model, text, spare=3))
    torch.testing.assert_close(checked.logits[0, :3], alone.logits[0], rtol=1e-5, atol=1e-5)
    for own, path in zip(asked, ((7, 8, 1, 2), (7, 8, 1, 3, 4)), strict=True):
        wanted, _ = slow_tree_logits(model, text, path, 0)
        torch.testing.assert_close(own, wanted[-1], rtol=1e-4, atol=1e-4)


def test_rows_are_asked_for_their_own_nodes() -> None:
    """One for all it has, another for few of many, a third for none."""
    model, text = model_of("llama", "joint"), prompt(12)
    offers = [
        Offer(line(7, (8,)), beside=Beside((0, 2), (3, 4), (0, 1))),
        Offer(line(5, ()), beside=Beside((0, 1, 2), (3, 4, 6), (2,))),
        Offer(line(9, (1, 2))),
    ]
    cache = model.new_cache(len(text) + 4, len(offers))
    single = [check(model, [one], prefilled(model, text, spare=4)) for one in offers]
    for row in range(len(offers)):
        alone = cache.row(row)
        alone.adopt(prefilled(model, text))
        cache.lengths[row] = len(text)
    together, beside = check(model, offers, cache)
    assert [len(own) for own in beside] == [2, 1, 0]
    for row, (checked, (asked,)) in enumerate(single):
        torch.testing.assert_close(beside[row], asked, rtol=1e-4, atol=1e-4)
        nodes = checked.logits.shape[1] - len(asked)
        torch.testing.assert_close(together.logits[row, :nodes], checked.logits[0, :nodes], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gamma": 0}, "gamma is 0"),
        ({"gamma": 65}, "gamma is 65"),
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram is 3; expected at most max_ngram, 2"),
        ({"grammar": 1}, "unknown keys in LookupSettings: grammar"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LookupSettings.from_dict(changes)


def test_a_request_may_say_more() -> None:
    """Its own cap goes before that of the settings."""
    model = model_of("llama", "joint")
    asked = replace(Request(prompt(4)), max_new_tokens=3)
    assert len(tokens_of(list(drafted(model, asked, DecodeSettings(max_new_tokens=9), Lookup())))) == 3
