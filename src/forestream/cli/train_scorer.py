"""`forestream train-scorer`: teach a finished adapter which branches are not worth checking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forestream.cli import learning, options


def train_scorer(
    adapter: options.Adapter,
    output: Annotated[Path, typer.Option(help="Adapter folder to write; may be the same.")],
    task: learning.Task = "e2e",
    data_dir: options.DataDir = None,
    base: options.Base = None,
    examples: learning.Examples = None,
    epochs: learning.Epochs = 1,
    batch_size: learning.BatchSize = 12,
    learning_rate: learning.LearningRate = 1e-3,
    device: options.Device = "cpu",
    dtype: Annotated[
        options.DType, typer.Option(help="Compute dtype; the scorer's weights are trained in float32.")
    ] = options.DType.auto,
    seed: learning.Seed = 0,
    save_every: learning.SaveEvery = 100,
    resume: learning.Resume = False,
) -> None:
    """Train the exit scorer of an adapter further, and nothing else: LoRA and streams keep every byte.

    `forestream train` trains it beside the rest, with a small weight. Before pruning it may be worth more: this goes
    through the layers below the streams' and the head only once per example, and no gradient goes through a layer.
    `forestream calibrate` shows what pruning with it loses.

    Example: forestream train-scorer --adapter my-adapter --task e2e --examples 2000 --output my-pruned-adapter
    """
    from forestream import checkpoint, provenance
    from forestream.data import drawn, tokenize
    from forestream.scorer import fit_scorer, save_scorer
    from forestream.tasks import get_task
    from forestream.training import TrainConfig

    dtype = options.dtype_on(device, dtype)
    made = provenance.collect()
    checkpoint.check_output(output)
    config = TrainConfig(
        epochs, batch_size, learning_rate=learning_rate, dtype=dtype.value, seed=seed, save_every=save_every
    )
    rows = drawn(get_task(task).examples("train", data_dir), seed, examples)
    model, tokenizer = checkpoint.load(
        adapter, base, options.torch_dtype(dtype), merge=False, device=options.torch_device(device)
    )
    used = [tokenize(tokenizer, row) for row in rows]
    run = output.parent / f"{output.name}.run"
    report = fit_scorer(model, used, tokenizer.eos_token_id, run, config, resume)
    save_scorer(model, adapter, output, {**made, "task": task, **report})
    console = Console()
    console.print(f"[green]wrote[/] {output}")
    console.print_json(json.dumps(report["last_log"]))
