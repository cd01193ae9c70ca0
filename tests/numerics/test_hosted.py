"""The host library's `generate` with our method is `generate` without it: what its own tests ask, in every family."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import tiny
from forestream.config import DecodeSettings
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.hosted import custom_generate
from forestream.sampling import greedy
from subject import model_of
from wrapped import STREAMS, prompt
from zoo import HOSTS

every_family = pytest.mark.parametrize("family", sorted(HOSTS))
PAD = 71
NEW = 12


def generator(family: str = "llama", mode: str = "joint") -> Generator:
    made = Generator(model_of(family, mode), tiny.tiny_tokenizer(), DecodeSettings(nodes=6))
    made.eos = ()
    return made


def padded(*texts: tuple[int, ...]) -> dict[str, Tensor]:
    """Left-padded inputs, as a tokenizer makes them."""
    longest = max(map(len, texts))
    ids = [[PAD] * (longest - len(text)) + list(text) for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def both(here: Generator, inputs: dict[str, Tensor], **asked: Any) -> tuple[Any, Any]:
    """What the host library writes, and what it writes with our method."""
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **asked}
    return here.host.generate(**inputs, **asked), here.host.generate(
        **inputs, **asked, custom_generate=custom_generate(here)
    )


def same(here: Generator, inputs: dict[str, Tensor], **asked: Any) -> Tensor:
    wanted, found = both(here, inputs, **asked)
    assert torch.equal(found, wanted), f"{found.tolist()} differs from {wanted.tolist()}"
    return wanted


@every_family
def test_greedy_text_of_one_and_of_ragged_prompts(family: str) -> None:
    here = generator(family)
    same(here, padded(prompt(7)))
    same(here, padded(prompt(3, seed=1), prompt(11, seed=2), prompt(1, seed=3)))


@every_family
def test_ends_of_text_pad_the_rows_that_have_them(family: str) -> None:
    here = generator(family)
    inputs = padded(prompt(5, seed=1), prompt(9, seed=2))
    text = same(here, inputs)[:, inputs["input_ids"].shape[1] :]
    for token in dict.fromkeys(text.flatten().tolist()):
        same(here, inputs, eos_token_id=token)
    same(here, inputs, eos_token_id=[int(text[0, 3]), int(text[1, 6])])


@every_family
def test_logits_and_scores_are_one_entry_per_token(family: str) -> None:
    """O05: of the same tokens, up to rounding."""
    here = generator(family)
    wanted, found = both(
        here,
        padded(prompt(5, seed=1), prompt(9, seed=2)),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        repetition_penalty=1.2,
    )
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert torch.equal(found.sequences, wanted.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert len(ours) == len(theirs) == NEW
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 8]]},
        {"sequence_bias": [[[3], 4.0], [[9, 4], -9.0]]},
        {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": list(range(30))},
        {"min_new_tokens": 8, "eos_token_id": list(range(60))},
        {"min_length": 15, "eos_token_id": list(range(60))},
        {"forced_eos_token_id": 17, "eos_token_id": 17},
        {"exponential_decay_length_penalty": (3, 1.8), "eos_token_id": 17},
        {"prefix_allowed_tokens_fn": lambda row, text: list(range(5 + row, 60 - len(text)))},
        {"remove_invalid_values": True, "renormalize_logits": True},
        {"max_new_tokens": None, "max_length": 16},
        {"stop_strings": None, "max_time": 60.0},
    ],
)
@every_family
def test_settings_of_the_host_library_hold(family: str, asked: dict[str, Any]) -> None:
    same(generator(family), padded(prompt(4, seed=1), prompt(9, seed=2)), **asked)


class SumIsOdd(StoppingCriteria):
    """Has a state: it looks at every second token only."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **keywords: Any) -> Tensor:
        self.calls += 1
        return (input_ids.sum(dim=1) % 2 == 1) & (self.calls % 2 == 0)


@every_family
def test_processors_and_criteria_of_the_user_hold(family: str) -> None:
    def push(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, int(input_ids[0].sum()) % 50] += 6.0
        return scores

    here, inputs = generator(family), padded(prompt(6))
    plain = same(here, inputs)
    pushed = same(here, inputs, logits_processor=LogitsProcessorList([push]))
    assert not torch.equal(plain, pushed)
    for criterion in (SumIsOdd, lambda: MaxTimeCriteria(60.0)):
        asked: dict[str, Any] = {"do_sample": False, "stopping_criteria": StoppingCriteriaList([criterion()])}
        wanted = here.host.generate(**inputs, max_new_tokens=NEW, **asked)
        asked["stopping_criteria"] = StoppingCriteriaList([criterion()])
        assert torch.equal(sample(here, inputs, **asked), wanted)


@every_family
def test_several_samples_of_a_prompt_differ_and_torchs_seed_decides(family: str) -> None:
    here, inputs = generator(family), padded(prompt(6))
    asked: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20, "num_return_sequences": 4}
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(sample(here, inputs, **asked))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len({tuple(row) for row in found[0].tolist()}) == 4


