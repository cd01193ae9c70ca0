"""A memory changes what is read, never what is written (cases D02, D03, D11, D13, D14, L07)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings, SamplingSettings
from forestream.decode import decode
from forestream.errors import CacheError, PromptError
from forestream.memory import Memory
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.steps import tokens_of
from oracle import assert_no_trace, prefilled
from stretched import BORDER, stretched
from subject import CARRIERS, model_of
from wrapped import prompt
from writers import foreseen
from zoo import POSITIONS

TURNS = (9, 1, 4, 12)
"""Tokens that each turn of a chat adds to what was written before."""


@contextmanager
def reading(model: StreamingLM) -> Iterator[list[int]]:
    """Sizes of all passes in here, in tokens that enter the first layer."""
    sizes: list[int] = []
    embed = model.port.embed

    def counted(ids: Tensor, positions: Tensor) -> Tensor:
        sizes.append(ids.numel())
        return embed(ids, positions)

    model.port.embed = counted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        del model.port.embed


def written(model: StreamingLM, request: Request, settings: DecodeSettings, memory: Memory | None) -> tuple[int, ...]:
    """The text, with drafts that are right most of the time."""
    truth = tokens_of(list(plain(model, request, settings)))
    with foreseen(request.prompt + truth, rate=0.7):
        found = tokens_of(list(decode(model, request, settings, memory=memory)))
    assert found == truth
    return found


def held(memory: Memory) -> StreamCache:
    assert memory._cache is not None
    return memory._cache


def first_prompt_pass(
    model: StreamingLM, text: Sequence[int], memory: Memory, settings: DecodeSettings
) -> tuple[int, tuple[int, ...]]:
    """Tokens that the prompt pass reads behind `memory`, and what is written."""
    with reading(model) as sizes:
        steps = list(decode(model, text, settings, memory=memory))
    return sizes[0], tokens_of(steps)


@pytest.mark.parametrize("law", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("carriers", CARRIERS)
@pytest.mark.parametrize("host", ["llama", "gpt2", "mistral-window"])
def test_a_chat_is_the_same_with_and_without(host: str, carriers: Any, law: dict[str, Any]) -> None:
    """D11: token for token over several turns, and of the prompt only what is new is read."""
    model = model_of(host, "joint")
    settings = DecodeSettings(nodes=7, carriers=carriers, max_new_tokens=10)
    memory, text = Memory(model), ()
    for turn, length in enumerate(TURNS):
        kept = len(text)
        text += prompt(length, seed=turn)
        request = Request(text, sampling=SamplingSettings(**law))
        new = written(model, request, settings, memory)
        # The last token was chosen, and has never been an input.
        assert memory.reused == max(kept - 1, 0)
        text += new


@pytest.mark.parametrize("carriers", CARRIERS)
def test_turns_that_end_at_a_drafted_end_of_text(carriers: Any) -> None:
    """The end was accepted with right drafts behind it: none of these may be taken for the next turn's."""
    model, settings = model_of("llama", "joint"), DecodeSettings(nodes=7, carriers=carriers, max_new_tokens=12)
    free = tokens_of(list(plain(model, prompt(6), settings)))
    for end in sorted(set(free)):
        memory, text = Memory(model), prompt(6)
        for turn in range(3):
            request = Request(text, (end,))
            truth = tokens_of(list(plain(model, request, settings)))
            onward = tokens_of(list(plain(model, Request(text + truth), settings)))
            with foreseen(text + truth + onward, rate=1.0):
                assert tokens_of(list(decode(model, request, settings, memory=memory))) == truth
            text += truth + prompt(2, seed=turn)
            # where the next turn goes on with what was drafted behind the end, and where it does not
            text += onward[:2] if turn else ()


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_plain_and_speculative_share_one(mode: str) -> None:
    """D13."""
    model, settings = model_of("qwen3", mode), DecodeSettings(max_new_tokens=9, prompt_chunk=4)
    memory, text = Memory(model), prompt(7)
    for run in (plain, decode, plain, decode, decode, plain):
        found = tokens_of(list(run(model, text, settings, memory=memory)))
        assert found == tokens_of(list(plain(model, text, settings)))
        text += found


