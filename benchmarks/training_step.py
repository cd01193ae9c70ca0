"""What a joint step of training costs over a step of its LoRA-only twin on the same batches.

    .venv/bin/python benchmarks/training_step.py --data-dir data --json benchmarks/results/e2e-training-step.json

Both take turns on every batch, forward, backward and update; who begins changes. Peak memory is that of a process that
trains one of them alone (Linux counts it). Needs an idle machine for some minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import torch
from torch import nn

from forestream import provenance, recipes
from forestream.bases import load_base
from forestream.data import Collator, Tokens, tokenize
from forestream.objective import TargetBatch, joint_loss
from forestream.plan import batches_of
from forestream.tasks import get_task
from forestream.training import collator, ordered, training_model
from forestream.trial import one_pass

KINDS: Final = ("joint", "twin")
Step = Callable[[list[Tokens]], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--recipe", default="e2e")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--stream-layers", type=int, help="other than the recipe's")
    parser.add_argument("--alone", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.alone:
        steps, batches = made_ready(given, (given.alone,))
        Path("/proc/self/clear_refs").write_text("5")  # loading took more than training will: forget that peak
        for batch in batches:
            steps[given.alone](batch)
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        print(1024 * int(peak))
        return
    made = provenance.collect(sys.argv[1:], program="benchmarks/training_step.py")
    steps, batches = made_ready(given, KINDS)
    for kind in KINDS:
        steps[kind](batches[0])
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number, batch in enumerate(batches):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            seconds[kind].append(steps[kind](batch))
    ratios = sorted(a / b for a, b in zip(seconds["joint"], seconds["twin"], strict=True))
    peak = {kind: alone(kind, given) for kind in KINDS}
    record = {
        "provenance": made,
        "settings": {"task": given.recipe, "split": "train", "dtype": "bfloat16", "batches": len(batches)},
        "training_step": {
            "seconds": {kind: round(median(own), 3) for kind, own in seconds.items()},
            "ratio": {"median": round(median(ratios), 3), "min": round(ratios[0], 3), "max": round(ratios[-1], 3)},
            "peak_bytes": peak,
            "peak_ratio": round(peak["joint"] / peak["twin"], 3),
        },
    }
    print(json.dumps(record["training_step"], indent=1))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


def made_ready(given: argparse.Namespace, kinds: tuple[str, ...]) -> tuple[dict[str, Step], list[list[Tokens]]]:
    """A step of each kind, by name, and batches of the recipe's training, drawn evenly from its beginning."""
    recipe = recipes.Recipe.from_dict(recipes.read(given.recipe), given.recipe)
    streams = replace(recipe.streams, stream_layers=given.stream_layers or recipe.streams.stream_layers)
    rows = get_task(recipe.task).examples("train", given.data_dir)[: 50 * recipe.training.batch_size]
    steps: dict[str, Step] = {}
    for kind in kinds:
        host, tokenizer = load_base(recipe.base, torch.bfloat16)
        config = streams if kind == "joint" else replace(streams, streams=0)
        collate = collator(config.streams, tokenizer.eos_token_id, recipe.training)
        steps[kind] = step_of(training_model(host, config), collate, recipe)
    data = ordered([tokenize(tokenizer, row) for row in rows], recipe.training, tokenizer.eos_token_id)
    return steps, batches_of(data, recipe.training.batch_size)[: given.batches]


def step_of(model: nn.Module, collate: Collator, recipe: recipes.Recipe) -> Step:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.training.learning_rate, weight_decay=0.0)

    def step(batch: list[Tokens]) -> float:
        began = perf_counter()
        targets: TargetBatch = collate.batch(batch)
        output = one_pass(model, targets, recipe.training)
        with torch.autocast("cpu", torch.bfloat16):
            loss = joint_loss(model, output, targets, recipe.loss)
        loss.total.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return perf_counter() - began

    return step


def alone(kind: str, given: argparse.Namespace) -> int:
    """Peak memory of a process that trains `kind` on the same batches, in bytes."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


if __name__ == "__main__":
    main()
