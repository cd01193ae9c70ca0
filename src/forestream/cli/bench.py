"""`forestream bench`: methods against plain decoding, on a task's prompts, interleaved in one run."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forestream.cli import options
from forestream.cli.output import write_json
from forestream.cli.progress import counted
from forestream.config import SamplingSettings

if TYPE_CHECKING:
    from forestream.generation import Generator


def bench(
    adapter: options.Adapter,
    task: Annotated[
        str, typer.Option(help="Whose prompts: e2e, sql, dialogsum, chat, spec_bench or synthetic.")
    ] = "e2e",
    split: Annotated[str, typer.Option(help="validation to choose settings, test to report.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="How many distinct prompts; all by default.")] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: plain (always needed), forestream (the settings below), budget-M, full-K, these two "
            "also with +prune, +fused or +prune+fused behind them; plain-float32 (or -bfloat16, -float16) is plain "
            "decoding in another dtype. Rivals on the same engine: lookup-GAMMA-N looks for the last N tokens earlier "
            "in the text and drafts the GAMMA behind them; draft-model-GAMMA has the --draft-model write GAMMA tokens "
            "ahead; lookahead-W-N-G checks up to G n-grams of N tokens, gathered from guesses in W columns. The host "
            "library's own generate: transformers, transformers+lookup-GAMMA, transformers+draft-model-GAMMA. Numbers "
            "may be left out (docs/peers.md)."
        ),
    ] = "plain,forestream",
    data_dir: options.DataDir = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="A small model with the base's tokenizer, for the methods that draft with one: a folder, such as "
            "`forestream train-draft-model` writes, or a hub name."
        ),
    ] = None,
    base: options.Base = None,
    dtype: options.DTypeName = options.DType.bfloat16,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    max_new_tokens: options.TaskTokens = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every method on every prompt.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    settings: options.Settings = None,
    tree: options.Tree = None,
    nodes: options.Nodes = None,
    k: options.K = None,
    streams: options.Streams = None,
    carriers: options.Carriers = None,
    prune_below: options.PruneBelow = None,
    prune_to: options.PruneTo = None,
    prune_methods_below: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Threshold of the methods with +prune.")
    ] = 0.05,
    json_file: options.JsonFile = None,
) -> None:
    """Measure speed and passes against plain decoding of the same model, in the same run.

    Methods take turns on every prompt. Speedup compares seconds per token after the prompt pass, prompt by prompt
    (median, min, max) and in total. equal_outputs counts the prompts whose token ids are those of plain decoding.

    Examples: forestream bench --adapter adapters/smollm2-135m-e2e --task e2e --data-dir data --limit 20

    forestream bench --adapter my-adapter --task e2e --split validation --methods plain,lookup-2,lookup-4,lookup-8
    """
    import torch

    from forestream import provenance
    from forestream.bench.methods import method
    from forestream.bench.runner import compare
    from forestream.data import prompts_of
    from forestream.tasks import get_task

    made = provenance.collect()
    chosen = get_task(task)
    examples = chosen.grouped(split, data_dir)[:limit]
    found = options.tuned_file(settings, adapter, dtype, device, compile, quantise)
    decoding = options.settings_from(
        None if found is None else found.decode,
        tree=tree,
        nodes=nodes,
        k=k,
        streams=streams,
        carriers=carriers,
        prune_below=prune_below,
        prune_to=prune_to,
        max_new_tokens=max_new_tokens or chosen.max_new_tokens,
    )
    generator = options.load_generator(adapter, base, dtype, decoding, device, compile, quantise)
    generator.schedule = options.schedule_of(found, decoding)
    generator.sampling = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # Methods that differ in a number only share what was loaded.
    stock = cache(partial(options.load_host, adapter, base, dtype, device, quantise))
    small = assistant = None
    if draft_model is not None:
        small = cache(partial(_draft_model, draft_model, dtype, device, compile))
        assistant = cache(partial(_assistant, draft_model, dtype, device))

    def other(dtype: str) -> Generator:
        return options.load_generator(adapter, base, options.DType(dtype), decoding, device, compile, quantise)

    compared = [
        method(name.strip(), generator, prune_methods_below, stock, other, small, assistant)
        for name in methods.split(",")
    ]
    prompts = prompts_of(generator.tokenizer, examples)
    with counted("prompts", len(prompts)) as advance:
        results = compare(generator.model, compared, prompts, repeats, lambda: advance(1), batch_size)
    record = {
        "provenance": made,
        "settings": {
            "adapter": adapter.name,
            "task": task,
            "split": split,
            "dtype": dtype.value,
            "quantise": quantise.value,
            "draft_model": None if draft_model is None else Path(draft_model).name,
            "device": device,
            "compile": generator.model.prepared,
            "batch_size": batch_size,
            "temperature": temperature,
            "sampling": vars(generator.sampling),
            "repeats": repeats,
            "threads": torch.get_num_threads(),
            "decode": vars(decoding),
        },
        **({"categories": [one.category for one in examples]} if any(one.category for one in examples) else {}),
        "methods": results,
    }
    _show(results)
    if json_file is not None:
        write_json(json_file, record)


def _draft_model(name: str, dtype: options.DType, device: str, form: options.CompileForm) -> Generator:
    """A small model that drafts, prepared as the model it drafts for is. Errors as of `load_base_generator`."""
    return options.load_base_generator(name, dtype, device, form)[0]


def _assistant(name: str, dtype: options.DType, device: str) -> Generator:
    """The same as the host library made it: nothing packed, nothing compiled. Errors as of `load_base_generator`."""
    with Console(stderr=True).status(f"loading {name} once more, for the host library's own generate"):
        from forestream.bases import load_base
        from forestream.config import StreamConfig
        from forestream.generation import Generator
        from forestream.model import StreamingLM

        host, tokenizer = load_base(name, options.torch_dtype(dtype))
        bare = StreamingLM(host, StreamConfig(streams=0, stream_layers=1, scorer_rank=0))
        return Generator(bare.to(options.torch_device(device)).eval(), tokenizer)


def _show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="against plain decoding, same model, same run", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("method", "tokens/\npass", "accept.\nlength", "nodes/\npass", "ms/\npass", "tokens/\ns", "speedup")
    for heading in (*headings, "min to max", "equal\ntexts"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for name, row in results.items():
        speedup = row["speedup"]
        decoded = speedup["median"] is not None
        table.add_row(
            name,
            f"{row['call_reduction']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['nodes_per_pass']:.1f}",
            f"{1000 * row['seconds_per_pass']:.0f}",
            f"{row['tokens_per_second']:.1f}",
            f"{speedup['median']:.2f}" if decoded else "-",
            f"{speedup['min']:.2f}-{speedup['max']:.2f}" if decoded else "-",
            f"{row['equal_outputs']}/{row['prompts']}",
        )
    Console().print(table)