@pytest.mark.parametrize(
    ("second", "reused"),
    [
        (prompt(20, seed=5), 0),  # nothing
        (prompt(20), 19),  # all: the last token must be read for its logits
        ((*prompt(19), 69), 19),  # all but the last
        (prompt(20)[:7], 6),  # a shorter one
        (prompt(20)[:1], 0),  # a single token
        ((*prompt(20)[:11], *prompt(9, seed=8)), 11),  # half
    ],
    ids=["nothing", "all", "all-but-last", "shorter", "single", "half"],
)
def test_of_a_second_prompt_only_what_differs_is_read(second: tuple[int, ...], reused: int) -> None:
    """D14."""
    model, settings = model_of("llama", "joint"), DecodeSettings(max_new_tokens=8)
    memory = Memory(model)
    list(decode(model, prompt(20), settings, memory=memory))
    read, found = first_prompt_pass(model, second, memory, settings)
    assert (memory.reused, read) == (reused, len(second) - reused)
    assert found == tokens_of(list(plain(model, second, settings)))


def test_all_that_was_read_and_written_is_read_once() -> None:
    """Tokens embedded over a chat by plain decoding: each token of the text once."""
    model, settings, text = model_of("llama", "joint"), DecodeSettings(max_new_tokens=6), ()
    memory = Memory(model)
    with reading(model) as sizes:
        for turn, length in enumerate(TURNS):
            text += prompt(length, seed=turn)
            text += tokens_of(list(plain(model, text, settings, memory=memory)))
    # Nothing was embedded twice: the last token of a turn is an input of the next turn only.
    assert sum(sizes) == len(text) - 1


def test_the_store_grows_with_the_chat_and_seldom() -> None:
    model, settings = model_of("llama", "joint"), DecodeSettings(max_new_tokens=2, nodes=4)
    memory, text, stores = Memory(model), prompt(3), []
    while len(text) < 100:
        found = tokens_of(list(decode(model, text, settings, memory=memory)))
        assert found == tokens_of(list(plain(model, text, settings)))
        stores.append((held(memory).capacity, held(memory).store(0, 0)[0].data_ptr()))
        text += (*found, 5)
    assert len(set(stores)) <= 5
    assert [size for size, _ in stores] == sorted(size for size, _ in stores)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("lengths", [(6, 12, BORDER - 4), (BORDER - 6, 6), (6, BORDER - 8, 3)])
def test_short_texts_of_stretched_hosts_are_reused(kind: str, lengths: tuple[int, ...]) -> None:
    model, memory = stretched(kind), None
    for length in lengths:
        memory = memory or Memory(model)
        text = prompt(length)
        assert written(model, Request(text), DecodeSettings(max_new_tokens=4), memory)
    assert memory is not None
    assert memory.reused > 0


@pytest.mark.parametrize(
    ("first", "second"),
    [(BORDER - 4, BORDER + 6), (BORDER + 6, BORDER - 4), (BORDER - 1, BORDER + 1), (BORDER + 1, BORDER - 1)],
)
def test_nothing_is_reused_across_the_border_of_rotary_frequencies(first: int, second: int) -> None:
    """Keys of texts on the other side are turned otherwise, also those of the places that both have."""
    model = stretched("longrope")
    memory, settings = Memory(model), DecodeSettings(max_new_tokens=6)
    list(decode(model, prompt(first), settings, memory=memory))
    read, found = first_prompt_pass(model, prompt(second), memory, settings)
    assert found == tokens_of(list(plain(model, prompt(second), settings)))
    assert (memory.reused, read) == (0, second)


@torch.no_grad()
def test_long_texts_of_a_stretched_host_are_reused_among_themselves() -> None:
    model = stretched("longrope")
    memory, settings = Memory(model), DecodeSettings(max_new_tokens=6)
    for text in (prompt(BORDER + 6), prompt(BORDER + 9), (*prompt(4), *prompt(BORDER, seed=4))):
        found = tokens_of(list(decode(model, text, settings, memory=memory)))
        assert found == tokens_of(list(plain(model, text, settings)))
        written_out = [*text, *found][: held(memory).committed]
        assert_no_trace(held(memory), prefilled(model, written_out))
    assert memory.reused == 4


