"""A training's plan for people to read."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table

if TYPE_CHECKING:
    from forestream.plan import Plan, Spread


def plan_table(plan: Plan) -> Table:
    """Rows and operations: of a pass on average, of the largest one, and of the whole run."""
    table = Table(title=f"{plan.examples:,} examples in {plan.passes:,} passes", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("of a pass", "mean", "largest", "whole run"):
        table.add_column(heading, justify="left" if heading == "of a pass" else "right", no_wrap=True)
    rows = {"main slots": plan.main, "stream slots": plan.stream}
    rows |= {f"head rows, {term}": spread for term, spread in plan.head.items()}
    for name, spread in rows.items():
        table.add_row(name, *(f"{value:,.0f}" for value in _values(spread)))
    for name, spread in {"GFLOP forward": plan.forward, "GFLOP backward": plan.backward}.items():
        table.add_row(name, *(f"{value / 1e9:,.3g}" for value in _values(spread)))
    return table


def _values(spread: Spread) -> tuple[float, float, float]:
    return spread.mean, spread.largest, spread.total


def plan_lines(plan: Plan) -> list[str]:
    """Padding, the ratio to a LoRA alone, memory, and time."""
    lines = [
        f"padding: {plan.padding:.1%} of the slots",
        f"operations: {plan.over_lora:.2f} times those of a LoRA without streams on the same batches",
    ]
    if (memory := plan.memory) is not None:
        learned = decimal(memory.trained + memory.gradients + memory.optimizer)
        lines.append(
            f"memory at the largest pass, estimated: {decimal(memory.peak)} (weights {decimal(memory.weights)}, "
            f"trained parameters with gradients and optimizer {learned}, activations {decimal(memory.activations)}, "
            f"logits {decimal(memory.logits)})"
        )
    peaks = [one.peak_bytes for one in plan.measured if one.peak_bytes is not None]
    if peaks:
        lines.append(
            f"memory of this process at its peak, measured, libraries and loading included: {decimal(max(peaks))}"
        )
    for one in plan.measured:
        speed = one.operations / one.seconds / 1e9
        lines.append(f"a pass of {one.operations / 1e9:,.3g} GFLOP took {one.seconds:.2f} s ({speed:,.0f} GFLOP/s)")
    if plan.seconds is not None and plan.seconds_per_update is not None:
        each, whole = f"{plan.seconds_per_update:.2f} s per update", timedelta(seconds=round(plan.seconds))
        lines.append(f"time: {each}, {plan.updates:,} updates, {whole} in all; loading and checkpoints come on top")
    return lines
