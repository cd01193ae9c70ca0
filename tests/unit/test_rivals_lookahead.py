"""The window sees what the paper's window sees, its guesses become n-grams, and n-grams become drafts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from forestream.config import DecodeSettings
from forestream.errors import ConfigError
from forestream.packing import Pack
from forestream.requests import Request
from forestream.rivals import loop
from forestream.rivals.lookahead import Lookahead, LookaheadSettings, NGramPool, Window, branches
from forestream.rivals.lookup import line
from forestream.rivals.loop import Offer, check, drafted
from forestream.rows import Row
from forestream.sampling import greedy
from forestream.steps import Counters, tokens_of
from forestream.topology import Topology
from oracle import prefilled, slow_tree_logits
from rival import FAMILIES, assert_as_plain
from subject import model_of
from wrapped import prompt
from zoo import POSITIONS

# (level, column): the text's last token is (0, 0)
Guess = tuple[int, int]


def window(settings: LookaheadSettings, passes: int) -> Window:
    """A window after so many passes; a guess that was made in pass p for column j is 100 p + j."""
    found = Window(settings, [list(range(1, settings.reach + 1))])
    for made in range(1, passes + 1):
        asked = found.nodes(99, 1).asked
        found.move([100 * made + column for column in range(len(asked))])
    return found


def guesses(found: Window) -> list[Guess]:
    """Levels and columns of the nodes, in the order in which a pass has them; the first is the text's last token."""
    columns = [len(found.levels[0]) + 1, *map(len, found.levels[1:])]
    return [(level, column) for level, many in enumerate(columns) for column in range(many)]


def sees(query: Guess, key: Guess) -> bool:
    """Figure 2 of the paper: level 0 up to the own column, and the levels above in the own column."""
    (level, column), (other, place) = query, key
    return place <= column if other == 0 else place == column and other <= level


@pytest.mark.parametrize("passes", range(6))
@pytest.mark.parametrize("size", [(2, 3), (3, 5), (5, 4), (4, 3)])
def test_who_sees_whom_is_the_papers_mask(size: tuple[int, int], passes: int) -> None:
    """Element by element, and positions too: also while levels are missing, and with drafts before the window."""
    settings = LookaheadSettings(*size, guesses=2)
    found, tree = window(settings, passes), branches(99, [(1, 2), (1, 3)])
    drafts = len(tree.tokens) - 1
    beside = found.nodes(99, drafts + 1)
    pack = Pack.tree(Topology((*tree.topology.parents, *beside.parents)))
    order = guesses(found)
    assert len(order) == len(beside.parents) + 1 == len(beside.tokens) + 1
    places = [0, *range(drafts + 1, drafts + len(order))]
    for query, at in zip(order, places, strict=True):
        assert int(pack.depths[0, at]) == sum(query)
        for key, there in zip(order, places, strict=True):
            assert bool(pack.visible[0, at, there]) == sees(query, key), (query, key)
        for draft in range(1, drafts + 1):
            assert not pack.visible[0, at, draft]
            assert not pack.visible[0, draft, at] or at == 0
    assert max(map(sum, order)) == settings.reach
    assert len(found.levels) == min(passes + 1, settings.ngram - 1)


def test_a_window_fills_level_by_level_and_then_moves_up() -> None:
    """W = 3, N = 4. Each guess stays at the place in the text that it was made for, one nearer with every pass."""
    settings = LookaheadSettings(3, 4, 2)
    assert [window(settings, passes).levels for passes in range(5)] == [
        [[1, 2, 3, 4]],
        [[2, 3, 4], [100, 101, 102, 103]],
        [[3, 4], [101, 102, 103], [200, 201, 202]],
        [[102, 103], [200, 201, 202], [300, 301, 302]],
        [[201, 202], [300, 301, 302], [400, 401, 402]],
    ]


def test_n_grams_are_the_columns_with_what_follows_them() -> None:
    settings = LookaheadSettings(3, 4, 2)
    third = window(settings, 3)
    # of the window after two passes, with the text's last token as the first column's first guess
    assert third.pool.behind(99) == [(101, 200, 300)]
    assert third.pool.behind(3) == [(102, 201, 301)]
    assert third.pool.behind(4) == [(103, 202, 302)]
    assert window(settings, 2).pool.behind(99) == [], "there are no n-grams before all levels are there"


