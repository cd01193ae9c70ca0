"""Lookahead decoding (Fu et al., 2024): the model's own guesses at later places, collected as n-grams, are the drafts.

Beside the drafts, every pass goes through a window of guesses: W columns of N - 1 levels, whose first guess is the
text's last token itself. Level k of column j guesses the token j + k places behind that one. It sees the guesses above
it in its column, and level 0 of the columns before: the window is a tree that hangs off the text's last token, so the
mask of draft trees is the paper's mask. What comes next behind the lowest guess of each column ends an n-gram, and is
the lowest level of the next window; all other levels move up by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from forestream.config import JsonConfig, whole
from forestream.drafting import DraftTree
from forestream.model import StreamingLM
from forestream.rivals.loop import Beside, Offer
from forestream.rows import Row
from forestream.sampling import greedy
from forestream.topology import Topology


@dataclass(frozen=True)
class LookaheadSettings(JsonConfig):
    """Size of the window and of the drafts.

    Attributes:
        window: W, columns of guesses; the text's last token begins the first one.
        ngram: N, tokens of an n-gram; a draft is as long less the one that it continues.
        guesses: G, n-grams that are kept for each first token, the latest ones, and checked when the text ends in it.
    """

    window: int = 8
    ngram: int = 4
    guesses: int = 8

    def __post_init__(self) -> None:
        whole("window", self.window, 2, 256)
        whole("ngram", self.ngram, 3, 16)
        whole("guesses", self.guesses, 1, 256)

    @property
    def reach(self) -> int:
        """Places behind the text's last token that the window and the drafts reach at most."""
        # While levels are missing, there are as many more columns.
        return self.window + self.ngram - 3

    def rounded(self, drafted: int) -> int:
        """Draft tokens that a pass is made for where there are `drafted`: few sizes, so that each has its own code."""
        longest = self.ngram - 1
        steps = (0, -(-self.guesses // 4) * longest, -(-self.guesses // 2) * longest, self.guesses * longest)
        return next(size for size in steps if size >= drafted)


@dataclass(frozen=True)
class Lookahead:
    """Drafts are n-grams that the model guessed earlier; there is no other model, and nothing is trained."""

    settings: LookaheadSettings = LookaheadSettings()

    @property
    def passes(self) -> set[int]:
        own = self.settings
        filling = {levels * (own.window + own.ngram - 1 - levels) for levels in range(1, own.ngram)}
        full = own.window * (own.ngram - 1)
        usual = {full + own.rounded(number * (own.ngram - 1)) for number in range(own.guesses + 1)}
        return usual | ({max(filling)} if max(filling) > max(usual) else set())

    def begin(self, model: StreamingLM, rows: Sequence[Row], chunk: int) -> LookaheadDrafts:
        return LookaheadDrafts(self.settings, model, rows)


class NGramPool:
    """The latest n-grams by their first token, `most` for each; one that comes again is the latest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._behind: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        known = self._behind.setdefault(ngram[0], {})
        known.pop(rest := tuple(ngram[1:]), None)
        known[rest] = None
        if len(known) > self.most:
            del known[next(iter(known))]

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """What is known to follow `token`, the latest first."""
        return list(reversed(self._behind.get(token, {})))


@dataclass
class Window:
    """The guesses of one text.

    Attributes:
        settings: its size.
        levels: of guesses; the first level lacks its first column, which is the text's last token. While levels are
            missing, one is added every pass and the first column, which the text has reached, goes.
        root: the text's last token, when `nodes` were asked for.
    """

    settings: LookaheadSettings
    levels: list[list[int]]
    root: int = -1
    pool: NGramPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = NGramPool(self.settings.guesses)

    @staticmethod
    def of(prompt: Sequence[int], settings: LookaheadSettings) -> Window:
        """Begin with tokens of the prompt, at random but always the same."""
        return Window(settings, [random.Random(0).choices(prompt, k=settings.reach)])

    @property
    def full(self) -> bool:
        return len(self.levels) == self.settings.ngram - 1

    def nodes(self, root: int, first: int) -> Beside:
        """The window behind the token `root`, as nodes of a pass whose number `first` is the window's first one.

        What is asked for is what follows each column; while levels are missing, not the first one's.
        """
        self.root = root
        parents, above = [], [0]
        for _ in self.levels[0]:
            parents.append(above[-1])
            above.append(first + len(parents) - 1)
        for _ in self.levels[1:]:
            parents += above
            above = [first + len(parents) - len(above) + column for column in range(len(above))]
        asked = [node - first for node in (above if self.full else above[1:])]
        return Beside(tuple(parents), tuple(token for level in self.levels for token in level), tuple(asked))

    def move(self, followed: Sequence[int]) -> None:
        """Take what follows each column that was asked for."""
        if self.full:
            columns = zip([self.root, *self.levels[0]], *self.levels[1:], followed, strict=True)
            for ngram in columns:
                self.pool.add(ngram)
            self.levels = [self.levels[1][1:], *self.levels[2:], list(followed)]
        else:
            self.levels = [*(level[1:] for level in self.levels), list(followed)]


class LookaheadDrafts:
    """The window and the n-grams of each text."""

    def __init__(self, settings: LookaheadSettings, model: StreamingLM, rows: Sequence[Row]) -> None:
        self.settings = settings
        self.windows = [Window.of(row.request.prompt, settings) for row in rows]
        self._rooms = [model.port.room(len(row.request.prompt)) for row in rows]

    def offer(self, rows: Sequence[Row]) -> list[Offer]:
        return [
            self._offer(row, window, room) for row, window, room in zip(rows, self.windows, self._rooms, strict=True)
        ]

    def learn(self, logits: Sequence[Float[Tensor, "asked V"]]) -> None:
        for window, own in zip(self.windows, logits, strict=True):
            if len(own):
                window.move(greedy(own))

    def keep(self, places: Sequence[int]) -> None:
        self.windows = [self.windows[place] for place in places]
        self._rooms = [self._rooms[place] for place in places]

    def _offer(self, row: Row, window: Window, room: int) -> Offer:
        root, depth = row.text[-1], row.left - 1
        tree = row.legal(branches(root, [ngram[:depth] for ngram in window.pool.behind(root)]))
        # Nothing may stand behind the end of the context, and behind the end of the text it would be of no use.
        if len(row.text) + self.settings.reach > room or depth < 1:
            return Offer(tree)
        nodes = len(tree.tokens)
        beside = window.nodes(root, nodes)
        if window.full:
            blank = self.settings.rounded(nodes - 1) - (nodes - 1)
            beside = Beside((*beside.parents, *[0] * blank), (*beside.tokens, *[root] * blank), beside.asked)
        return Offer(tree, beside=beside)


def branches(root: int, ngrams: Sequence[Sequence[int]]) -> DraftTree:
    """`ngrams` behind the token `root`; what several begin with is there once."""
    parents, tokens, known = [-1], [root], dict[tuple[int, int], int]()
    for ngram in ngrams:
        node = 0
        for token in ngram:
            if (node, token) not in known:
                known[node, token] = len(tokens)
                parents.append(node)
                tokens.append(token)
            node = known[node, token]
    return DraftTree(Topology(tuple(parents)), tuple(tokens))
