"""Penalties that act on drafts, too: more drafts are accepted, and no text changes (case F07)."""

from typing import Any

import pytest
import torch

from batch import Prophets, alone, together
from forestream.config import DecodeSettings, SamplingSettings
from forestream.decode import decode_batch
from forestream.drafting import drafter_for
from forestream.requests import Request
from forestream.rows import Row
from forestream.steps import Step, tokens_of
from oracle import Prophet
from subject import model_of
from wrapped import prompt

FEW = tuple((token,) for token in range(89) if token not in (5, 8, 13, 21, 34, 55))
"""All tokens but six are bad words: streams that do not know it draft almost nothing else."""

LAWS: dict[str, dict[str, Any]] = {
    "words": {"bad_words": FEW},
    "words, sampled": {"bad_words": FEW, "temperature": 2.0},
    "bias": {"logit_bias": tuple(((token,), -30.0) for (token,) in FEW), "temperature": 2.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 1.5},
}


def both(law: dict[str, Any], settings: DecodeSettings) -> list[list[list[Step]]]:
    """Steps of four texts without mirroring and with it."""
    model, found = model_of("llama", "joint"), []
    for mirror in (False, True):
        batch = [
            Request(
                prompt(3 + row, seed=row),
                sampling=SamplingSettings(**law, mirror=mirror),
                max_new_tokens=16,
                row=row,
            )
            for row in range(4)
        ]
        truths = [tokens_of(alone(model, one)) for one in batch]
        found.append(together(model, batch, settings))
        assert [tokens_of(steps) for steps in found[-1]] == truths
    return found


def hits(steps: list[list[Step]]) -> int:
    return sum(step.accepted for own in steps for step in own)


@pytest.mark.parametrize(
    "settings", [DecodeSettings(nodes=9), DecodeSettings(tree="full", k=2)], ids=["budget", "full"]
)
@pytest.mark.parametrize("name", LAWS)
def test_mirroring_changes_drafts_and_no_text(name: str, settings: DecodeSettings) -> None:
    bare, mirrored = both(LAWS[name], settings)
    assert [tokens_of(steps) for steps in bare] == [tokens_of(steps) for steps in mirrored]
    assert [step.tree for own in bare for step in own] != [step.tree for own in mirrored for step in own]
    if name != "penalties":
        assert hits(mirrored) > hits(bare) + 10


def test_no_bad_word_is_drafted() -> None:
    """Of one token; with six left, trees of two a stream hold none of the others."""
    _, mirrored = both(LAWS["words"], DecodeSettings(tree="full", k=2))
    drafted = {token for own in mirrored for step in own if step.tree for token in step.tree.tokens[1:]}
    assert drafted
    assert drafted <= {5, 8, 13, 21, 34, 55}


def test_mirrored_logits_are_those_of_the_penalties() -> None:
    """Each stream's, with the text so far; unasked, they are handed through as they are."""
    logits = torch.randn(3, 89, generator=torch.Generator().manual_seed(1))
    law: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "temperature": 2.0, "top_k": 3}
    row = Row(Request((4, 7), sampling=SamplingSettings(**law, mirror=True)), 9)
    row.text += [9, 7]
    wanted = logits.clone()
    for stream in wanted:
        for token in (4, 7, 9):
            stream[token] = stream[token] / 1.3 if stream[token] > 0 else stream[token] * 1.3
        stream[[9, 7]] -= 1.0
    kept = logits.clone()
    assert torch.allclose(row.mirrored(logits), wanted)
    assert torch.equal(logits, kept)
    bare = Row(Request((4, 7), sampling=SamplingSettings(**law)), 9)
    assert bare.mirrored(logits) is logits
    assert row.mirrored(logits[:0]).shape == (0, 89)


def test_mirroring_beside_drafts_that_are_right() -> None:
    """Rows that mirror and rows that do not, together."""
    model = model_of("gpt2", "joint")
    batch = [
        Request(
            prompt(4), sampling=SamplingSettings(**LAWS["penalties"], mirror=row % 2 == 1), max_new_tokens=14, row=row
        )
        for row in range(4)
    ]
    truths = [tokens_of(alone(model, one)) for one in batch]
    prophets = tuple(
        Prophet(drafter_for(DecodeSettings()), one.prompt + truth, 0.8)
        for one, truth in zip(batch, truths, strict=True)
    )
    found: list[list[Step]] = [[], [], [], []]
    for outcome in decode_batch(model, batch, DecodeSettings(), Prophets(prophets)):
        for number, step in outcome:
            found[number].append(step)
    assert [tokens_of(steps) for steps in found] == truths
    assert hits(found) > 10
