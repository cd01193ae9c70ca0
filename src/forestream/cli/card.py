"""`forestream card`: write an adapter's model card anew, with what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forestream.cli import options
from forestream.errors import DataError


def card(
    adapter: options.Adapter,
    record: Annotated[
        list[Path] | None,
        typer.Option(
            "--record",
            exists=True,
            dir_okay=False,
            help="A record of `forestream evaluate` or `forestream bench` (--json) for this adapter; may be repeated.",
        ),
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="Of the adapter, as the hub spells it, such as apache-2.0.")
    ] = None,
) -> None:
    """Write README.md of an adapter folder from its provenance, with the hub's front matter.

    `forestream train` writes the first one. Scores and speeds are those of the records given, each with the command
    that measured it; without a record there are none.

    Example: forestream card --adapter my-adapter --record quality.json --record speed.json --licence apache-2.0
    """
    from forestream.bench.report import markdown
    from forestream.card import FILE, render
    from forestream.checkpoint import PROVENANCE
    from forestream.manifest import Manifest

    manifest = Manifest.read(adapter)
    name = adapter.resolve().name
    found = adapter / PROVENANCE
    made: dict[str, Any] = json.loads(found.read_text()) if found.is_file() else {}
    records = [_of(name, path) for path in record or []]
    evaluations = [one for one in records if "scores" in one]
    tables = [markdown(one) for one in records]
    text = render(name, manifest.config, manifest.base.name, made, evaluations, tables, licence)
    (adapter / FILE).write_text(text, encoding="utf-8")
    Console().print(f"[green]wrote[/] {adapter / FILE}")


def _of(name: str, path: Path) -> dict[str, Any]:
    """The record in `path`.

    Raises:
        DataError: it is no record of this package with a table, or another adapter's.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        own = record["settings"]["adapter"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no record of an adapter ({type(error).__name__}: {error})") from error
    if own != name:
        raise DataError(f"{path} is a record of {own}; expected one of {name}")
    if not {"scores", "methods", "calibration"} & set(record):
        raise DataError(f"{path} holds neither scores nor methods; give a record of evaluate, bench or calibrate")
    return record
