"""The host library's own greedy `generate`, token by token, as steps: what a user has without this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from forestream.config import DecodeSettings
from forestream.drafting import DraftTree
from forestream.model import StreamingLM
from forestream.prefill import ROOT_ALONE, token_limit
from forestream.steps import Finish, Step


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
    model: StreamingLM, prompt: Sequence[int], settings: DecodeSettings, eos: Sequence[int] = ()
) -> Iterator[Step]:
    """Write greedily after `prompt` with `generate`; steps come when the text is done, with the times it took.

    Args:
        model: must not be prepared: its host is to be as the library made it.
    """
    limit = token_limit(model, prompt, settings.max_new_tokens)
    clock = _Clock()
    ids = torch.tensor([list(prompt)], device=model.device)
    arguments: dict[str, Any] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "do_sample": False}
    with model.as_host() as host:
        written = host.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            eos_token_id=list(eos) or None,
            pad_token_id=eos[0] if eos else 0,
            streamer=clock,
            **arguments,
        )
    tokens = written[0, len(prompt) :].tolist()
    for i, token in enumerate(tokens):
        seconds = clock.times[i + 1] - clock.times[i]
        finish: Finish | None = "stop" if token in eos else "length" if i + 1 == limit else None
        root = DraftTree(ROOT_ALONE, (tokens[i - 1],)) if i else None
        yield Step((token,), 0, seconds, root, (0,) if i else (), (0,) if i else (), finish)
