"""The commands put together; an error of ours becomes one line on stderr and exit code 1.

Of `verify`, `evaluate` and `report`, 1 is an answer: their errors exit with 2.
"""

from __future__ import annotations

import logging
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from forestream.cli.bench import bench
from forestream.cli.calibrate import calibrate
from forestream.cli.card import card
from forestream.cli.cost import cost
from forestream.cli.demo import demo
from forestream.cli.distill import distill
from forestream.cli.evaluate import evaluate
from forestream.cli.export import export
from forestream.cli.generate import generate
from forestream.cli.inspect import inspect_adapter
from forestream.cli.profile import profile
from forestream.cli.report import report
from forestream.cli.serve import serve
from forestream.cli.train import train
from forestream.cli.train_draft_model import train_draft_model
from forestream.cli.train_medusa import train_medusa
from forestream.cli.train_sampler import train_sampler
from forestream.cli.train_scorer import train_scorer
from forestream.cli.trim import trim
from forestream.cli.tune import tune
from forestream.cli.verify import verify
from forestream.errors import ForestreamError


class _OneLineErrors(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ForestreamError as error:
            Console(stderr=True, soft_wrap=True).print(
                f"[bold red]error:[/] {type(error).__name__}: {escape(str(error))}", highlight=False
            )
            raise typer.Exit(2 if ctx.invoked_subcommand in ("verify", "evaluate", "report") else 1) from error


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def main() -> None:
    """Speculative Streaming: a model that drafts its own next tokens while it checks the last ones."""
    for name in ("torchao", "torch.utils._pytree"):
        # The host library imports torchao where it is installed, which then complains of parts for other machines.
        logging.getLogger(name).setLevel(logging.ERROR)


app.command()(demo)
app.command()(generate)
app.command("inspect")(inspect_adapter)
app.command()(distill)
app.command()(train)
app.command("train-scorer")(train_scorer)
app.command("train-sampler")(train_sampler)
app.command()(trim)
app.command("train-medusa")(train_medusa)
app.command("train-draft-model")(train_draft_model)
app.command()(evaluate)
app.command()(bench)
app.command()(report)
app.command()(verify)
app.command()(profile)
app.command()(tune)
app.command()(calibrate)
app.command()(cost)
app.command()(card)
app.command()(export)
app.command()(serve)
