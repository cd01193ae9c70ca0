"""Reported log-probabilities are the host's own, and asking for them changes nothing (cases A15, O01 to O05)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from batch import requests, together
from forestream.baseline import plain
from forestream.config import DecodeSettings, SamplingSettings
from forestream.decode import decode
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.steps import Step, TokenScore, tokens_of
from subject import CARRIERS, model_of
from wrapped import prompt
from writers import foreseen

TOKENS = 14
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
    "penalties": {"repetition_penalty": 1.3, "logit_bias": (((7,), 3.0),)},
}
REPORTED = (0, 1, 5, 1000)
"""How many of the most probable tokens; the last is more than there are."""


def scores_of(steps: Sequence[Step]) -> list[TokenScore]:
    return [score for step in steps for score in step.scores]


@torch.no_grad()
def stock_laws(model: StreamingLM, start: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "T V"]:
    """Log-probabilities in front of each of `tokens`, by one stock forward over the whole text."""
    ids = torch.tensor([[*start, *tokens]])
    logits = model.port.model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(start) - 1 : -1].double().log_softmax(dim=-1)


def runs(model: StreamingLM, request: Request, **settings: Any) -> tuple[list[Step], list[Step]]:
    """Speculative and plain steps of the same text."""
    chosen = DecodeSettings(max_new_tokens=TOKENS, **settings)
    theirs = list(plain(model, request, chosen))
    with foreseen(request.prompt + tokens_of(theirs), rate=0.7):
        ours = list(decode(model, request, chosen))
    assert tokens_of(ours) == tokens_of(theirs)
    assert sum(step.accepted for step in ours) > 2
    return ours, theirs


def assert_near(found: Sequence[TokenScore], wanted: Sequence[TokenScore], margin: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert abs(ours.logprob - theirs.logprob) <= margin * max(1.0, abs(theirs.logprob))
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        for (_, a), (_, b) in zip(ours.top, theirs.top, strict=True):
            assert abs(a - b) <= margin * max(1.0, abs(b))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("top", REPORTED)
@pytest.mark.parametrize(("host", "carriers"), [("llama", "deferred"), ("gemma2", "fused"), ("gpt2", "deferred")])
def test_they_are_plain_decodings_and_the_hosts(host: str, carriers: Any, top: int, law: str) -> None:
    """O01, O02: before processors and temperature, in float32 within 1e-5."""
    model = model_of(host, "joint")
    request = Request(prompt(6), sampling=SamplingSettings(**LAWS[law]), logprobs=top)
    ours, theirs = runs(model, request, carriers=carriers)
    # Tokens far down the list may be equally probable up to rounding: they are compared by value, below.
    if top <= 5:
        assert_near(scores_of(ours), scores_of(theirs))
    tokens = tokens_of(ours)
    laws = stock_laws(model, request.prompt, tokens)
    for steps in (ours, theirs):
        for score, token, row in zip(scores_of(steps), tokens, laws, strict=True):
            assert abs(score.logprob - float(row[token])) <= 1e-4
            best = row.sort(descending=True).values[: len(score.top)]
            assert torch.allclose(torch.tensor([value for _, value in score.top], dtype=torch.double), best, atol=1e-4)
            for one, value in score.top:
                assert abs(value - float(row[one])) <= 1e-4


@pytest.mark.parametrize("top", REPORTED)
@pytest.mark.parametrize("host", ["llama", "opt-pre"])
def test_one_for_every_token_and_no_more_than_there_are(host: str, top: int) -> None:
    """O03, O05: sums of probabilities stay at or under 1, values fall, ids differ."""
    model = model_of(host, "lossless")
    vocabulary = model.port.config.vocab_size
    ours, _ = runs(model, Request(prompt(6), logprobs=top))
    for step in ours:
        assert len(step.scores) == len(step.tokens)
        for token, score in zip(step.tokens, step.scores, strict=True):
            ids, values = [one for one, _ in score.top], [value for _, value in score.top]
            assert len(ids) == len(set(ids)) == min(top, vocabulary)
            assert sum(map(exp, values)) <= 1 + 1e-5
            assert values == sorted(values, reverse=True)
            assert score.logprob <= 0
            if top:
                assert (ids[0], values[0]) == (token, pytest.approx(score.logprob, abs=1e-5)), "greedy takes the best"
            if top > vocabulary:
                assert sum(map(exp, values)) == pytest.approx(1, abs=1e-5)


def test_ties_go_to_the_lowest_id() -> None:
    score = TokenScore.of(2, torch.tensor([0.0, 1.0, 1.0, 1.0, -2.0]), 4)
    assert [token for token, _ in score.top] == [1, 2, 3, 0]
    assert TokenScore.of(2, torch.zeros(5), 0) == TokenScore(pytest.approx(-torch.tensor(5.0).log().item()), ())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("carriers", CARRIERS)
def test_asking_changes_neither_text_nor_trees(carriers: Any, law: str) -> None:
    """A15."""
    model, start = model_of("llama", "joint"), prompt(6)
    request = Request(start, sampling=SamplingSettings(**LAWS[law]))
    outlines = []
    for top in (None, 0, 5):
        ours, _ = runs(model, replace(request, logprobs=top), carriers=carriers, prune_to=6)
        outlines.append([(s.tokens, s.accepted, s.tree, s.kept, s.path, s.finish) for s in ours])
        assert bool(scores_of(ours)) == (top is not None)
    assert outlines == [outlines[0]] * 3


def test_rows_of_a_batch_report_their_own() -> None:
    model = model_of("qwen2", "joint")
    asked = [replace(one, logprobs=top) for one, top in zip(requests((5, 1, 9), TOKENS), (0, None, 3), strict=True)]
    for one, steps in zip(asked, together(model, asked, DecodeSettings(nodes=6)), strict=True):
        alone = list(plain(model, one, DecodeSettings()))
        assert tokens_of(steps) == tokens_of(alone)
        assert_near(scores_of(steps), scores_of(alone))
        assert len(scores_of(steps)) == (0 if one.logprobs is None else TOKENS)


def test_half_precision_is_summed_in_single() -> None:
    logits = torch.linspace(-3, 3, 1000, dtype=torch.bfloat16)
    score = TokenScore.of(999, logits, 1000)
    assert sum(exp(value) for _, value in score.top) == pytest.approx(1, abs=1e-5)
    assert score.logprob == pytest.approx(float(logits.double().log_softmax(0)[999]), abs=1e-5)
