"""Several texts together: each is what it would be alone, whatever its company (cases G01 to G11, A18)."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from batch import accepted, alone, assert_as_alone, requests, together
from forestream.config import DecodeSettings
from forestream.decode import decode_batch
from forestream.errors import ConfigError, PromptError
from forestream.generation import Generator
from forestream.memory import Memory
from forestream.model import StreamingLM
from forestream.requests import unpadded
from forestream.schedule import Schedule
from forestream.steps import tokens_of
from oracle import prefilled
from stretched import BORDER, stretched
from subject import CARRIERS, PRUNINGS, WHO, model_of
from tiny import tiny_tokenizer
from wrapped import prompt, wrapped
from zoo import HOSTS, WINDOW

RAGGED = (5, 1, 2 * WINDOW + 3, 9)
CAPS = (12, 20, 1, 7)


@pytest.mark.parametrize("carriers", CARRIERS)
@pytest.mark.parametrize("family", sorted(HOSTS))
def test_every_family_with_ragged_prompts_and_ends(family: str, carriers: Any) -> None:
    settings = DecodeSettings(nodes=6, carriers=carriers)
    found = assert_as_alone(model_of(family, "joint"), requests(RAGGED, CAPS), settings)
    assert accepted(found) > 5


@pytest.mark.parametrize("pruning", PRUNINGS)
@pytest.mark.parametrize("tree", [{"tree": "full", "k": 2, "streams": 3}, {"tree": "budget", "nodes": 9}])
def test_trees_pruned_and_not_where_rows_keep_different_nodes(tree: dict[str, Any], pruning: str) -> None:
    model = model_of("mistral-window", "lossless")
    for rule in PRUNINGS[pruning]:
        for who in WHO:
            found = assert_as_alone(model, requests(RAGGED), DecodeSettings(**tree, **rule, **who), 0.9)
            assert accepted(found) > 5


@pytest.mark.parametrize("rows", range(1, 9))
def test_batches_of_one_to_eight(rows: int) -> None:
    """G02."""
    lengths = [1 + (7 * row) % 13 for row in range(rows)]
    assert_as_alone(model_of("llama", "joint"), requests(lengths, 8), DecodeSettings(nodes=5))


def test_many_rows_of_random_lengths() -> None:
    """G09: 16 rows, 60 tokens."""
    lengths = torch.randint(1, 40, (16,), generator=torch.Generator().manual_seed(3)).tolist()
    found = assert_as_alone(model_of("qwen2", "joint"), requests(lengths, 60), DecodeSettings(nodes=8))
    assert accepted(found) > 100


def test_value_rotation_and_low_rank_starts() -> None:
    for changes in ({"value_rotation": True, "rotation_angle": 0.7}, {"start": "low_rank"}, {"positions": "same"}):
        assert_as_alone(wrapped("llama", **changes), requests(RAGGED), DecodeSettings(nodes=6, carriers="fused"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_on_both_sides_of_a_border_of_rotary_frequencies(kind: str) -> None:
    """Tables are chosen by each row's own length, not by the longest row's."""
    model = stretched(kind)
    lengths = (3, BORDER + 4, BORDER - 6) if kind == "longrope" else (3, BORDER - 6)
    found = assert_as_alone(model, requests(lengths, 12), DecodeSettings(nodes=6))
    assert len(tokens_of(found[-1])) == 6, "the last text ends at the border"


def test_a_finished_row_leaves_the_work() -> None:
    model, seen = wrapped("llama"), []
    forward = model.port.embed
    model.port.embed = lambda ids, positions: (seen.append(len(ids)), forward(ids, positions))[1]  # type: ignore[method-assign]
    together(model, requests((4, 4, 4), (3, 9, 15)), None)
    assert seen == [1, 1, 1] + [3] * 2 + [2] * 6 + [1] * 6


def test_no_logits_of_any_row_are_undefined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A18: a row that is filled up has slots that see nothing but themselves."""
    model, logits = model_of("llama", "joint"), []
    right = StreamingLM.logits
    monkeypatch.setattr(StreamingLM, "logits", lambda self, states: logits.append(right(self, states)) or logits[-1])
    together(model, requests(RAGGED), DecodeSettings(tree="full", k=2, streams=2, carriers="fused"))
    assert all(found.isfinite().all() for found in logits)
    assert any(len(found) == len(RAGGED) for found in logits)


