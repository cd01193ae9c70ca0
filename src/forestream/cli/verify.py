"""`forestream verify`: does drafting leave the text alone? Asked of one's own model, adapter and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forestream.cli import loading, options
from forestream.cli.demo import PROMPTS
from forestream.cli.output import write_json
from forestream.cli.progress import counted
from forestream.cli.prompts import Prompt, read_prompts
from forestream.cli.writing import figures, heading
from forestream.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from forestream.agreement import Agreement
    from forestream.generation import Generator
    from forestream.steps import Counters

_SHOWN: Final = 20  # differences in the table; the record has all of them
_FEW_PASSES: Final = 50


def verify(
    adapter: options.ShippedAdapter = None,
    base: options.Base = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            exists=True,
            dir_okay=False,
            help='Your prompts: a text file with one per line, or JSON lines (.jsonl) with a key "prompt"; blank lines '
            "are skipped. Without it and without --task, the five of `forestream demo`.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Take the prompts of a task: e2e, sql, dialogsum, chat, spec_bench, gsm8k, humaneval or synthetic."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of the task.  [default: validation]")] = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many prompts; all by default.")] = None,
    dtype: options.DTypeName = options.DType.float32,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="In half precision: how far below plain decoding's best logit a token may be.  [default: 4 units in "
            "the last place of the text's largest logit]",
        ),
    ] = None,
    device: options.Device = "cpu",
    compile: options.CompileHow = options.CompileForm.auto,
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
    max_new_tokens: options.MaxNewTokens = None,
    json_file: options.JsonFile = None,
) -> None:
    """Check that drafting leaves the text alone: every prompt is written after by plain decoding and by forestream.

    In float32 the claim is equality, token for token. In bfloat16 and float16 passes of several tokens round otherwise
    than passes of one, so texts may part where tokens are nearly tied: the claim is that plain decoding, made to read
    the text one token a pass, would have chosen every token or one at most the margin below its choice.

    Exit code 0: the claim holds; 1: it does not, and the first difference is named; 2: nothing could be checked.

    --json writes: claim, holds, margin, prompts (each with number, where, prompt, tokens, first_difference, the two
    tokens plain and written there, margin, worst, unit and allowed), total, and what it was run with.

    Example: forestream verify --adapter my-adapter --prompts my-prompts.txt --dtype bfloat16
    """
    dtype = options.dtype_on(device, dtype)
    if margin is not None and dtype == options.DType.float32:
        raise ConfigError("found --margin with float32, where texts have to be equal; it belongs to half precision")
    given, cap = _prompts(prompts, task, split, data_dir)
    folder = options.shipped_adapter(adapter)
    decoding = options.settings_from(
        options.tuned(settings, folder, dtype, device, compile),
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
        max_new_tokens=max_new_tokens or cap,
    )
    generator = loading.load_generator(folder, base, dtype, decoding, device, compile)
    report = _run(generator, given[:limit], dtype, margin)
    console = Console(highlight=False)
    console.print(_summary(report))
    if report.differing:
        console.print(_differences(report, generator))
    if not report.counters.accepted:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"warning: {_nothing_accepted(report.counters)}", style="yellow", markup=False
        )
    console.print(_verdict(report, generator), style="red" if report.failed else "green", markup=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, {**heading(folder, generator), **report.record()})
    if report.failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Report:
    """What came out.

    Attributes:
        margin: stated by the user, for half precision; None takes the usual one.
        counters: of the speculative runs.
    """

    dtype: options.DType
    margin: float | None
    prompts: Sequence[Prompt]
    found: Sequence[Agreement]
    counters: Counters

    @property
    def exact(self) -> bool:
        """Whether the claim is equality."""
        return self.dtype == options.DType.float32

    @property
    def differing(self) -> list[Agreement]:
        return [one for one in self.found if not one.equal]

    @property
    def failed(self) -> list[Agreement]:
        """Those for which the claim does not hold."""
        return [one for one in self.differing if self.exact or not one.near(self.margin)]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.found)

    @property
    def equal(self) -> str:
        return f"{len(self.found) - len(self.differing)} of {len(self.found)}"

    def allowed(self, one: Agreement) -> float:
        return 0.0 if self.exact else one.allowed(self.margin)

    def record(self) -> dict[str, Any]:
        entries = [
            {"prompt": prompt.text, "where": prompt.where, **one.record(), "allowed": self.allowed(one)}
            for prompt, one in zip(self.prompts, self.found, strict=True)
        ]
        total = {
            "prompts": len(self.found),
            "tokens": self.tokens,
            "equal": len(self.found) - len(self.differing),
            "accepted": self.counters.accepted,
            **figures(self.counters),
        }
        claim = "equal" if self.exact else "near tie"
        return {"claim": claim, "holds": not self.failed, "margin": self.margin, "prompts": entries, "total": total}


def _prompts(
    file: Path | None, task: str | None, split: str | None, data_dir: Path | None
) -> tuple[list[Prompt], int | None]:
    """The prompts of a file, of a task or built in, and the cap on tokens that goes with them.

    Raises:
        PromptError: there are two sources, or a line of the file is bad.
        ConfigError: an option has nothing to belong to.
    """
    if file is not None and task is not None:
        raise PromptError("found --prompts and --task; give one of them")
    if task is None:
        for option, value in (("--split", split), ("--data-dir", data_dir)):
            if value is not None:
                raise ConfigError(f"found {option} without --task, to which it belongs")
        if file is not None:
            return read_prompts(file), None
        return [Prompt(text, f"built-in prompt {number}") for number, text in enumerate(PROMPTS, start=1)], None
    from forestream.tasks import get_task

    chosen, part = get_task(task), split or "validation"
    examples = chosen.grouped(part, data_dir)
    texts = [
        Prompt(one.prompt, f"prompt {number} of {task}, {part}", one.form)
        for number, one in enumerate(examples, start=1)
    ]
    return texts, chosen.max_new_tokens


def _run(generator: Generator, prompts: Sequence[Prompt], dtype: options.DType, margin: float | None) -> Report:
    from forestream.agreement import compare
    from forestream.steps import Counters

    # All of them before the first text: a bad prompt is not to be found out after an hour.
    ids = [_ids(generator, prompt) for prompt in prompts]
    found, counters = [], Counters()
    with counted("prompts", len(ids)) as advance:
        for number, one in enumerate(ids, start=1):
            plain = generator.collect(generator.plain_steps(one))
            ours = generator.collect(generator.steps(one))
            counters.merge(ours.counters)
            found.append(compare(generator.model, one, plain.tokens, ours.tokens, number))
            advance(1)
    return Report(dtype, margin, prompts, found, counters)


def _ids(generator: Generator, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt that can be written after.

    Raises:
        PromptError: it is empty or leaves no room.
    """
    from forestream.data import prompt_ids
    from forestream.prefill import token_limit

    ids = prompt_ids(generator.tokenizer, prompt.asked)
    try:
        token_limit(generator.model, ids, generator.settings.max_new_tokens)
    except PromptError as error:
        raise PromptError(f"{prompt.where}: {error}") from error
    return ids


