"""What is asked for: refused by name where it cannot be, and kept apart text by text where it has a state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from batch import together
from forestream.config import DecodeSettings, SamplingSettings
from forestream.errors import ConfigError, PromptError
from forestream.generation import Generator
from forestream.requests import Request
from subject import model_of
from tiny import tiny_tokenizer
from wrapped import wrapped
from zoo import custom

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", (5,)),
        ("bad_words", 5),
        ("bad_words", ((True,),)),
        ("bad_words", ((-1,),)),
        ("bad_words", ((1.0,),)),
        ("bad_words", ("ab",)),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", ((5, 1.0),)),
        ("logit_bias", (((5,), "x"),)),
        ("logit_bias", (((5,), NAN),)),
        ("logit_bias", (((5,), INF),)),
        ("logit_bias", (((5,), True),)),
        ("logit_bias", (((5,),),)),
        ("temperature", INF),
        ("temperature", NAN),
        ("repetition_penalty", INF),
        ("presence_penalty", NAN),
    ],
)
def test_values_that_make_no_law_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingSettings(**{name: value})


def test_lists_and_a_bias_of_minus_infinity_are_taken() -> None:
    settings = SamplingSettings(bad_words=[[1, 2]], logit_bias=[[[3], -INF], [(4,), 2]])  # type: ignore[arg-type]
    assert settings.bad_words == ((1, 2),)
    assert settings.logit_bias == (((3,), -INF), ((4,), 2.0))


@pytest.mark.parametrize("law", [{"bad_words": ((3, 89),)}, {"logit_bias": (((500,), 1.0),)}], ids=str)
@pytest.mark.parametrize("settings", [DecodeSettings(), None], ids=["drafts", "plain"])
def test_words_beyond_the_vocabulary_are_refused(law: dict[str, Any], settings: DecodeSettings | None) -> None:
    asked = Request((1, 2), sampling=SamplingSettings(**law), max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"holds id (89|500); the model knows 0 to 88"):
        together(model_of("llama", "joint"), [asked], settings)


@pytest.mark.parametrize("strange", [-1, 89])
def test_prompts_beyond_the_vocabulary_are_refused(strange: int) -> None:
    with pytest.raises(PromptError, match=f"holds the id {strange}; this model knows ids from 0 to 88"):
        together(model_of("llama", "joint"), [Request((1, strange, 2), max_new_tokens=3)], DecodeSettings())


def test_a_row_is_a_number_that_can_key_a_draw() -> None:
    for row in (-1, 2**64):
        with pytest.raises(ConfigError, match="row"):
            Request((1,), row=row)
    hot = SamplingSettings(temperature=2.0)
    rows = [Request((1,), sampling=hot, row=row, max_new_tokens=8) for row in (0, 2**63, 2**64 - 1)]
    found = together(model_of("llama", "joint"), rows, DecodeSettings())
    assert len({tuple(token for step in steps for token in step.tokens) for steps in found}) == 3


class Fifth:
    """Ends a text at the fifth call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> bool:
        self.calls += 1
        return self.calls == 5


class Third(Fifth):
    """Forbids the first forty tokens from the third call on."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        super().__call__(input_ids, scores)
        return scores if self.calls < 3 else scores.index_fill(1, torch.arange(0, 40), -torch.inf)


@pytest.mark.parametrize("method", ["forestream", "plain"])
def test_whatever_has_a_state_has_one_for_each_text(method: Any) -> None:
    """Processors and criteria that a batch shares: each text is the one that is written alone."""
    tokenizer = tiny_tokenizer()
    here = Generator(wrapped(custom("llama", vocab_size=len(tokenizer), num_key_value_heads=2)), tokenizer)
    law: dict[str, Any] = {"temperature": 2.0, "max_new_tokens": 9}
    found = here.generate_batch(["ab", "c", "ab"], method, processors=[Third()], criteria=[Fifth()], **law)
    for row, (prompt, one) in enumerate(zip(["ab", "c", "ab"], found, strict=True)):
        alone = here.generate(prompt, processors=[Third()], criteria=[Fifth()], row=row, **law)
        assert one.tokens == alone.tokens
        assert len(one.tokens) == 5
        assert min(one.tokens[2:]) >= 40
