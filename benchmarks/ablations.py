"""One setting of the training changed at a time: what it does to losses, to drafts accepted, and to a pass.

    .venv/bin/python benchmarks/ablations.py --data-dir data --runs ablations

Every variant is the E2E recipe with fewer examples, and with what BASE and its line below say; all but the other seed
see the same examples in the same order. A trained variant is measured on validation prompts against plain decoding of
itself. The record grows variant by variant: started again, the script goes on where it stopped. About six minutes a
variant on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from forestream import provenance

BASE: Final = (
    "training.batch_size=6",
    "training.stream_rate=50",
    "training.draft_vocabulary=2048",
    "training.share=0.5",
)
"""What makes streams learn something from few examples, in little time."""
VARIANTS: Final[dict[str, tuple[str, ...]]] = {
    "as it is": (),
    "another seed": ("training.seed=1",),
    "positions: same": ("streams.positions=same",),
    "start: low rank": ("streams.start=low_rank",),
    "value rotation instead of P_j": ("streams.value_rotation=true",),
    "rate of P_j x 1": ("training.stream_rate=1",),
    "N_s = 4": ("streams.stream_layers=4",),
    "N_s = 15": ("streams.stream_layers=15",),
    "alpha = 0": ("loss.stream=0.0",),
    "alpha = 1": ("loss.stream=1.0",),
    "plain heads in the joint loss": (),
    "path sampler": ("training.sampler_width=64",),
    "G = 2": ("streams.streams=2",),
    "G = 8": ("streams.streams=8",),
    "alpha = 0.3": ("loss.stream=0.3",),
    "alpha = 0.03": ("loss.stream=0.03",),
    "alpha halved with every j": ("loss.decay=0.5",),
    "N_s = 2": ("streams.stream_layers=2",),
    "N_s = 1": ("streams.stream_layers=1",),
    "G = 6": ("streams.streams=6",),
    "all of the carriers": ("training.share=1.0",),
    "soft targets": ("loss.target=soft",),
    "soft and hard targets": ("loss.target=both",),
    "learning rate 2e-3": ("training.learning_rate=2e-3",),
}
HEADS: Final = "plain heads in the joint loss"
"""The variant with heads on the final state in place of streams: `benchmarks/plain_heads.py` trains it."""
METHOD: Final = "budget-8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument(
        "--runs", type=Path, required=True, help="folder for the adapters; they are not kept in the record"
    )
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only", help="names of variants, separated by semicolons; all by default")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/e2e-ablations.json"))
    given = parser.parse_args()
    record = begun(given)
    for name in given.only.split(";") if given.only else VARIANTS:
        if name not in {row["variant"] for row in record["ablations"]}:
            record["ablations"].append({"variant": name, **ran(name, given)})
            given.json.write_text(json.dumps(record, indent=1) + "\n")


def begun(given: argparse.Namespace) -> dict[str, Any]:
    """The record so far; one of other examples or prompts is refused."""
    settings = {"task": "e2e", "split": "validation", "dtype": given.dtype, "method": METHOD}
    settings |= {"base": list(BASE), "examples": given.examples, "prompts": given.prompts}
    if given.json.is_file():
        record: dict[str, Any] = json.loads(given.json.read_text())
        if record["settings"] != settings:
            sys.exit(f"{given.json} was begun with {record['settings']}; expected {settings}: name another file")
        return record
    made = provenance.collect(sys.argv[1:], program="benchmarks/ablations.py")
    return {"provenance": made, "settings": settings, "ablations": []}


def ran(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train a variant, measure it, and say what came of it."""
    adapter = given.runs / "".join(letter if letter.isalnum() else "-" for letter in name)
    whole = adapter / "medusa" if name == HEADS else adapter  # written last
    if not (whole / "provenance.json").is_file():
        where = ("--recipe", "e2e", "--output", adapter, "--data-dir", given.data_dir)
        wanted = (f"examples={given.examples}", f"training.dtype={given.dtype}", *BASE, *VARIANTS[name])
        if name == HEADS:
            python(Path(__file__).with_name("plain_heads.py"), *where, *wanted)
        else:
            python("-m", "forestream", "train", *where, "--resume", *wanted)
    bench = adapter.with_suffix(".json")
    where = ("--adapter", adapter, "--data-dir", given.data_dir, "--split", "validation", "--limit", given.prompts)
    if name == HEADS:
        where += ("--medusa", adapter / "medusa")
    method = f"medusa-{METHOD}" if name == HEADS else METHOD
    asked = ("--methods", f"plain,{method}", "--dtype", given.dtype, "--json", bench)
    python("-m", "forestream", "bench", *where, *asked)
    trained = json.loads((adapter / "provenance.json").read_text())
    drafted = json.loads(bench.read_text())["methods"][method]
    last = trained["last_log"]
    return {
        "overrides": list(VARIANTS[name]),
        "main_loss": last["main_loss"],
        "stream_losses": [value for key, value in last.items() if key.startswith("stream_") and key.endswith("_loss")],
        "call_reduction": drafted["call_reduction"],
        "speedup": drafted["speedup"]["of_totals"],
        "training_seconds": trained["seconds"],
        "commit": trained["commit"],
    }


def python(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
