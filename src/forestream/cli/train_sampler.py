"""`forestream train-sampler`: teach a finished adapter to draft along the path it has taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forestream.cli import learning, options
from forestream.manifest import Manifest


def train_sampler(
    adapter: options.Adapter,
    output: Annotated[Path, typer.Option(help="Adapter folder to write; may be the same.")],
    task: learning.Task = "e2e",
    data_dir: options.DataDir = None,
    answers: learning.Answers = None,
    base: options.Base = None,
    examples: learning.Examples = None,
    epochs: learning.Epochs = 1,
    batch_size: learning.BatchSize = 12,
    learning_rate: learning.LearningRate = 3e-3,
    device: options.Device = "cpu",
    dtype: Annotated[
        options.DType, typer.Option(help="Compute dtype; the sampler's weights are trained in float32.")
    ] = options.DType.auto,
    width: Annotated[int, typer.Option(min=1, help="Of a fresh sampler's inner layer.")] = 64,
    seed: learning.Seed = 0,
    save_every: learning.SaveEvery = 100,
    resume: learning.Resume = False,
) -> None:
    """Train the path sampler of an adapter, and nothing else: LoRA and streams keep every byte.

    By themselves streams do not know which token stands before the one they foretell. The sampler tells them, path by
    path, so that drafts fit together: trees of the same size are accepted far deeper, for two small products a level.
    It learns fast, since no gradient goes through a layer: a few thousand examples are plenty. An adapter whose sampler
    was trained before goes on from there; train a new one after training streams further.

    Example: forestream train-sampler --adapter my-adapter --task e2e --examples 3600 --output my-adapter
    """
    from forestream import checkpoint, provenance
    from forestream.sampler import fit_sampler, save_sampler
    from forestream.training import TrainConfig

    dtype = options.dtype_on(device, dtype)
    made = provenance.collect()
    checkpoint.check_output(output)
    config = TrainConfig(
        epochs, batch_size, learning_rate=learning_rate, dtype=dtype.value, seed=seed, save_every=save_every
    )
    rows, _ = learning.rows_of(task, data_dir, answers)
    model, tokenizer = checkpoint.load(
        adapter, base, options.torch_dtype(dtype), merge=False, device=options.torch_device(device)
    )
    base_print = Manifest.read(adapter).base.fingerprint
    used = learning.tokens_of(tokenizer, rows, answers, base_print, seed, examples)
    run = output.parent / f"{output.name}.run"
    report = fit_sampler(model, used, tokenizer.eos_token_id, run, config, width, resume)
    save_sampler(model, adapter, output, {**made, "task": task, **report})
    console = Console()
    console.print(f"[green]wrote[/] {output}")
    console.print_json(json.dumps(report["last_log"]))
