"""`forestream calibrate`: what pruning keeps, what it loses, and what is left of the passes it saves."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forestream.cli import loading, options
from forestream.cli.output import write_json
from forestream.cli.progress import counted
from forestream.config import DecodeSettings
from forestream.errors import ConfigError

if TYPE_CHECKING:
    from forestream.calibration import Kept, Scored

_THRESHOLDS: Final = "0.0001,0.001,0.003,0.01,0.03,0.1"
_SIZES: Final = "4,8,16"


def calibrate(
    adapter: options.ShippedAdapter = None,
    task: Annotated[
        str, typer.Option(help="Whose prompts: e2e, sql, dialogsum, chat, spec_bench, gsm8k, humaneval or synthetic.")
    ] = "e2e",
    split: Annotated[str, typer.Option(help="Rules are chosen on validation and reported on test.")] = "validation",
    limit: Annotated[int, typer.Option(min=1, help="How many distinct prompts.")] = 24,
    thresholds: Annotated[str, typer.Option(help="Values of --prune-below, with commas between.")] = _THRESHOLDS,
    sizes: Annotated[str, typer.Option(help="Values of --prune-to, with commas between; empty for none.")] = _SIZES,
    tree: options.Tree = options.TreeForm.full,
    nodes: options.Nodes = None,
    k: options.K = None,
    streams: options.Streams = None,
    data_dir: options.DataDir = None,
    base: options.Base = None,
    dtype: options.DTypeName = options.DType.auto,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    max_new_tokens: options.TaskTokens = None,
    json_file: options.JsonFile = None,
) -> None:
    """Show what each pruning rule keeps of the draft trees, and which good edges it loses.

    The model writes the texts of some prompts, and at every place of every text the tree that decoding would draft
    there is scored by the exit scorer, unpruned. Every rule is then replayed on these trees: nodes kept in a pass,
    edges lost that the text follows (drafts that would have been accepted), tokens per pass, and what share that is of
    the unpruned trees' tokens per pass. In float32 the counts are those of a real run under the rule; in half precision
    they may differ at near ties. Times are not predicted: `forestream bench` with a method such as full-2+prune
    measures them.

    Example: forestream calibrate --task e2e --data-dir data --tree full --k 2 --thresholds 0.001,0.01,0.1
    """
    from forestream import provenance
    from forestream.calibration import score_text
    from forestream.data import prompts_of
    from forestream.tasks import get_task

    dtype = options.dtype_on(device, dtype)
    made = provenance.collect()
    folder = options.shipped_adapter(adapter)
    chosen = get_task(task)
    settings = options.settings_from(
        tree=tree, nodes=nodes, k=k, streams=streams, max_new_tokens=max_new_tokens or chosen.max_new_tokens
    )
    rules = _rules(settings, thresholds, sizes)
    examples = chosen.grouped(split, data_dir)[:limit]
    generator = loading.load_generator(folder, base, dtype, settings, device, compile, quantise)
    texts: list[tuple[Scored, ...]] = []
    with counted("scoring the trees of every place", len(examples)) as advance:
        for prompt in prompts_of(generator.tokenizer, examples):
            texts.append(score_text(generator.model, prompt, settings, generator.eos))
            advance(1)
    found = _replayed(rules, texts)
    Console().print(_table(f"{task}, {split} split, {len(examples)} texts, {_shape(settings)}", found))
    if json_file is not None:
        run = {"adapter": folder.resolve().name, "task": task, "split": split, "inputs": len(examples)}
        how = {"dtype": dtype.value, "quantise": quantise.value, "device": device, "decode": asdict(settings)}
        write_json(json_file, {"provenance": made, "settings": {**run, **how}, "calibration": found})


def _rules(settings: DecodeSettings, thresholds: str, sizes: str) -> dict[str, DecodeSettings]:
    """Settings by the name of their pruning rule, the one that keeps all first.

    Raises:
        ConfigError: a value is no number or out of range.
    """
    try:
        below = sorted({float(one) for one in thresholds.split(",") if one.strip()})
        most = sorted({int(one) for one in sizes.split(",") if one.strip()}, reverse=True)
    except ValueError as error:
        raise ConfigError(f"--thresholds {thresholds!r} and --sizes {sizes!r}: {error}; expected numbers") from error
    rules = {"all": settings}
    rules |= {f"prune_below {one:g}": replace(settings, prune_below=one) for one in below}
    return rules | {f"prune_to {one}": replace(settings, prune_to=one) for one in most}


def _replayed(rules: dict[str, DecodeSettings], texts: list[tuple[Scored, ...]]) -> list[dict[str, Any]]:
    """An entry of the record for each rule.

    Raises:
        ConfigError: no text has a pass after its prompt's.
    """
    from forestream.calibration import replay
    from forestream.pruning import keep_rule

    usable = [places for places in texts if places]
    if not usable:
        raise ConfigError("no text goes beyond its first token; there is nothing to prune")
    entries: list[dict[str, Any]] = []
    for name, settings in rules.items():
        runs = [replay(places, keep_rule(settings)) for places in usable]
        total: Kept = sum(runs[1:], runs[0])
        entries.append(
            {
                "rule": name,
                **asdict(total),
                "offered_per_pass": round(total.offered_per_pass, 3),
                "nodes_per_pass": round(total.nodes_per_pass, 3),
                "share_lost": round(total.share_lost, 4),
                "call_reduction": round(total.call_reduction, 4),
            }
        )
        entries[-1]["share_of_call_reduction"] = round(total.call_reduction * entries[0]["passes"] / total.tokens, 4)
    return entries


def _shape(settings: DecodeSettings) -> str:
    return f"full trees, k = {settings.k}" if settings.tree == "full" else f"budget trees of {settings.nodes}"


def _table(title: str, entries: list[dict[str, Any]]) -> Table:
    from forestream.bench.report import calibration_cells

    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("rule", "nodes kept", "good edges lost", "tokens/pass", "share"):
        table.add_column(heading, justify="left" if heading == "rule" else "right", no_wrap=True)
    for row in entries:
        table.add_row(*calibration_cells(row))
    return table
