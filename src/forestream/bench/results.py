"""Result files as they lie on disk: what each is, or a clear error that names it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forestream.bench.report import kind_of
from forestream.errors import DataError

TRAINING: Final = "training log"
"""The kind of a training's log, which is no record but a line for every few updates."""


@dataclass(frozen=True)
class Result:
    """One result file.

    Attributes:
        path: where it was read.
        name: of the file, made different from the others' where it must be.
        kind: the key that tells what a record is of, or `TRAINING`.
        record: what it holds; of a training, its lines below "lines".
    """

    path: Path
    name: str
    kind: str
    record: dict[str, Any]


def read_all(paths: Sequence[Path]) -> list[Result]:
    """All of `paths`, in their order, under names of their own.

    Raises:
        DataError: a file is missing, broken or of no known kind; it is named.
    """
    found: list[Result] = []
    names: set[str] = set()
    for path in paths:
        kind, record = _read(path)
        name, number = path.stem, 2
        while name in names:
            name, number = f"{path.stem} ({number})", number + 1
        names.add(name)
        found.append(Result(path, name, kind, record))
    return found


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); expected a result file") from error
    if path.suffix == ".jsonl":
        return TRAINING, {"lines": _lines(path, text)}
    record = _parsed(path, text)
    if not isinstance(record, dict) or not isinstance(record.get("provenance"), dict):
        raise DataError(
            f"{path} holds no record with its provenance; expected what a command of forestream wrote with --json, or "
            "the .jsonl log of a training"
        )
    try:
        kind = kind_of(record)
    except DataError as error:
        raise DataError(f"{path} is a record of no known kind: {error}") from error
    return kind, record


def _lines(path: Path, text: str) -> list[dict[str, Any]]:
    lines = [_parsed(path, line, number) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines or not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
        raise DataError(f"{path} is no log of a training; expected JSON Lines, each with its step")
    return lines


def _parsed(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = f"line {line} of {path}" if line else str(path)
        raise DataError(f"{where} is no JSON ({error}); write the record anew") from error
