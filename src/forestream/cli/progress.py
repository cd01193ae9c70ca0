"""The progress bar of commands that go through many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn


@contextmanager
def counted(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the block runs; call what it yields with the number of prompts just done."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(label, total=total)
        yield lambda done: progress.advance(bar, done)
