"""Prompt lookup finds the latest match of the longest end of the text, at a cost that does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestream.requests import Request
from forestream.rivals.lookup import Lookup, LookupSettings, NGrams, line
from forestream.rows import Row
from subject import model_of

SETTINGS = st.builds(
    lambda gamma, low, more: LookupSettings(gamma, low + more, low),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 3),
)


def searched(text: Sequence[int], settings: LookupSettings, most: int) -> tuple[int, ...]:
    """Brute force: every length and every place is looked at."""
    for size in range(settings.max_ngram, settings.min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if list(text[start : start + size]) == list(text[len(text) - size :]):
                whole = list(text)
                for place in range(start + size, start + size + most):
                    whole.append(whole[place])
                return tuple(whole[len(text) :])
    return ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), SETTINGS, st.data())
def test_the_match_is_the_one_that_a_search_finds(
    text: list[int], settings: LookupSettings, data: st.DataObject
) -> None:
    """However the text grew, and however much is wanted."""
    index, read = NGrams(settings), 0
    while read < len(text):
        read = data.draw(st.integers(read + 1, len(text)), label="read")
        most = data.draw(st.integers(0, settings.gamma), label="most")
        assert index.continuation(text[:read], most) == searched(text[:read], settings, most)


@pytest.mark.parametrize(
    ("text", "settings", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], LookupSettings(2), (9, 1)),
        ([1, 2, 7, 5, 2, 8, 1, 2], LookupSettings(1), (7,)),  # two tokens match further back than one
        ([1, 2, 7, 5, 2, 8, 1, 2], LookupSettings(1, max_ngram=1), (8,)),  # the latest match
        ([4, 5, 4, 5], LookupSettings(5), (4, 5, 4, 5, 4)),  # what repeats itself goes on to
        ([6, 6], LookupSettings(3), (6, 6, 6)),
        ([1, 2, 3], LookupSettings(3), ()),
        ([1, 2, 9, 3, 2], LookupSettings(3, 3, 2), ()),  # one token is not enough
        ([5], LookupSettings(3), ()),
    ],
)
def test_small_texts(text: list[int], settings: LookupSettings, found: tuple[int, ...]) -> None:
    assert NGrams(settings).continuation(text, settings.gamma) == found


def test_a_longer_text_costs_no_more() -> None:
    """Tokens are read once: what is looked at does not grow with the text."""

    class Counted(list[int]):
        looks = 0

        def __getitem__(self, place: object) -> object:
            Counted.looks += 1
            return super().__getitem__(place)  # type: ignore[call-overload]

    index, text, looks = NGrams(LookupSettings(2)), Counted([1]), []
    for token in range(600):
        Counted.looks = 0
        text.append(token % 50)
        index.continuation(text, 2)
        looks.append(Counted.looks)
    assert max(looks[100:]) <= max(looks[:100]) <= 10


def test_drafts_are_no_longer_than_what_may_be_written() -> None:
    row = Row(Request((1, 2, 3, 1, 2)), 3)
    drafts = Lookup(LookupSettings(4)).begin(model_of("llama", "joint"), [row], 8)
    assert drafts.offer([row])[0].tree == line(2, (3, 1))
    row.text.append(3)
    assert drafts.offer([row])[0].tree == line(3, (1,))
    row.text.append(9)
    assert drafts.offer([row])[0].tree == line(9, ())


def test_texts_keep_their_own_n_grams_when_others_have_ended() -> None:
    rows = [Row(Request(text), 8) for text in ((1, 5, 1), (2, 6, 2), (3, 7, 3))]
    drafts = Lookup(LookupSettings(1)).begin(model_of("llama", "joint"), rows, 8)
    drafts.offer(rows)
    drafts.keep([2, 0])
    assert [offer.tree.tokens for offer in drafts.offer([rows[2], rows[0]])] == [(3, 7), (1, 5)]
