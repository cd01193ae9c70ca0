"""Processors that settings ask for: penalties against slow arithmetic, their order, and what greedy leaves out."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from forestream.config import SamplingSettings
from forestream.processors import WrittenPenalty, limits, penalties, warpers
from laws import slow_law, softmax

V = 12
PROMPT, WRITTEN = [3, 4, 4, 9], [5, 4, 5, 5]


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(1, V, generator=torch.Generator().manual_seed(seed))


def processed(found: list[Any], text: list[int], scores: torch.Tensor) -> list[float]:
    for processor in found:
        scores = processor(torch.tensor([text]), scores)
    return scores[0].tolist()


def by_hand(settings: SamplingSettings, prompt: list[int], written: list[int], scores: list[float]) -> list[float]:
    """Biases, repetition, presence and frequency, bad words: token by token."""
    text = prompt + written
    found = []
    for token, score in enumerate(scores):
        for (*before, last), bias in settings.logit_bias:
            if last == token and (not before or text[-len(before) :] == before):
                score += bias
        if token in text:
            score = score / settings.repetition_penalty if score > 0 else score * settings.repetition_penalty
        if token in written:
            score -= settings.presence_penalty
        for other in written:
            if other == token:
                score -= settings.frequency_penalty
        if any(last == token and (not w or text[-len(w) :] == w) for *w, last in settings.bad_words):
            score = float("-inf")
        found.append(score)
    return found


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 0.75},
        {"presence_penalty": -0.5, "frequency_penalty": 0.25},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.05},
        {"repetition_penalty": 0.5, "frequency_penalty": -1.0},
        {"bad_words": ((1,), (5, 2), (4, 5, 5, 7), (3, 5, 8))},
        {"logit_bias": (((2,), 1.5), ((5, 3), -2.0), ((4, 3), 9.0))},
        {
            "repetition_penalty": 1.7,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "bad_words": ((4,), (5, 0)),
            "logit_bias": (((5,), 6.0), ((4,), 9.0)),
        },
    ],
    ids=str,
)
def test_penalties_against_slow_arithmetic(asked: dict[str, Any]) -> None:
    """F02, F06: at the first token, where nothing is written yet, and at a later one."""
    settings = SamplingSettings(**asked)
    for written in ([], WRITTEN):
        found = processed(penalties(settings, len(PROMPT), ()), PROMPT + written, logits())
        assert found == pytest.approx(by_hand(settings, PROMPT, written, logits()[0].tolist()), abs=1e-5)


def test_written_penalties_leave_the_prompt_alone_and_take_rows_together() -> None:
    texts = torch.tensor([PROMPT + WRITTEN, [*PROMPT, 4, 4, 4, 4]])
    found = WrittenPenalty(len(PROMPT), 1.0, 0.5)(texts, torch.zeros(2, V))
    assert {token: float(score) for token, score in enumerate(found[0]) if score} == {4: -1.5, 5: -2.5}
    assert {token: float(score) for token, score in enumerate(found[1]) if score} == {4: -3.0}


def test_nothing_asked_nothing_done() -> None:
    settings = SamplingSettings(temperature=1.0)
    assert penalties(settings, 3, (1,)) == limits(settings, 3, (1,)) == warpers(settings) == []


def test_greedy_text_has_no_warpers_however_they_are_set() -> None:
    """B02, B15: below 1e-5 nothing is drawn."""
    assert warpers(SamplingSettings(top_k=3, top_p=0.5, min_p=0.1)) == []
    assert SamplingSettings(temperature=1e-6).greedy
    assert not SamplingSettings(temperature=1e-5).greedy


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 7, "top_p": 0.8, "min_p": 0.1}]
)
def test_warpers_make_the_law_that_slow_arithmetic_makes(temperature: float, cuts: dict[str, Any]) -> None:
    """B05: cuts act on the law at this temperature, each on what the one before left, and what is left sums to 1."""
    for seed in range(20):
        scores = processed(warpers(SamplingSettings(temperature=temperature, **cuts)), PROMPT, logits(seed))
        found = softmax({token: score for token, score in enumerate(scores) if score > float("-inf")})
        assert found == pytest.approx(slow_law(logits(seed)[0].tolist(), temperature, **cuts), abs=1e-6)


def test_warpers_in_another_order_are_noticed() -> None:
    """A cut by probability before the temperature is another cut."""
    right = warpers(SamplingSettings(temperature=3.0, top_p=0.8))
    found = [[score > float("-inf") for score in processed(some, PROMPT, logits())] for some in (right, right[::-1])]
    assert found[0] != found[1]


def test_bad_words_never_forbid_the_end_of_the_text() -> None:
    """As in the host library; a longer word that ends with it is forbidden, and nothing may be left of the list."""
    settings = SamplingSettings(bad_words=((2,), (7,), (5, 7)))
    found = processed(penalties(settings, len(PROMPT), (7, 8)), [*PROMPT, 1], logits())
    assert [token for token, score in enumerate(found) if score == float("-inf")] == [2]
    found = processed(penalties(settings, len(PROMPT), (7, 8)), [*PROMPT, 5], logits())
    assert [token for token, score in enumerate(found) if score == float("-inf")] == [2, 7]
    only = penalties(SamplingSettings(bad_words=((7,),)), len(PROMPT), (7,))
    assert processed(only, PROMPT, logits()) == logits()[0].tolist()


def test_the_end_is_forbidden_until_enough_is_written() -> None:
    """E10: counted behind the prompt; with no end there is nothing to forbid."""
    settings = SamplingSettings(min_new_tokens=3)
    for written in range(5):
        found = processed(limits(settings, len(PROMPT), (0, 6)), PROMPT + [1] * written, logits())
        assert [token for token, score in enumerate(found) if score == float("-inf")] == ([0, 6] if written < 3 else [])
    assert limits(settings, len(PROMPT), ()) == []


def test_words_and_biases_come_back_from_json() -> None:
    settings = SamplingSettings(bad_words=((1, 2), (3,)), logit_bias=(((4,), 1.0), ((5, 6), -2.5)), temperature=0.5)
    assert SamplingSettings.from_json(settings.to_json()) == settings
    assert SamplingSettings.from_dict(json.loads(json.dumps(asdict(settings)))) == settings
