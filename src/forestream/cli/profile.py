"""`forestream profile`: what passes cost on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forestream.cli import loading, options
from forestream.cli.output import write_json
from forestream.cli.progress import counted

if TYPE_CHECKING:
    from forestream.cost import Profile
    from forestream.generation import Generator


def profile(
    adapter: options.ShippedAdapter = None,
    base: options.Base = None,
    dtype: options.DTypeName = options.DType.auto,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    context: Annotated[int, typer.Option(min=1, help="Tokens in front of the measured passes.")] = 128,
    output: Annotated[
        Path | None,
        typer.Option("--output", dir_okay=False, help="Write the costs into this file, for `forestream cost`, `tune`."),
    ] = None,
) -> None:
    """Measure the cost of a pass by its number of slots: one layer, the head, and everything around them.

    A row is a slot that goes through together with others: a node of the draft tree or a stream. While rows are few, a
    pass takes as long as reading the weights once, and more rows are nearly free: that is what drafting lives on. Where
    the column "of one row" begins to climb, larger trees begin to cost.

    Measure on an idle machine. Example: forestream profile --output machine.json
    """
    dtype = options.dtype_on(device, dtype)
    folder = options.shipped_adapter(adapter)
    generator = loading.load_generator(folder, base, dtype, None, device, compile, quantise)
    costs = measure(generator, folder, options.precision(dtype, quantise), device, compile, context)
    Console().print(_table(costs))
    if output is not None:
        write_json(output, asdict(costs))


def measure(
    generator: Generator,
    folder: Path,
    precision: str,
    device: str,
    compile: options.CompileForm,
    context: int = 128,
) -> Profile:
    """The profile of a loaded model, behind a progress bar."""
    from forestream.manifest import Manifest
    from forestream.profiling import ROUNDS, ROWS
    from forestream.profiling import profile as run
    from forestream.tuning import this_setup

    setup = this_setup(precision, device, options.compile_how(compile))
    with counted("measuring passes", len(ROWS) + ROUNDS) as advance:
        return run(generator.model, Manifest.read(folder).base.name, setup, context=context, advance=lambda: advance(1))


def _table(costs: Profile) -> Table:
    title = f"{costs.model}, {costs.dtype}, compile {costs.compile}, {costs.processor}, {costs.threads} threads"
    table = Table(title=title, box=SIMPLE_HEAD, caption_justify="left")
    drafts = costs.draft_head
    heads = ("head, ms", "draft head, ms") if drafts else ("head, ms",)
    for heading in ("rows", "layer, ms", *heads, "whole pass, ms", "of one row"):
        table.add_column(heading, justify="right")
    whole = {rows: costs.layers * costs.layer(rows) + costs.head(rows) for rows, _ in costs.layer.points}
    first = next(iter(whole.values()))
    for rows, seconds in costs.layer.points:
        cells = (1e3 * seconds, 1e3 * costs.head(rows), *([1e3 * drafts(rows)] if drafts else []), 1e3 * whole[rows])
        table.add_row(str(rows), *(f"{cell:.2f}" for cell in cells), f"{whole[rows] / first:.2f}")
    table.caption = (
        f"Around a plain pass {1e3 * costs.overhead:.1f} ms; drafting, verifying and committing "
        f"{1e3 * costs.draft_overhead:.1f} ms more."
    )
    return table
