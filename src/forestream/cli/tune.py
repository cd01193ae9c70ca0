"""`forestream tune`: the settings that are fastest for an adapter on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forestream.cli import loading, options
from forestream.cli.output import write_json
from forestream.cli.profile import measure
from forestream.cli.progress import counted
from forestream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forestream.cost import Profile
    from forestream.generation import Generator
    from forestream.tuning import Prediction


def tune(
    adapter: options.ShippedAdapter = None,
    task: Annotated[
        str, typer.Option(help="Whose prompts: e2e, sql, dialogsum, chat, spec_bench, gsm8k, humaneval or synthetic.")
    ] = "e2e",
    split: Annotated[str, typer.Option(help="Settings are chosen on validation and reported on test.")] = "validation",
    limit: Annotated[int, typer.Option(min=1, help="How many distinct prompts.")] = 24,
    candidates: Annotated[int, typer.Option(min=1, help="How many of the best predictions are run.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every candidate on every prompt.")] = 1,
    batches: Annotated[
        str | None,
        typer.Option(help="Also choose for so many texts together: numbers that increase, such as 2,4,8."),
    ] = None,
    confirm: Annotated[
        str | None,
        typer.Option(help="Also run the same candidates on this split, and tell how far the choice is from its best."),
    ] = None,
    data_dir: options.DataDir = None,
    base: options.Base = None,
    dtype: options.DTypeName = options.DType.auto,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    profile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Costs that `forestream profile` measured; by default anew."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", dir_okay=False, help="Settings file; by default decoding.json beside the adapter."),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Find the fastest settings for an adapter on this machine, and write them into a settings file.

    First the cost of a pass is measured, for any number of slots. Then the model writes the texts of some prompts, and
    what its streams would have drafted at every place is noted. Both together predict the speed of every setting: form
    and size of the tree, number of streams, fused or deferred. The best few are run against plain decoding, in turns,
    and the fastest of them is chosen. If that is plain decoding, the settings say so and nothing is drafted.

    generate, bench and demo use the file beside the adapter by themselves, as long as the machine, the dtype and the
    way of compiling are the same.

    Tune on an idle machine. Example: forestream tune --task e2e --data-dir data
    """
    from forestream import provenance, tuning
    from forestream.cost import Profile
    from forestream.data import prompts_of
    from forestream.tasks import get_task

    dtype = options.dtype_on(device, dtype)
    sizes, made = _sizes(batches), provenance.collect()
    folder = options.shipped_adapter(adapter)
    chosen = get_task(task)
    texts = chosen.grouped(split, data_dir)[:limit]  # before anything that takes long
    decoding = options.settings_from(max_new_tokens=chosen.max_new_tokens)
    generator = loading.load_generator(folder, base, dtype, decoding, device, compile, quantise)
    precision = options.precision(dtype, quantise)
    prompts = prompts_of(generator.tokenizer, texts)
    costs = (
        measure(generator, folder, precision, device, compile)
        if profile is None
        else Profile.from_dict(json.loads(profile.read_text()))
    )
    predictions = _predictions(generator, costs, prompts)
    best = tuning.shortlist(predictions, candidates)

    def run(what: str, ids: Sequence[tuple[int, ...]], rows: int = 1) -> dict[str, dict[str, Any]]:
        with counted(what, len(ids)) as advance:
            return tuning.measure(generator, best, ids, repeats, lambda: advance(1), rows)

    results = run("running the best", prompts)
    name, settings = tuning.choose(best, results)
    errors = [_error(one, results[one.name]) for one in best]
    Console().print(
        _table(best, results, costs, name), f"largest error of a predicted time per pass: {max(map(abs, errors)):.0%}"
    )
    setup = tuning.this_setup(precision, device, options.compile_how(compile))
    together, by_rows = {}, []
    for rows in sizes:
        together[rows] = run(f"running the best, {rows} texts together", prompts, rows)
        fastest, own = tuning.choose(best, together[rows])
        by_rows.append((rows, own))
        Console().print(f"{rows} texts together: {fastest} is the fastest")
    confirmed = {}
    if confirm is not None:
        others = prompts_of(generator.tokenizer, chosen.grouped(confirm, data_dir)[:limit])
        confirmed = run(f"running the same on {confirm}", others)
        Console().print(f"on {confirm}, {name} reaches {tuning.share_of_best(name, confirmed):.0%} of the best speed")
    write_json(path := output or folder / tuning.FILE, asdict(tuning.Tuned(setup, settings, tuple(by_rows))))
    Console(stderr=True).print(f"{name} is the fastest; {path} says so", style="dim", highlight=False)
    if json_file is not None:
        about = {"adapter": folder.name, "task": task, "split": split, "dtype": precision, "prompts": len(prompts)}
        record: dict[str, Any] = {
            "provenance": made,
            "settings": {**about, "compile": setup.compile, "repeats": repeats, "device": device},
            "profile": asdict(costs),
            "predictions": [asdict(one) for one in predictions],
            "methods": results,
            "together": together,
            "confirmed": {"split": confirm, "methods": confirmed} if confirm is not None else None,
            "chosen": {"name": name, "settings": asdict(settings)},
            "prediction_errors": {one.name: round(error, 4) for one, error in zip(best, errors, strict=True)},
        }
        write_json(json_file, record)


