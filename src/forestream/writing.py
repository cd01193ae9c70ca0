"""Text as it is written: whole characters, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forestream.steps import Step


class Piece(NamedTuple):
    """Text that one token added; empty while a character is incomplete."""

    text: str
    token: int
    drafted: bool


class Writing:
    """Text of a run under way. Joined, the pieces are the whole text.

    A character whose bytes are spread over several tokens comes with the last of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._sent = 0

    def add(self, step: Step) -> list[Piece]:
        """What the tokens of `step` add."""
        pieces = []
        for place, token in enumerate(step.tokens):
            self._tokens.append(token)
            text = self._decode(self._tokens)
            last = step.finish is not None and place == len(step.tokens) - 1
            new = "" if text.endswith("\N{REPLACEMENT CHARACTER}") and not last else text[self._sent :]
            self._sent += len(new)
            pieces.append(Piece(new, token, place < step.accepted))
        return pieces
