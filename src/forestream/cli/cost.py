"""`forestream cost`: when drafting inside the model pays, against a second model and on a measured machine."""

from __future__ import annotations

from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forestream.cli import options
from forestream.cli.output import write_json
from forestream.cost import (
    Profile,
    break_even_acceptance,
    break_even_tokens,
    pass_seconds,
    plain_seconds,
    streaming_over_two_model,
    two_model_tokens,
)
from forestream.errors import ConfigError

_Carriers = Literal["fused", "deferred"]
_CARRIERS: Final[tuple[_Carriers, ...]] = get_args(_Carriers)
_COST_RATIOS: Final = (2, 4, 8, 16, 32, 64)
_ACCEPTANCE_RATIOS: Final = (0.5, 0.75, 1.0, 1.25, 1.5)
_NODES: Final = (4, 8, 16, 32)
_PLOTS: Final = (".png", ".svg")
_WON, _LOST, _BEST = "green", "red", "bold"


def cost(
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            exists=True,
            dir_okay=False,
            help="A machine's measured costs, as `forestream profile` writes them: predicts the time of a pass there.",
        ),
    ] = None,
    pass_cost: Annotated[
        float,
        typer.Option(
            "--pass-cost",
            help="Cost of one pass with streams, in plain passes of the same model; 1 where streams ride along for "
            "free. `forestream bench` measures it: ms/pass of a method over that of plain.",
        ),
    ] = 1.25,
    gamma: Annotated[
        int, typer.Option("--gamma", min=0, help="Tokens that the rival's draft model writes per target pass.")
    ] = 4,
    alpha: Annotated[
        float,
        typer.Option(
            "--alpha", min=0.0, max=1.0, help="How often the target accepts one of them, those before it accepted."
        ),
    ] = 0.8,
    streams: Annotated[
        int, typer.Option("--streams", min=0, max=64, help="G, streams per carrier, for what --profile predicts.")
    ] = 4,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Draw the map, with its break-even line, into this .png or .svg."),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Compute when drafting pays. Nothing is measured and no model is loaded.

    The map compares Speculative Streaming with two-model decoding, where a small model drafts and the target checks.
    Two models spend gamma draft passes and one target pass on T_two tokens, streaming one somewhat dearer pass on T_ss:

        speed of streaming / speed of two models = (1 + gamma C_draft / C_target) / pass cost * T_ss / T_two

    Down: how much dearer the target is than its draft model. Across: T_ss / T_two. Above 1.00 streaming is faster, even
    where it accepts fewer tokens, because it never waits for a draft model. "Equal at" is the T_ss / T_two where both
    are as fast; "tokens" is the T_ss that it takes, were T_two what --gamma and --alpha make it.

    With --profile a second table says what one pass costs on that machine, by nodes of the draft tree and by the way of
    carrying streams, and how many tokens it has to bring to be faster than plain decoding. A pass brings G + 1 at most.

    --json writes: map, profile (if one was given) with its predictions, and what it was run with.

    Example: forestream cost --pass-cost 1.1 --gamma 5 --plot map.svg
    """
    if plot is not None and plot.suffix.lower() not in _PLOTS:
        raise ConfigError(f"--plot is {plot.name!r}; expected a name that ends in {' or '.join(_PLOTS)}")
    measured = Profile.from_json(_text(profile)) if profile is not None else None
    theirs = two_model_tokens(gamma, alpha)
    record = _map(gamma, pass_cost, theirs)
    console = Console(highlight=False)
    _show(
        console,
        f"speed of streaming over two models, gamma {gamma}, pass cost {pass_cost:g}",
        _map_table(record),
        f"across: T_ss / T_two; tokens: the T_ss that equals T_two = {theirs:.2f} (alpha {alpha:g})",
    )
    predictions = None
    if measured is not None:
        predictions = _predictions(measured, streams)
        _show(
            console,
            f"{measured.model}, {measured.dtype}, {measured.device}, {measured.threads} threads, compile "
            f"{measured.compile}\na plain pass takes {1000 * plain_seconds(measured):.2f} ms",
            _prediction_table(predictions, streams),
            f"break-even: tokens per pass to be as fast as plain; G + 1 = {streams + 1} at most",
        )
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_bytes(_drawing(gamma, pass_cost, plot.suffix.lower().removeprefix(".")))
    if json_file is not None:
        from forestream import provenance

        settings = {"pass_cost": pass_cost, "gamma": gamma, "alpha": alpha, "streams": streams}
        whole: dict[str, Any] = {"provenance": provenance.collect(), "settings": settings, "map": record}
        if measured is not None:
            whole["profile"] = {**asdict(measured), "predictions": predictions}
        write_json(json_file, whole)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}); expected JSON") from error


def _map(gamma: int, pass_cost: float, theirs: float) -> list[dict[str, Any]]:
    """A row per ratio of costs."""
    rows = []
    for ratio in _COST_RATIOS:
        same: dict[str, Any] = {"cost_ratio": ratio, "gamma": gamma, "pass_cost": pass_cost}
        rows.append(
            {
                "cost_ratio": ratio,
                "speedup": {
                    str(across): streaming_over_two_model(acceptance_ratio=across, **same)
                    for across in _ACCEPTANCE_RATIOS
                },
                "equal_at": break_even_acceptance(theirs=1.0, **same),
                "equal_tokens": break_even_acceptance(theirs=theirs, **same),
            }
        )
    return rows


def _show(console: Console, heading: str, table: Table, note: str) -> None:
    console.print(Text(heading, "bold"), table, Text(f"{note}\n", "dim"), sep="\n")


def _map_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    across = [f"{ratio:.2f}" for ratio in _ACCEPTANCE_RATIOS]
    for heading in ("target\n/ draft", *across, "equal\nat", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(f"{value:.2f}", _WON if value >= 1 else _LOST) for value in row["speedup"].values()]
        table.add_row(str(row["cost_ratio"]), *cells, f"{row['equal_at']:.2f}", f"{row['equal_tokens']:.2f}")
    return table


def _predictions(profile: Profile, streams: int) -> list[dict[str, Any]]:
    """A row per tree size: milliseconds per pass and tokens per pass to be as fast as plain, for each way."""
    rows: list[dict[str, Any]] = []
    for nodes in _NODES:
        row: dict[str, Any] = {"nodes": nodes}
        for carriers in _CARRIERS:
            seconds = pass_seconds(profile, nodes, streams, carriers)
            row[carriers] = {
                "milliseconds_per_pass": 1000 * seconds,
                "break_even_call_reduction": break_even_tokens(profile, seconds),
            }
        rows.append(row)
    return rows


def _prediction_table(rows: list[dict[str, Any]], streams: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = [f"{carriers}\n{unit}" for carriers in _CARRIERS for unit in ("ms/pass", "break-even")]
    for heading in ("nodes", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        best = min(row[carriers]["milliseconds_per_pass"] for carriers in _CARRIERS)
        cells = []
        for carriers in _CARRIERS:
            milliseconds, needed = row[carriers].values()
            style = _BEST if milliseconds == best else ""
            cells += [
                Text(f"{milliseconds:.2f}", style),
                Text(f"{needed:.2f}", _WON if needed < streams + 1 else _LOST),
            ]
        table.add_row(str(row["nodes"]), *cells)
    return table


def _drawing(gamma: int, pass_cost: float, form: str) -> bytes:
    """The map as a heat map with the line of equal speed, as a PNG or SVG file; equal arguments, equal bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    steps = range(121)
    low, high = _ACCEPTANCE_RATIOS[0], _ACCEPTANCE_RATIOS[-1]
    across = [low + (high - low) * step / 120 for step in steps]
    down = [_COST_RATIOS[0] * (_COST_RATIOS[-1] / _COST_RATIOS[0]) ** (step / 120) for step in steps]
    speed = [
        [streaming_over_two_model(cost_ratio=y, acceptance_ratio=x, gamma=gamma, pass_cost=pass_cost) for x in across]
        for y in down
    ]
    reach = max(*(max(row) for row in speed), *(1 / min(row) for row in speed))
    with rc_context({"svg.hashsalt": "forestream", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 5), layout="constrained")
        axes = FigureCanvasAgg(figure).figure.subplots()
        norm = LogNorm(1 / reach, reach)
        mesh = axes.pcolormesh(across, down, speed, norm=norm, cmap="PuOr", shading="nearest", rasterized=True)
        axes.set_yscale("log", base=2)
        axes.set_yticks(_COST_RATIOS, [str(ratio) for ratio in _COST_RATIOS])
        if min(map(min, speed)) < 1 < max(map(max, speed)):
            line = axes.contour(across, down, speed, levels=[1.0], colors="black", linewidths=2)
            axes.clabel(line, fmt=lambda _: "equal")
        axes.set_xlabel("tokens per target pass, streaming / two models")
        axes.set_ylabel("cost of a pass, target / draft model")
        axes.set_title(f"speed of streaming over two-model decoding\ngamma {gamma}, pass cost {pass_cost:g}")
        bar = figure.colorbar(mesh, label="above 1 streaming is faster")
        ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4) if 1 / reach <= tick <= reach]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.minorticks_off()
        file = BytesIO()
        figure.savefig(file, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return file.getvalue()
