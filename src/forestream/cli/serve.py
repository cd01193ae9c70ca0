"""`forestream serve`: start a server on an exported folder."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Engine(StrEnum):
    vllm = "vllm"


def serve(
    model: Annotated[Path, typer.Option(help="Folder that `forestream export vllm` wrote.")],
    further: Annotated[
        list[str] | None, typer.Argument(help="Options of vLLM's own, behind --; they go before those set here.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What serves it.")] = Engine.vllm,
    drafts: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens drafted at a time, one a stream; all streams by default, 0 drafts nothing."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    eager: Annotated[
        bool, typer.Option("--eager", help="Compile nothing: starts minutes earlier, and every pass takes longer.")
    ] = False,
    rows: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Most tokens that a step verifies, prompts apart: the more requests run, the fewer each drafts.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and print the command instead of running it.")] = (
        False
    ),
) -> None:
    """Start vLLM's OpenAI-compatible server, which drafts with the model's streams.

    Run it with the Python that vLLM is installed beside. What cannot work is refused before the server starts: a folder
    that was not exported, more drafts than streams, another version of vLLM.

    Example: forestream serve --engine vllm --model my-model --port 8000 -- --max-num-seqs 16
    """
    from forestream.vllm.server import launch

    started = launch(model, drafts, host, port, eager, rows, further or ())
    if dry_run:
        typer.echo(started.shell())
        return
    Console(stderr=True).print(f"{engine.value} on {started.address}; ready when {started.health} answers")
    # In place of this process, so that signals and the exit code are the server's.
    os.execve(started.command[0], started.command, {**os.environ, **started.environment})
