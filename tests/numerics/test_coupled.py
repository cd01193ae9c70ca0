"""COUPLE, in float32: sampled text with speculation is plain decoding's, token for token, whatever shares the batch.

Draws are keyed by seed, row and place in the text, so both ways draw the same tokens (cases E10, G11, P01 to P03).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from batch import accepted, alone, assert_as_alone, sampled, together
from forestream.config import DecodeSettings, SamplingSettings
from forestream.requests import Request
from forestream.rows import Row
from forestream.steps import tokens_of
from subject import model_of
from wrapped import prompt

EOS = tuple(range(0, 70, 6))
"""So many ends of text that random texts meet one now and then."""

LAWS: dict[str, dict[str, Any]] = {
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 2.0, "top_k": 7},
    "top_p": {"temperature": 2.5, "top_p": 0.8},
    "min_p": {"temperature": 2.5, "min_p": 0.02},
    "cuts": {"temperature": 3.0, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "penalties": {
        "temperature": 2.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "mirror": True,
    },
    "words": {
        "temperature": 2.0,
        "bad_words": (*((token,) for token in range(1, 70, 3)), (2, 5), (5, 2, 8)),
        "logit_bias": (((3,), 4.0), ((8,), 6.0), ((8, 11), 9.0)),
        "min_new_tokens": 5,
    },
}
SETTINGS = (
    DecodeSettings(nodes=3),
    DecodeSettings(nodes=9, carriers="fused"),
    DecodeSettings(nodes=9, carriers="fused", carried=2),
    DecodeSettings(tree="full", k=1, carriers="fused"),
    DecodeSettings(tree="full", k=2, streams=3),
    DecodeSettings(nodes=16, prune_to=9),
    DecodeSettings(nodes=12, prune_below=1e-4, carriers="fused"),
    DecodeSettings(nodes=5, lookup_beside=3, lookup_behind=2),
    DecodeSettings(tree="static", shape=((0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 2))),
)


def drawn(numbers: Sequence[int], tokens: int = 8, **law: Any) -> list[Request]:
    """Texts behind random prompts; the number of a text keys everything about it."""
    return [
        Request(
            prompt(1 + number % 11, seed=number),
            eos=EOS,
            sampling=SamplingSettings(**{"seed": number // 3, **law}),
            max_new_tokens=tokens - number % 3,
            row=number % 5,
        )
        for number in numbers
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "phi", "opt-post", "mistral-window"])
def test_five_hundred_prompts(family: str) -> None:
    """Nearly: 8 laws for 7 families, each with a ragged batch of four, and 5 texts alone; 504 in all."""
    model, hits, place = model_of(family, "lossless" if len(family) % 2 else "joint"), 0, len(family)
    for law in LAWS.values():
        place += 1
        first = 100 * place
        settings = SETTINGS[place % len(SETTINGS)]
        hits += accepted(assert_as_alone(model, drawn(range(first, first + 4), **law), settings))
        for number in range(first + 4, first + 9):
            settings = SETTINGS[number % len(SETTINGS)]
            hits += accepted(assert_as_alone(model, drawn([number], **law), settings, rate=0.8))
    assert hits > 40


def test_laws_of_their_own_within_a_batch() -> None:
    """Each row has another law; one is greedy, one ends at once."""
    asked = [replace(one, row=row) for row, one in enumerate(drawn(range(8), tokens=14))]
    asked = [sampled(one, seed=5, **law) for one, law in zip(asked, LAWS.values(), strict=True)]
    asked = [*asked, replace(asked[0], sampling=SamplingSettings()), replace(asked[1], max_new_tokens=1)]
    found = assert_as_alone(model_of("qwen2", "joint"), asked, DecodeSettings(nodes=8), 0.9)
    assert accepted(found) > 10


def test_a_text_is_the_same_among_any_mates() -> None:
    """P01: first, last or in the middle, alone or beside texts of other lengths, laws and seeds."""
    model = model_of("llama", "joint")
    wanted, *mates = drawn(range(40, 46), tokens=12, temperature=2.0)
    truth = tokens_of(alone(model, wanted))
    for place in range(5):
        company = [*mates[:place], wanted, *mates[place + 1 :]]
        steps = together(model, company, SETTINGS[place], [tokens_of(alone(model, one)) for one in company])
        assert tokens_of(steps[place]) == truth
    assert [tokens_of(alone(model, wanted)) for _ in range(2)] == [truth] * 2


def test_two_seeds_in_one_batch_are_each_their_single_run() -> None:
    """P02: of the same prompt and row, with nothing but the seed between them."""
    model = model_of("gpt2", "joint")
    asked = [sampled(Request(prompt(6), max_new_tokens=12), temperature=2.0, seed=seed) for seed in (1, 2, 1)]
    one, other, again = (tokens_of(steps) for steps in assert_as_alone(model, asked, DecodeSettings(nodes=8)))
    assert one != other
    assert one == again


def test_different_seeds_and_different_rows_differ() -> None:
    """P03: and the largest seed there is counts as one."""
    base = Request(prompt(6), max_new_tokens=12)
    laws = [{"temperature": 2.0, "seed": seed} for seed in (0, 1, 2, 2**32, 2**64 - 1)]
    asked = [sampled(base, **law) for law in laws] + [replace(sampled(base, **laws[0]), row=row) for row in (1, 2, 99)]
    found = together(model_of("llama", "joint"), asked, DecodeSettings(nodes=8))
    assert len({tokens_of(steps) for steps in found}) == len(asked)


def test_turning_the_tree_never_changes_a_sampled_text() -> None:
    model = model_of("mistral-window", "joint")
    (asked,) = drawn([7], tokens=24, temperature=1.7)
    texts = {tokens_of(together(model, [asked], settings)[0]) for settings in SETTINGS}
    assert texts == {tokens_of(alone(model, asked))}


def test_a_generator_carried_along_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that depend on how many were made before, by whatever row."""
    calls: list[int] = []
    right = Row._choose

    def wrong(self: Row, logits: Any, drafts: list[int]) -> Any:
        calls.append(0)
        self.request = replace(self.request, row=len(calls))
        return right(self, logits, drafts)

    monkeypatch.setattr(Row, "_choose", wrong)
    model, asked = model_of("llama", "joint"), drawn(range(4), temperature=2.0)
    calls.clear()
    truths = [tokens_of(alone(model, one)) for one in asked]
    calls.clear()
    assert [tokens_of(steps) for steps in together(model, asked, DecodeSettings())] != truths
