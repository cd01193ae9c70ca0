"""What a model remembers of the last text: the next one that starts the same need not be read again."""

from __future__ import annotations

from collections.abc import Sequence

from forestream.cache import StreamCache
from forestream.errors import CacheError
from forestream.model import StreamingLM


class Memory:
    """The cache of one text after the other, such as the turns of a chat. Plain and speculative decoding share it.

    One text at a time: a run that goes on after another was begun is an error.

    Attributes:
        reused: tokens of the last prompt that were not read again.
    """

    def __init__(self, model: StreamingLM) -> None:
        self.model = model
        self.reused = 0
        self._cache: StreamCache | None = None
        self._text: Sequence[int] = ()
        self._room = 0

    def open(self, text: Sequence[int], capacity: int) -> StreamCache:
        """A cache of at least `capacity` slots that holds as much of the prompt `text` as is known, but its last token.

        `text` is the caller's own list, which grows by what is written: the cache must always hold the front of it.
        """
        known = self._known(text)
        if self._cache is None or self._cache.capacity < capacity:
            # twice the room, so that a growing chat moves seldom
            cache = self.model.new_cache(capacity if self._cache is None else max(capacity, 2 * self._cache.capacity))
            if self._cache is not None:
                self._cache.rewind(known)
                cache.adopt(self._cache)
            self._cache = cache
        self._cache.rewind(known)
        self.model.layers.admit(self._cache)
        self._text, self._room, self.reused = text, self.model.port.room(len(text)), known
        return self._cache

    def check(self, text: Sequence[int]) -> None:
        """Make sure that the cache is still that of `text`.

        Raises:
            CacheError: another text was begun since.
        """
        if self._text is not text:
            raise CacheError("another text was begun on this memory; finish one before the next, or give each its own")

    def _known(self, text: Sequence[int]) -> int:
        # Some rotary types turn all keys of a longer text otherwise: those of another kind of text are of no use.
        if self._cache is None or self._room != self.model.port.room(len(text)):
            return 0
        held = self._text[: self._cache.committed]
        known = next((i for i, (a, b) in enumerate(zip(held, text[:-1], strict=False)) if a != b), None)
        return min(len(held), len(text) - 1) if known is None else known
