"""Paired bootstrap intervals: known distributions, degenerate ones, and what the guard says of them."""

import numpy as np
import pytest

from forestream.errors import ConfigError, DataError
from forestream.quality import compare


def pairs(seed: int, count: int = 80, loss: float = 0.0) -> tuple[list[float], list[float]]:
    """Scores of a twin, and of a model that is worse by `loss` on the mean; hard examples are hard for both."""
    generator = np.random.default_rng(seed)
    twin = generator.normal(60.0, 15.0, count)
    return list(twin - loss + generator.normal(0.0, 3.0, count)), list(twin)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Of 300 samples, 95 % intervals miss 15 on average; for 80 examples percentiles are a little too narrow."""
    found = [compare(*pairs(seed, loss=1.0), resamples=400, seed=seed) for seed in range(300)]
    covered = sum(one.interval.low <= -1.0 <= one.interval.high for one in found)
    assert 272 <= covered <= 297
    own = sum(one.twin_interval.low <= 60.0 <= one.twin_interval.high for one in found)
    assert 272 <= own <= 297
    narrow = [compare(*pairs(seed, loss=1.0), level=0.5, resamples=400, seed=seed).interval for seed in range(300)]
    assert 120 <= sum(one.low <= -1.0 <= one.high for one in narrow) <= 180


def test_the_interval_is_that_of_the_mean_difference() -> None:
    joint, twin = pairs(0, 400)
    one = compare(joint, twin)
    differences = np.array(joint) - np.array(twin)
    error = differences.std() / np.sqrt(len(differences))
    assert one.difference == pytest.approx(differences.mean())
    assert one.interval.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.15 * error)
    assert one.interval.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.15 * error)
    # Unpaired, hard and easy examples would drown it.
    assert one.interval.high - one.interval.low < 0.4 * (one.twin_interval.high - one.twin_interval.low)


def test_equal_scores_leave_no_doubt() -> None:
    one = compare([50.0, 70.0, 90.0], [50.0, 70.0, 90.0], bound=0.0)
    assert (one.interval.low, one.interval.high, one.difference) == (0.0, 0.0, 0.0)
    assert one.held
    assert one.place == "inside"
    assert one.twin_interval.low == 50.0
    assert one.twin_interval.high == 90.0
    constant = compare([40.0] * 10, [50.0] * 10)
    assert (constant.interval.low, constant.interval.high) == (-10.0, -10.0)
    assert constant.lost
    assert constant.place == "below"
    assert compare([60.0] * 10, [50.0] * 10).place == "above"


@pytest.mark.parametrize(("loss", "held", "lost"), [(0.0, True, False), (6.0, False, True), (2.0, False, False)])
def test_a_loss_is_within_the_bound_beyond_it_or_not_known(loss: float, held: bool, lost: bool) -> None:
    one = compare(*pairs(3, 200, loss), bound=0.02)
    assert (one.held, one.lost) == (held, lost)
    assert one.held == (one.interval.low >= -2.0)


def test_the_bound_is_met_exactly() -> None:
    assert compare([48.0] * 5, [50.0] * 5, bound=0.02).held
    assert not compare([47.9] * 5, [50.0] * 5, bound=0.02).held


def test_the_seed_decides_and_parts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, twin = pairs(1)
    first = compare(joint, twin, resamples=500)
    assert compare(joint, twin, resamples=500) == first
    assert compare(joint, twin, resamples=500, seed=1) != first
    monkeypatch.setattr("forestream.quality._AT_A_TIME", 333)
    assert compare(joint, twin, resamples=500) == first


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(DataError, match="3 and 2 scores; expected both on the same examples"):
        compare([1.0, 2.0, 3.0], [1.0, 2.0])
    for few in ([], [1.0]):
        with pytest.raises(DataError, match=f"found {len(few)} examples; an interval needs two"):
            compare(few, few)
    for wrong in ({"bound": -0.1}, {"bound": 2.0}, {"level": 0.0}, {"level": 1.0}, {"resamples": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            compare([1.0, 2.0], [1.0, 2.0], **wrong)
