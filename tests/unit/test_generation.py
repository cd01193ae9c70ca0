"""The user's object: what may be asked for, what is refused, what is left alone (cases M05, M09)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from forestream.config import DecodeSettings, SamplingSettings
from forestream.drafting import DraftTree
from forestream.errors import AcceptanceWarning, ConfigError, GrammarError, PromptError
from forestream.generation import Generation, Generator
from forestream.grammar import Grammar
from forestream.memory import Memory
from forestream.requests import Request
from forestream.schedule import Schedule
from forestream.steps import Step
from forestream.topology import Topology
from writers import writer

PROMPT = "the cat"
PROMPTS = ("the cat", "a", "some longer text to go on from", "x y")
CALLS = ("generate", "stream", "pieces", "steps", "plain_steps", "generate_batch", "request")


def called(shared: Generator, name: str, prompt: Any = PROMPT, **asked: Any) -> Any:
    """Run one of the ways to ask for a text."""
    if name == "generate_batch":
        return shared.generate_batch([prompt], **asked)
    found = getattr(shared, name)(prompt, **asked)
    return list(found) if isinstance(found, Iterator) else found


def outline(found: Generation) -> list[tuple[Any, ...]]:
    """Steps without their seconds."""
    return [(s.tokens, s.accepted, s.tree, s.kept, s.path, s.finish, s.scores) for s in found.steps]


class NoRepeats(LogitsProcessor):
    """Keeps a state: forbids the tokens that it was shown as chosen before."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        self.seen.append(int(input_ids[0, -1]))
        scores[:, self.seen] = -torch.inf
        return scores


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["max_tokens", "temprature", "prompt_", "do_sample", "sampling"])
def test_unknown_names_are_named(call: str, name: str) -> None:
    """With the names that are known."""
    with pytest.raises(ConfigError, match=f"unknown: {name}; what can be asked for is .*max_new_tokens.*stop"):
        called(writer(), call, **{name: 1})


@pytest.mark.parametrize(
    "asked",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 2.5},
        {"nodes": 0},
        {"tree": "bush"},
        {"carriers": "none"},
        {"streams": 5},
        {"prune_below": 2.0},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_k": -2},
        {"seed": -1},
        {"repetition_penalty": 0},
        {"accept": "maybe"},
        {"bad_words": [[]]},
        {"logprobs": -1},
        {"logprobs": True},
        {"logprobs": "five"},
        {"row": -1},
        {"row": 0.5},
        {"eos": "end"},
        {"eos": [-4]},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": 5},
        {"stop": [b"a"]},
        {"processors": [3]},
        {"criteria": 3},
        {"watch": 3},
        {"grammar": "digits"},
    ],
    ids=str,
)
def test_wrong_values_are_named(asked: dict[str, Any]) -> None:
    for call in ("generate", "stream", "generate_batch"):
        with pytest.raises(ConfigError, match=next(iter(asked))):
            called(writer(), call, **asked)


def test_settings_of_trees_belong_to_the_call_that_decodes() -> None:
    shared = writer()
    for asked in ({"nodes": 3}, {"carriers": "fused"}):
        with pytest.raises(ConfigError, match="holds no settings of draft trees"):
            shared.request(PROMPT, **asked)


@pytest.mark.parametrize(
    "asked", [{"temperature": 1.0}, {"stop": "a"}, {"logprobs": 1}, {"row": 2}, {"eos": 3}], ids=str
)
def test_a_request_says_itself_what_is_asked_for(asked: dict[str, Any]) -> None:
    shared = writer()
    request = shared.request(PROMPT)
    for call in CALLS:
        with pytest.raises(ConfigError, match=f"{next(iter(asked))} beside a request"):
            called(shared, call, request, **asked)
    assert outline(shared.generate(request, nodes=4)) == outline(shared.generate(PROMPT, nodes=4))


def test_memories_of_other_models_are_refused() -> None:
    shared = writer()
    memory = Memory(writer("bytes").model)
    with pytest.raises(ConfigError, match="another model's"):
        shared.generate(PROMPT, memory=memory)


def test_bad_prompts_of_a_batch_are_refused_before_anything_is_written() -> None:
    with pytest.raises(PromptError, match="empty"):
        writer().generate_batch([PROMPT, ""])
    assert writer().generate_batch([]) == []


# --- what is asked for ----------------------------------------------------------------------------------------


def test_prompts_are_text_ids_or_requests() -> None:
    shared = writer()
    ids = shared.tokenizer(PROMPT)["input_ids"]
    wanted = outline(shared.generate(PROMPT))
    for prompt in (ids, tuple(ids), torch.tensor(ids).tolist(), shared.request(PROMPT), shared.request(ids)):
        assert outline(shared.generate(prompt)) == wanted


