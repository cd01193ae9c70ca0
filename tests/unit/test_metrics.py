"""Scores whose right value can be worked out by hand."""

import pytest

from forestream.errors import DataError
from forestream.metrics import exact_match, rouge


def test_rouge_of_a_reference_is_100_and_of_foreign_words_0() -> None:
    assert rouge(["The cat sat."], [["The cat sat."]]) == {"rouge1": 100.0, "rougeLsum": 100.0}
    assert rouge(["alpha beta"], [["gamma delta"]]) == {"rouge1": 0.0, "rougeLsum": 0.0}


def test_rouge1_counts_words_in_any_order_and_lsum_does_not() -> None:
    scores = rouge(["one two three"], [["three two one four"]])
    # 3 common words: precision 3/3, recall 3/4. The longest common subsequence has one word: 1/3 and 1/4.
    assert scores["rouge1"] == pytest.approx(100 * 2 * 1 * 0.75 / 1.75)
    assert scores["rougeLsum"] == pytest.approx(100 * 2 * (1 / 3) * (1 / 4) / (1 / 3 + 1 / 4))


def test_rouge_takes_the_best_reference_of_each_example_then_the_mean() -> None:
    references = [["nothing here", "a red fox"], ["zebra"]]
    assert rouge(["a red fox", "giraffe"], references) == {"rouge1": 50.0, "rougeLsum": 50.0}


def test_rouge_stems() -> None:
    assert rouge(["restaurants serving"], [["restaurant serves"]])["rouge1"] == 100.0


def test_lsum_matches_sentence_by_sentence() -> None:
    # As one long sentence the order would count and the score fall.
    swapped = rouge(["Dogs bark. Cats meow."], [["Cats meow. Dogs bark."]])
    assert swapped["rougeLsum"] == 100.0
    assert rouge(["Dogs bark\nCats meow"], [["Cats meow. Dogs bark."]])["rougeLsum"] == 100.0
    assert rouge(["Dogs bark Cats meow"], [["Cats meow Dogs bark"]])["rougeLsum"] == 50.0


def test_rouge_of_an_empty_prediction_is_0() -> None:
    assert rouge([""], [["some text"]]) == {"rouge1": 0.0, "rougeLsum": 0.0}


@pytest.mark.parametrize(
    ("prediction", "hit"),
    [
        ("SELECT a FROM t", True),
        ("  SELECT  a\n\tFROM t ; ", True),
        ("SELECT a FROM t;", True),
        ("SELECT a FROM t;;", False),
        ("; SELECT a FROM t", False),
        ("select a from t", False),
        ("SELECT a FROM t WHERE b", False),
        ("", False),
    ],
)
def test_exact_match_forgives_white_space_and_one_final_semicolon(prediction: str, hit: bool) -> None:
    assert exact_match([prediction], [["SELECT a FROM t"]]) == {"exact_match": 100.0 * hit}


def test_exact_match_normalises_references_too_and_takes_any_of_them() -> None:
    assert exact_match(["b", "x", "c"], [["a", " b ;"], ["y"], ["c"]])["exact_match"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("metric", [rouge, exact_match])
def test_what_cannot_be_scored_is_refused(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(DataError, match="2 predictions and 1 examples"):
        metric(["a", "b"], [["a"]])
    with pytest.raises(DataError, match="no predictions"):
        metric([], [])
    with pytest.raises(DataError, match="example 1 has"):
        metric(["a", "b"], [["a"], []])
    # A bare string would be taken apart into letters.
    with pytest.raises(DataError, match="example 0 has 'a text'"):
        metric(["a"], ["a text"])
