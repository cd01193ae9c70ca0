"""The host library's own door: `model.generate(..., custom_generate=...)` decodes with drafts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from forestream.config import SamplingSettings
from forestream.decode import decode_batch
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.requests import Request, each_its_own, unpadded
from forestream.steps import Step

# What the host library hands to every method, or makes itself.
_HANDED: Final = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "cache"}

# Settings of other ways to generate, with the values that ask for nothing.
_OTHER_WAYS: Final[dict[str, tuple[Any, ...]]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


@dataclass
class _Kept:
    """Logits of one text's tokens, as they came and as processors left them."""

    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def __call__(self, token: int, logits: Tensor, scores: Tensor) -> None:
        self.logits.append(logits.to(torch.float32, copy=True))  # a view would keep all logits of its pass
        self.scores.append(scores.float())


def custom_generate(generator: Generator, streamer: BaseStreamer | None = None) -> Callable[..., Any]:
    """A method for the host library's `generate`, which then writes with drafts what it would write without.

    The user's `GenerationConfig`, logits processors and stopping criteria hold as they are. Greedy text is the host
    library's; sampled text is drawn from the same law with randomness of its own, seeded by torch's.

    >>> generator.host.generate(**inputs, max_new_tokens=64, custom_generate=custom_generate(generator))

    Args:
        streamer: told of tokens as they come. One that is handed to `generate` itself is found as well.

    Raises (when called):
        ConfigError: the model is not the generator's own, or something is asked for that cannot be honoured: beam or
            contrastive search, an assistant, a cache that holds text already, unknown inputs.
    """

    def method(
        model: PreTrainedModel,
        input_ids: Int[Tensor, "B T"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        _refuse(generator, model, logits_processor, generation_config, input_ids, inputs)
        told = streamer or _handed_to_the_caller()
        if told is not None and len(input_ids) > 1:
            raise ConfigError(f"a streamer takes one text; {len(input_ids)} were asked for")
        if streamer is not None:
            streamer.put(input_ids.cpu())  # `generate` tells its own of the prompt
        dictionary = bool(generation_config.return_dict_in_generate)
        kept = [_Kept() for _ in input_ids]
        asked = _requests(generator, input_ids, logits_processor, stopping_criteria, generation_config, inputs)
        if dictionary and (generation_config.output_scores or generation_config.output_logits):
            asked = [replace(one, watch=own) for one, own in zip(asked, kept, strict=True)]
        run = decode_batch(generator.model, asked, generator.schedule or generator.settings)
        texts = _written(run, len(asked), told)
        sequences = _padded(input_ids, texts, generation_config, asked[0].eos)
        if not dictionary:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_entries([own.scores for own in kept]) if generation_config.output_scores else None,
            logits=_entries([own.logits for own in kept]) if generation_config.output_logits else None,
        )

    return method


def _refuse(
    generator: Generator,
    model: PreTrainedModel,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    ids: Int[Tensor, "B T"],
    inputs: dict[str, Any],
) -> None:
    if model is not generator.host:
        raise ConfigError("this method belongs to another model; call `generate` of the generator's own host")
    for name, nothing in _OTHER_WAYS.items():
        if (found := getattr(config, name, None)) not in nothing:
            raise ConfigError(f"{name} is {found!r}; decoding with drafts cannot honour it, generate without it")
    if any(isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor) for one in processors):
        raise ConfigError("guidance_scale asks for passes of its own; decoding with drafts cannot honour it")
    if unknown := sorted(name for name in set(inputs) - _HANDED if inputs[name] is not None):
        raise ConfigError(f"{', '.join(unknown)} were given to generate; decoding with drafts knows nothing of them")
    if (cache := inputs.get("cache")) is not None and cache.get_seq_length():
        raise ConfigError(f"the cache holds {cache.get_seq_length()} tokens; use `Memory` to go on from earlier text")
    places = inputs.get("position_ids")
    if places is not None:
        mask = inputs.get("attention_mask")
        shown = torch.ones_like(ids) if mask is None else mask
        # What stands at padding is nobody's position.
        if ((places.expand(ids.shape) != shown.cumsum(-1) - 1) & shown.bool()).any():
            raise ConfigError("position_ids are not those of the text; decoding with drafts counts positions itself")


def _requests(
    generator: Generator,
    ids: Int[Tensor, "B T"],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: dict[str, Any],
) -> list[Request]:
    prompts = unpadded(ids, inputs.get("attention_mask"))
    ends = config.eos_token_id
    eos = () if ends is None else tuple(map(int, ends)) if isinstance(ends, list | tuple) else (int(ends),)
    # The host library makes one of its own for the ends that a row knows by itself.
    others = [
        one for one in criteria if type(one) is not EosTokenCriteria or set(one.eos_token_id.tolist()) != set(eos)
    ]
    law = SamplingSettings()
    if config.do_sample:
        # The temperature is among the processors.
        law = SamplingSettings(temperature=1.0, seed=int(torch.randint(2**62, (1,))))
    asked = []
    for row, own in enumerate(ids):
        asked.append(
            Request(
                prompt=prompts[row],
                eos=eos,
                sampling=law,
                processors=tuple(_of_row(one, row) for one in processors),
                criteria=tuple(others),
                max_new_tokens=int(config.max_length) - ids.shape[1],
                row=row,
                history=tuple(own.tolist()),
            )
        )
    return each_its_own(asked)


def _of_row(processor: Any, row: int) -> Any:
    """`processor` for one row of the batch that it was made for."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), 1)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(processor.prompt_ignore_length, Tensor):
        own = copy(processor)
        own.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return own
    return processor


def _written(run: Iterator[list[tuple[int, Step]]], texts: int, streamer: BaseStreamer | None) -> list[list[int]]:
    written: list[list[int]] = [[] for _ in range(texts)]
    for outcome in run:
        for number, step in outcome:
            written[number] += step.tokens
            if streamer is not None:
                for token in step.tokens:
                    streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return written


def _padded(
    ids: Int[Tensor, "B T"], texts: Sequence[Sequence[int]], config: GenerationConfig, eos: Sequence[int]
) -> Int[Tensor, "B t"]:
    longest = max(map(len, texts))
    pad = int(config.pad_token_id) if config.pad_token_id is not None else eos[0] if eos else 0
    rows = [[*text, *[pad] * (longest - len(text))] for text in texts]
    return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device).view(len(rows), longest)], dim=1)


def _entries(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """One [B, V] for each token of the longest text; rows that had ended are zero."""
    longest = max(rows, key=len)
    return tuple(
        torch.stack([row[i] if i < len(row) else torch.zeros_like(one) for row in rows])
        for i, one in enumerate(longest)
    )


def _handed_to_the_caller() -> BaseStreamer | None:
    """The streamer that `generate` was called with: it tells its own methods of it, but not a custom one."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("streamer")
        if frame.f_code.co_name == "generate" and isinstance(found, BaseStreamer):
            return found
        frame = frame.f_back
    return None