def test_a_request_holds_all_that_was_asked_for() -> None:
    shared, processor = writer(), RepetitionPenaltyLogitsProcessor(1.2)
    request = shared.request(
        PROMPT, temperature=0.5, seed=3, processors=[processor], eos=7, row=4, logprobs=2, stop=["a", "b"]
    )
    assert request.sampling == SamplingSettings(temperature=0.5, seed=3)
    assert (request.processors, request.eos, request.row, request.logprobs) == ((processor,), (7,), 4, 2)
    assert len(request.criteria) == 1
    assert shared.request(PROMPT).eos == shared.eos


def test_settings_of_the_object_hold_until_a_call_says_otherwise() -> None:
    shared = writer()
    law = SamplingSettings(temperature=0.9, seed=5)
    warm = Generator(shared.model, shared.tokenizer, replace(shared.settings, max_new_tokens=9), law)
    assert len(warm.generate(PROMPT).tokens) == 9
    assert outline(warm.generate(PROMPT)) == outline(
        shared.generate(PROMPT, max_new_tokens=9, **{name: getattr(law, name) for name in ("temperature", "seed")})
    )
    assert warm.generate(PROMPT, temperature=0.0).tokens == shared.generate(PROMPT).tokens[:9]
    assert not warm.generate(PROMPT).lossy
    assert warm.generate(PROMPT, accept="ratio", threshold=0.5).lossy


# --- what is left alone ---------------------------------------------------------------------------------------


@contextmanager
def unchanged(*things: Any) -> Iterator[None]:
    before = [deepcopy(state(thing)) for thing in things]
    yield
    assert [state(thing) for thing in things] == before


def state(thing: Any) -> Any:
    """What a thing holds, in full, as far as it can be compared."""
    if isinstance(thing, dict):
        return {name: state(one) for name, one in thing.items()}
    if isinstance(thing, list | tuple):
        return [state(one) for one in thing]
    if isinstance(thing, LogitsProcessor):
        return (type(thing), state(vars(thing)))
    return thing.tolist() if isinstance(thing, Tensor) else thing


@pytest.mark.parametrize("call", [call for call in CALLS if call != "request"])
def test_what_the_caller_hands_over_is_unchanged(call: str) -> None:
    """M09: settings, lists, dictionaries, processors and prompts are what they were."""
    settings, law = DecodeSettings(max_new_tokens=8), SamplingSettings(temperature=0.7)
    shared = Generator(writer().model, writer().tokenizer, settings, law)
    prompt = list(shared.tokenizer(PROMPT)["input_ids"])
    asked: dict[str, Any] = {
        "processors": [RepetitionPenaltyLogitsProcessor(1.3)],
        "criteria": [lambda ids, scores: False],
        "eos": [3, 4],
        "stop": ["never", "nowhere"],
        "bad_words": [[5, 6], [7]],
        "logit_bias": [[[8], 1.5]],
        "min_new_tokens": 3,
    }
    host = shared.model.port.model
    with unchanged(settings, law, prompt, asked, host.config.to_dict(), host.generation_config.to_dict()):
        called(shared, call, prompt, **asked)
    assert (shared.settings, shared.sampling) == (settings, law)


def test_a_request_can_be_used_again() -> None:
    shared = writer()
    request = shared.request(PROMPT, temperature=0.8, stop="never", logprobs=1, bad_words=[[5]])
    before = {field.name: getattr(request, field.name) for field in fields(Request)}
    first, second = shared.generate(request), shared.generate(request)
    assert outline(first) == outline(second) == outline(shared.generate_batch([request])[0])
    assert {field.name: getattr(request, field.name) for field in fields(Request)} == before


@pytest.mark.parametrize(
    "law", [{}, {"temperature": 1.2, "seed": 9}, {"repetition_penalty": 1.4, "logprobs": 3}], ids=str
)
@pytest.mark.parametrize("trees", [{}, {"tree": "full", "carriers": "fused"}, {"prune_to": 4}], ids=str)
def test_two_calls_that_are_alike_run_alike(trees: dict[str, Any], law: dict[str, Any]) -> None:
    """M05: the same steps, not the same text only, whatever random numbers others draw between."""
    shared = writer()
    first = outline(shared.generate(PROMPT, **trees, **law))
    torch.rand(3)
    shared.generate("between", temperature=1.0)
    assert outline(shared.generate(PROMPT, **trees, **law)) == first


# --- batches --------------------------------------------------------------------------------------------------


def by_row(shared: Generator, prompts: Sequence[Any], **asked: Any) -> list[tuple[int, ...]]:
    return [shared.generate(prompt, row=row, **asked).tokens for row, prompt in enumerate(prompts)]


