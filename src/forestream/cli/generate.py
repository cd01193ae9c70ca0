"""`forestream generate`: prompts in, texts out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from forestream.cli import options
from forestream.cli.output import write_json
from forestream.cli.prompts import numbered_lines
from forestream.cli.writing import figures, heading, speed_line
from forestream.errors import PromptError
from forestream.writing import Writing

if TYPE_CHECKING:
    from forestream.generation import Generation, Generator
    from forestream.steps import Step


def generate(
    adapter: options.Adapter,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; without it and without --file, stdin is read, a prompt per line.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", exists=True, dir_okay=False, help="Text file with a prompt per line; blanks are skipped."
        ),
    ] = None,
    base: options.Base = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode plainly, one token a pass: the same text, to compare speeds.")
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Print text while it is written; by default on a terminal only."),
    ] = None,
    settings: options.Settings = None,
    tree: options.Tree = None,
    nodes: options.Nodes = None,
    k: options.K = None,
    streams: options.Streams = None,
    carriers: options.Carriers = None,
    prune_below: options.PruneBelow = None,
    prune_to: options.PruneTo = None,
    max_new_tokens: options.MaxNewTokens = None,
    dtype: options.DTypeName = options.DType.bfloat16,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    json_file: options.JsonFile = None,
) -> None:
    """Write after one or several prompts.

    Texts go to stdout, one after the other; a line of statistics goes to stderr. Settings of the draft tree change
    the speed; in float32 they never change the text.

    --json writes: generations (each with prompt, text, tokens, finish and figures), total, and what it was run with.

    Example: forestream generate --adapter adapters/e2e "name[The Copper Kettle], eatType[pub], area[riverside] ->"
    """
    decoding = options.settings_from(
        options.tuned(settings, adapter, dtype, device, compile, quantise),
        tree=tree,
        nodes=nodes,
        k=k,
        streams=streams,
        carriers=carriers,
        prune_below=prune_below,
        prune_to=prune_to,
        max_new_tokens=max_new_tokens,
    )
    prompts = _prompts(prompt, file)
    generator = options.load_generator(adapter, base, dtype, decoding, device, compile, quantise)
    live = sys.stdout.isatty() if stream is None else stream
    done: list[Generation] = []
    for given in prompts:
        steps = generator.plain_steps(given) if plain else generator.steps(given)
        done.append(generator.collect(_printed(generator, steps) if live else steps))
        typer.echo("" if live else done[-1].text)
    total = _total(done)
    Console(stderr=True).print(speed_line(total), style="dim", highlight=False)
    if json_file is not None:
        record: dict[str, Any] = {
            **heading(adapter, generator),
            "method": "plain" if plain else "forestream",
            "generations": [_entry(given, one) for given, one in zip(prompts, done, strict=True)],
            "total": figures(total),
        }
        write_json(json_file, record)


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts of the command line, of a file, or of stdin.

    Raises:
        PromptError: there are two sources, or none, or no prompt in it.
    """
    if prompt is not None and file is not None:
        raise PromptError("found a prompt and --file; give one of them")
    if prompt is not None:
        return [prompt]
    if file is None and sys.stdin.isatty():
        raise PromptError("found no prompt; give one as an argument, a file of them with --file, or lines on stdin")
    name = "stdin" if file is None else str(file)
    try:
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is no UTF-8 text ({error.reason} at byte {error.start})") from error
    prompts = [line for _, line in numbered_lines(text)]
    if not prompts:
        raise PromptError(f"found no prompt in {name}; expected one per line")
    return prompts


def _printed(generator: Generator, steps: Iterator[Step]) -> Iterator[Step]:
    """The same steps, their text printed as they come."""
    writing = Writing(generator.text)
    for step in steps:
        typer.echo("".join(piece.text for piece in writing.add(step)), nl=False)
        sys.stdout.flush()
        yield step


def _total(done: list[Generation]) -> Any:
    from forestream.steps import Counters

    total = Counters()
    for one in done:
        total.merge(one.counters)
    return total


def _entry(prompt: str, generation: Generation) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish": generation.steps[-1].finish,
        **figures(generation.counters),
    }
