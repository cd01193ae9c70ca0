"""Prompt lookup alone: what came next the last time that the text read like its end, in the prompt or in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxtyping import Float
from torch import Tensor

from forestream.config import JsonConfig, whole
from forestream.drafting import DraftTree
from forestream.errors import ConfigError
from forestream.lookup import NGrams
from forestream.model import StreamingLM
from forestream.rivals.loop import Offer
from forestream.rows import Row
from forestream.topology import Topology, chain


@dataclass(frozen=True)
class LookupSettings(JsonConfig):
    """What is looked for, and how much of what is found is drafted.

    Attributes:
        gamma: tokens drafted behind a match.
        max_ngram: tokens at the end of the text that should match; with no match one fewer is tried, and so on.
        min_ngram: the fewest that are tried.
    """

    gamma: int = 4
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        whole("gamma", self.gamma, 1, 64)
        whole("max_ngram", self.max_ngram, 1, 64)
        whole("min_ngram", self.min_ngram, 1, 64)
        if self.min_ngram > self.max_ngram:
            raise ConfigError(f"min_ngram is {self.min_ngram}; expected at most max_ngram, {self.max_ngram}")


@dataclass(frozen=True)
class Lookup:
    """Drafts are looked up; a pass without a match is plain decoding's."""

    settings: LookupSettings = LookupSettings()

    @property
    def passes(self) -> set[int]:
        return {1, 1 + self.settings.gamma}

    def begin(self, model: StreamingLM, rows: Sequence[Row], chunk: int) -> LookupDrafts:
        return LookupDrafts(self.settings, len(rows))


class LookupDrafts:
    """The n-grams of each text."""

    def __init__(self, settings: LookupSettings, rows: int) -> None:
        self.gamma = settings.gamma
        self._read = [NGrams(settings.max_ngram, settings.min_ngram) for _ in range(rows)]

    def offer(self, rows: Sequence[Row]) -> list[Offer]:
        return [
            Offer(row.legal(line(row.text[-1], own.continuation(row.text, min(self.gamma, row.left - 1)))))
            for row, own in zip(rows, self._read, strict=True)
        ]

    def learn(self, logits: Sequence[Float[Tensor, "asked V"]]) -> None:
        """Nothing: the text is all there is to know."""

    def keep(self, places: Sequence[int]) -> None:
        self._read = [self._read[place] for place in places]


def line(root: int, tokens: Sequence[int]) -> DraftTree:
    """A draft without branches: `tokens` one after the other behind `root`."""
    return DraftTree(_chain(1 + len(tokens)), (root, *tokens))


# The same few lengths recur pass after pass, and whoever gets the same tree again gets its masks with it.
@lru_cache(maxsize=128)
def _chain(length: int) -> Topology:
    return chain(length)
