"""Lossy rules: named, off by default, marked in the result, and no less willing than the exact one (cases B03, B22)."""

from functools import cache
from itertools import product
from math import exp, log, sqrt
from typing import Any

import pytest
import torch

from batch import alone, together
from forestream.baseline import plain
from forestream.config import DecodeSettings, SamplingSettings
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.sampling import acceptable
from forestream.steps import tokens_of
from laws import softmax
from subject import model_of
from tiny import tiny_tokenizer
from wrapped import prompt, wrapped
from zoo import custom

LOSSY: tuple[dict[str, Any], ...] = (
    {"accept": "typical", "threshold": 0.09},
    {"accept": "top_k", "threshold": 3},
    {"accept": "ratio", "threshold": 0.2},
)
V = 9


def slow(scores: list[float], drafts: tuple[int, ...], accept: str, threshold: float) -> int | None:
    """The most probable draft that passes, by numbers of Python."""
    law = softmax({token: score for token, score in enumerate(scores) if score > float("-inf")})
    entropy = -sum(share * log(share) for share in law.values())
    least = {
        "typical": min(threshold, sqrt(threshold) * exp(-entropy)),
        "top_k": sorted(law.values())[-min(int(threshold), len(law))],
        "ratio": threshold * max(law.values()),
    }[accept]
    passing = [token for token in drafts if law.get(token, 0.0) >= least and token in law]
    return min(passing, key=lambda token: (-law[token], token), default=None)


@cache
def texts() -> Generator:
    tokenizer = tiny_tokenizer()
    host = custom("llama", vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512)
    return Generator(wrapped(host), tokenizer)


def crowd(model: StreamingLM, **law: Any) -> list[Request]:
    """Forty texts of one prompt."""
    asked = SamplingSettings(**{"temperature": 1.5, **law})
    return [Request(prompt(5), sampling=asked, row=row, max_new_tokens=3) for row in range(40)]


# --- the rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["typical", "top_k", "ratio"])
def test_what_passes_is_what_slow_arithmetic_lets_pass(accept: Any) -> None:
    found = set()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        scores = (3 * torch.rand(1, generator=generator) * torch.randn(V, generator=generator)).float()
        if seed % 3 == 0:
            scores[[1, 4, 6]] = -torch.inf
        for threshold, drafts in product((1, 2, 5, 99) if accept == "top_k" else (0.0, 0.05, 0.3, 0.9), DRAFTS):
            settings = SamplingSettings(temperature=1.0, accept=accept, threshold=threshold)
            draft = acceptable(scores, drafts, settings)
            assert draft == slow(scores.double().tolist(), drafts, accept, threshold)
            found.add(draft is None)
    assert found == {True, False}


DRAFTS: tuple[tuple[int, ...], ...] = ((), (0,), (4,), (7, 2), (1, 4, 6), tuple(range(V)))


@pytest.mark.parametrize("law", LOSSY)
def test_what_is_forbidden_never_passes(law: dict[str, Any]) -> None:
    scores = torch.tensor([0.0, -torch.inf, 1.0])
    for threshold in {law["threshold"], 99 if law["accept"] == "top_k" else 0.0}:
        settings = SamplingSettings(**law | {"threshold": threshold})
        assert acceptable(scores, (1,), settings) is None
        assert acceptable(scores, (), settings) is None


def test_of_equally_probable_drafts_the_lowest_id_passes() -> None:
    settings = SamplingSettings(accept="ratio", threshold=0.1)
    assert acceptable(torch.tensor([0.0, 1.0, 1.0, 1.0]), (3, 0, 2), settings) == 2


# --- what they do to texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LOSSY, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_no_fewer_drafts_are_accepted_than_by_the_exact_rule(law: dict[str, Any], temperature: float) -> None:
    """Text by text, in the first pass with drafts: behind it the texts are no longer the same."""
    model = model_of("llama", "joint")
    settings = DecodeSettings(tree="full", k=8, streams=1)
    exact = together(model, crowd(model, temperature=temperature), settings)
    lossy = together(model, crowd(model, temperature=temperature, **law), settings)
    pairs = [(ours[1].accepted, theirs[1].accepted) for ours, theirs in zip(lossy, exact, strict=True)]
    assert all(ours >= theirs for ours, theirs in pairs)
    if temperature:
        assert sum(ours for ours, _ in pairs) > sum(theirs for _, theirs in pairs)


