"""What sampling settings ask for, as a list of logits processors: the host library's own wherever it has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forestream.config import SamplingSettings
from forestream.sampling import Processor


class WrittenPenalty(LogitsProcessor):
    """Presence and frequency penalties: they look at the text that was written, not at the prompt."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        counts = torch.zeros_like(scores)
        written = input_ids[:, self.prompt :]
        counts.scatter_add_(1, written, torch.ones(written.shape, dtype=scores.dtype, device=scores.device))
        return scores - self.frequency * counts - self.presence * (counts > 0)


def penalties(settings: SamplingSettings, prompt: int, eos: Sequence[int]) -> list[Processor]:
    """Biases, penalties and bad words, in the host library's order; they keep no state.

    Args:
        prompt: length of the prompt.
        eos: ids that end the text, which bad words never forbid.
    """
    found: list[Processor] = []
    if settings.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[list(word), bias] for word, bias in settings.logit_bias]))
    if settings.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.presence_penalty or settings.frequency_penalty:
        found.append(WrittenPenalty(prompt, settings.presence_penalty, settings.frequency_penalty))
    if settings.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in settings.bad_words], list(eos) or None))
    return found


def limits(settings: SamplingSettings, prompt: int, eos: Sequence[int]) -> list[Processor]:
    """The shortest length, in the host library's place for it: behind the penalties."""
    if not settings.min_new_tokens or not eos:
        return []
    return [MinNewTokensLengthLogitsProcessor(prompt, settings.min_new_tokens, list(eos))]


def warpers(settings: SamplingSettings) -> list[Processor]:
    """Temperature and the cuts of the tail; they come last, and greedy decoding has none."""
    found: list[Processor] = []
    if settings.greedy:
        return found
    if settings.temperature != 1:
        found.append(TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k:
        found.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        found.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0:
        found.append(MinPLogitsWarper(settings.min_p))
    return found
