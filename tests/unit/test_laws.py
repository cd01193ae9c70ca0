"""The slow law and the chi-square test themselves: known values, and a power that is stated."""

import random

import pytest

from laws import chi_square, slow_law, softmax


def test_a_law_by_hand() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    assert slow_law(logits, top_k=1) == {3: 1.0}
    assert set(slow_law(logits, top_p=0.7)) == {2, 3}
    assert set(slow_law(logits, top_p=0.6)) == {3}
    assert set(slow_law(logits, min_p=0.36)) == {2, 3}
    assert set(slow_law(logits, temperature=3.0, min_p=0.36)) == {0, 1, 2, 3}
    assert set(slow_law(logits, forbidden=(3,), top_k=2)) == {1, 2}
    assert sum(slow_law(logits, temperature=0.5, top_p=0.99).values()) == pytest.approx(1.0)


def test_chi_square_by_the_book() -> None:
    """60 throws of a die; 13.4 with five degrees of freedom is exceeded with probability 0.0199."""
    found = [face for face, count in enumerate((5, 8, 9, 8, 10, 20)) for _ in range(count)]
    assert chi_square(found, dict.fromkeys(range(6), 1 / 6)) == pytest.approx(0.01991, abs=1e-5)


def test_what_cannot_be_is_an_alarm() -> None:
    assert chi_square([0, 0, 1], {0: 1.0}) == 0.0
    assert chi_square([0, 0], {0: 1.0}) == 1.0


def test_rare_outcomes_count_as_one() -> None:
    law = {0: 0.9, **dict.fromkeys(range(1, 101), 0.001)}
    assert chi_square([0] * 900 + [1] * 100, law) == pytest.approx(1.0)
    assert chi_square([0] * 1000, law) < 1e-20


def test_false_alarms_are_as_rare_as_they_are_said_to_be() -> None:
    rng, law = random.Random(0), softmax(dict(enumerate([0.0, 1.0, 0.3, 2.0])))
    values = [chi_square(rng.choices([*law], [*law.values()], k=400), law) for _ in range(400)]
    assert 5 < sum(value < 0.05 for value in values) < 40
    assert min(values) > 1e-5
