"""Prompt lookup as a method of its own."""

from __future__ import annotations

from forestream.requests import Request
from forestream.rivals.lookup import Lookup, LookupSettings, line
from forestream.rows import Row
from subject import model_of


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


def test_the_shortest_match_is_the_settings() -> None:
    """One token matches: too few where two are asked for."""
    row = Row(Request((1, 2, 9, 3, 2)), 8)
    for settings, tokens in ((LookupSettings(3, 3, 2), (2,)), (LookupSettings(3, 3, 1), (2, 9, 3, 2))):
        drafts = Lookup(settings).begin(model_of("llama", "joint"), [row], 8)
        assert drafts.offer([row])[0].tree.tokens == tokens


def test_the_longest_match_is_the_settings() -> None:
    row = Row(Request((1, 2, 7, 5, 2, 8, 1, 2)), 8)
    for longest, token in ((1, 8), (3, 7)):  # two tokens match further back than one
        drafts = Lookup(LookupSettings(1, longest)).begin(model_of("llama", "joint"), [row], 8)
        assert drafts.offer([row])[0].tree.tokens == (2, token)
