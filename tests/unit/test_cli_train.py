"""`forestream train` on a tiny base: recipes, what changes them, plans, starts from an adapter, refusals."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import tiny
from forestream.checkpoint import PROVENANCE, STREAMS, VOCABULARY
from forestream.cli import app
from forestream.cli.train import train
from forestream.manifest import Manifest
from forestream.objective import LossConfig
from forestream.recipes import Recipe
from forestream.training import TrainConfig

RECIPE = """
task: synthetic
base: {base}
examples: 24
streams: {{streams: 2, stream_layers: 2, lora_rank: 4, lora_alpha: 8}}
training: {{batch_size: 8, dtype: float32, warmup: 0}}
loss: {{decay: 0.5}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    path = folder / "own.yaml"
    path.write_text(RECIPE.format(base=tiny.tiny_base(folder / "base")))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "200"})


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    line: str = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


def provenance(adapter: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((adapter / PROVENANCE).read_text())
    return record


def test_a_recipe_is_trained_and_recorded_whole(recipe: Path, tmp_path: Path) -> None:
    output = done("--recipe", recipe, "--output", tmp_path / "own", "streams.positions=same", "--learning-rate", 2e-3)
    record = provenance(tmp_path / "own")
    kept = Recipe.from_dict(record["recipe"])
    assert (kept.task, kept.examples, kept.mode) == ("synthetic", 24, "joint")
    assert (kept.streams.streams, kept.streams.positions) == (2, "same")
    assert (kept.training.batch_size, kept.training.learning_rate, kept.loss.decay) == (8, 2e-3, 0.5)
    assert Manifest.read(tmp_path / "own").config == kept.streams
    assert record["updates"] == 3
    assert record["stream"]["positions"] == "same"
    assert "loss weights: main 1, stream_1 0.1, stream_2 0.05, scorer 0.1" in output
    assert re.search(r"3 passes in 3 updates; a pass has \d{3} main and \d{3} stream slots on average, 0% of", output)
    assert "  positions: same\n" in output
    assert "  learning_rate: 0.002\n" in output


def test_a_draft_vocabulary_is_written_with_the_adapter(recipe: Path, tmp_path: Path) -> None:
    output = done("--recipe", recipe, "--output", tmp_path / "own", "training.draft_vocabulary=7")
    assert load_file(tmp_path / "own" / STREAMS)[VOCABULARY].shape == (7,)
    record = provenance(tmp_path / "own")
    assert record["vocabulary"] == {"size": 7, "of": 98}
    assert record["recipe"]["training"]["draft_vocabulary"] == 7
    assert "draft_vocabulary: 7" in output
    assert "Its streams draft 7 of 98 tokens" in (tmp_path / "own" / "README.md").read_text()
    begun = ("--output", tmp_path / "on", "start_from=" + str(tmp_path / "own"), "training.draft_vocabulary=0")
    done("--recipe", recipe, *begun)
    assert VOCABULARY not in load_file(tmp_path / "on" / STREAMS)


def test_a_path_sampler_is_trained_with_the_streams_and_told_of(recipe: Path, tmp_path: Path) -> None:
    output = done("--recipe", recipe, "--output", tmp_path / "own", "training.sampler_width=5")
    tensors = load_file(tmp_path / "own" / STREAMS)
    assert tensors["sampler.up"].shape[0] == 5
    assert tensors["sampler.up"].any()
    record = provenance(tmp_path / "own")
    assert record["sampler"]["width"] == 5
    assert "It has a path sampler, trained on" in (tmp_path / "own" / "README.md").read_text()
    assert "of streams, scorer and sampler" in output
    # It was made for those streams, and is not taken over.
    done("--recipe", recipe, "--output", tmp_path / "on", "start_from=" + str(tmp_path / "own"))
    assert "sampler.up" not in load_file(tmp_path / "on" / STREAMS)


def test_options_go_before_changes_and_changes_before_the_recipe(recipe: Path, tmp_path: Path) -> None:
    changes = ("training.batch_size=12", "examples=12", "training.epochs=2")
    file = tmp_path / "plan.json"
    done("--recipe", recipe, "--plan", "--json", file, *changes, "--batch-size", 6)
    record = json.loads(file.read_text())
    assert record["recipe"]["training"]["batch_size"] == 6
    assert (record["plan"]["examples"], record["plan"]["passes"]) == (24, 4)


def test_a_plan_is_shown_and_nothing_is_trained(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    output = done("--recipe", recipe, "--plan", "--json", file)
    for text in (
        "main slots",
        "stream slots",
        "head rows, stream_2",
        "head rows, scorer",
        "GFLOP backward",
        "padding:",
    ):
        assert text in output
    for text in (
        "padding: ",
        "times those of a LoRA without streams",
        "memory at the largest pass",
        "s per update, 3 updates",
    ):
        assert text in output
    record = json.loads(file.read_text())
    assert set(record) == {"provenance", "recipe", "plan"}
    plan = record["plan"]
    assert plan["main"]["total"] == 3 * plan["main"]["mean"]
    assert plan["over_lora"] > 1
    assert plan["seconds"] == pytest.approx(3 * plan["seconds_per_update"])
    assert plan["memory"]["peak"] > plan["memory"]["activations"] > 0
    assert list(tmp_path.iterdir()) == [file]


def test_without_a_recipe_half_of_the_layers_carry_streams(recipe: Path, tmp_path: Path) -> None:
    small = ("--task", "synthetic", "--base", recipe.parent / "base", "--examples", 4, "--dtype", "float32")
    done(*small, "--output", tmp_path / "own", "streams.lora_rank=2")
    assert Manifest.read(tmp_path / "own").config.stream_layers == 2
    done(*small, "--output", tmp_path / "other", "streams.lora_rank=2", "--stream-layers", 3)
    assert Manifest.read(tmp_path / "other").config.stream_layers == 3


@pytest.mark.parametrize(("home", "told"), [(True, "bfloat16"), (False, "float32")])
def test_without_a_dtype_the_machine_decides(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: bool, told: str
) -> None:
    monkeypatch.setattr("forestream.bases.multiplies_bfloat16", lambda: home)
    done("--recipe", recipe, "--output", tmp_path / "own", "--examples", 8, "training.dtype=auto")
    record = provenance(tmp_path / "own")
    assert record["recipe"]["training"]["dtype"] == record["training"]["dtype"] == told
    assert Manifest.read(tmp_path / "own").base.precision == told


def test_a_run_can_start_from_an_adapter(recipe: Path, tmp_path: Path) -> None:
    done("--recipe", recipe, "--output", tmp_path / "first")
    again = ("--recipe", recipe, "--output", tmp_path / "second", "--start-from", tmp_path / "first")
    done(*again, "training.learning_rate=0")
    record = provenance(tmp_path / "second")
    assert record["recipe"]["start_from"] == "first"
    assert len(record["started_from"]) == 64
    assert provenance(tmp_path / "first")["started_from"] is None
    first, second = (load_file(tmp_path / name / STREAMS) for name in ("first", "second"))
    assert all(bool((first[name] == tensor).all()) for name, tensor in second.items())
    elsewhere = (*again[:2], "--plan", *again[4:])
    assert "start_from: first" in done(*elsewhere, "--streams", 3)
    assert "trained with lora_rank" in refused(*elsewhere, "streams.lora_rank=3")


def test_what_cannot_be_trained_is_refused_in_a_line(recipe: Path, tmp_path: Path) -> None:
    assert "the command line names no task; expected task: NAME, or --task NAME" in refused(
        "--output", tmp_path / "own"
    )
    assert "found neither --output nor --plan" in refused("--recipe", recipe)
    assert "found --output and --plan" in refused("--recipe", recipe, "--plan", "--output", tmp_path / "own")
    assert "--json holds a plan" in refused("--recipe", recipe, "--output", tmp_path / "own", "--json", tmp_path / "a")
    assert "unknown key training.rate; known are" in refused("--recipe", recipe, "--plan", "training.rate=1")
    assert "found no recipe 'e3e'" in refused("--recipe", "e3e", "--plan")
    wrong = refused("--recipe", recipe, "--plan", "training.schedule=step")
    assert f"recipe {recipe}: schedule is 'step'; expected one of 'linear', 'cosine'" in wrong


def test_defaults_that_the_help_names_are_those_of_the_settings() -> None:
    named: dict[str, str] = {}
    for name, parameter in inspect.signature(train, eval_str=True).parameters.items():
        (info,) = [one for one in get_args(parameter.annotation) if hasattr(one, "help")][:1] or (None,)
        if info is not None and (found := re.search(r"\[default: (.+)\]$", info.help or "")):
            named[name] = found[1]
    recipe = Recipe(task="synthetic")
    values = {field.name: getattr(recipe.training, field.name) for field in fields(TrainConfig)}
    values |= {"base": recipe.base, "mode": recipe.mode, "streams": recipe.streams.streams}
    values |= {"stream_weight": LossConfig().stream, "target": LossConfig().target}
    assert len(named) == 14
    assert named == {name: str(values[name]) for name in named}
