"""The scripts in benchmarks/ on a tiny adapter: sweeps can be gone on with, and the timeline parts a pass."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny
from forestream.bench.results import read_all
from forestream.bench.series import series_of
from forestream.cli import app
from forestream.config import SamplingSettings
from forestream.generation import Generator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("benchmarks") / "tiny")


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


def test_a_sweep_is_a_series_and_goes_on_where_it_stopped(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    start = subprocess.run

    def bench(command: list[str], check: bool = False, **how: Any) -> Any:
        """As a process of its own would, without loading the libraries again; other processes are started."""
        if command[0] != sys.executable:
            return start(command, check=check, **how)
        assert command[1:4] == ["-m", "forestream", "bench"]
        assert check
        commands.append(command)
        result = CliRunner().invoke(app, command[3:])
        assert result.exit_code == 0, result.output
        return None

    loaded = script("sweeps")
    monkeypatch.setattr(subprocess, "run", bench)
    sizes = {"1": ("--batch-size", "1"), "2": ("--batch-size", "2")}
    monkeypatch.setitem(loaded["SWEEPS"], "batch", sizes)
    mine = [
        "--adapter",
        str(adapter),
        "--task",
        "synthetic",
        "--limit",
        "2",
        "--repeats",
        "1",
        "--output",
        str(tmp_path),
    ]
    bench_own = ["--", "--dtype", "float32", "--compile", "off", "--max-new-tokens", "6"]
    monkeypatch.setattr(sys, "argv", ["sweeps.py", "batch", *mine, *bench_own])
    loaded["main"]()
    assert len(commands) == 2
    files = [tmp_path / f"batch-{size}.json" for size in (1, 2)]
    (series,) = series_of(read_all(files))
    assert (series.axis, [value for value, _ in series.points]) == ("batch size", [1, 2])
    files[1].unlink()
    loaded["main"]()
    assert [Path(command[-1]).name for command in commands[2:]] == ["batch-2.json"]
    assert json.loads(files[1].read_text())["settings"]["batch_size"] == 2


def test_rivals_meet_at_the_best_setting_of_each(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, commands = script("peers"), list[list[str]]()
    start = subprocess.run

    def bench(command: list[str], check: bool = False, **how: Any) -> Any:
        if command[0] != sys.executable:
            return start(command, check=check, **how)
        commands.append(command)
        result = CliRunner().invoke(app, command[3:])
        assert result.exit_code == 0, result.output
        return None

    monkeypatch.setattr(subprocess, "run", bench)
    monkeypatch.setitem(loaded["FAMILIES"], "lookup", ("lookup-2-2", "lookup-4-2"))
    for family in ("lookahead", "transformers"):
        monkeypatch.delitem(loaded["FAMILIES"], family)
    mine = ["--adapter", str(adapter), "--task", "synthetic", "--swept", "2", "--measured", "3"]
    own = ["--", "--dtype", "float32", "--compile", "off", "--max-new-tokens", "6", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *mine, "--output", str(tmp_path), *own])
    loaded["main"]()
    assert len(commands) == 2, "what needs a draft model or heads is left out"
    (swept,) = tmp_path.glob("synthetic-sweep-*.json")
    speeds = {name: row["speedup"]["of_totals"] for name, row in json.loads(swept.read_text())["methods"].items()}
    best = max(("lookup-2-2", "lookup-4-2"), key=lambda name: speeds[name])
    record = json.loads((tmp_path / "synthetic-peers.json").read_text())
    assert list(record["methods"]) == ["plain", "transformers", "forestream", best]
    assert (record["settings"]["split"], record["methods"]["plain"]["prompts"]) == ("test", 3)
    loaded["main"]()
    assert len(commands) == 3, "a sweep that is there is not run again"


def test_every_sweep_has_points() -> None:
    points_of = script("sweeps")["points_of"]
    for sweep, count in (("precision", 3), ("batch", 5), ("temperature", 4), ("prompt", 5)):
        points = points_of(sweep, ["own"])
        assert len(points) == len({name for name, _ in points}) == count
        assert all(options[:2] == ["--adapter", "own"] and len(options) > 3 for _, options in points)
    assert points_of("streams", ["a/four", "a/eight"]) == [
        ("streams-four", ["--adapter", "a/four"]),
        ("streams-eight", ["--adapter", "a/eight"]),
    ]


@pytest.mark.parametrize("arguments", [("streams",), ("batch", "--adapter", "a", "--adapter", "b"), ("colour",)])
def test_impossible_sweeps_are_refused(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweeps.py", *arguments, "--output", "out"])
    with pytest.raises(SystemExit):
        script("sweeps")["main"]()


def test_what_drawing_tokens_costs_is_a_part_of_its_own(adapter: Path) -> None:
    """K14: the law with its temperature and cuts is in the part "choice", and the parts are the pass."""
    loaded = script("timeline")
    generator = Generator.from_pretrained(adapter, dtype=torch.float32)
    generator.sampling = SamplingSettings(temperature=0.8, top_p=0.9)
    for steps in (generator.plain_steps, generator.steps):
        passes = list(loaded["timed"](generator.model, steps("name[A] ->", max_new_tokens=5)))
        assert passes
        for parts in passes:
            assert set(parts) == {*loaded["PARTS"], "pass"}
            assert parts["choice"] > 0
            assert sum(seconds for part, seconds in parts.items() if part != "pass") == pytest.approx(parts["pass"])