def _predictions(generator: Generator, costs: Profile, prompts: Sequence[tuple[int, ...]]) -> list[Prediction]:
    """What every setting of the grid is expected to do after these prompts."""
    from forestream import tuning

    with counted("recording what streams draft", len(prompts)) as advance:
        traces = tuning.record_traces(generator, prompts, lambda: advance(1))
    streams = generator.model.stream_config.streams
    offered = tuning.grid(traces, streams, generator.settings)
    with counted("predicting settings", len(offered)) as advance:
        return tuning.predict_all(costs, traces, offered, lambda: advance(1))


def _sizes(batches: str | None) -> list[int]:
    """Raises:
    ConfigError: the numbers do not increase from 2.
    """
    try:
        sizes = [int(one) for one in batches.split(",")] if batches else []
    except ValueError:
        sizes = [0]
    if sizes != sorted(set(sizes)) or any(one < 2 for one in sizes):
        raise ConfigError(f"--batches is {batches!r}; expected numbers from 2 that increase, such as 2,4,8")
    return sizes


def _error(prediction: Prediction, result: dict[str, Any]) -> float:
    """Predicted over measured seconds per pass, less 1."""
    return float(prediction.pass_seconds / result["seconds_per_pass"]) - 1


def _table(best: Sequence[Prediction], results: dict[str, dict[str, Any]], costs: Profile, chosen: str) -> Table:
    from forestream.cost import plain_seconds

    table = Table(title="predicted → measured", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("setting", "tokens a pass", "ms a pass", "tokens/s", "speedup"):
        named = heading == "setting"  # long names are folded before figures are cut
        table.add_column(heading, justify="left" if named else "right", no_wrap=not named, overflow="fold")
    own = plain_seconds(costs)
    rows = [("plain", 1.0, own, 1 / own, 1.0)]
    rows += [(p.name, p.tokens_per_pass, p.pass_seconds, p.tokens_per_second, p.speedup) for p in best]
    for name, tokens, seconds, speed, speedup in rows:
        found = results[name]
        table.add_row(
            name,
            f"{tokens:.2f} → {found['call_reduction']:.2f}",
            f"{1e3 * seconds:.1f} → {1e3 * found['seconds_per_pass']:.1f}",
            f"{speed:.1f} → {found['tokens_per_second']:.1f}",
            f"{speedup:.2f} → {found['speedup']['of_totals']:.2f}",
            style="green" if name == chosen else "",
        )
    return table
