"""`forestream train-draft-model`: the small model of two-model decoding, to compare streams with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forestream.cli import learning, options


def train_draft_model(
    output: Annotated[Path, typer.Option(help="Model folder to write.")],
    task: Annotated[str, typer.Option(help="What to learn: e2e, sql, dialogsum or synthetic.")] = "e2e",
    data_dir: options.DataDir = None,
    base: Annotated[
        str, typer.Option(help="The model to draft for: its tokenizer, vocabulary and context are taken.")
    ] = "smollm2-135m",
    examples: learning.Examples = None,
    epochs: learning.Epochs = 1,
    width: Annotated[
        int, typer.Option(min=32, help="Of the hidden states, a multiple of 32; embedding rows are as wide.")
    ] = 160,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    batch_size: learning.BatchSize = 12,
    accumulate: learning.Accumulate = 1,
    learning_rate: learning.LearningRate = 2e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Updates over which the rate rises.")] = 100,
    device: options.Device = "cpu",
    dtype: Annotated[options.DType, typer.Option(help="Compute dtype; weights are float32.")] = options.DType.float32,
    seed: Annotated[int, typer.Option(min=0, help="Of the fresh weights, and of the order of examples.")] = 0,
    save_every: learning.SaveEvery = 500,
    resume: learning.Resume = False,
) -> None:
    """Train a small Llama from nothing to draft for a base on a task: the other way to have drafts, for comparison.

    It learns the completions of the task's training split, as `forestream train` does with the same --seed and
    --examples. What is written is an ordinary model folder, which `forestream bench --draft-model` and the host
    library's `generate(assistant_model=...)` take. Checkpoints and the log go to OUTPUT.run beside it.

    Example: forestream train-draft-model --task e2e --data-dir data --output draft-e2e --epochs 3
    """
    from forestream import provenance
    from forestream.bases import load_base
    from forestream.data import drawn, tokenize
    from forestream.rivals.draft_model import (
        DraftModelConfig,
        check_output,
        fit_draft_model,
        fresh_model,
        save_draft_model,
    )
    from forestream.tasks import get_task
    from forestream.training import TrainConfig

    made = provenance.collect()
    check_output(output)
    size = DraftModelConfig(width, layers)
    config = TrainConfig(
        epochs,
        batch_size,
        accumulate,
        learning_rate,
        warmup,
        dtype=dtype.value,
        seed=seed,
        save_every=save_every,
        schedule="cosine",
    )
    rows = drawn(get_task(task).examples("train", data_dir), seed, examples)
    host, tokenizer = load_base(base)
    model = fresh_model(host.config, size, seed).to(options.torch_device(device))
    del host
    parameters = model.num_parameters()
    console = Console()
    console.print(
        f"{len(rows)} examples, {epochs} epochs, batch {batch_size} x {accumulate}; {parameters:,} parameters"
    )
    used = [tokenize(tokenizer, row) for row in rows]
    run = output.parent / f"{output.name}.run"
    report = fit_draft_model(model, used, tokenizer.eos_token_id, run, config, resume)
    record = {**made, "task": task, "base": Path(base).name, "parameters": parameters, "size": asdict(size), **report}
    save_draft_model(model, tokenizer, output, record)
    console.print(f"[green]wrote[/] {output}")
    console.print_json(json.dumps(report["last_log"]))