def test_a_pool_keeps_the_latest() -> None:
    pool = NGramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (2, 4, 5), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert pool.behind(1) == [(6, 7), (2, 3)]
    assert pool.behind(2) == [(4, 5)]
    assert pool.behind(3) == []


def test_drafts_share_what_they_begin_with() -> None:
    tree = branches(9, [(1, 2, 3), (1, 2, 4), (5,), (1, 2)])
    assert tree.tokens == (9, 1, 2, 3, 4, 5)
    assert tree.topology.parents == (-1, 0, 1, 2, 2, 0)
    assert branches(9, []) == line(9, ())


@pytest.mark.parametrize("host", FAMILIES)
def test_guesses_are_what_the_model_says_behind_their_columns(host: str) -> None:
    """Against ordinary text: the column's own way through the window, read as one sequence."""
    model, text, settings = model_of(host, "joint"), prompt(12), LookaheadSettings(3, 4, 2)
    found = Window.of(text, settings)
    for _ in range(5):
        root, before = 7, [*map(list, found.levels)]
        beside = found.nodes(root, 1)
        _, (asked,) = check(model, [Offer(line(root, ()), beside=beside)], prefilled(model, text, spare=24))
        first = 0 if found.full else 1
        for column, own in enumerate(asked, start=first):
            path = [root, *before[0][:column], *(level[column] for level in before[1:])]
            wanted, _ = slow_tree_logits(model, text, path, 0)
            torch.testing.assert_close(own, wanted[-1], rtol=1e-4, atol=1e-4)
        found.move(greedy(asked))


def test_passes_have_the_sizes_that_were_announced() -> None:
    model, own = model_of("llama", "joint"), Lookahead(LookaheadSettings(4, 4, 5))
    sizes, whole = [], loop.Pack.forest

    def seen(trees: Any, carriers: Any, streams: int = 0) -> Pack:
        sizes.append(len(trees[0]))
        return whole(trees, carriers, streams)

    counters = Counters()
    for seed in range(3):
        sizes.clear()
        with patch.object(loop.Pack, "forest", staticmethod(seen)):
            counters.extend(assert_as_plain(model, Request(prompt(8, seed=seed)), own, 40))
        assert max(sizes) <= max(own.passes)
        middle = [size for size in sizes if size > 1][2:-1]  # two passes fill the window; plain passes have one slot
        assert set(middle) <= own.passes
    assert counters.accepted > 5
    assert counters.nodes > counters.passes


def test_no_window_reaches_past_the_context_or_the_end_of_the_text() -> None:
    settings = LookaheadSettings(4, 4, 2)
    model, own = model_of("gpt2", "joint"), Lookahead(settings)
    for length in (POSITIONS - settings.reach, POSITIONS - settings.reach - 1, POSITIONS - 3):
        row = Row(Request(prompt(length)), 40)
        row.text.append(1)
        (offer,) = own.begin(model, [row], 8).offer([row])
        assert bool(offer.beside.tokens) == (len(row.text) + settings.reach <= POSITIONS)
    row = Row(Request(prompt(5)), 2)
    row.text.append(1)
    (offer,) = own.begin(model, [row], 8).offer([row])
    assert not offer.beside.tokens, "one more token may be written: nothing is gained by looking further"


def test_the_same_request_gets_the_same_drafts_again() -> None:
    model, own, settings = model_of("llama", "joint"), Lookahead(), DecodeSettings(max_new_tokens=30)
    first, second = (list(drafted(model, prompt(6), settings, own)) for _ in range(2))
    assert [step.tree for step in first] == [step.tree for step in second]
    assert len(tokens_of(first)) == 30


@pytest.mark.parametrize(("changes", "told"), [((1, 4, 2), "window"), ((4, 2, 2), "ngram"), ((4, 4, 0), "guesses")])
def test_sizes_out_of_range_are_refused(changes: tuple[int, int, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LookaheadSettings(*changes)


def test_few_sizes_of_passes() -> None:
    for settings in (LookaheadSettings(), LookaheadSettings(5, 3, 1), LookaheadSettings(15, 5, 15)):
        longest = settings.ngram - 1
        sizes = [settings.rounded(count) for count in range(settings.guesses * longest + 1)]
        assert all(size >= count for count, size in enumerate(sizes))
        assert all(before <= after for before, after in pairwise(sizes))
        assert len(Lookahead(settings).passes) <= 5
