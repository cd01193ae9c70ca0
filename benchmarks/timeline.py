"""Where the time of a pass goes, plain and with drafts, and how far both are from reading the weights once.

    .venv/bin/python benchmarks/timeline.py --json benchmarks/results/timeline-bfloat16.json

Prints milliseconds per pass by part, draws them beside the record, and compares with the roofline: bytes of the weights
that a pass multiplies by, over the memory bandwidth measured in the same process. The part "choice" is what choosing
tokens costs; with a temperature and cuts, drawing them. Needs an idle machine for a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import matplotlib
import torch

from forestream import provenance
from forestream.cache import StreamCache
from forestream.cli.demo import PROMPTS
from forestream.compiled import EagerLayers
from forestream.config import DecodeSettings, SamplingSettings
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.rows import Row
from forestream.tuning import Tuned

PARTS = ("inputs", "trunk", "stream layers", "head", "choice", "commit", "everything else")
ROUNDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", default="adapters/smollm2-135m-e2e")
    parser.add_argument("--settings", type=Path, help="a file that `forestream tune` wrote")
    parser.add_argument("--compile", default="layer", choices=("off", "layer", "full"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    made = provenance.collect(sys.argv[1:], program="benchmarks/timeline.py")
    settings = Tuned.read(given.settings).decode if given.settings else DecodeSettings()
    generator = Generator.from_pretrained(given.adapter, settings=settings, compile=given.compile)
    generator.sampling = SamplingSettings(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    generator.warm_up()
    passes = {"plain": generator.plain_steps, "forestream": generator.steps}
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in passes}
    for turn in range(ROUNDS + 1):
        for prompt in PROMPTS:
            for name, steps in passes.items():
                for parts in timed(generator.model, steps(prompt)):
                    for part, seconds in parts.items() if turn else ():
                        found[name][part].append(seconds)
    milliseconds = {
        name: {part: round(1e3 * median(times), 3) for part, times in parts.items()} for name, parts in found.items()
    }
    record = {
        "provenance": made,
        "settings": {
            "adapter": Path(given.adapter).name,
            "dtype": "bfloat16",
            "compile": given.compile,
            "sampling": vars(generator.sampling),
            "decode": vars(settings),
        },
        "milliseconds": milliseconds,
        "roofline": roofline(generator.model, {name: parts["pass"] for name, parts in milliseconds.items()}),
    }
    given.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"milliseconds": milliseconds, "roofline": record["roofline"]}, indent=1))
    draw(milliseconds, given.json.with_suffix(".png"))


def timed(model: StreamingLM, steps: Iterator[Any]) -> Iterator[dict[str, float]]:
    """Seconds of every pass after the prompt's, by part."""
    spent: dict[str, float] = defaultdict(float)
    with watching(model, spent):
        next(steps)
        while True:
            spent.clear()
            began = perf_counter()
            if next(steps, None) is None:
                return
            whole = perf_counter() - began
            parts = {part: spent.get(part, 0.0) for part in PARTS[:-1]}
            yield {**parts, PARTS[-1]: whole - sum(parts.values()), "pass": whole}


@contextmanager
def watching(model: StreamingLM, spent: dict[str, float]) -> Iterator[None]:
    """Add up the time of the parts of a pass while they run."""
    layers, trunk = type(model.layers), model.trunk_layers

    def add(owner: Any, name: str, part: str | Callable[..., str]) -> tuple[Any, str, Any]:
        right = getattr(owner, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            began = perf_counter()
            result = right(*arguments, **keywords)
            spent[part if isinstance(part, str) else part(*arguments)] += perf_counter() - began
            return result

        setattr(owner, name, wrapped)
        return owner, name, right

    def of_layers(own: EagerLayers, span: range, *rest: Any) -> str:
        return "trunk" if span == trunk else "stream layers"

    changed = [
        add(StreamingLM, "_inputs", "inputs"),
        add(layers, "__call__", of_layers),
        add(StreamingLM, "logits", "head"),
        add(Row, "read", "choice"),
        add(StreamCache, "commit", "commit"),
    ]
    try:
        yield
    finally:
        for owner, name, right in changed:
            setattr(owner, name, right)


def roofline(model: StreamingLM, passes: dict[str, float]) -> dict[str, Any]:
    """Bytes that a pass must read, the machine's bandwidth, and what share of it each method's pass reaches."""
    size = sum(t.numel() * t.element_size() for layer in model.port.layers for t in weights(layer))
    head = model.port.model.get_output_embeddings()
    size += sum(t.numel() * t.element_size() for t in weights(head))
    buffer = torch.ones(2**27, dtype=torch.int64)  # 1 GiB: far beyond any cache
    times = []
    for _ in range(6):
        began = perf_counter()
        buffer.sum()
        times.append(perf_counter() - began)
    bandwidth = buffer.numel() * buffer.element_size() / min(times)
    floor = 1e3 * size / bandwidth
    return {
        "weight_bytes": size,
        "bytes_per_second": round(bandwidth),
        "floor_milliseconds": round(floor, 3),
        "share_of_bandwidth": {name: round(floor / spent, 3) for name, spent in passes.items()},
    }


def weights(module: Any) -> list[torch.Tensor]:
    """Distinct matrices of a module: layers that share a packed one count it once."""
    found = {id(t): t for t in (*module.parameters(), *module.buffers()) if t.dim() == 2}
    return list(found.values())


def draw(milliseconds: dict[str, dict[str, float]], path: Path) -> None:
    """One bar for each method, its parts one after the other."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 2.2), layout="constrained")
    for place, parts in enumerate(milliseconds.values()):
        left = 0.0
        for number, part in enumerate(PARTS):
            axes.barh(place, parts[part], left=left, color=f"C{number}", label=part if place == 0 else None)
            left += parts[part]
    axes.set_yticks(range(len(milliseconds)), list(milliseconds))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of one pass, medians")
    axes.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.45))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
