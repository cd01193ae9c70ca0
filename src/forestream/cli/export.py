"""`forestream export`: an adapter merged into its base, as a folder that other engines serve."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forestream.cli import options


class Form(StrEnum):
    vllm = "vllm"
    hf = "hf"


def export(
    form: Annotated[
        Form, typer.Argument(help="vllm: with what vLLM needs to draft. hf: the merged model alone, for any engine.")
    ],
    adapter: options.Adapter,
    output: Annotated[Path, typer.Option(help="Folder to write; it must be absent or empty.")],
    base: options.Base = None,
    dtype: Annotated[
        options.DType,
        typer.Option(help="Of the weights in the folder, and what the engine then runs in unless told otherwise."),
    ] = options.DType.bfloat16,
) -> None:
    """Merge a joint adapter into its base and write an ordinary model folder: weights, configuration, tokenizer.

    A folder for vLLM holds the streams too, and names the model class that forestream brings to vLLM; `forestream serve
    --engine vllm` serves it. Every other engine takes it for the merged model.

    Example: forestream export vllm --adapter my-adapter --output my-model
    """
    from forestream.export import export_hf, export_vllm

    write = export_vllm if form == Form.vllm else export_hf
    write(adapter, output, base, options.torch_dtype(dtype))
    Console().print(f"[green]wrote[/] {output}")
