"""Which settings to decode with, by the number of texts that are under way together."""

from __future__ import annotations

from dataclasses import dataclass

from forestream.config import DecodeSettings
from forestream.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The more texts share a pass, the less a draft is worth: settings for each number of rows and above.

    Attributes:
        steps: pairs (rows, settings), rows increasing from 1; each holds from that many rows up to the next.

    Raises:
        ConfigError: rows do not increase from 1.
    """

    steps: tuple[tuple[int, DecodeSettings], ...]

    def __post_init__(self) -> None:
        rows = [least for least, _ in self.steps]
        if not rows or rows[0] != 1 or rows != sorted(set(rows)):
            raise ConfigError(f"a schedule for {rows} rows; expected numbers that increase from 1")

    @staticmethod
    def of(settings: DecodeSettings | Schedule) -> Schedule:
        """`settings`, if they are a schedule already, or the same settings for any number of rows."""
        return settings if isinstance(settings, Schedule) else Schedule(((1, settings),))

    def least(self, rows: int) -> int:
        """The number of rows whose settings hold for `rows` texts under way."""
        return max(least for least, _ in self.steps if least <= rows)
