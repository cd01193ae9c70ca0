"""Rows of a data set, out of a local folder or from the hub."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from forestream.errors import DataError

_CONVERTED: Final = "refs/convert/parquet"


def rows(
    dataset_folder: str,
    hub_name: str | None,
    split: str,
    data_dir: Path | None,
    fields: Sequence[str] = (),
    hub_part: str | None = None,
) -> list[dict[str, Any]]:
    """Return one dictionary for each row, in the order of the file.

    Args:
        dataset_folder: the data set's folder below `data_dir`, with one ``{split}.jsonl.gz`` for each split.
        hub_name: the data set's name on the hub, asked when `data_dir` is None; None if the hub does not have it.
        split: the name of the split.
        data_dir: the folder that holds the data sets' folders, or None.
        fields: what every row must have as a string.
        hub_part: the configuration to ask the hub for, where a data set has several.

    Raises:
        DataError: the file is missing or corrupt, the hub cannot be reached or has no such data set or split, or a
            row lacks one of `fields`.
    """
    numbered: Iterable[tuple[int, dict[str, Any]]]
    if data_dir is None and hub_name is None:
        raise DataError(
            f"the data set {dataset_folder!r} is on no hub and is read from a folder only: give --data-dir DIR, where "
            f"DIR/{dataset_folder}/{split}.jsonl.gz holds one JSON object a line, with the fields {', '.join(fields)}"
        )
    if data_dir is None:
        assert hub_name is not None
        where = f"split {split!r} of {hub_name}"
        numbered = enumerate(_from_hub(hub_name, dataset_folder, split, hub_part), start=1)
    else:
        path = Path(data_dir) / dataset_folder / f"{split}.jsonl.gz"
        where = str(path)
        numbered = _numbered_lines(path)
    found: list[dict[str, Any]] = []
    for number, row in numbered:
        for field in fields:
            if not isinstance(row.get(field), str):
                raise DataError(
                    f"row {number} of {where} has no text in field {field!r}: found the fields "
                    f"{', '.join(sorted(row)) or 'none'}; expected {', '.join(fields)}"
                )
        found.append(row)
    if not found:
        raise DataError(f"{where} has no rows; expected at least one")
    return found


def _numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each JSON object of a gzipped JSON Lines file with the number of its line, from 1; blank lines
    are passed.

    Raises:
        DataError: the file is missing, is no gzip file, is cut off, or a line is no JSON object.
    """
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.jsonl.gz"))
        raise DataError(
            f"found no file {path} (files there: {', '.join(beside) or 'none'}); expected the data folder to "
            f"hold {path.parent.name}/train.jsonl.gz, validation.jsonl.gz and test.jsonl.gz: pass the folder "
            f"above {path.parent.name} as --data-dir"
        )
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parse(line, path, number)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} could not be read after line {number} ({error}); expected JSON Lines in UTF-8, gzipped: "
            "make or download the file again"
        ) from error


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"line {number} of {path} is no JSON ({error}); found {line.strip()[:60]!r}, expected one JSON "
            "object: make or download the file again"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"line {number} of {path} holds a {type(row).__name__}; expected one JSON object")
    return row


def _from_hub(hub_name: str, dataset_folder: str, split: str, part: str | None = None) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"fetching {hub_name} needs the package 'datasets', which is not installed; run: pip install "
            "datasets, or give local files with --data-dir"
        ) from error
    asked = (hub_name,) if part is None else (hub_name, part)
    try:
        try:
            loaded = datasets.load_dataset(*asked, split=split)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            # The repository holds a loading script, which is no longer run; the hub keeps the converted rows
            # in a branch beside it.
            loaded = datasets.load_dataset(*asked, split=split, revision=_CONVERTED)
        return [dict(row) for row in loaded]
    except Exception as error:  # the hub client raises network errors of several libraries
        lines = str(error).strip().splitlines() or [""]
        raise DataError(
            f"split {split!r} of {hub_name} could not be had from the hub ({type(error).__name__}: "
            f"{lines[0]}); check the network and the name of the split, or give local files with --data-dir "
            f"DIR, where DIR/{dataset_folder}/{split}.jsonl.gz holds one JSON object a line"
        ) from error
