"""`forestream evaluate`: how good an adapter's texts are, by its task's own score, alone or against its twin's."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forestream.cli import loading, options
from forestream.cli.output import write_json
from forestream.cli.progress import counted
from forestream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forestream.evaluation import Written
    from forestream.quality import Comparison
    from forestream.tasks import Example, Task


class Way(StrEnum):
    forestream = "forestream"
    plain = "plain"
    batched = "batched"


def evaluate(
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Adapter folder, as `forestream train` writes it.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            exists=True,
            dir_okay=False,
            help="Instead of --adapter: a record of this command (--json), whose texts are scored as they are.",
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(help="Which task's inputs and score: e2e, sql, dialogsum, chat or synthetic.")
    ] = "e2e",
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="How many distinct inputs; all by default.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            exists=True,
            help="The twin: an adapter folder trained alike with --streams 0, or a record of its texts (--json). The "
            "exit code is then 1 if the loss of quality is not shown to be within --bound.",
        ),
    ] = None,
    bound: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Loss that is allowed; 0.02 is 2 points of 100.")
    ] = 0.02,
    way: Annotated[
        Way,
        typer.Option(
            help="How the texts are written: forestream or plain, one at a time, or batched, the host library's own "
            "greedy generate on --batch-size prompts. In float32 all three write the same texts."
        ),
    ] = Way.forestream,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time for --way batched.")] = 16,
    data_dir: options.DataDir = None,
    base: options.Base = None,
    dtype: options.DTypeName = options.DType.auto,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    max_new_tokens: options.TaskTokens = None,
    json_file: options.JsonFile = None,
) -> None:
    """Score an adapter's texts on distinct inputs, against all references of each; with --against, guard their quality.

    The guard holds if, for every score, the whole 95 % interval of the difference (adapter less twin, paired bootstrap
    over the inputs) lies above -bound. A loss that is merely not shown to be smaller fails too: take more inputs. The
    exit code is 0 if it holds, 1 if it does not, 2 on errors.

    Example: forestream evaluate --adapter adapters/smollm2-135m-e2e --task e2e --data-dir data --limit 50

    Example: forestream evaluate --texts joint.json --against twin.json --task e2e --data-dir data
    """
    from forestream import provenance
    from forestream.evaluation import Written, digest, outputs
    from forestream.quality import compare
    from forestream.tasks import get_task

    dtype = options.dtype_on(device, dtype)
    if (adapter is None) == (texts is None):
        raise ConfigError("give either --adapter, to write texts, or --texts, to score written ones")
    made = provenance.collect()
    chosen = get_task(task)
    if not chosen.metric_names:
        raise ConfigError(f"{task} scores no texts: it is there to measure speed with; use `forestream bench`")
    cap = max_new_tokens or chosen.max_new_tokens
    settings = options.settings_from(max_new_tokens=cap)
    # The host library's own generate runs the host's own code.
    form = options.CompileForm.off if way == Way.batched else compile

    def write(folder: Path, examples: list[Example]) -> Written:
        generator = loading.load_generator(folder, base, dtype, settings, device, form, quantise)
        with counted(f"inputs, {folder.name}", len(examples)) as advance:
            found = outputs(generator, examples, way.value, batch_size, advance)
        run = {"adapter": folder.resolve().name, "task": task, "split": split, "inputs": len(examples)}
        how = {"way": way.value, "dtype": dtype.value, "quantise": quantise.value, "max_new_tokens": cap}
        return Written(tuple(found), {**run, **how, "prompts": digest(examples)})

    sources = [source for source in (adapter or texts, against) if source is not None]
    examples, written = _gather(sources, write, task, split, chosen.grouped(split, data_dir), limit)
    own, *twin = [_scored(chosen, one, examples) for one in written]
    record = {"provenance": made, **own}
    title = f"{task}, {split} split, {len(examples)} inputs"
    found = {}
    if twin:
        found = {name: compare(own["each"][name], twin[0]["each"][name], bound) for name in chosen.metric_names}
        record |= {"against": twin[0], "guard": {name: _entry(one) for name, one in found.items()}}
    Console().print(_guard(title, found) if found else _scores(title, own["scores"]))
    if json_file is not None:
        write_json(json_file, record)
    _answer(found, bound)


def _scored(task: Task, written: Written, examples: list[Example]) -> dict[str, Any]:
    """One adapter's part of the record."""
    each = task.score_each(written.outputs, examples)
    return {
        "settings": written.settings,
        "scores": {name: round(score, 4) for name, score in task.score(written.outputs, examples).items()},
        "each": {name: [round(score, 4) for score in own] for name, own in each.items()},
        "outputs": list(written.outputs),
    }


def _gather(
    sources: list[Path],
    write: Callable[[Path, list[Example]], Written],
    task: str,
    split: str,
    examples: list[Example],
    limit: int | None,
) -> tuple[list[Example], list[Written]]:
    """The inputs and each source's texts for them: read from records, which have the say how many, or written.

    Raises:
        ConfigError: two sources were written in different ways.
        DataError: a record is of other inputs.
    """
    from forestream.evaluation import Written

    saved = {source: Written.read(source) for source in sources if source.is_file()}
    count = limit or min([len(examples), *(len(one.outputs) for one in saved.values())])
    chosen = examples[:count]
    written = [
        saved[source].on(task, split, examples, len(chosen)) if source in saved else write(source, chosen)
        for source in sources
    ]
    for name in ("dtype", "quantise", "max_new_tokens"):
        values = [one.settings.get(name, "off") for one in written]
        if len(set(values)) > 1:
            raise ConfigError(
                f"the texts were written with {name} {values[0]} and {values[1]}; write both alike, so that only the "
                "adapters differ"
            )
    return chosen, written


def _entry(one: Comparison) -> dict[str, Any]:
    return {**asdict(one), "difference": one.difference, "held": one.held, "place": one.place}


def _scores(title: str, scores: dict[str, float]) -> Table:
    table = Table(title=title)
    for name in scores:
        table.add_column(name, justify="right")
    table.add_row(*(f"{score:.2f}" for score in scores.values()))
    return table


def _guard(title: str, found: dict[str, Comparison]) -> Table:
    table = Table(title=f"{title}; intervals of 95 %")
    for heading in ("score", "adapter", "twin", "difference", "adapter is", "guard"):
        table.add_column(heading, justify="left" if heading in ("score", "guard") else "right")
    for name, one in found.items():
        table.add_row(
            name,
            f"{one.joint:.2f}",
            f"{one.twin:.2f} ({one.twin_interval.low:.2f} to {one.twin_interval.high:.2f})",
            f"{one.difference:+.2f} ({one.interval.low:+.2f} to {one.interval.high:+.2f})",
            f"{one.place} the twin's",
            "holds" if one.held else "lost" if one.lost else "not shown",
            style="" if one.held else "red",
        )
    return table


def _answer(found: dict[str, Comparison], bound: float) -> None:
    """Say what failed, if anything did, and end with code 1."""
    console = Console(stderr=True)
    for name, one in found.items():
        if one.held:
            continue
        told = (
            f"{name} lost more than {100 * bound:g} points: the difference lies below {one.interval.high:+.2f}"
            if one.lost
            else f"{name} may have lost more than {100 * bound:g} points: the difference is {one.difference:+.2f}, its "
            f"interval reaches down to {one.interval.low:+.2f}; take more inputs, or allow more with --bound"
        )
        console.print(told, style="red", highlight=False, soft_wrap=True)
    if not all(one.held for one in found.values()):
        raise typer.Exit(1)
