"""`forestream generate`: prompts in, texts out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from forestream.cli import loading, options
from forestream.cli.output import write_json
from forestream.cli.prompts import numbered_lines
from forestream.cli.writing import figures, heading, speed_line
from forestream.config import SamplingSettings
from forestream.errors import ConfigError, PromptError
from forestream.tasks.base import user
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
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt to the model as what a user says, by its chat template.")
    ] = False,
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
    carried: options.Carried = None,
    lookup_beside: options.LookupBeside = None,
    lookup_behind: options.LookupBehind = None,
    prune_below: options.PruneBelow = None,
    prune_to: options.PruneTo = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    samples: Annotated[int, typer.Option("-n", "--samples", min=1, help="Texts to draw for every prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the text behind this string; can be given several times.")
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Write JSON that satisfies this schema (a file)."),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Write text that matches this regular expression.")] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="Record every token's log-probability, and so many most probable tokens (--json)."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts written together.")] = 1,
    dtype: options.DTypeName = options.DType.auto,
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
    dtype = options.dtype_on(device, dtype)
    found = options.tuned_file(settings, adapter, dtype, device, compile, quantise)
    decoding = options.settings_from(
        None if found is None else found.decode,
        tree=tree,
        nodes=nodes,
        k=k,
        streams=streams,
        carriers=carriers,
        carried=carried,
        lookup_beside=lookup_beside,
        lookup_behind=lookup_behind,
        prune_below=prune_below,
        prune_to=prune_to,
        max_new_tokens=max_new_tokens,
    )
    if stream and batch_size > 1:
        raise ConfigError("--stream shows one text at a time; found --batch-size above 1")
    prompts = _prompts(prompt, file)
    generator = loading.load_generator(adapter, base, dtype, decoding, device, compile, quantise)
    generator.schedule = options.schedule_of(found, decoding)
    generator.sampling = SamplingSettings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    grammar = _grammar(json_schema.read_text() if json_schema else None, regex)
    asked: dict[str, Any] = {"stop": stop, "grammar": grammar, "logprobs": logprobs}
    prompts = [given for given in prompts for _ in range(samples)]
    rows = [row for _ in range(len(prompts) // samples) for row in range(samples)]
    live = (sys.stdout.isatty() if stream is None else stream) and batch_size == 1
    done: list[Generation] = []
    for first in range(0, len(prompts), batch_size):
        group = [
            generator.request([user(given)] if chat else given, row=row, **asked)
            for given, row in zip(prompts[first : first + batch_size], rows[first:], strict=False)
        ]
        if live:
            steps = generator.plain_steps(group[0]) if plain else generator.steps(group[0])
            done.append(generator.collect(_printed(generator, steps)))
            typer.echo("")
            continue
        done += generator.generate_batch(group, "plain" if plain else "forestream")
        for one in done[first:]:
            typer.echo(one.text)
    total = _total(done)
    Console(stderr=True).print(speed_line(total), style="dim", highlight=False)
    if json_file is not None:
        record: dict[str, Any] = {
            **heading(adapter, generator),
            "method": "plain" if plain else "forestream",
            "sampling": vars(generator.sampling),
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
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is no UTF-8 text ({error.reason} at byte {error.start})") from error
    prompts = [line for _, line in numbered_lines(text)]
    if not prompts:
        raise PromptError(f"found no prompt in {name}; expected one per line")
    return prompts


def _grammar(json_schema: str | None, regex: str | None) -> Any:
    """The grammar that was asked for, or None.

    Raises:
        ConfigError: two of them, or one that is malformed.
    """
    if json_schema is None and regex is None:
        return None
    if json_schema is not None and regex is not None:
        raise ConfigError("found --json-schema and --regex; a text follows one grammar")
    from forestream.grammar import Grammar

    return Grammar.regex(regex) if regex is not None else Grammar.json_schema(json_schema or "")


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
        "finish": generation.finish,
        "metrics": generation.counters.request_metrics,
        **({"logprobs": [vars(score) for score in generation.scores]} if generation.scores else {}),
        **figures(generation.counters),
    }
