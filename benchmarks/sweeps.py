"""Sweeps: one setting changes, everything else stays, and each point is a bench record of its own.

    .venv/bin/python benchmarks/sweeps.py batch --data-dir data --output benchmarks/results/sweeps
    .venv/bin/forestream report benchmarks/results/sweeps/*.json --output report

Sweeps are precision (float32, bfloat16, int8 weights), batch (1 to 16), temperature (0 to 1), prompt (128 to 4096
tokens) and streams (an adapter for each number of streams: give --adapter several times). A point whose file is there
is not run again, so an interrupted sweep goes on where it stopped. Wants an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SWEEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "precision": {
        "float32": ("--dtype", "float32"),
        "bfloat16": ("--dtype", "bfloat16"),
        "int8": ("--dtype", "bfloat16", "--quantise", "int8"),
    },
    "batch": {str(size): ("--batch-size", str(size)) for size in (1, 2, 4, 8, 16)},
    "temperature": {str(value): ("--temperature", str(value)) for value in (0.0, 0.3, 0.7, 1.0)},
    "prompt": {str(tokens): ("--prompt-tokens", str(tokens)) for tokens in (128, 512, 1024, 2048, 4096)},
    "streams": {},
}
"""The options of each point, by its name."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="What is given behind -- goes to every run of `forestream bench`."
    )
    parser.add_argument("sweep", choices=list(SWEEPS))
    parser.add_argument("--adapter", action="append", help="several for `streams`; by default the repository's own")
    parser.add_argument("--task", default="e2e")
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets; without it they come from the hub")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", default="plain,forestream")
    parser.add_argument("--output", type=Path, required=True, help="folder of the records")
    own, rest = parser.parse_args(_before(sys.argv[1:])), _behind(sys.argv[1:])
    adapters = own.adapter or ["adapters/smollm2-135m-e2e"]
    if (own.sweep == "streams") != (len(adapters) > 1):
        parser.error("the sweep over streams needs several adapters, the others one")
    common = ["--task", own.task, "--split", own.split, "--limit", str(own.limit), "--repeats", str(own.repeats)]
    common += ["--methods", own.methods, *(["--data-dir", str(own.data_dir)] if own.data_dir else []), *rest]
    points = points_of(own.sweep, adapters)
    for number, (name, options) in enumerate(points, start=1):
        file = own.output / f"{name}.json"
        if file.is_file():
            print(f"{number} of {len(points)}: {file} is there", flush=True)
            continue
        print(f"{number} of {len(points)}: {name}", flush=True)
        command = [sys.executable, "-m", "forestream", "bench", *options, *common, "--json", str(file)]
        subprocess.run(command, check=True)


def points_of(sweep: str, adapters: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Name and options of every point, in order."""
    if sweep == "streams":
        return [(f"streams-{Path(one).name}", ["--adapter", one]) for one in adapters]
    return [(f"{sweep}-{name}", ["--adapter", adapters[0], *options]) for name, options in SWEEPS[sweep].items()]


def _before(arguments: Sequence[str]) -> list[str]:
    return list(arguments[: arguments.index("--")] if "--" in arguments else arguments)


def _behind(arguments: Sequence[str]) -> list[str]:
    return list(arguments[arguments.index("--") + 1 :] if "--" in arguments else [])


if __name__ == "__main__":
    main()