@pytest.mark.parametrize("method", ["forestream", "plain"])
@pytest.mark.parametrize("law", [{}, {"temperature": 1.1, "seed": 2}], ids=["greedy", "sampled"])
def test_a_batch_is_its_rows_one_by_one(law: dict[str, Any], method: Any) -> None:
    shared = writer()
    found = shared.generate_batch(PROMPTS, method, **law)
    assert [one.tokens for one in found] == by_row(shared, PROMPTS, **law)
    assert all(one.text == shared.text(one.tokens) and one.finish for one in found)


def test_a_row_that_was_asked_for_is_the_first_texts() -> None:
    shared = writer()
    found = shared.generate_batch([PROMPT, PROMPT], temperature=1.0, row=7)
    assert [one.tokens for one in found] == [shared.generate(PROMPT, temperature=1.0, row=row).tokens for row in (7, 8)]


def test_samples_of_one_prompt_differ_and_share_its_prompt_pass() -> None:
    shared, sizes = writer(), []
    law = {"temperature": 1.0, "seed": 4}
    wanted = by_row(shared, [PROMPT] * 5, **law)
    embed = shared.model.port.embed
    shared.model.port.embed = lambda ids, *rest: (sizes.append(tuple(ids.shape)), embed(ids, *rest))[1]  # type: ignore[method-assign]
    try:
        found = shared.generate_batch([PROMPT] * 5, **law)
    finally:
        del shared.model.port.embed
    assert [one.tokens for one in found] == wanted
    assert len(set(wanted)) == 5
    length = len(shared.tokenizer(PROMPT)["input_ids"])
    assert sizes[0] == (1, length)
    assert all(rows <= 5 and size <= 8 for rows, size in sizes[1:])
    assert sizes[1][0] == 5


def test_each_text_of_a_batch_has_processors_and_criteria_of_its_own() -> None:
    """Both have a state here: shared, they would forbid what others wrote, and end too early."""
    shared = writer()

    def asked() -> dict[str, Any]:
        return {"processors": [NoRepeats()], "criteria": [Fifth()]}

    wanted = [shared.generate(prompt, row=row, **asked()).tokens for row, prompt in enumerate(PROMPTS)]
    given = asked()
    assert [one.tokens for one in shared.generate_batch(PROMPTS, **given)] == wanted
    assert [len(tokens) for tokens in wanted] == [5] * 4
    assert (len(given["processors"][0].seen), given["criteria"][0].calls) == (5, 5), "the caller's own saw one text"


class Fifth:
    """True when it is called for the fifth time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"]) -> bool:
        self.calls += 1
        return self.calls == 5


def test_requests_of_a_batch_are_taken_as_they_are() -> None:
    shared = writer()
    requests = [
        replace(shared.request(PROMPT, temperature=0.9, row=3), max_new_tokens=5),
        shared.request("a", stop="B"),
        shared.request(PROMPT, logprobs=2),
    ]
    found = shared.generate_batch(requests)
    for one, request in zip(found, requests, strict=True):
        alone = shared.generate(request)
        assert (one.tokens, one.finish) == (alone.tokens, alone.finish)
        assert len(one.scores) == len(alone.scores)
    assert len(found[0].tokens) == 5


def test_a_schedule_is_used_unless_a_call_sets_trees_itself() -> None:
    shared = writer()
    settings = DecodeSettings(tree="full", k=1, max_new_tokens=12)
    schedule = Schedule(((1, settings), (3, DecodeSettings(nodes=1))))
    planned = Generator(shared.model, shared.tokenizer, settings, schedule=schedule)
    one, four = planned.generate_batch(PROMPTS[:1], eos=[]), planned.generate_batch(PROMPTS, eos=[])
    assert max(sizes_of(one)) == 5
    assert sizes_of(four) == {1}, "three texts and more are decoded plainly"
    assert [text.tokens for text in four] == by_row(planned, PROMPTS, eos=[])
    other = planned.generate_batch(PROMPTS, nodes=6, tree="budget", eos=[])
    assert max(sizes_of(other)) == 6
    assert [text.tokens for text in other] == [text.tokens for text in four]


def test_a_cap_leaves_the_schedule_in_force_and_comes_before_its_own() -> None:
    """Trees are the schedule's business, lengths are not: a batch is as long as its rows alone."""
    shared = writer()
    schedule = Schedule(((1, DecodeSettings(max_new_tokens=3)), (2, DecodeSettings(nodes=1, max_new_tokens=4))))
    planned = Generator(shared.model, shared.tokenizer, DecodeSettings(max_new_tokens=9), schedule=schedule)
    for asked, length in (({}, 9), ({"max_new_tokens": 6}, 6), ({"max_new_tokens": 15}, 15)):
        found = planned.generate_batch(PROMPTS, eos=[], **asked)
        assert [len(text.tokens) for text in found] == [length] * 4
        assert sizes_of(found) == {1}


