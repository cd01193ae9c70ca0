"""Drafts that are looked up: what came next the last time that the text read like its end."""

from __future__ import annotations

from collections.abc import Sequence

from forestream.config import DecodeSettings
from forestream.drafting import DraftTree


class NGrams:
    """Where every n-gram of a growing text last ended; reading a token costs the same wherever it stands.

    Args:
        longest: tokens at the end of the text that should match; with no match one fewer is tried, and so on.
        shortest: the fewest that are tried.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest, self.shortest = longest, shortest
        self._ends: dict[tuple[int, ...], int] = {}
        self._read = 0

    def continuation(self, text: Sequence[int], most: int, path: Sequence[int] = ()) -> tuple[int, ...]:
        """Up to `most` tokens that followed the latest earlier match of the longest n-gram at the end.

        Where the match overlaps the end, what followed runs on into the continuation itself, so that a text that
        repeats itself goes on to do so. Empty where nothing matches.

        Args:
            text: the text of the last call, or one that continues it.
            path: what may come behind it. The end is then that of the path; matches are looked for in the text.
        """
        for end in range(self._read + 1, len(text)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                self._ends[tuple(text[end - size : end])] = end
        self._read = max(self._read, len(text) - 1)
        whole = len(text) + len(path)
        tail = (*text[-self.longest :], *path)
        for size in range(min(self.longest, whole - 1), self.shortest - 1, -1):
            if (place := self._ends.get(tail[-size:])) is not None:
                followed = [*text[place : place + most], *path[: max(place + most - len(text), 0)]]
                while len(followed) < most:
                    followed.append(followed[len(followed) - (whole - place)])
                return tuple(followed)
        return ()


def with_copies(
    tree: DraftTree, text: Sequence[int], ngrams: NGrams, settings: DecodeSettings, depth: int
) -> DraftTree:
    """`tree` with the nodes that `settings` have looked up.

    Args:
        tree: what streams foretell behind the last token of `text`.
        ngrams: of `text`.
        depth: of the deepest draft that could be used.
    """
    beside, behind = settings.lookup_beside, settings.lookup_behind
    if beside:
        reach = min(max(tree.topology.depths) + beside, depth)
        tree = tree.joined(ngrams.continuation(text, reach), beside)
    if behind:
        path = tree.first_choices
        reach = min(behind, depth - len(path))
        tree = tree.joined((*path, *ngrams.continuation(text, reach, path)), behind)
    return tree
