"""`forestream trim`: give a finished adapter a draft vocabulary, so that its streams need few of the head's rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forestream.cli import learning, options
from forestream.errors import ConfigError
from forestream.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forestream.tasks import Example


def trim(
    adapter: options.Adapter,
    output: Annotated[Path, typer.Option(help="Adapter folder to write; may be the same.")],
    task: Annotated[str, typer.Option(help="Whose texts: e2e, sql, dialogsum, chat or synthetic.")] = "e2e",
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens to keep, the most frequent ones; by default every token that occurs."),
    ] = None,
    data_dir: options.DataDir = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Count in the base's own answers, out of this file of `forestream distill`, and not in the task's.",
        ),
    ] = None,
    base: options.Base = None,
    json_file: options.JsonFile = None,
) -> None:
    """Give an adapter a draft vocabulary: the tokens that its streams may draft.

    A task's texts use few of the tokens a model knows. Counted are those of the training split's completions, all of
    them. The streams' logits then cost the head's rows of these alone. The text stays what it is: the main stream keeps
    all rows, and writes what is never drafted. What is lost are drafts of tokens outside; the coverage says how many
    there are to lose. Weights keep every byte, and trimming again replaces the vocabulary.

    Example: forestream trim --adapter my-adapter --task e2e --size 4096 --output my-trimmed-adapter
    """
    from forestream import checkpoint, provenance
    from forestream.distillation import read_answers
    from forestream.revision import revise
    from forestream.tasks import get_task
    from forestream.vocabulary import DraftVocabulary

    made = provenance.collect()
    checkpoint.check_output(output)
    manifest = Manifest.read(adapter)
    if not manifest.config.streams:
        raise ConfigError("this adapter has 0 streams and drafts nothing; give one that was trained with streams")
    rows, _ = learning.rows_of(task, data_dir, answers)
    model, tokenizer = checkpoint.load(adapter, base, merge=False)
    if answers is not None:
        told_by = read_answers(answers, rows, tokenizer, manifest.base.fingerprint)
        texts = {"answers": [one.completion for one in told_by]}
    else:
        held_out = get_task(task).examples("validation", data_dir)
        texts = {"train": _completions(tokenizer, rows), "validation": _completions(tokenizer, held_out)}
    V, counted = model.port.head_size, next(iter(texts.values()))
    vocabulary = DraftVocabulary.counted(counted, tokenizer.eos_token_id, V, size)
    coverage = {split: vocabulary.coverage(own) for split, own in texts.items()}
    record: dict[str, Any] = {
        **made,
        "task": task,
        "size": len(vocabulary),
        "of": V,
        "completions": len(counted),
        "coverage": {split: round(share, 6) for split, share in coverage.items()},
    }
    revise(adapter, output, {checkpoint.VOCABULARY: vocabulary.ids.int()}, {"vocabulary": record})
    console = Console()
    console.print(_table(record))
    console.print(f"[green]wrote[/] {output}")
    if json_file is not None:
        from forestream.cli.output import write_json

        write_json(json_file, record)


def _completions(tokenizer: PreTrainedTokenizerBase, rows: list[Example]) -> list[tuple[int, ...]]:
    """Token ids of the completions of `rows`, behind a progress bar."""
    from forestream.cli.progress import counted
    from forestream.data import tokenize

    found = []
    with counted("reading completions", len(rows)) as advance:
        for row in rows:
            found.append(tokenize(tokenizer, row).completion)
            advance(1)
    return found


def _table(record: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_row("head rows of a stream, before", f"{record['of']:,}")
    table.add_row("head rows of a stream, now", f"{record['size']:,} ({record['size'] / record['of']:.1%})")
    for split, share in record["coverage"].items():
        table.add_row(f"tokens of {split} completions inside", f"{share:.3%}")
    return table
