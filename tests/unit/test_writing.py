"""Text in pieces: joined they are the text, and no character comes before it is whole (cases L01 to L03)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from forestream.steps import Step
from forestream.writing import Piece, Writing
from tiny import tiny_tokenizer
from writers import byte_tokenizer

HOLE = "\N{REPLACEMENT CHARACTER}"
TEXTS = (
    "abcd the abcabcd",
    "Grüße an die Bäckerei: ä, ö, ü und ß",
    "🙂 🙃🙂 the 👩‍👩‍👧‍👦 and 🏳️‍🌈",
    "日本語のテキスト、そして العربية",
    "é combining e\N{COMBINING ACUTE ACCENT} " + "\N{ZERO WIDTH JOINER}",
    "🙂",
    "  leading, trailing and\n\nlines \t ",
)


def decoded(tokenizer_tokens: Sequence[int]) -> str:
    found = BYTES.decode(list(tokenizer_tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(found, str)
    return found


BYTES = byte_tokenizer()
END = BYTES.eos_token_id


def steps_of(tokens: Sequence[int], sizes: Iterator[int]) -> list[Step]:
    """A run that delivers `tokens` in steps of these sizes; all but the last token of each were drafted."""
    steps, left = [], list(tokens)
    while left:
        new = tuple(left[: next(sizes)])
        del left[: len(new)]
        steps.append(Step(new, len(new) - 1, 0.0, finish=None if left else "stop"))
    return steps


def cycle(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes


def pieces(tokens: Sequence[int], *sizes: int) -> list[Piece]:
    writing = Writing(decoded)
    return [piece for step in steps_of(tokens, cycle(*sizes)) for piece in writing.add(step)]


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (5, 2, 1), (100,)])
@pytest.mark.parametrize("text", TEXTS)
def test_joined_they_are_the_text(text: str, sizes: tuple[int, ...]) -> None:
    """L01, L02: whatever the passes deliver together, one piece a token, and no half of a character."""
    tokens = BYTES(text)["input_ids"]
    for ended in (tokens, [*tokens, END]):
        found = pieces(ended, *sizes)
        assert "".join(piece.text for piece in found) == text
        assert [piece.token for piece in found] == ended
        assert not any(HOLE in piece.text for piece in found)


@pytest.mark.parametrize("text", TEXTS)
def test_what_has_come_is_always_the_front_of_the_text(text: str) -> None:
    """L03: nothing is taken back, and no more than an unfinished character is held back."""
    tokens, come = BYTES(text)["input_ids"], ""
    for place, piece in enumerate(pieces(tokens, 1)):
        come += piece.text
        assert text.startswith(come)
        whole = decoded(tokens[: place + 1])
        assert come == (whole if not whole.endswith(HOLE) else whole.rstrip(HOLE))


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_text_that_ends_within_a_character_shows_it_as_it_is_decoded(cut: int) -> None:
    tokens = BYTES("ab🙂")["input_ids"][:-cut]
    for ended in (tokens, [*tokens, END]):
        assert "".join(piece.text for piece in pieces(ended, 2)) == decoded(ended)


def test_bytes_that_never_make_a_character_do_not_block_what_follows() -> None:
    """Any tokens at all, good text or not: all pairs and some longer rows of bytes."""
    lone = [BYTES("🙂é")["input_ids"][place] for place in (0, 1, 3, 4, 5)] + BYTES("az")["input_ids"]
    for tokens in product(lone, repeat=4):
        found = pieces(tokens, 1)
        assert "".join(piece.text for piece in found) == decoded(tokens)
        come = ""
        for place, piece in enumerate(found):
            come += piece.text
            assert not come or decoded(tokens).startswith(come), (tokens, place)


def test_a_replacement_character_that_was_written_is_delivered() -> None:
    for text in (f"a{HOLE}b", f"a{HOLE}"):
        assert "".join(piece.text for piece in pieces(BYTES(text)["input_ids"], 1)) == text


def test_special_tokens_within_a_text_are_empty_pieces() -> None:
    a, b = BYTES("a")["input_ids"], BYTES("🙂")["input_ids"]
    found = pieces([*a, END, *b[:2], END, *a], 2)
    assert "".join(piece.text for piece in found) == decoded([*a, END, *b[:2], END, *a])
    assert found[1].text == ""


def test_pieces_say_which_tokens_were_drafted() -> None:
    found = pieces(BYTES("xyz!xyz!")["input_ids"], 3, 1)
    assert [piece.drafted for piece in found] == [True, True, False, False] * 2


def test_characters_of_one_token_come_at_once() -> None:
    tokenizer = tiny_tokenizer()
    writing = Writing(lambda tokens: tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
    tokens = tokenizer("to be")["input_ids"]
    found = [piece.text for step in steps_of(tokens, cycle(2)) for piece in writing.add(step)]
    assert found == list("to be")
