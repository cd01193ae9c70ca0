"""Whether one model's texts are as good as another's: scores of the same examples, paired, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from forestream.config import in_range, whole
from forestream.errors import DataError

Place = Literal["below", "inside", "above"]

_AT_A_TIME: Final = 1_000_000  # indices drawn together


@dataclass(frozen=True)
class Interval:
    """Where a mean lies, by the percentiles of its resampled values."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The scores of a joint adapter and its twin on the same examples, in percent.

    Attributes:
        joint, twin: means over the examples.
        interval: of the mean difference, joint less twin.
        twin_interval: of the twin's own mean.
        bound: the loss of quality that is allowed, as a share of the full score of 100.
    """

    joint: float
    twin: float
    interval: Interval
    twin_interval: Interval
    bound: float

    @property
    def difference(self) -> float:
        return self.joint - self.twin

    @property
    def held(self) -> bool:
        """Whether the loss is shown to be within the bound: the whole interval of the difference is."""
        return self.interval.low >= -100 * self.bound

    @property
    def lost(self) -> bool:
        """Whether the loss is shown to be beyond the bound. Neither held nor lost: too few examples to tell."""
        return self.interval.high < -100 * self.bound

    @property
    def place(self) -> Place:
        """Where the joint score lies, seen from the twin's own interval."""
        if self.joint < self.twin_interval.low:
            return "below"
        return "inside" if self.joint <= self.twin_interval.high else "above"


def compare(
    joint: Sequence[float],
    twin: Sequence[float],
    bound: float = 0.02,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare scores of the same examples, in percent and in the same order.

    Examples are drawn with replacement, the same ones for both, so that what makes an example hard for both cancels out
    of the difference. Intervals run between the percentiles of the means of `resamples` draws.

    Args:
        bound: allowed loss, as a share of the full score: 0.02 is 2 points of 100.
        level: of the intervals, above 0 and below 1.

    Raises:
        DataError: the lengths differ, or there are fewer than two examples: one says nothing of the spread.
        ConfigError: a setting is out of range.
    """
    in_range("bound", bound, 0.0, 1.0)
    in_range("level", level, 0.01, 0.9999)
    whole("resamples", resamples, 1)
    if len(joint) != len(twin):
        raise DataError(f"found {len(joint)} and {len(twin)} scores; expected both on the same examples")
    if len(joint) < 2:
        raise DataError(f"found {len(joint)} examples; an interval needs two at least, and is worth little below 100")
    scores = np.array([joint, twin], dtype=np.float64)
    means = _resampled(np.vstack([scores[0] - scores[1], scores[1]]), resamples, seed)
    tail = (1 - level) / 2
    interval, own = (Interval(*map(float, np.quantile(row, [tail, 1 - tail]))) for row in means)
    return Comparison(float(scores[0].mean()), float(scores[1].mean()), interval, own, bound)


def _resampled(rows: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Means of every row over examples drawn with replacement, the same ones for all rows: [rows, resamples]."""
    generator = np.random.default_rng(seed)
    count = rows.shape[1]
    step = max(1, _AT_A_TIME // count)
    parts = [
        rows[:, generator.integers(count, size=(min(step, resamples - done), count))].mean(axis=2)
        for done in range(0, resamples, step)
    ]
    return np.concatenate(parts, axis=1)
