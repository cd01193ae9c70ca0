"""What streams foretell along the paths of a draft tree, where a path sampler makes it depend on the token before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.drafting import best_ids, best_tokens
from forestream.model import StreamingLM


def unchanged(logits: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """The law of drafts that nothing else is asked of."""
    return logits


@dataclass(frozen=True)
class Paths:
    """The streams of one node, asked level by level: a `drafting.Ahead`.

    Attributes:
        model: with a path sampler.
        states: final states of the streams that may be used, [G, D].
        law: what becomes of logits before drafts are chosen by them.
    """

    model: StreamingLM
    states: Float[Tensor, "G D"]
    law: Callable[[Tensor], Tensor] = unchanged

    @property
    def depth(self) -> int:
        """Streams that may be used."""
        return len(self.states)

    def ids(self, level: int, tokens: Sequence[int], k: int) -> list[list[int]]:
        """The k best tokens of stream `level` + 1 behind each of `tokens`."""
        vocabulary = self.model.vocabulary
        return best_ids(self._logits(level, tokens), k, None if vocabulary is None else vocabulary.ids)

    def scored(self, level: int, tokens: Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        """These, and their log-probabilities."""
        vocabulary = self.model.vocabulary
        return best_tokens(self._logits(level, tokens), k, None if vocabulary is None else vocabulary.ids)

    @torch.inference_mode()
    def _logits(self, level: int, tokens: Sequence[int]) -> Float[Tensor, "N K"]:
        states = self.states[level].expand(len(tokens), -1)
        before = torch.tensor(tokens, device=states.device)
        return self.law(self.model.draft_logits(self.model.behind(states, before)))
