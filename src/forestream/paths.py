"""What streams foretell along the paths of a draft tree, where a path sampler makes it depend on the token before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.model import Rows, StreamingLM
from forestream.ranking import best_ids, best_tokens

NEAR = 128
"""Candidates of a stream that a path sampler is to choose among: those that come first whatever stands before them."""


def shortlisted(model: StreamingLM, width: int) -> tuple[int, Rows] | None:
    """C, how many candidates a stream has along paths (NEAR, or `width` if that is more), and the rows they are of.

    With a short list the whole head is read once for all streams and not once a level. None where it is read whole:
    there is no path sampler, the head knows no more tokens, or its rows are not at hand.
    """
    count, rows = max(NEAR, width), model.draft_rows
    return None if model.sampler is None or rows is None or len(rows[0]) <= count else (count, rows)


def told(
    model: StreamingLM, states: Float[Tensor, "N D"], before: Int[Tensor, " N"], width: int
) -> Float[Tensor, "N K"]:
    """Logits of streams behind the tokens `before`: minus infinity at those that are no candidates along paths."""
    logits = model.draft_logits(model.behind(states, before))
    if (short := shortlisted(model, width)) is None:
        return logits
    near = model.draft_logits(states).topk(short[0], dim=1).indices
    return torch.full_like(logits, -torch.inf).scatter(1, near, logits.gather(1, near))


@dataclass(frozen=True)
class Paths:
    """The streams of one node, asked level by level: a `drafting.Ahead`.

    Attributes:
        model: with a path sampler.
        states: final states of the streams that may be used, [G, D].
        width: most tokens that will be asked for behind one.
        law: what becomes of logits of all columns before drafts are chosen by them; None leaves them as they are.
    """

    model: StreamingLM
    states: Float[Tensor, "G D"]
    width: int
    law: Callable[[Tensor], Tensor] | None = None

    @property
    def depth(self) -> int:
        """Streams that may be used."""
        return len(self.states)

    def ids(self, level: int, tokens: Sequence[int], k: int) -> list[list[int]]:
        """The k best tokens of stream `level` + 1 behind each of `tokens`."""
        logits, ids = self._behind(level, tokens)
        return best_ids(logits, k, ids)

    def scored(self, level: int, tokens: Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        """These, and their log-probabilities among those that they are chosen from."""
        logits, ids = self._behind(level, tokens)
        return best_tokens(logits, k, ids)

    @torch.inference_mode()
    def _behind(self, level: int, tokens: Sequence[int]) -> tuple[Float[Tensor, "N C"], Int[Tensor, " C"] | None]:
        """Logits of the tokens that are chosen among, and these tokens; None where they are all V."""
        states = self.states[level].expand(len(tokens), -1)
        states = self.model.behind(states, torch.tensor(tokens, device=states.device))
        ids = self.model.draft_ids
        if self._near is None:
            logits = self.model.draft_logits(states)
            return logits if self.law is None else self.law(logits), ids
        columns, weight, bias = self._near
        logits = self.model.draft_logits(states, (weight[level], None if bias is None else bias[level]))
        return logits, columns[level] if ids is None else ids[columns[level]]

    @cached_property
    def _near(self) -> tuple[Int[Tensor, "G C"], Float[Tensor, "G C E"], Float[Tensor, "G C"] | None] | None:
        """Columns of each stream's candidates, in increasing order, with the head's rows; None where they are all."""
        short = shortlisted(self.model, self.width) if self.law is None else None
        if short is None:
            return None
        count, (weight, bias) = short
        columns = self.model.draft_logits(self.states).topk(count, dim=1, sorted=False).indices.sort(dim=1).values
        return columns, weight[columns], None if bias is None else bias[columns]
