"""Every rival at its own best setting, against streams, in one run.

    .venv/bin/python benchmarks/peers.py --adapter adapters/smollm2-135m-e2e --task e2e --data-dir data \\
        --draft-model draft-e2e --medusa medusa-e2e -- --dtype float32 --settings decoding.json

Each family's settings are swept on the validation split, and the fastest in total goes into one run on the test split,
together with plain decoding, the host library's own and what `forestream tune` chose. A sweep whose record is there is
not run again. Families that need a draft model or heads are left out where no folder is given. Wants an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "lookup": ("lookup-2-2", "lookup-4-2", "lookup-4-3", "lookup-8-2"),
    "lookahead": ("lookahead-2-3-2", "lookahead-4-3-4", "lookahead-4-4-4", "lookahead-8-4-8"),
    "draft-model": ("draft-model-2", "draft-model-3", "draft-model-4", "draft-model-6"),
    "medusa": ("medusa-static-4", "medusa-static-6", "medusa-static-8", "medusa-budget-5", "medusa-budget-8"),
    "transformers": ("transformers", "transformers+lookup-4", "transformers+lookup-10"),
    "transformers-draft-model": ("transformers+draft-model-3", "transformers+draft-model-5"),
}
"""The settings that each family is tried with."""
NEEDS: Final = {"draft-model": "draft_model", "transformers-draft-model": "draft_model", "medusa": "medusa"}
"""The folder without which a family is left out."""


def main() -> None:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="What is given behind -- goes to every run of `forestream bench`."
    )
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets; without it they come from the hub")
    parser.add_argument("--draft-model", help="folder that `forestream train-draft-model` wrote")
    parser.add_argument("--medusa", help="folder that `forestream train-medusa` wrote")
    parser.add_argument("--swept", type=int, default=16, help="validation prompts of each sweep")
    parser.add_argument("--measured", type=int, default=60, help="test prompts")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the records")
    given, rest = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    best = []
    for family, names in FAMILIES.items():
        if family in NEEDS and getattr(given, NEEDS[family]) is None:
            print(f"{family} is left out: no --{NEEDS[family].replace('_', '-')}", flush=True)
            continue
        record = given.output / f"{given.task}-sweep-{family}.json"
        if not record.is_file():
            bench(given, family, ("plain", *names), "validation", given.swept, record, rest)
        best.append(fastest(record, names))
        print(f"{family}: {best[-1]} is the fastest of {', '.join(names)}", flush=True)
    methods = ("plain", "transformers", "forestream", *(one for one in best if one != "transformers"))
    bench(given, None, methods, "test", given.measured, given.output / f"{given.task}-peers.json", rest)


def bench(
    given: argparse.Namespace,
    family: str | None,
    methods: tuple[str, ...],
    split: str,
    limit: int,
    record: Path,
    rest: list[str],
) -> None:
    """Run `methods` of a family, or of all of them, on a split."""
    where = ["--adapter", given.adapter, "--task", given.task, "--split", split, "--limit", str(limit)]
    where += ["--data-dir", str(given.data_dir)] if given.data_dir else []
    for option in ("draft_model", "medusa"):
        if getattr(given, option) is not None and (family is None or NEEDS.get(family) == option):
            where += [f"--{option.replace('_', '-')}", getattr(given, option)]
    asked = ["--methods", ",".join(methods), *rest, "--json", str(record)]
    subprocess.run([sys.executable, "-m", "forestream", "bench", *where, *asked], check=True)


def fastest(record: Path, names: tuple[str, ...]) -> str:
    """The one of `names` that was the fastest in total."""
    methods = json.loads(record.read_text())["methods"]
    return max(names, key=lambda name: methods[name]["speedup"]["of_totals"])


if __name__ == "__main__":
    main()
