"""What streams still foresee with a draft vocabulary: tokens per pass by its size, on the same texts.

    .venv/bin/python benchmarks/draft_vocabulary.py --data-dir data --json benchmarks/results/e2e-draft-vocabulary.json

Texts are those of plain decoding. The streams of every place are recorded once for each vocabulary, and decoding with
each tree is simulated, which gives the passes of a real run in float32. No time is measured: the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import torch

from forestream import checkpoint, provenance
from forestream.acceptance import record, simulate
from forestream.baseline import plain
from forestream.cli.options import SHIPPED
from forestream.config import DecodeSettings
from forestream.data import prompts_of, tokenize
from forestream.drafting import BudgetTree
from forestream.steps import tokens_of
from forestream.tasks import get_task
from forestream.vocabulary import DraftVocabulary

SIZES: Final = (128, 256, 512, 1024, 2048, None)
"""None is every token that the training completions hold."""
TREES: Final = (8, 16, 32)
"""Nodes of budget trees."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, default=SHIPPED)
    parser.add_argument("--task", default="e2e")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    made = provenance.collect(sys.argv[1:], program="benchmarks/draft_vocabulary.py")
    task = get_task(given.task)
    model, tokenizer = checkpoint.load(given.adapter)
    end, V = tokenizer.eos_token_id, model.port.head_size
    completions = [tokenize(tokenizer, row).completion for row in task.examples("train", given.data_dir)]
    vocabularies = {len(one): one for one in (DraftVocabulary.counted(completions, end, V, size) for size in SIZES)} | {
        V: None
    }
    settings = DecodeSettings(max_new_tokens=task.max_new_tokens)
    counts = {(size, nodes): [0, 0] for size in vocabularies for nodes in TREES}
    texts = []
    for prompt in prompts_of(tokenizer, task.grouped(given.split, given.data_dir)[: given.limit]):
        text = tokens_of(list(plain(model, prompt, settings, (end,))))
        texts.append(text)
        for size, vocabulary in vocabularies.items():
            model.restrict(vocabulary)
            trace = record(model, prompt, text, max(TREES), settings.max_new_tokens)
            for nodes in TREES:
                run = simulate(trace, BudgetTree(nodes), trace.streams)
                counts[size, nodes][0] += run.tokens
                counts[size, nodes][1] += run.passes
    record_of: dict[str, Any] = {
        "provenance": made,
        "settings": {
            "adapter": given.adapter.resolve().name,
            "task": given.task,
            "split": given.split,
            "inputs": len(texts),
            "dtype": str(torch.float32).removeprefix("torch."),
        },
        "draft_vocabulary": [
            {
                "size": size,
                "covers_train": 1.0 if one is None else round(one.coverage(completions), 6),
                "covers_texts": 1.0 if one is None else round(one.coverage(texts), 6),
                "tokens_per_pass": {str(n): round(counts[size, n][0] / counts[size, n][1], 4) for n in TREES},
                "passes": {str(n): counts[size, n][1] for n in TREES},
            }
            for size, one in vocabularies.items()
        ],
    }
    print(json.dumps(record_of["draft_vocabulary"], indent=1))
    if given.json:
        given.json.write_text(json.dumps(record_of, indent=1) + "\n")


if __name__ == "__main__":
    main()
