"""Two texts side by side, drawn while they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forestream.cli.writing import coloured
from forestream.writing import Piece, Writing

if TYPE_CHECKING:
    from forestream.steps import Step

_FRAME = 4  # a panel's borders and padding, in columns


class Side:
    """One of the two texts and its statistics."""

    def __init__(self, title: str, decode: Callable[[Sequence[int]], str]) -> None:
        from forestream.steps import Counters

        self.title = title
        self.counters = Counters()
        self._writing = Writing(decode)
        self._pieces: list[Piece] = []

    def add(self, step: Step) -> None:
        self.counters.add(step)
        self._pieces += self._writing.add(step)

    @property
    def text(self) -> Text:
        text = coloured(self._pieces)
        return text[len(text.plain) - len(text.plain.lstrip()) :]

    @property
    def speed(self) -> str:
        return f"{self.counters.passes} passes, {self.counters.tokens_per_second:.1f} tokens/s"


class Stage:
    """Draws its sides after every step, and only then: nothing is drawn while a pass runs and is timed."""

    def __init__(self, console: Console, sides: Sequence[Side]) -> None:
        self.console = console
        self.sides = sides
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Stage:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def watch(self, side: Side, steps: Iterator[Step]) -> Iterator[Step]:
        """The same steps, drawn as they come."""
        for step in steps:
            side.add(step)
            self._live.update(self._panels(), refresh=True)
            yield step

    def _panels(self) -> Table:
        width = (self.console.width - len(self.sides) + 1) // len(self.sides)
        texts = [side.text for side in self.sides]
        lines = max(len(text.wrap(self.console, max(width - _FRAME, 1))) for text in texts)
        grid = Table.grid(padding=(0, 1, 0, 0))
        for _ in self.sides:
            grid.add_column(width=width)
        grid.add_row(
            *(
                Panel(text, title=side.title, subtitle=side.speed, height=max(lines, 1) + 2, border_style="dim")
                for side, text in zip(self.sides, texts, strict=True)
            )
        )
        return grid
