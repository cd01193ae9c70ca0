"""`forestream bench`: methods against plain decoding, on a task's prompts, interleaved in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forestream.cli import loading, options
from forestream.cli.output import write_json
from forestream.cli.progress import counted
from forestream.cli.summary import provenance_of
from forestream.config import SamplingSettings

if TYPE_CHECKING:
    from forestream.bench.asked import Asked
    from forestream.bench.runner import Record
    from forestream.generation import Generator
    from forestream.tasks import Example, Task


def bench(
    adapter: options.Adapter,
    task: Annotated[
        str, typer.Option(help="Whose prompts: e2e, sql, dialogsum, chat, spec_bench, gsm8k, humaneval or synthetic.")
    ] = "e2e",
    split: Annotated[str, typer.Option(help="validation to choose settings, test to report.")] = "test",
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many distinct prompts, of all categories alike; all by default.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: plain (always needed), forestream (the settings below), budget-M, full-K, these two "
            "also with +prune, +GN (only the first N streams draft), +fused, +fused-N (--carried) and +lookup-B-A (B "
            "nodes looked up beside the tree, A behind its first choices) behind them, in this order; "
            "plain-float32 (or -bfloat16, -float16) is plain decoding in another dtype. "
            "Rivals on the same engine: lookup-GAMMA-N looks for the last N tokens earlier "
            "in the text and drafts the GAMMA behind them; draft-model-GAMMA has the --draft-model write GAMMA tokens "
            "ahead; lookahead-W-N-G checks up to G n-grams of N tokens, gathered from guesses in W columns; medusa, "
            "medusa-static-M, medusa-budget-M and medusa-full-K draft with the heads of --medusa. The host library's "
            "own generate: transformers, transformers+lookup-GAMMA, transformers+draft-model-GAMMA. Numbers may be "
            "left out (docs/peers.md)."
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
    dtype: options.DTypeName = options.DType.auto,
    quantise: options.QuantiseHow = options.QuantiseForm.off,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
    max_new_tokens: options.TaskTokens = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every method on every prompt.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bring every prompt to this length: other examples in front of it, or its beginning cut off."
        ),
    ] = None,
    steps: Annotated[
        bool,
        typer.Option(
            "--steps",
            help="Record every pass: tokens, accepted drafts, nodes, seconds. `forestream report --check` "
            "works the figures out from it again.",
        ),
    ] = False,
    entropy: Annotated[
        bool,
        typer.Option(
            "--entropy", help="Record how certain the model is of each text, beside acceptance: a pass more per prompt."
        ),
    ] = False,
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
    carried: options.Carried = None,
    lookup_beside: options.LookupBeside = None,
    lookup_behind: options.LookupBehind = None,
    prune_below: options.PruneBelow = None,
    prune_to: options.PruneTo = None,
    prune_methods_below: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Threshold of the methods with +prune.")
    ] = 0.05,
    medusa: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Heads for this adapter, as `forestream train-medusa` writes."),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Measure speed and passes against plain decoding of the same model, in the same run.

    Methods take turns on every prompt. Speedup compares seconds per token after the prompt pass, prompt by prompt
    (median, min, max) and in total. equal_outputs counts the prompts whose token ids are those of plain decoding.
    Where a task has parts (spec_bench), there is a table of them too; of a chat, every turn is run. The record also has
    latencies, memory, extra parameters and operations: docs/bench.md describes it, `forestream report` draws it.

    Examples: forestream bench --adapter adapters/smollm2-135m-e2e --task e2e --data-dir data --limit 20

    forestream bench --adapter my-adapter --task e2e --split validation --methods plain,lookup-2,lookup-4,lookup-8
    """
    from forestream import provenance
    from forestream.bench.asked import asked, evenly
    from forestream.bench.methods import Medusa, method
    from forestream.bench.resident import watched
    from forestream.bench.runner import run
    from forestream.tasks import get_task

    dtype = options.dtype_on(device, dtype)
    made = provenance.collect()
    chosen = get_task(task)
    examples = evenly(chosen.grouped(split, data_dir), limit)
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
        max_new_tokens=max_new_tokens or chosen.max_new_tokens,
    )
    generator = loading.load_generator(adapter, base, dtype, decoding, device, compile, quantise)
    generator.schedule = options.schedule_of(found, decoding)
    generator.sampling = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # Methods that differ in a number only share what was loaded.
    stock = cache(partial(loading.load_host, adapter, base, dtype, device, quantise))
    small = assistant = None
    if draft_model is not None:
        small = cache(partial(_draft_model, draft_model, dtype, device, compile))
        assistant = cache(partial(_assistant, draft_model, dtype, device))

    def other(dtype: str) -> Generator:
        return loading.load_generator(adapter, base, options.DType(dtype), decoding, device, compile, quantise)

    rival = None if medusa is None else Medusa.load(medusa, generator)
    names = [name.strip() for name in methods.split(",")]
    compared = [method(name, generator, prune_methods_below, stock, other, small, assistant, rival) for name in names]
    with _turns(examples) as answered:
        given = asked(generator, examples, prompt_tokens, answered)
    prompts = given.prompts
    with counted("prompts", len(prompts)) as advance, watched(generator.model.device) as memory:
        records = run(generator.model, compared, prompts, repeats, lambda: advance(1), batch_size)
    setting = {
        "adapter": adapter.name,
        "task": task,
        "split": split,
        "dtype": dtype.value,
        "quantise": quantise.value,
        "device": device,
        "compile": generator.model.prepared,
        "batch_size": batch_size,
        "prompt_tokens": prompt_tokens,
        "temperature": temperature,
        "sampling": vars(generator.sampling),
        "repeats": repeats,
        "warm_up": min(batch_size, len(prompts)),
        **_around(generator),
        "decode": vars(decoding),
        "draft_model": None if draft_model is None else Path(draft_model).name,
        "medusa": None if medusa is None else medusa.name,
    }
    record = {
        "provenance": made,
        "settings": setting,
        "training": _training(adapter),
        "memory": memory or None,
        **_measured(generator, chosen, given, records, entropy),
    }
    if steps:
        for name, own in records.items():
            record["methods"][name]["steps"] = own.log()
    _show(record["methods"])
    _show_parts(record)
    _show_setting(record)
    if json_file is not None:
        write_json(json_file, record)


