"""Lookup finds the latest match of the longest end of the text, at a cost that does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestream.config import DecodeSettings
from forestream.drafting import DraftTree
from forestream.lookup import NGrams, with_copies
from forestream.topology import Topology, chain
from strategies import paths_of, topologies

NGRAMS = st.builds(lambda low, more: NGrams(low + more, low), st.integers(1, 3), st.integers(0, 3))


def searched(text: Sequence[int], ngrams: NGrams, most: int, path: Sequence[int] = ()) -> tuple[int, ...]:
    """Brute force: every length, and every place before the last token of the text, is looked at."""
    seen = [*text, *path]
    for size in range(ngrams.longest, ngrams.shortest - 1, -1):
        for start in range(min(len(seen), len(text)) - size - 1, -1, -1):
            if size < len(seen) and seen[start : start + size] == seen[len(seen) - size :]:
                whole = list(seen)
                for place in range(start + size, start + size + most):
                    whole.append(whole[place])
                return tuple(whole[len(seen) :])
    return ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), NGRAMS, st.data())
def test_the_match_is_the_one_that_a_search_finds(text: list[int], ngrams: NGrams, data: st.DataObject) -> None:
    """However the text grew, whatever may come behind it, and however much is wanted."""
    read = 0
    while read < len(text):
        read = data.draw(st.integers(read + 1, len(text)), label="read")
        most = data.draw(st.integers(0, 6), label="most")
        path = data.draw(st.lists(st.integers(0, 3), max_size=4), label="path")
        assert ngrams.continuation(text[:read], most) == searched(text[:read], ngrams, most)
        assert ngrams.continuation(text[:read], most, path) == searched(text[:read], ngrams, most, path)


@pytest.mark.parametrize(
    ("text", "ngrams", "most", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], NGrams(), 2, (9, 1)),
        ([1, 2, 7, 5, 2, 8, 1, 2], NGrams(), 1, (7,)),  # two tokens match further back than one
        ([1, 2, 7, 5, 2, 8, 1, 2], NGrams(1), 1, (8,)),  # the latest match
        ([4, 5, 4, 5], NGrams(), 5, (4, 5, 4, 5, 4)),  # what repeats itself goes on to
        ([6, 6], NGrams(), 3, (6, 6, 6)),
        ([1, 2, 3], NGrams(), 3, ()),
        ([1, 2, 9, 3, 2], NGrams(3, 2), 3, ()),  # one token is not enough
        ([5], NGrams(), 3, ()),
    ],
)
def test_small_texts(text: list[int], ngrams: NGrams, most: int, found: tuple[int, ...]) -> None:
    assert ngrams.continuation(text, most) == found


def test_a_longer_text_costs_no_more() -> None:
    """Tokens are read once: what is looked at does not grow with the text."""

    class Counted(list[int]):
        looks = 0

        def __getitem__(self, place: object) -> object:
            Counted.looks += 1
            return super().__getitem__(place)  # type: ignore[call-overload]

    ngrams, text, looks = NGrams(), Counted([1]), []
    for token in range(600):
        Counted.looks = 0
        text.append(token % 50)
        ngrams.continuation(text, 2)
        looks.append(Counted.looks)
    assert max(looks[100:]) <= max(looks[:100]) <= 10


# --- trees and what is looked up ------------------------------------------------------------------------------


@given(topologies(12), st.lists(st.integers(0, 3), max_size=8), st.integers(0, 6), st.data())
def test_a_path_joins_a_tree_where_they_part(
    topology: Topology, path: list[int], most: int, data: st.DataObject
) -> None:
    tokens = [9] * len(topology)
    for children in topology.children:
        drawn = data.draw(st.permutations(range(max(len(children), 4))))
        for child, token in zip(children, drawn, strict=False):
            tokens[child] = token
    tree = DraftTree(topology, tuple(tokens))
    joined = tree.joined(path, most)
    assert joined.tokens[: len(tokens)] == tree.tokens
    assert joined.topology.parents[: len(tokens)] == topology.parents
    held = set(paths_of(tree))
    wanted = [tuple(path[:size]) for size in range(1, len(path) + 1)]
    assert paths_of(joined)[len(tokens) - 1 :] == [one for one in wanted if one not in held][:most]


def test_first_choices_are_followed_to_their_end() -> None:
    assert DraftTree(Topology((-1, 0, 0, 1, 1, 3)), (5, 6, 7, 8, 9, 4)).first_choices == (6, 8, 4)
    assert DraftTree(chain(1), (5,)).first_choices == ()


TEXT = (1, 2, 3, 4, 5, 9, 1, 2)  # its end has been read before: 3 4 5 9 may come


@pytest.mark.parametrize(
    ("settings", "depth", "paths"),
    [
        ({}, 9, [(7,), (7, 8)]),
        ({"lookup_beside": 2}, 9, [(7,), (7, 8), (3,), (3, 4)]),
        ({"lookup_beside": 2}, 1, [(7,), (7, 8), (3,)]),  # deeper drafts could not be used
        ({"lookup_behind": 2}, 9, [(7,), (7, 8)]),  # 8 was never read
        ({"lookup_behind": 2, "lookup_beside": 1}, 9, [(7,), (7, 8), (3,)]),
    ],
    ids=str,
)
def test_drafts_beside_streams(settings: dict[str, int], depth: int, paths: list[tuple[int, ...]]) -> None:
    tree = DraftTree(chain(3), (2, 7, 8))
    assert paths_of(with_copies(tree, TEXT, NGrams(), DecodeSettings(**settings), depth)) == paths


@pytest.mark.parametrize(
    ("settings", "depth", "paths"),
    [
        ({"lookup_beside": 2}, 9, [(3,), (3, 7), (3, 4), (3, 4, 5)]),  # the streams have its beginning
        ({"lookup_behind": 2}, 9, [(3,), (3, 7)]),
        ({"lookup_behind": 3}, 9, [(3,), (3, 7)]),
    ],
    ids=str,
)
def test_drafts_that_streams_have_the_beginning_of(
    settings: dict[str, int], depth: int, paths: list[tuple[int, ...]]
) -> None:
    tree = DraftTree(chain(3), (2, 3, 7))
    assert paths_of(with_copies(tree, TEXT, NGrams(), DecodeSettings(**settings), depth)) == paths


def test_drafts_behind_the_first_choices_of_streams() -> None:
    tree = DraftTree(Topology((-1, 0, 0, 1)), (2, 8, 6, 4))  # 8 4, and what was read behind 4
    found = with_copies(tree, TEXT, NGrams(), DecodeSettings(lookup_behind=3), 9)
    assert paths_of(found)[3:] == [(8, 4, 5), (8, 4, 5, 9), (8, 4, 5, 9, 1)]
    assert paths_of(with_copies(tree, TEXT, NGrams(), DecodeSettings(lookup_behind=3), 3))[3:] == [(8, 4, 5)]
    both = with_copies(tree, TEXT, NGrams(), DecodeSettings(lookup_beside=1, lookup_behind=1), 9)
    assert paths_of(both)[3:] == [(3,), (8, 4, 5)]


def test_without_streams_the_text_alone_is_followed() -> None:
    root = DraftTree(chain(1), (2,))
    for settings in (DecodeSettings(lookup_beside=3), DecodeSettings(lookup_behind=3)):
        assert paths_of(with_copies(root, TEXT, NGrams(), settings, 9)) == [(3,), (3, 4), (3, 4, 5)]