@pytest.mark.parametrize("law", [{"accept": "top_k", "threshold": 1}, {"accept": "ratio", "threshold": 1.0}], ids=str)
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.5}], ids=str)
def test_the_strictest_rules_write_the_greedy_text(law: dict[str, Any], changes: dict[str, Any]) -> None:
    model = model_of("llama", "joint")
    for seed in range(12):
        start = prompt(1 + seed, seed=seed)
        exact = Request(start, sampling=SamplingSettings(**changes), max_new_tokens=16)
        truth = tokens_of(alone(model, exact))
        lossy = Request(start, sampling=SamplingSettings(**law, **changes), max_new_tokens=16)
        (steps,) = together(model, [lossy], DecodeSettings(nodes=16), [truth])
        assert tokens_of(steps) == truth
        (twin,) = together(model, [exact], DecodeSettings(nodes=16), [truth])
        assert [step.accepted for step in steps] == [step.accepted for step in twin]


def test_plain_decoding_knows_no_lossy_rule() -> None:
    """It has no drafts: the rule changes nothing there."""
    model = model_of("llama", "joint")
    exact, *lossy = (
        tokens_of(alone(model, Request(prompt(5), sampling=SamplingSettings(temperature=1.5, **law), max_new_tokens=9)))
        for law in ({}, *LOSSY)
    )
    assert lossy == [exact] * 3


# --- named, off by default, marked ----------------------------------------------------------------------------------


def test_lossy_rules_are_off_unless_they_are_asked_for() -> None:
    assert SamplingSettings().accept == "exact"
    assert not SamplingSettings(temperature=1.0, top_p=0.5).lossy
    assert all(SamplingSettings(**law).lossy for law in LOSSY)
    assert not texts().generate("ab", max_new_tokens=3).lossy
    assert not texts().generate("ab", max_new_tokens=3, temperature=1.0).lossy


@pytest.mark.parametrize("law", LOSSY, ids=str)
def test_texts_of_lossy_rules_are_marked(law: dict[str, Any]) -> None:
    here = texts()
    assert here.generate("ab", max_new_tokens=3, **law).lossy
    request = here.request("ab", **law)
    assert here.generate(request, max_new_tokens=3).lossy
    found = here.generate_batch([request, here.request("cd")], max_new_tokens=3)
    assert [one.lossy for one in found] == [True, False]


@pytest.mark.parametrize(
    "law",
    [
        {"accept": "typical"},
        {"threshold": 0.5},
        {"accept": "sloppy", "threshold": 0.5},
        {"accept": "ratio", "threshold": 1.5},
        {"accept": "top_k", "threshold": 0.5},
        {"accept": "top_k", "threshold": 0},
        {"accept": "typical", "threshold": -0.1},
    ],
    ids=str,
)
def test_rules_without_what_they_need_are_refused(law: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"threshold|accept"):
        SamplingSettings(**law)


# --- nearly greedy --------------------------------------------------------------------------------------------------


def test_a_temperature_of_nearly_nothing_is_greedy() -> None:
    """B02, B03, B15: whatever the seed, with speculation and without; and at 2e-5, where it is drawn, nearly so."""
    model, start = model_of("llama", "joint"), prompt(6)
    truth = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=12))))
    for temperature, seed in product((0.0, 1e-6, 2e-5), range(3)):
        law = SamplingSettings(temperature=temperature, seed=seed, top_k=40)
        asked = Request(start, sampling=law, max_new_tokens=12)
        assert tokens_of(alone(model, asked)) == truth
        assert tokens_of(together(model, [asked], DecodeSettings(nodes=9), [truth])[0]) == truth
