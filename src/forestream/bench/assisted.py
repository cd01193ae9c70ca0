"""The host library's own `generate` with drafts, of prompt lookup or an assistant, as steps: its passes are counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from forestream.bench.stock import AS_ASKED
from forestream.config import DecodeSettings, JsonConfig, in_range, whole
from forestream.drafting import DraftTree
from forestream.errors import ConfigError, ForestreamError
from forestream.model import StreamingLM
from forestream.prefill import token_limit
from forestream.steps import Finish, Step
from forestream.topology import chain


@dataclass(frozen=True)
class StockLookupSettings(JsonConfig):
    """Of the library's prompt lookup; where they are not given, its own defaults.

    Attributes:
        gamma: `prompt_lookup_num_tokens`.
        max_ngram: `max_matching_ngram_size`.
    """

    gamma: int = 10
    max_ngram: int = 2

    def __post_init__(self) -> None:
        whole("gamma", self.gamma, 1, 64)
        whole("max_ngram", self.max_ngram, 1, 64)


@dataclass(frozen=True)
class AssistedSettings(JsonConfig):
    """Of the library's assisted decoding; where they are not given, its own defaults. The number stays constant.

    Attributes:
        gamma: `num_assistant_tokens`.
        confidence: `assistant_confidence_threshold`: the assistant stops ahead of time behind a token less probable.
    """

    gamma: int = 20
    confidence: float = 0.4

    def __post_init__(self) -> None:
        whole("gamma", self.gamma, 1, 64)
        in_range("confidence", self.confidence, 0.0, 1.0)


def looked_up(
    model: StreamingLM,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    ahead: StockLookupSettings,
    eos: Sequence[int] = (),
) -> list[list[Step]]:
    """As `stock`, with the library's prompt lookup, which takes one text at a time.

    Raises:
        ConfigError: there are several prompts.
    """
    how = {"prompt_lookup_num_tokens": ahead.gamma, "max_matching_ngram_size": ahead.max_ngram}
    return [_with_drafts(model, _alone(prompts), settings, eos, None, how)]


def assisted(
    model: StreamingLM,
    assistant: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    ahead: AssistedSettings,
    eos: Sequence[int] = (),
) -> list[list[Step]]:
    """As `stock`, with drafts of `assistant`, a model with the same vocabulary; the library takes one text at a time.

    Raises:
        ConfigError: there are several prompts.
    """
    own = assistant.generation_config
    own.num_assistant_tokens, own.num_assistant_tokens_schedule = ahead.gamma, "constant"
    own.assistant_confidence_threshold = ahead.confidence
    return [_with_drafts(model, _alone(prompts), settings, eos, assistant, {"assistant_model": assistant})]


def _alone(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    if len(prompts) != 1:
        raise ConfigError(
            f"{len(prompts)} prompts together; with drafts the host library takes one: leave out --batch-size, or "
            "transformers+lookup and transformers+draft-model"
        )
    return prompts[0]


@dataclass
class _Rounds(BaseStreamer):
    """What the library did until it handed tokens on, again and again; the prompt comes first.

    Attributes:
        tokens: handed on in each round.
        ends: when.
        passes: of the model in the round under way: when each began, and the ids it was given.
        calls: of the assistant in the round under way.
    """

    tokens: list[list[int]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    passes: list[tuple[float, list[int]]] = field(default_factory=list)
    calls: int = 0
    done: list[tuple[list[tuple[float, list[int]]], int]] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        self.ends.append(perf_counter())
        self.tokens.append(value.flatten().tolist())
        self.done.append((self.passes, self.calls))
        self.passes, self.calls = [], 0

    def end(self) -> None:
        """Nothing is held back."""

    @contextmanager
    def watching(self, model: nn.Module, assistant: nn.Module | None) -> Iterator[None]:
        """Count passes: whatever the library says of itself, these were made."""

        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.passes.append((perf_counter(), kwargs["input_ids"][0].tolist()))

        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.calls += 1

        hooks = [model.register_forward_pre_hook(seen, with_kwargs=True)]
        if assistant is not None:
            hooks.append(assistant.register_forward_pre_hook(called))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@torch.inference_mode()
def _with_drafts(
    model: StreamingLM,
    prompt: Sequence[int],
    settings: DecodeSettings,
    eos: Sequence[int],
    assistant: PreTrainedModel | None,
    how: dict[str, Any],
) -> list[Step]:
    limit, rounds = token_limit(model, prompt, settings.max_new_tokens), _Rounds()
    ids = torch.tensor([list(prompt)], device=model.device)
    with model.as_host() as host, rounds.watching(model.port.model, assistant):
        host.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            eos_token_id=list(eos) or None,
            pad_token_id=eos[0] if eos else 0,
            streamer=rounds,
            **AS_ASKED,
            **how,
        )
    steps, left = [], limit
    for number in range(1, len(rounds.tokens)):
        left -= len(rounds.tokens[number])
        steps.append(_round(rounds, number, left, eos, prompt if number == 1 else ()))
    return steps


def _round(rounds: _Rounds, number: int, left: int, eos: Sequence[int], prompt: Sequence[int]) -> Step:
    """What the library did between two moments at which it handed tokens on.

    Its first round reads the prompt and checks drafts in one pass: this is the prompt pass, whatever it delivers.

    Raises:
        ForestreamError: that took another number of the model's passes than one.
    """
    tokens, (passes, calls) = rounds.tokens[number], rounds.done[number]
    if len(passes) != 1:
        raise ForestreamError(f"the host library made {len(passes)} passes for {len(tokens)} tokens; expected one")
    began, given = passes[0]
    before = rounds.ends[number - 1]
    drafts = given[len(prompt) or 1 :]
    agreed = [draft == token for draft, token in zip(drafts, tokens, strict=False)]
    accepted = agreed.index(False) if False in agreed else len(agreed)
    finish: Finish | None = "stop" if tokens[-1] in eos else "length" if left <= 0 else None
    tree = None if prompt else DraftTree(chain(len(given)), tuple(given))
    kept = tuple(range(len(given))) if tree else ()
    path = kept[: accepted + 1]
    seconds, ahead = rounds.ends[number] - before, began - before
    return Step(
        tokens=tuple(tokens),
        accepted=accepted,
        seconds=seconds,
        tree=tree,
        kept=kept,
        path=path,
        finish=finish,
        draft_calls=calls,
        draft_seconds=ahead,
    )