def _summary(report: Report) -> Table:
    counters = report.counters
    table = Table(show_header=False, box=box.SIMPLE)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = {
        "prompts": str(len(report.found)),
        "tokens compared": str(report.tokens),
        "equal texts": report.equal,
        "drafts accepted": f"{counters.accepted}, in {counters.passes} passes after the prompts'",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _differences(report: Report, generator: Generator) -> Table:
    table = Table(title="first differences", title_style="bold", title_justify="left", box=box.SIMPLE)
    table.add_column("prompt")
    table.add_column("token,\nfrom 0", justify="right", no_wrap=True)
    for name in ("plain decoding", "forestream"):
        table.add_column(name)
    for name in ("margin", "worst", "allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    bad = {one.number for one in report.failed}
    for one in report.differing[:_SHOWN]:
        table.add_row(
            Text(report.prompts[one.number - 1].where),
            str(one.first_difference),
            *(Text(_token(generator, token)) for token in (one.plain, one.written)),
            *(f"{value:.3g}" for value in (one.margin, one.worst, report.allowed(one))),
            style="red" if one.number in bad else "",
        )
    if len(report.differing) > _SHOWN:
        table.caption = f"and {len(report.differing) - _SHOWN} more, which --json writes"
    return table


def _token(generator: Generator, token: int | None) -> str:
    """A token as text and number; None is a text that had ended."""
    return "ended" if token is None else f"{generator.tokenizer.decode([token])!r} ({token})"


def _verdict(report: Report, generator: Generator) -> str:
    """One sentence."""
    counters = report.counters
    drafted = f"{counters.accepted} drafts were accepted in {counters.passes} passes"
    if report.failed:
        first, share = report.failed[0], f"{len(report.failed)} of {len(report.found)} texts"
        claim = (
            f"in float32 {share} differ"
            if report.exact
            else f"in {report.dtype} {share} have a token further below plain decoding's choice than allowed"
        )
        where = report.prompts[first.number - 1].where
        plain, written = (_token(generator, token) for token in (first.plain, first.written))
        return (
            f"The claim does not hold: {claim}. The first difference is at token {first.first_difference} (from 0) "
            f"after {where}, where plain decoding chooses {plain} and forestream wrote {written}, {first.margin:.3g} "
            f"apart (at worst {first.worst:.3g}, {report.allowed(first):.3g} allowed). Please report it."
        )
    if not report.differing:
        return (
            f"The claim holds: in {report.dtype} all {len(report.found)} texts, {report.tokens} tokens, are those of "
            f"plain decoding; {drafted}."
        )
    worst = max(one.worst for one in report.differing)
    allowed = min(report.allowed(one) for one in report.differing)
    return (
        f"The claim holds: in {report.dtype} {report.equal} texts are those of plain decoding, and in the others no "
        f"token is more than {worst:.3g} below its choice ({allowed:.3g} allowed); {drafted}."
    )


def _nothing_accepted(counters: Counters) -> str:
    """What to do about a run that verified no acceptance."""
    if not counters.passes:
        return (
            "every text ended with its prompt pass, so there was nothing to verify; take prompts with longer texts, or "
            "raise --max-new-tokens"
        )
    if not counters.acceptance_by_position:
        return (
            f"nothing was drafted in {counters.passes} passes, so nothing was verified; look at --nodes and --streams, "
            "at the adapter's decoding.json (it says so where plain decoding is fastest), and whether the adapter has "
            "streams (forestream inspect)"
        )
    few = counters.passes < _FEW_PASSES
    return (
        f"no draft was accepted in {counters.passes} passes, so only refusals were verified; "
        + ("these are few passes: more prompts or a higher --max-new-tokens may do. Else " if few else "")
        + "see that the prompts have the form that the adapter was trained on, that it is the adapter for this task, "
        "and that its training went on long enough (forestream inspect shows every draft)"
    )
