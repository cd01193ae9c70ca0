"""`forestream train-medusa`: Medusa heads for a finished adapter's model, to compare its streams with."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forestream.cli import learning, options
from forestream.cli.progress import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forestream.acceptance import Trace
    from forestream.model import StreamingLM
    from forestream.rivals.medusa import MedusaHeads


class Projection(StrEnum):
    own = "own"
    shared = "shared"


class ScheduleName(StrEnum):
    linear = "linear"
    cosine = "cosine"


def train_medusa(
    adapter: options.Adapter,
    output: Annotated[Path, typer.Option(help="Folder to write; bench --medusa takes it.")],
    task: learning.Task = "e2e",
    data_dir: options.DataDir = None,
    base: options.Base = None,
    heads: Annotated[int, typer.Option(min=1, max=64, help="How many; head j foretells what stream j does.")] = 4,
    projection: Annotated[
        Projection,
        typer.Option(
            help="own: every head has a projection to the vocabulary of its own, as published; shared: the model's own "
            "head, frozen, serves all: far smaller."
        ),
    ] = Projection.own,
    decay: Annotated[float, typer.Option(min=0.0, help="Head j weighs this to the power of j.")] = 0.8,
    examples: learning.Examples = None,
    epochs: learning.Epochs = 1,
    batch_size: learning.BatchSize = 12,
    accumulate: learning.Accumulate = 1,
    learning_rate: learning.LearningRate = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Updates until the peak is reached.")] = 20,
    schedule: Annotated[
        ScheduleName, typer.Option(help="How the rate falls from its peak to zero.")
    ] = ScheduleName.cosine,
    device: options.Device = "cpu",
    dtype: Annotated[
        options.DType, typer.Option(help="Compute dtype; the heads' weights are trained in float32.")
    ] = options.DType.auto,
    seed: learning.Seed = 0,
    save_every: learning.SaveEvery = 100,
    log_every: Annotated[int, typer.Option(min=1, help="Updates between lines of the log.")] = 10,
    resume: learning.Resume = False,
    measure: Annotated[
        int,
        typer.Option(
            min=0,
            help="On so many validation prompts it is measured how often each candidate is right, which static trees "
            "(medusa-static-M of bench) are chosen by; 0 leaves it out.",
        ),
    ] = 24,
) -> None:
    """Train Medusa heads on the model of an adapter, which is merged into its base and frozen: Medusa-1.

    With the settings of `forestream train`, the heads see the same examples in the same order as the adapter's streams
    did, and head j learns the tokens that stream j learned. A twin (`forestream train --streams 0`) is an adapter too.

    Example: forestream train-medusa --adapter my-twin --task e2e --data-dir data --output my-medusa
    """
    import torch

    from forestream import checkpoint, provenance
    from forestream.data import drawn, prompts_of, tokenize
    from forestream.generation import end_tokens
    from forestream.objective import LossConfig
    from forestream.rivals.medusa import MedusaConfig, MedusaHeads
    from forestream.rivals.medusa_folder import MANIFEST, HeadsManifest, save_acceptance, save_heads
    from forestream.rivals.medusa_training import fit_heads
    from forestream.tasks import get_task
    from forestream.training import TrainConfig

    made = provenance.collect()
    dtype = options.dtype_on(device, dtype)
    checkpoint.check_output(output, MANIFEST)
    settings = MedusaConfig(heads, projection.value)
    belongs = HeadsManifest.of(settings, adapter)
    config = TrainConfig(
        epochs,
        batch_size,
        accumulate,
        learning_rate=learning_rate,
        warmup=warmup,
        schedule=schedule.value,
        dtype=dtype.value,
        seed=seed,
        save_every=save_every,
        log_every=log_every,
    )
    loss = LossConfig(main=0.0, stream=decay, decay=decay, scorer=0.0)
    chosen = get_task(task)
    rows = drawn(chosen.examples("train", data_dir), seed, examples)
    tried = chosen.grouped("validation", data_dir)[:measure] if measure else []
    model, tokenizer = checkpoint.load(adapter, base, options.torch_dtype(dtype), device=options.torch_device(device))
    model.restrict(None)  # heads foretell any token, whatever the adapter's streams draft from
    used = [tokenize(tokenizer, row) for row in rows]
    torch.manual_seed(seed)
    trained = MedusaHeads.fresh(settings, model)
    console = Console()
    console.print(f"{len(used)} examples; {trained.added:,} parameters in {heads} heads, projections {projection}")
    run = output.parent / f"{output.name}.run"
    report = fit_heads(model, trained, used, tokenizer.eos_token_id, run, config, loss, resume, belongs.adapter_print)
    save_heads(trained, output, adapter, {**made, "task": task, "parameters": trained.added, **report})
    if tried:
        traces = _traces(
            model, trained, prompts_of(tokenizer, tried), chosen.max_new_tokens, end_tokens(model, tokenizer)
        )
        save_acceptance(output, traces, {"task": task, "split": "validation"})
    console.print(f"[green]wrote[/] {output}")
    console.print_json(json.dumps(report["last_log"]))


def _traces(
    model: StreamingLM, heads: MedusaHeads, prompts: Sequence[Sequence[int]], most: int, eos: Sequence[int]
) -> list[Trace]:
    """What the heads would have drafted at every place of the texts that the model writes after `prompts`."""
    from forestream.baseline import plain
    from forestream.config import DecodeSettings
    from forestream.rivals.medusa import record
    from forestream.steps import tokens_of

    heads.to(model.dtype).eval()
    traces = []
    with counted("measuring acceptance", len(prompts)) as advance:
        for prompt in prompts:
            tokens = tokens_of(list(plain(model, prompt, DecodeSettings(max_new_tokens=most), eos)))
            traces.append(record(model, heads, prompt, tokens, limit=most))
            advance(1)
    return traces
