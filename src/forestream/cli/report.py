"""`forestream report`: result files as one page, and figures worked out again from their log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forestream.errors import ConfigError


def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORD...",
            help="Files that commands wrote with --json (bench, tune, evaluate, calibrate), records of the scripts in "
            "benchmarks/, or the .jsonl log of a training.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", file_okay=False, help="Folder for report.md and report.html, made if need be."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Work the counters of bench records out again from their log (`forestream bench --steps`) and "
            "compare: exit code 1 if they differ.",
        ),
    ] = False,
) -> None:
    """Turn result files into Markdown and one page of HTML.

    The page holds its plots and needs nothing but itself. Bench records that differ in one setting only (precision,
    batch size, temperature, streams, length of prompts) are also drawn over that setting. The same files give the
    same bytes.

    Examples:

    forestream report benchmarks/results/*.json --output report

    forestream report --check run.json
    """
    from forestream.bench.results import read_all

    if output is None and not check:
        raise ConfigError("nothing is asked for; give --output FOLDER for a report, or --check")
    results = read_all(records)
    if output is not None:
        from forestream.bench.page import report_markdown, report_page, sections_of

        sections = sections_of(results)
        output.mkdir(parents=True, exist_ok=True)
        for name, text in (("report.md", report_markdown(sections)), ("report.html", report_page(sections))):
            _write(output / name, text)
            typer.echo(output / name)
    if check:
        from forestream.bench.log import differences
        from forestream.errors import DataError

        found = []
        for result in results:
            try:
                found += [f"{result.path}: {line}" for line in differences(result.record)]
            except DataError as error:
                raise DataError(f"{result.path}: {error}") from error
        for line in found:
            typer.echo(line)
        if found:
            raise typer.Exit(1)
        Console(stderr=True).print(f"{len(results)} checked: figures are those of the log", style="green")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