def test_prompts_that_are_shared_are_read_once() -> None:
    model, seen = wrapped("llama"), []
    forward = model.port.embed
    model.port.embed = lambda ids, positions: (seen.append(ids.shape), forward(ids, positions))[1]  # type: ignore[method-assign]
    asked = [replace(one, prompt=prompt(30)) for one in requests((1, 1, 1), 5)]
    texts = [tokens_of(steps) for steps in together(model, asked, None)]
    assert seen[0] == (1, 30)
    assert all(shape == (3, 1) for shape in seen[1:])
    assert texts == [tokens_of(alone(model, asked[0]))] * 3


def test_a_request_for_no_tokens_yields_nothing_and_the_others_go_on() -> None:
    found = assert_as_alone(model_of("llama", "joint"), requests((3, 4, 5), (0, 6, 0)), DecodeSettings())
    assert [len(tokens_of(steps)) for steps in found] == [0, 6, 0]
    assert together(model_of("llama", "joint"), requests((3,), (0,)), DecodeSettings()) == [[]]


def test_bad_requests_are_refused_before_anything_runs() -> None:
    model = model_of("llama", "joint")
    with pytest.raises(PromptError, match="the prompt is empty"):
        together(model, [*requests((3,)), replace(requests((3,))[0], prompt=())], DecodeSettings())
    with pytest.raises(ConfigError, match="a memory belongs to one text; 2"):
        next(decode_batch(model, requests((3, 3)), DecodeSettings(), memory=Memory(model)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_inputs_are_the_prompts_without_their_padding(side: str) -> None:
    """G06, G07, G14: the token that pads may be any, the one that ends texts among them."""
    made = Generator(model_of("llama", "joint"), tiny_tokenizer(), DecodeSettings(nodes=6, max_new_tokens=12))
    texts = [prompt(length, seed=length) for length in (3, 8, 1)]
    ids, mask = torch.full((3, 8), made.eos[0]), torch.zeros(3, 8, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(8 - len(text), 8) if side == "left" else slice(len(text))
        ids[row, place], mask[row, place] = torch.tensor(text), 1
    found = made.generate_batch({"input_ids": ids, "attention_mask": mask})
    assert [one.tokens for one in found] == [made.generate(text).tokens for text in texts]


def test_padding_inside_of_a_row_is_refused() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(PromptError, match="row 1 has padding between"):
        unpadded(ids, torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))
    with pytest.raises(PromptError, match=r"expected \[B, T\] for both"):
        unpadded(ids, torch.ones(2, 3))
    assert unpadded(ids) == [(0, 0, 0, 0)] * 2


# --- fewer drafts the more texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("carriers", CARRIERS)
def test_a_schedule_goes_from_plain_to_deep_as_texts_end(carriers: Any) -> None:
    deep = DecodeSettings(tree="full", k=1, carriers=carriers)
    shallow = replace(deep, streams=2)
    schedule = Schedule(((1, deep), (2, shallow), (4, DecodeSettings(nodes=1))))
    found = assert_as_alone(model_of("gpt2", "joint"), requests((4, 5, 6, 7), (6, 6, 16, 30)), schedule, rate=1.0)
    sizes = [len(step.kept) for step in found[3]]
    assert sizes[:6] == [0, 1, 1, 1, 1, 1], "four texts: plain"
    assert set(sizes[6:8]) == {3}
    assert max(sizes) == 5


@pytest.mark.parametrize("rows", [(), (2,), (1, 1), (1, 4, 2)])
def test_a_schedule_begins_at_one_row_and_increases(rows: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="increase from 1"):
        Schedule(tuple((least, DecodeSettings()) for least in rows))


# --- what is left in the cache --------------------------------------------------------------------------------


@torch.no_grad()
def test_rows_hold_their_own_text_and_no_holes() -> None:
    """G03, G06: after passes of ragged trees, each row's keys and values are those of a fresh prefill."""
    model, caches = wrapped("llama"), []
    fresh = model.new_cache
    model.new_cache = lambda capacity, rows=1: caches.append(fresh(capacity, rows)) or caches[-1]  # type: ignore[method-assign]
    asked = requests((5, 1, 9), 30)
    truths = [tokens_of(alone(model, one)) for one in asked]
    run = decode_batch(model, asked, DecodeSettings(nodes=6))
    written = [list(one.prompt) for one in asked]
    for _, outcome in zip(range(6), run, strict=False):
        for number, step in outcome:
            written[number] += step.tokens
    run.close()  # type: ignore[attr-defined]
    cache = caches[-1]
    for row, text in enumerate(written):
        assert text == [*asked[row].prompt, *truths[row]][: len(text)]
        held, wanted = cache.row(row), prefilled(model, text[:-1])
        for layer in range(4):
            for found, right in zip(held.content(layer), wanted.content(layer), strict=True):
                assert torch.allclose(found, right, atol=1e-5 * float(right.abs().max()))