def sample(here: Generator, inputs: dict[str, Tensor], method: Any = None, **asked: Any) -> Tensor:
    method = method or custom_generate(here)
    written: Tensor = here.host.generate(**inputs, **asked, max_new_tokens=NEW, custom_generate=method)
    return written


@every_family
def test_top_k_of_one_is_greedy(family: str) -> None:
    here, inputs = generator(family), padded(prompt(6))
    assert torch.equal(sample(here, inputs, do_sample=True, top_k=1, pad_token_id=PAD), same(here, inputs))


def test_streamers_are_told_however_they_are_given() -> None:
    here, inputs = generator(), padded(prompt(6))
    text = here.tokenizer.decode(same(here, inputs)[0, 6:].tolist())
    for handed in (True, False):
        streamer = TextIteratorStreamer(here.tokenizer, skip_prompt=True)
        method = custom_generate(here, None if handed else streamer)
        sample(here, inputs, method, do_sample=False, **({"streamer": streamer} if handed else {}))
        assert "".join(streamer) == text
    with pytest.raises(ConfigError, match="a streamer takes one text; 2"):
        here.host.generate(
            **padded(prompt(3), prompt(3)),
            max_new_tokens=NEW,
            pad_token_id=PAD,
            custom_generate=custom_generate(here, TextStreamer(here.tokenizer)),
        )


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is 0.6"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is True"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(asked: dict[str, Any], name: str) -> None:
    here = generator()
    with pytest.raises(ConfigError, match=name):
        here.host.generate(**padded(prompt(5)), max_new_tokens=5, custom_generate=custom_generate(here), **asked)


def test_unknown_inputs_and_foreign_models_are_refused() -> None:
    """C11."""
    here, inputs = generator(), padded(prompt(5))
    method = custom_generate(here)
    with pytest.raises(ConfigError, match="another model"):
        generator("qwen2").host.generate(**inputs, max_new_tokens=5, custom_generate=method)
    with pytest.raises(ConfigError, match="position_ids are not those of the text"):
        here.host.generate(**inputs, position_ids=torch.arange(5)[None] + 3, max_new_tokens=5, custom_generate=method)
    with pytest.raises(ConfigError, match="inputs_embeds"):
        here.host.generate(inputs_embeds=torch.randn(1, 5, 48), max_new_tokens=5, custom_generate=method)
    cache = DynamicCache(config=here.host.config)
    here.host(inputs["input_ids"][:, :3], use_cache=True, **{here.model.port.cache_keyword: cache})
    with pytest.raises(ConfigError, match="the cache holds 3 tokens"):
        here.host.generate(**inputs, max_new_tokens=5, custom_generate=method, cache=cache)


@every_family
def test_without_the_method_the_host_is_untouched(family: str) -> None:
    """M02: its plain forward is what it was."""
    here, ids = generator(family), torch.tensor([prompt(9)])
    before = here.host(ids).logits
    same(here, padded(prompt(9)))
    assert torch.equal(here.host(ids).logits, before)
    assert greedy(before[0, -1:]) == greedy(here.host(ids).logits[0, -1:])


class Switched(StoppingCriteria):
    """Turned by somebody else, such as a button."""

    def __init__(self) -> None:
        self.on, self.lock = False, threading.Lock()

    def __call__(self, input_ids: Tensor, scores: Any, **keywords: Any) -> Tensor:
        return torch.full((len(input_ids),), self.on)


class Switching(BaseStreamer):
    """Turns the switch at the fourth put: the prompt's, and three tokens."""

    def __init__(self, switch: Switched) -> None:
        self.switch, self.puts = switch, 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        self.switch.on = self.puts >= 4

    def end(self) -> None:
        """Nothing is held back."""


def test_a_criterion_that_is_turned_from_outside_is_the_callers_own() -> None:
    here, inputs, lengths = generator(), padded(prompt(6)), []
    for method in (None, custom_generate(here)):
        switch = Switched()
        asked: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([switch]), "streamer": Switching(switch)}
        keywords = {} if method is None else {"custom_generate": method}
        lengths.append(here.host.generate(**inputs, max_new_tokens=NEW, do_sample=False, **asked, **keywords).shape[1])
    assert lengths[0] < 6 + NEW
    assert lengths[0] <= lengths[1] <= lengths[0] + STREAMS, "the rest of the pass had been written already"


def test_ends_of_the_users_own_criteria_hold() -> None:
    here, inputs = generator(), padded(prompt(6))
    text = same(here, inputs)[0, 6:].tolist()
    end = next(token for token in text[3:] if token not in text[:3])
    for eos in (None, PAD):
        criteria = StoppingCriteriaList([EosTokenCriteria(eos_token_id=end)])
        written = same(here, inputs, eos_token_id=eos, stopping_criteria=criteria)
        assert int(written[0, -1]) == end


def test_without_a_padding_token_rows_are_filled_with_the_end() -> None:
    here, inputs = generator(), padded(prompt(5, seed=1), prompt(9, seed=2))
    text = same(here, inputs)[:, 9:]
    same(here, inputs, eos_token_id=(int(text[0, 2]), 88), pad_token_id=None)
