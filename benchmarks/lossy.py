"""What the lossy rules of acceptance buy, and what they cost: speed against divergence from the model's own law.

    .venv/bin/python benchmarks/lossy.py --data-dir data --json benchmarks/results/e2e-lossy.json

Where a rule takes a draft, it writes that draft with certainty, so the text's law there is 1 on it and the divergence
(of the law written from the model's law at temperature 1, as Kullback and Leibler have it) is -log p(draft). Its mean
over tokens is reported, in nats per token, beside the task's score, tokens a pass, and seconds. It is an upper bound:
drafts that were chosen without the rule's help count as if the rule had taken them. Exact decoding has 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forestream import provenance
from forestream.config import Acceptance, DecodeSettings, SamplingSettings
from forestream.decode import decode
from forestream.generation import Generator
from forestream.steps import Counters, tokens_of
from forestream.tasks import get_task

RULES: tuple[tuple[Acceptance, float | None], ...] = (
    ("exact", None),
    ("typical", 0.05),
    ("typical", 0.1),
    ("typical", 0.3),
    ("top_k", 2),
    ("top_k", 5),
    ("ratio", 0.5),
    ("ratio", 0.2),
    ("ratio", 0.05),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", default="adapters/smollm2-135m-e2e")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--compile", default="layer", choices=("off", "layer"))
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    task = get_task("e2e")
    made = provenance.collect(sys.argv[1:], program="benchmarks/lossy.py")
    settings = DecodeSettings(max_new_tokens=task.max_new_tokens)
    generator = Generator.from_pretrained(given.adapter, settings=settings, compile=given.compile)
    generator.warm_up()
    examples = task.grouped("validation", given.data_dir)[: given.limit]
    rows = []
    for temperature in given.temperature or (0.0, 1.0):
        for rule, threshold in RULES:
            law = SamplingSettings(temperature=temperature, accept=rule, threshold=threshold)
            rows.append(
                {
                    "accept": rule,
                    "threshold": threshold,
                    "temperature": temperature,
                    **run(generator, task, examples, law),
                }
            )
            print(rows[-1], flush=True)
    record = {
        "provenance": made,
        "settings": {
            "task": "e2e",
            "split": "validation",
            "prompts": len(examples),
            "dtype": "bfloat16",
            "decode": vars(settings),
        },
        "rules": rows,
    }
    given.json.write_text(json.dumps(record, indent=1) + "\n")


def run(generator: Generator, task: Any, examples: Any, law: SamplingSettings) -> dict[str, float]:
    """All prompts under one rule."""
    total, texts, divergence = Counters(), [], 0.0
    for example in examples:
        request = replace(generator.request(example.prompt), sampling=law, logprobs=0)
        steps = list(decode(generator.model, request, generator.settings))
        total.extend(steps)
        texts.append(generator.text(tokens_of(steps)))
        if law.lossy:
            divergence -= sum(score.logprob for step in steps for score in step.scores[: step.accepted])
    return {
        "call_reduction": round(total.call_reduction, 3),
        "seconds_per_token": round(total.decode_seconds / max(total.decoded, 1), 5),
        "nats_per_token": round(divergence / total.generated, 4),
        **{name: round(score, 2) for name, score in task.score(texts, examples).items()},
    }


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
