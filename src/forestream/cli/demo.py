"""`forestream demo`: the same text, written plainly and by forestream, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forestream.cli import loading, options
from forestream.cli.output import write_json
from forestream.cli.writing import ACCEPTED, OWN, figures, heading, tree_form

if TYPE_CHECKING:
    from forestream.config import DecodeSettings
    from forestream.generation import Generation, Generator
    from forestream.steps import Counters

PROMPTS: Final = (
    "name[Alimentum], eatType[pub], food[English], priceRange[moderate], customer rating[3 out of 5], "
    "area[riverside], familyFriendly[yes], near[Café Rouge] ->",
    "name[The Waterman], food[Italian], priceRange[high], customer rating[average], area[city centre], "
    "familyFriendly[no], near[Crowne Plaza Hotel] ->",
    "name[Wildwood], eatType[restaurant], food[Indian], priceRange[less than £20], area[riverside], "
    "familyFriendly[yes] ->",
    "name[The Punter], eatType[coffee shop], food[French], priceRange[cheap], customer rating[5 out of 5], "
    "area[riverside] ->",
    "name[Giraffe], eatType[pub], food[Fast food], priceRange[more than £30], customer rating[low], "
    "area[city centre], familyFriendly[yes] ->",
)
"""Put together for this demo, out of the names and values that the shipped adapter was trained to write about."""

NEAR_TIE: Final = 0.5
"""Logits this close may change places by rounding: bfloat16 tells numbers between 16 and 32 apart in steps of 1/8."""

_FIGURES: Final = 68  # columns that the table needs beside the prompts


@dataclass(frozen=True)
class Pair:
    """One prompt, written both ways.

    Attributes:
        margin: where the texts part, how far apart the logits of the two tokens are; None if the texts are identical.
    """

    prompt: str
    plain: Generation
    ours: Generation
    margin: float | None

    @property
    def identical(self) -> str:
        if self.margin is None:
            return "yes"
        return "no (near tie)" if self.margin <= NEAR_TIE else f"no (margin {self.margin:.2f})"

    def record(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "plain": {"text": self.plain.text, **figures(self.plain.counters)},
            "forestream": {"text": self.ours.text, **figures(self.ours.counters)},
            "speedup": _speedup(self.plain.counters, self.ours.counters),
            "identical": self.margin is None,
            "first_difference_margin": self.margin,
        }


def demo(
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Your own prompt instead of the five built in; may be given several times."),
    ] = None,
    adapter: options.ShippedAdapter = None,
    base: options.Base = None,
    dtype: options.DTypeName = options.DType.auto,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    max_new_tokens: options.MaxNewTokens = 96,
    settings: options.Settings = None,
    nodes: options.Nodes = None,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    json_file: options.JsonFile = None,
) -> None:
    """Watch the same text being written twice: one token a pass, and by drafting ahead.

    Without --nodes and without a settings file of `forestream tune`, the fastest of three settings is taken, after a
    try.

    The model turns facts about made-up restaurants into sentences, first plainly, then by forestream. Both run the
    same weights on the same machine, each after one warm-up run; times are those of the passes, drawing is not timed.

    The texts must be identical: drafts only save passes. With --dtype float32 a difference is an error (exit code 1);
    in bfloat16 rounding may decide between two words that are nearly tied, and the table says so.

    --json writes: prompts (each with plain and forestream: text and figures; speedup, identical,
    first_difference_margin), total (plain, forestream, speedup, identical), and what it was run with.
    """
    dtype = options.dtype_on(device, dtype)
    folder = options.shipped_adapter(adapter)
    tuned = options.tuned(settings, folder, dtype, device, compile, quantise)
    decoding = options.settings_from(tuned, nodes=nodes, max_new_tokens=max_new_tokens)
    generator = loading.load_generator(folder, base, dtype, decoding, device, compile, quantise)
    console = Console(highlight=False)
    prompts = tuple(prompt) if prompt else PROMPTS
    with Console(stderr=True).status("warming up: compiling, and one text by each method, not counted"):
        if tuned is None and nodes is None:
            generator.settings = _fastest(generator, prompts[0])
        generator.collect(generator.plain_steps(prompts[0]))
        generator.generate(prompts[0])
    console.print(_introduction(generator, folder, options.precision(dtype, quantise)))
    pairs = [_compare(generator, console, number, given, len(prompts)) for number, given in enumerate(prompts, 1)]
    plain, ours = (_sum([getattr(pair, side).counters for pair in pairs]) for side in ("plain", "ours"))
    console.print(_table(pairs, plain, ours, console.width))
    console.print(_explanation(plain, ours))
    if json_file is not None:
        total = {
            "plain": figures(plain),
            "forestream": figures(ours),
            "speedup": _speedup(plain, ours),
            "identical": all(pair.margin is None for pair in pairs),
        }
        record = {**heading(folder, generator), "prompts": [pair.record() for pair in pairs], "total": total}
        write_json(json_file, record)
    _judge(pairs, dtype)


def _fastest(generator: Generator, prompt: str) -> DecodeSettings:
    """Of a tree with deferred streams and chains with fused ones, what writes this prompt's text fastest here."""
    usual, streams = generator.settings, generator.model.stream_config.streams
    chain = replace(usual, tree="full", shape=None, k=1, carriers="fused")
    tried = [usual, *(replace(chain, streams=used) for used in range(max(streams - 1, 1), streams + 1))]
    speeds = {}
    for settings in tried:
        generator.settings = settings
        generator.generate(prompt)  # compiles
        speeds[settings] = generator.generate(prompt).counters.tokens_per_second
    return max(tried, key=lambda settings: speeds[settings])


