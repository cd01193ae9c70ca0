"""The draft vocabulary: the tokens that streams may draft, which saves most of the head's rows where a task needs few.

Main logits stay whole, so the text is what it would be: a token that is not in here is never drafted, only written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from forestream.errors import ConfigError

OUTSIDE: Final = -1
"""Column of a token that is not in the vocabulary."""


class DraftVocabulary(nn.Module):
    """K of a model's V tokens. Column c of logits over the vocabulary belongs to token `ids[c]`.

    Args:
        ids: the tokens, at least one, in increasing order.
        among: V, tokens that the model's head knows.

    Attributes:
        ids: the tokens, [K].

    Raises:
        ConfigError: there is no token, or they are not increasing, or not within 0 to V - 1.
    """

    ids: Int[Tensor, " K"]

    def __init__(self, ids: Sequence[int] | Int[Tensor, " K"], among: int) -> None:
        super().__init__()
        given = torch.as_tensor(ids)
        if given.dim() != 1 or not len(given) or given.is_floating_point() or given.dtype == torch.bool:
            raise ConfigError(
                f"a draft vocabulary is a {given.dtype} of shape {tuple(given.shape)}; expected a list of token ids, "
                "at least one"
            )
        given = given.long()
        if bool((given.diff() <= 0).any()):
            raise ConfigError("the ids of a draft vocabulary are not increasing; sort them, each of them once")
        if int(given[0]) < 0 or int(given[-1]) >= among:
            raise ConfigError(
                f"a draft vocabulary holds ids {int(given[0])} to {int(given[-1])}; the model knows 0 to {among - 1}"
            )
        self.among = among
        self.register_buffer("ids", given.clone())

    @staticmethod
    def counted(completions: Iterable[Sequence[int]], end: int, among: int, size: int | None = None) -> DraftVocabulary:
        """The most frequent tokens of texts that a model is to write.

        Args:
            completions: token ids.
            end: the end-of-text token, which is always taken.
            among: V, tokens that the model's head knows.
            size: most tokens to take, ties to the lowest id; None takes every token that occurs.

        Raises:
            ConfigError: `size` is below 1, or a token is not within 0 to V - 1.
        """
        if size is not None and size < 1:
            raise ConfigError(f"the size of a draft vocabulary is {size}; expected 1 or more tokens")
        counts = Counter(token for completion in completions for token in completion)
        del counts[end]
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        return DraftVocabulary(sorted([end, *ranked[: None if size is None else size - 1]]), among)

    def __len__(self) -> int:
        """K."""
        return len(self.ids)

    def same(self, other: DraftVocabulary | None) -> bool:
        """Whether `other` holds the same tokens of as many."""
        return other is not None and self.among == other.among and torch.equal(self.ids.cpu(), other.ids.cpu())

    def columns(self, tokens: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """The column of each token; OUTSIDE of those that are not in here, ids that are none included."""
        ids = self.ids.to(tokens.device)
        places = torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)
        return torch.where(ids[places] == tokens, places, OUTSIDE)

    def spread(self, logits: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows V"]:
        """Logits over all V tokens: minus infinity at those that are not in here."""
        whole = logits.new_full((*logits.shape[:-1], self.among), -torch.inf)
        if len(logits):  # logits of no rows may have any width
            whole[..., self.ids] = logits
        return whole

    def coverage(self, completions: Iterable[Sequence[int]]) -> float:
        """Share of the tokens of some texts that are in here; 1 of no tokens."""
        known = set(self.ids.tolist())
        counts = Counter(token in known for completion in completions for token in completion)
        return counts[True] / counts.total() if counts else 1.0
