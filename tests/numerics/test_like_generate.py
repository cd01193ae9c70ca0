"""Settings mean what they mean in the host library: texts and logits of its `generate` (cases B05, B18, F02, F06)."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from batch import alone
from forestream.config import DecodeSettings, SamplingSettings
from forestream.decode import decode
from forestream.drafting import drafter_for
from forestream.processors import warpers
from forestream.requests import Request
from forestream.rows import Row
from forestream.steps import tokens_of
from oracle import Prophet
from subject import model_of
from wrapped import prompt

FAMILIES = ("llama", "gpt2", "qwen2")
START = prompt(9)
EOS = (3, 7, 21, 39, 61)
THEIRS = {"bad_words": "bad_words_ids", "logit_bias": "sequence_bias"}
"""Fields that have another name there."""

GREEDY: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.05},
    {"repetition_penalty": 1.4, "min_new_tokens": 12},
    {"min_new_tokens": 7},
    {"bad_words": ((5,), (30,), *((token,) for token in range(40, 70)), (2, 6))},
    {"logit_bias": (((4,), 5.0), ((4, 9), 20.0), ((8,), -3.0))},
    {
        "repetition_penalty": 1.2,
        "bad_words": tuple((token,) for token in range(0, 70, 2)),
        "logit_bias": (((5,), 4.0), ((9,), 6.0)),
        "min_new_tokens": 5,
    },
)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "bad_words": ((11,), (12,), (70,))},
)


def theirs(asked: dict[str, Any]) -> dict[str, Any]:
    """The settings as the host library takes them."""
    found: dict[str, Any] = {"top_k": 0} | asked
    if "bad_words" in found:
        found["bad_words"] = [list(word) for word in found["bad_words"]]
    if "logit_bias" in found:
        found["logit_bias"] = [[list(word), bias] for word, bias in found["logit_bias"]]
    return {THEIRS.get(name, name): value for name, value in found.items()}


@torch.no_grad()
def generate(family: str, start: tuple[int, ...], tokens: int, **asked: Any) -> Any:
    config = GenerationConfig(
        max_new_tokens=tokens,
        eos_token_id=list(EOS),
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **theirs(asked),
    )
    ids = torch.tensor([start])
    host = model_of(family, "joint").port.model  # its adapter is merged
    return host.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


@cache
def greedy_text(family: str, place: int) -> tuple[int, ...]:
    found = generate(family, START, 20, do_sample=False, **GREEDY[place])
    return tuple(found.sequences[0, len(START) :].tolist())


@pytest.mark.parametrize("place", range(len(GREEDY)))
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_generate(family: str, place: int) -> None:
    """F02, F06: plain and with 2, 8 and 48 drafts."""
    model, truth = model_of(family, "joint"), greedy_text(family, place)
    asked = Request(START, EOS, SamplingSettings(**GREEDY[place]), max_new_tokens=20)
    assert tokens_of(alone(model, asked)) == truth
    for drafts in (2, 8, 48):
        settings = DecodeSettings(nodes=drafts + 1)
        prophet = Prophet(drafter_for(settings), START + truth, 0.7)
        assert tokens_of(list(decode(model, asked, settings, drafter=prophet))) == truth


def test_the_settings_above_have_their_say() -> None:
    """Each changes the text of some family, and some texts end early."""
    free = {family: generate(family, START, 20, do_sample=False).sequences[0, len(START) :] for family in FAMILIES}
    for place in range(len(GREEDY)):
        assert any(greedy_text(family, place) != tuple(free[family].tolist()) for family in FAMILIES)
    assert any(len(text) < 20 for text in free.values())


def processed(family: str, **law: Any) -> tuple[tuple[int, ...], list[Tensor]]:
    """A speculative text, and what its tokens were drawn from."""
    scores: list[Tensor] = []
    asked = Request(
        START,
        (),
        SamplingSettings(seed=3, **law),
        max_new_tokens=8,
        watch=lambda token, logits, given: scores.append(given.clone()),
    )
    model = model_of(family, "joint")
    truth = tokens_of(alone(model, asked))
    scores.clear()
    prophet = Prophet(drafter_for(DecodeSettings()), START + truth, 0.8)
    steps = list(decode(model, asked, DecodeSettings(), drafter=prophet))
    assert any(step.accepted for step in steps)
    return tokens_of(steps), scores


def agrees(family: str, law: dict[str, Any]) -> bool:
    """Whether every token of a speculative text was drawn from what `generate` draws its next token from."""
    text, scores = processed(family, **law)
    assert len(scores) == len(text)
    for place, found in enumerate(scores):
        wanted = generate(family, START + text[:place], 1, do_sample=True, **law).scores[0][0]
        if not torch.equal(found.isfinite(), wanted.isfinite()):
            return False
        kept = wanted.isfinite()
        if not torch.allclose(found[kept], wanted[kept], atol=1e-4):
            return False
    return True


@pytest.mark.parametrize("law", SAMPLED, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_processed_logits_are_those_of_generate(family: str, law: dict[str, Any]) -> None:
    """B05, B18: temperature, top-k, top-p, min-p and penalties, in its order."""
    assert agrees(family, law)


def test_cuts_before_the_temperature_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forestream.rows.warpers", lambda law: warpers(law)[::-1])
    assert not agrees("llama", SAMPLED[3])


def test_penalties_behind_the_cuts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Row.__init__

    def wrong(self: Row, *args: Any) -> None:
        right(self, *args)
        self._processors.reverse()

    monkeypatch.setattr(Row, "__init__", wrong)
    assert not agrees("llama", SAMPLED[6])


def test_an_order_that_is_right_is_not_noticed() -> None:
    assert agrees("llama", SAMPLED[3])
    assert agrees("llama", SAMPLED[6])