def _introduction(generator: Generator, folder: Path, precision: str) -> Text:
    model, settings = generator.model, generator.settings
    return Text.assemble(
        f"adapter {folder.name} ({model.stream_config.mode}, {model.stream_config.streams} streams), {precision}, "
        f"{tree_form(settings)}, streams {settings.carriers}\n",
        ("drafted, then accepted", ACCEPTED),
        "   ",
        ("the main stream's own", OWN),
    )


def _compare(generator: Generator, console: Console, number: int, prompt: str, prompts: int) -> Pair:
    """Write one prompt both ways, in view."""
    from forestream.agreement import first_difference_margin
    from forestream.cli.stage import Side, Stage
    from forestream.data import prompt_ids

    console.print(Text.assemble("\n", (f"{number} of {prompts}  ", "bold"), prompt), soft_wrap=not console.is_terminal)
    sides = Side("plain decoding", generator.text), Side("forestream", generator.text)
    runs = generator.plain_steps(prompt), generator.steps(prompt)
    if console.is_terminal:
        with Stage(console, sides) as stage:
            plain, ours = (generator.collect(stage.watch(side, run)) for side, run in zip(sides, runs, strict=True))
    else:
        plain, ours = (generator.collect(run) for run in runs)
        for side, generation in zip(sides, (plain, ours), strict=True):
            for step in generation.steps:
                side.add(step)
            console.print(Text.assemble(f"{side.title}: {side.speed}\n  ", side.text), soft_wrap=True)
    margin = None
    if plain.tokens != ours.tokens:
        ids = prompt_ids(generator.tokenizer, prompt)
        margin = first_difference_margin(generator.model, ids, plain.tokens, ours.tokens)
    return Pair(prompt, plain, ours, margin)


def _sum(counters: Sequence[Counters]) -> Counters:
    from forestream.steps import Counters

    total = Counters()
    for one in counters:
        total.merge(one)
    return total


def _speedup(plain: Counters, ours: Counters) -> float | None:
    """Ratio of the decoding speeds; None where nothing was decoded after the prompt pass."""
    before, after = plain.tokens_per_second, ours.tokens_per_second
    return round(after / before, 4) if before and after else None


def _table(pairs: Sequence[Pair], plain: Counters, ours: Counters, width: int) -> Table:
    title = "\nplain → forestream"
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE, show_footer=True)
    table.add_column("prompt", "total", width=max(12, width - _FIGURES), no_wrap=True, overflow="ellipsis")
    same = sum(pair.margin is None for pair in pairs)
    footers = (*_cells(plain, ours), f"{same} of {len(pairs)}")
    for name, footer in zip(("tokens", "passes", "tokens/s", "speedup", "identical"), footers, strict=True):
        table.add_column(name, footer, justify="right", no_wrap=True)
    for pair in pairs:
        style = "" if pair.margin is None else "yellow"
        table.add_row(Text(pair.prompt), *_cells(pair.plain.counters, pair.ours.counters), Text(pair.identical, style))
    return table


def _cells(plain: Counters, ours: Counters) -> tuple[str, str, str, str]:
    speedup = _speedup(plain, ours)
    tokens = str(ours.generated)
    return (
        tokens if plain.generated == ours.generated else f"{plain.generated} → {tokens}",
        f"{plain.passes} → {ours.passes}",
        f"{plain.tokens_per_second:.1f} → {ours.tokens_per_second:.1f}",
        f"{speedup:.2f}x" if speedup else "-",
    )


def _explanation(plain: Counters, ours: Counters) -> str:
    if not plain.passes or not ours.passes:
        return "Every text ended with the prompt pass; there was nothing to speed up."
    cost = (ours.decode_seconds / ours.passes) / (plain.decode_seconds / plain.passes)
    speedup = _speedup(plain, ours)
    return (
        f"forestream needed {ours.passes} passes for {ours.generated} tokens (call reduction "
        f"{ours.call_reduction:.2f}): a pass writes the main stream's own next token and, on average, "
        f"{ours.mean_acceptance_length - 1:.2f} drafts that it accepts (mean acceptance length "
        f"{ours.mean_acceptance_length:.2f}). It took {cost:.2f} times as long as a plain pass, so in all the text "
        f"came {speedup:.2f} times as fast."
    )


def _judge(pairs: Sequence[Pair], dtype: options.DType) -> None:
    """Say what a difference means.

    Raises:
        Exit: code 1, if texts differ in float32.
    """
    margins = [pair.margin for pair in pairs if pair.margin is not None]
    if not margins:
        return
    console = Console(stderr=True, highlight=False)
    where = (
        f"{len(margins)} of {len(pairs)} texts differ; where they part, the two tokens' logits lay up to "
        f"{max(margins):.3g} apart"
    )
    if dtype == options.DType.float32:
        console.print(f"[bold red]error:[/] {where}; in float32 there must be no difference, please report it")
        raise typer.Exit(1)
    console.print(
        f"[yellow]{where}. In bfloat16 rounding decides between tokens that are nearly tied; --dtype float32 gives "
        "identical texts.[/]"
    )
