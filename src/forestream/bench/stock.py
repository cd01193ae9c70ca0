"""The host library's own greedy `generate`, token by token, as steps: what a user has without this package."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, Final

import torch
from transformers.generation.streamers import BaseStreamer

from forestream.config import DecodeSettings
from forestream.drafting import DraftTree
from forestream.model import StreamingLM
from forestream.prefill import ROOT_ALONE, token_limit
from forestream.requests import padded
from forestream.steps import Finish, Step

AS_ASKED: Final[dict[str, Any]] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "do_sample": False}
"""What a model's own generation settings might ask for otherwise."""


class _Clock(BaseStreamer):
    """Notes when each token arrives; the prompt arrives first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


@torch.inference_mode()
def stock(
    model: StreamingLM, prompts: Sequence[Sequence[int]], settings: DecodeSettings, eos: Sequence[int] = ()
) -> list[list[Step]]:
    """Write greedily after `prompts`, padded on the left, with `generate`: the steps of each text.

    A pass over several texts counts for each of them with its share, as long as the text goes on.

    Args:
        model: must not be prepared: its host is to be as the library made it.
    """
    limit = min(token_limit(model, prompt, settings.max_new_tokens) for prompt in prompts)
    pad, clock = eos[0] if eos else 0, _Clock()
    ids, mask = padded(prompts, pad)
    with model.as_host() as host:
        written = host.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=limit,
            eos_token_id=list(eos) or None,
            pad_token_id=pad,
            streamer=clock,
            **AS_ASKED,
        )
    texts = [_until_end(row[ids.shape[1] :].tolist(), eos) for row in written]
    seconds = [b - a for a, b in pairwise(clock.times)]
    return [_steps(tokens, seconds, [len(text) for text in texts], limit, eos) for tokens in texts]


def _until_end(tokens: list[int], eos: Sequence[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens, start=1) if token in eos), len(tokens))
    return tokens[:end]


def _steps(
    tokens: Sequence[int], seconds: Sequence[float], lengths: Sequence[int], limit: int, eos: Sequence[int]
) -> list[Step]:
    steps = []
    for i, token in enumerate(tokens):
        share = seconds[i] / sum(length > i for length in lengths)
        last = i == len(tokens) - 1
        finish: Finish | None = "stop" if last and token in eos else "length" if i + 1 == limit else None
        root = DraftTree(ROOT_ALONE, (tokens[i - 1],)) if i else None
        steps.append(Step((token,), 0, share, root, (0,) if i else (), (0,) if i else (), finish))
    return steps