def sizes_of(found: Sequence[Generation]) -> set[int]:
    return {len(step.kept) for one in found for step in one.steps if step.tree is not None}


def test_many_passes_without_an_accepted_draft_are_warned_of() -> None:
    """M10: fifty of them are no accident, fewer may be."""
    tree = DraftTree(Topology((-1, 0)), (1, 2))
    one, here = Step((1,), 0, 0.1, tree, (0, 1), (0,)), writer()
    here.collect(iter([one] * 49))
    with pytest.warns(AcceptanceWarning, match="not one draft was accepted in 50 passes"):
        here.collect(iter([one] * 50))
    here.collect(iter([*[one] * 50, Step((2, 1), 1, 0.1, tree, (0, 1), (0, 1))]))


def test_a_request_takes_its_cap_along() -> None:
    here = writer()
    assert here.request(PROMPT).max_new_tokens is None
    assert len(here.generate(here.request(PROMPT, max_new_tokens=3)).tokens) == 3


# --- usual forms of prompts, and what batches share -----------------------------------------------------------------


def test_prompts_come_in_any_usual_form() -> None:
    here, ids = writer(), [5, 6, 7]
    wanted = here.generate(ids).tokens
    made = here.tokenizer(PROMPT)
    for form in (tuple(ids), torch.tensor(ids), torch.tensor([ids]), np.array(ids), [ids], [np.int64(i) for i in ids]):
        assert here.generate(form).tokens == wanted
    assert here.generate(made).tokens == here.generate(PROMPT).tokens
    assert here.generate(here.tokenizer(PROMPT, return_tensors="pt")).tokens == here.generate(PROMPT).tokens
    together = here.tokenizer(["a", PROMPT])
    assert [one.tokens for one in here.generate_batch(together)] == [here.generate(p).tokens for p in ("a", PROMPT)]
    assert here.generate(ids, max_new_tokens=np.int64(3), seed=np.int64(1)).tokens == wanted[:3]


@pytest.mark.parametrize("wrong", [None, 5, [5.0, 6.5], [True, False], [[5], [6]], ["ab", "cd"], {"x": 1}, [None]])
def test_prompts_of_other_forms_are_refused(wrong: Any) -> None:
    with pytest.raises(PromptError):
        writer().generate(wrong)


def test_calls_that_make_no_sense_are_refused() -> None:
    here = writer()
    with pytest.raises(ConfigError, match="method is 'plian'"):
        here.generate_batch([PROMPT], "plian")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="a batch takes several"):
        here.generate_batch(PROMPT)
    with pytest.raises(ConfigError, match="expected a Memory"):
        here.generate(PROMPT, memory=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a processor returned None"):
        here.generate(PROMPT, processors=[lambda ids, scores: None])


class After:
    """True once it was called so many times; a switch that another thread might turn cannot be copied."""

    def __init__(self, calls: int, switch: Any = None) -> None:
        self.left, self.switch = calls, switch

    def __call__(self, ids: Tensor, scores: Tensor) -> list[bool]:
        self.left -= 1
        return [self.left <= 0]


@pytest.mark.parametrize("switch", [None, "a lock"])
def test_the_first_text_of_a_batch_has_the_callers_own_criteria(switch: Any) -> None:
    here, own = writer(), After(4, threading.Lock() if switch else None)
    found = here.generate_batch([PROMPT, "a"], criteria=[own], eos=())
    assert own.left <= 0
    if not switch:
        assert [len(one.tokens) for one in found] == [4, 4]
        request = here.request("a", criteria=[After(3)], eos=())
        assert [len(one.tokens) for one in here.generate_batch([request, request])] == [3, 3]


def test_a_cap_beside_a_request_goes_before_its_own() -> None:
    here = writer()
    assert len(here.generate(here.request(PROMPT, max_new_tokens=5, eos=()), max_new_tokens=3).tokens) == 3


def test_plain_text_is_never_lossy() -> None:
    (found,) = writer().generate_batch([PROMPT], "plain", accept="typical", threshold=0.1)
    assert not found.lossy


def test_a_grammar_knows_the_ends_of_its_own_call() -> None:
    here, three = writer("bytes"), Grammar.regex("[ab]{3}")
    for eos in ((5,), (7, 9), here.eos):
        found = here.generate("ab", grammar=three, eos=eos)
        assert len(found.tokens) <= 4
        assert found.tokens[-1] in eos
    with pytest.raises(ConfigError):
        here.generate("ab", grammar=three, eos=())
    with pytest.raises(GrammarError, match="the grammar allows nothing that the other rules allow"):
        here.generate("ab", grammar=three, min_new_tokens=10)
