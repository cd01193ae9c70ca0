"""`forestream evaluate`: how good an adapter's texts are, by its task's own score."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forestream.cli import options
from forestream.cli.output import write_json
from forestream.cli.progress import counted
from forestream.errors import ConfigError


class Way(StrEnum):
    forestream = "forestream"
    plain = "plain"
    batched = "batched"


def evaluate(
    adapter: options.Adapter,
    task: Annotated[
        str, typer.Option(help="Which task's inputs and score: e2e, sql, dialogsum, chat or synthetic.")
    ] = "e2e",
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="How many distinct inputs; all by default.")] = None,
    way: Annotated[
        Way,
        typer.Option(
            help="How the texts are written: forestream or plain, one at a time, or batched, the host library's own "
            "greedy generate on --batch-size prompts. In float32 all three write the same texts."
        ),
    ] = Way.forestream,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time for --way batched.")] = 16,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the data sets; without it they are read from the hub.")
    ] = None,
    base: options.Base = None,
    dtype: options.DTypeName = options.DType.bfloat16,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many tokens; the task's own limit by default.")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Score an adapter's texts on distinct inputs, against all references of each.

    Example: forestream evaluate --adapter adapters/smollm2-135m-e2e --task e2e --data-dir data --limit 50
    """
    from forestream import provenance
    from forestream.evaluation import outputs
    from forestream.tasks import get_task

    made = provenance.collect()
    chosen = get_task(task)
    if not chosen.metric_names:
        raise ConfigError(f"{task} scores no texts: it is there to measure speed with; use `forestream bench`")
    examples = chosen.grouped(split, data_dir)[:limit]
    settings = options.settings_from(max_new_tokens=max_new_tokens or chosen.max_new_tokens)
    # The host library's own generate runs the host's own code.
    form = options.CompileForm.off if way == Way.batched else compile
    generator = options.load_generator(adapter, base, dtype, settings, device, form, quantise)
    with counted("inputs", len(examples)) as advance:
        texts = outputs(generator, examples, way.value, batch_size, advance)
    scores = chosen.score(texts, examples)
    table = Table(title=f"{task}, {split} split, {len(examples)} inputs")
    for name in scores:
        table.add_column(name, justify="right")
    table.add_row(*(f"{score:.2f}" for score in scores.values()))
    Console().print(table)
    if json_file is not None:
        run = {"adapter": adapter.name, "task": task, "split": split, "inputs": len(examples), "way": way.value}
        record = {
            "provenance": made,
            "settings": {
                **run,
                "dtype": dtype.value,
                "quantise": quantise.value,
                "max_new_tokens": settings.max_new_tokens,
            },
            "scores": {name: round(score, 4) for name, score in scores.items()},
            "outputs": texts,
        }
        write_json(json_file, record)