@contextmanager
def _turns(examples: Sequence[Example]) -> Iterator[Callable[[int], None]]:
    """A bar for writing the answers that later turns of chats come behind, if there are any."""
    if not any(one.turns for one in examples):
        yield lambda done: None
        return
    with counted("earlier turns", len(examples)) as advance:
        yield advance


def _around(generator: Generator) -> dict[str, Any]:
    """What the model brings: G as trained, its mode, and threads."""
    import torch

    config = generator.model.stream_config
    return {"trained_streams": config.streams, "mode": config.mode, "threads": torch.get_num_threads()}


def _training(adapter: Path) -> dict[str, Any]:
    """What the adapter's provenance says of its training: examples, updates, seconds; null of what it does not say."""
    found = provenance_of(adapter)
    return {name: found.get(name) for name in ("examples", "updates", "seconds")}


def _measured(
    generator: Generator, task: Task, given: Asked, records: dict[str, Record], entropy: bool
) -> dict[str, Any]:
    """What the record holds of the runs themselves."""
    from forestream.bench import PLAIN
    from forestream.bench.entropy import mean_entropy, rank_correlation
    from forestream.bench.parts import by_category

    results = {name: record.summary(records[PLAIN]) for name, record in records.items()}
    if task.metric_names and given.examples is not None:
        for name, own in records.items():
            texts = [generator.text(run.tokens) for run in own.runs]
            scores = task.score(texts, given.examples)
            results[name]["scores"] = {metric: round(score, 4) for metric, score in scores.items()}
    found: dict[str, Any] = {}
    nats: list[float] | None = None
    if entropy:
        pairs = zip(given.prompts, records[PLAIN].runs, strict=True)
        nats = [round(mean_entropy(generator.model, prompt, run.tokens), 5) for prompt, run in pairs]
        correlated = {name: rank_correlation(nats, own.acceptance) for name, own in records.items() if name != PLAIN}
        found["entropy"] = {"nats_per_token": nats, "rank_correlation": correlated}
    if given.categories is not None:
        found["categories"] = list(given.categories)
        found["by_category"] = by_category(records, given.categories, nats)
    if given.turns is not None:
        found["turns"] = list(given.turns)
    return {**found, "methods": results}


def _draft_model(name: str, dtype: options.DType, device: str, form: options.CompileForm) -> Generator:
    """A small model that drafts, prepared as the model it drafts for is. Errors as of `load_base_generator`."""
    return loading.load_base_generator(name, dtype, device, form)[0]


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
        named = heading == "method"  # long names are folded before figures are cut
        table.add_column(heading, justify="left" if named else "right", no_wrap=not named, overflow="fold")
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


def _show_setting(record: dict[str, Any]) -> None:
    """What the figures hang on, in a line."""
    own, machine = record["settings"], record["provenance"]["machine"]
    law = "greedy" if not own["temperature"] else f"temperature {own['temperature']:g}"
    told = (
        f"{own['adapter']}, {own['task']} {own['split']} split, {own['dtype']}, quantise {own['quantise']}, compile "
        f"{own['compile']}, batch {own['batch_size']}, {law}, {own['repeats']} repeats, {own['warm_up']} to warm up; "
        f"{machine['gpu'] or machine['processor']}, {own['threads']} threads"
    )
    Console().print(told, style="dim", highlight=False, markup=False)


def _show_parts(record: dict[str, Any]) -> None:
    """A line for every part of the data set and every method that drafts."""
    if "by_category" not in record:
        return
    table = Table(title="by category", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("category", "method", "prompts", "tokens/\npass", "accept.\nlength", "speedup", "equal\ntexts"):
        table.add_column(heading, justify="left" if heading in ("category", "method") else "right", no_wrap=True)
    for category, part in record["by_category"].items():
        for name, row in part["methods"].items():
            table.add_row(
                category,
                name,
                str(row["prompts"]),
                f"{row['call_reduction']:.2f}",
                f"{row['mean_acceptance_length']:.2f}",
                f"{row['speedup']['of_totals']:.2f}",
                f"{row['equal_outputs']}/{row['prompts']}",
            )
    Console().print(table)