@pytest.mark.parametrize("carriers", CARRIERS)
def test_a_run_closed_anywhere_leaves_a_usable_memory(carriers: Any) -> None:
    """D02, L07."""
    model, start = model_of("llama", "lossless"), prompt(6)
    settings = DecodeSettings(nodes=8, max_new_tokens=14, carriers=carriers)
    truth = tokens_of(list(plain(model, start, settings)))
    with foreseen(start + truth, rate=0.6):
        passes = len(list(decode(model, start, settings)))
        for cut in range(passes + 1):
            memory = Memory(model)
            run = decode(model, start, settings, memory=memory)
            for _ in range(cut):
                next(run)
            run.close()  # type: ignore[attr-defined]
            again = [*decode(model, (*start, *truth[:2]), settings, memory=memory)]
            assert tokens_of(again)[:12] == truth[2:]
            assert memory.reused >= (len(start) if cut else 0)


class _Fault(Exception):
    """Something breaks in the middle of a pass."""


@pytest.mark.parametrize("calls", [0, 2, 5, 9, 14])
@pytest.mark.parametrize("broken", ["run", "head", "commit", "advance"])
def test_a_run_that_broke_leaves_a_usable_memory(broken: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D03: a layer, the head or a commit fails; what the memory holds then is still the front of the text."""
    model, start = model_of("llama", "joint"), prompt(11)
    settings = DecodeSettings(nodes=8, max_new_tokens=14, prompt_chunk=4)
    truth = tokens_of(list(plain(model, start, settings)))
    memory, left = Memory(model), [calls]
    owner: Any = model.port if broken in ("run", "head") else StreamCache
    right = getattr(owner, broken)

    def breaks(*args: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise _Fault
        return right(*args, **keywords)

    with foreseen(start + truth, rate=0.6):
        with monkeypatch.context() as patched:
            patched.setattr(owner, broken, breaks)
            try:
                list(decode(model, start, settings, memory=memory))
            except _Fault:
                pass
            else:
                assert calls > 5, "this call is among those of the first passes"
        for text, wanted in ((start, truth), ((*start, *truth[:3]), truth[3:])):
            found = tokens_of(list(decode(model, text, settings, memory=memory)))
            assert found[: len(wanted)] == wanted


def test_a_prompt_that_is_refused_leaves_the_memory_as_it_was() -> None:
    model, settings = model_of("llama", "joint"), DecodeSettings(max_new_tokens=8)
    memory = Memory(model)
    truth = tokens_of(list(decode(model, prompt(9), settings, memory=memory)))
    for refused in ((), prompt(POSITIONS)):
        with pytest.raises(PromptError):
            next(decode(model, refused, settings, memory=memory))
    assert not list(decode(model, prompt(5), replace(settings, max_new_tokens=0), memory=memory))
    read, found = first_prompt_pass(model, prompt(9) + truth, memory, settings)
    assert (memory.reused, read) == (9 + 8 - 1, 1)
    assert found == tokens_of(list(plain(model, prompt(9) + truth, settings)))


@torch.no_grad()
def test_what_is_held_is_a_fresh_prefill_of_the_front_of_the_text() -> None:
    """INV: after turns of both kinds, keys and values are those of the text read at once."""
    model, memory, text = model_of("gemma3", "joint"), None, prompt(4)
    memory = Memory(model)
    for turn, run in enumerate((decode, plain, decode)):
        text += tokens_of(list(run(model, text, DecodeSettings(max_new_tokens=7), memory=memory)))
        assert_no_trace(held(memory), prefilled(model, text[: held(memory).committed]))
        text += prompt(3, seed=turn)


@pytest.mark.parametrize("run", [decode, plain])
def test_a_run_that_goes_on_after_another_was_begun_is_an_error(run: Any) -> None:
    model = model_of("llama", "joint")
    memory, settings = Memory(model), DecodeSettings(nodes=4, max_new_tokens=12)
    first = run(model, prompt(5), settings, memory=memory)
    next(first)
    second = tokens_of(list(run(model, prompt(7), settings, memory=memory)))
    with pytest.raises(CacheError, match="another text was begun on this memory"):
        next(first)
    assert second == tokens_of(list(plain(model, prompt(7), settings)))
