"""What a pass with streams costs next to a plain one, on hosts of the paper's sizes with random weights.

    .venv/bin/python benchmarks/paper_sizes.py --json benchmarks/results/paper-sizes-bfloat16.json

Weights do not matter for the cost, only shapes do. Every pass offers a tree of M nodes; settings take turns, medians
count. Needs about 8 GiB of memory and ten minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from forestream import provenance
from forestream.baseline import plain
from forestream.config import DecodeSettings, StreamConfig
from forestream.decode import decode
from forestream.model import StreamingLM

HOSTS: dict[str, Any] = {
    "opt-1.3b": OPTConfig(
        hidden_size=2048,
        num_hidden_layers=24,
        ffn_dim=8192,
        num_attention_heads=32,
        word_embed_proj_dim=2048,
        vocab_size=50272,
    ),
    "llama-1.1b": LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
        max_position_embeddings=2048,
    ),
}
SHARES = {"1/6": 6, "1/2": 2}
NODES = (4, 8, 16, 32)
STREAMS, PROMPT, ROUNDS = 4, 128, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--compile", choices=("off", "layer"), default="layer")
    given = parser.parse_args()
    made = provenance.collect(sys.argv[1:], program="benchmarks/paper_sizes.py")
    hosts: dict[str, Any] = {}
    for name, config in HOSTS.items():
        for share, parts in SHARES.items():
            # Preparing a model changes its configuration.
            found = costs(deepcopy(config), config.num_hidden_layers // parts, given.compile)
            hosts[f"{name}, N_s/N_L {share}"] = found
            print(name, share, {way: cost["plain_passes"] for way, cost in found.items()}, flush=True)
    settings = {"dtype": "bfloat16", "streams": STREAMS, "prompt": PROMPT, "rounds": ROUNDS, "compile": given.compile}
    given.json.write_text(json.dumps({"provenance": made, "settings": settings, "hosts": hosts}, indent=1) + "\n")


def costs(config: Any, stream_layers: int, compile: Any) -> dict[str, Any]:
    """Milliseconds of a pass, and how many plain passes that is, by setting."""
    host = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = StreamingLM(host, StreamConfig(streams=STREAMS, stream_layers=stream_layers))
    model.prepare(compile)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (PROMPT,), generator=draw).tolist()
    usual = DecodeSettings(max_new_tokens=10)
    ways = {
        f"M={nodes} {carriers}": replace(usual, nodes=nodes, carriers=carriers)
        for nodes in NODES
        for carriers in ("deferred", "fused")
    }
    seconds: dict[str, list[float]] = {"plain": [], **{name: [] for name in ways}}
    for turn in range(ROUNDS + 1):
        for name in seconds:
            steps = list(plain(model, prompt, usual) if name == "plain" else decode(model, prompt, ways[name]))
            nodes = 1 if name == "plain" else ways[name].nodes
            whole = [step.seconds for step in steps[1:] if len(step.kept) == nodes]
            if turn:  # the first round compiles
                seconds[name] += whole[:4]
    own = median(seconds["plain"])
    return {
        name: {
            "milliseconds": round(1e3 * median(times), 2),
            "least": round(1e3 * min(times), 2),
            "most": round(1e3 * max(times), 2),
            "plain_passes": round(median(times) / own, 3),
        }
        for name, times in seconds.items()
    }


if __name__ == "__main__":
    main()
