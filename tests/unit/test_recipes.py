"""Recipes: those that come with the package, what a file may say, what is refused, and changes behind it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from forestream import recipes
from forestream.config import StreamConfig
from forestream.errors import ConfigError
from forestream.objective import LossConfig
from forestream.recipes import Recipe
from forestream.tasks import get_task
from forestream.training import TrainConfig

WHOLE = """
task: synthetic
base: some/model
mode: lossless
examples: 7
start_from: adapters/other
streams:
  streams: 2
  positions: same
training:
  learning_rate: 5e-4
  warmup: 3
loss:
  decay: 0.5
expected:
  main_loss: 1.5
"""


def write(folder: Path, text: str) -> str:
    path = folder / "own.yaml"
    path.write_text(text)
    return str(path)


def refused(folder: Path, text: str) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        Recipe.from_dict(recipes.read(path), path)
    assert path in str(caught.value)
    return str(caught.value)


# --- those of the package -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_of_the_package_can_be_read(name: str) -> None:
    recipe = Recipe.from_dict(recipes.read(name), name)
    assert recipe.task == name
    assert recipe.base == "smollm2-135m"
    assert (recipe.streams.streams, recipe.training.learning_rate) == (4, 1e-3)
    assert recipe.loss.stream == (1.0 if recipe.mode == "lossless" else 0.1)


def test_the_recipes_of_the_package() -> None:
    found = {name: Recipe.from_dict(recipes.read(name), name) for name in recipes.names()}
    assert sorted(found) == ["chat", "dialogsum", "e2e", "sql"]
    assert {name: recipe.mode for name, recipe in found.items() if recipe.mode != "joint"} == {"chat": "lossless"}
    assert {name: recipe.streams.stream_layers for name, recipe in found.items()} == {
        "chat": 8,
        "dialogsum": 8,
        "e2e": 8,
        "sql": 8,
    }
    assert {name: recipe.training.batch_size * recipe.training.accumulate for name, recipe in found.items()} == {
        "chat": 6,
        "dialogsum": 6,
        "e2e": 12,
        "sql": 12,
    }
    assert {name: recipe.examples for name, recipe in found.items()} == {
        "chat": 640,
        "dialogsum": 1500,
        "e2e": 10800,
        "sql": 4800,
    }
    assert [get_task(name).name for name in ("e2e", "sql", "dialogsum")] == ["e2e", "sql", "dialogsum"]


# --- files ----------------------------------------------------------------------------------------------------


def test_a_file_says_everything_of_a_training(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipes.read(write(tmp_path, WHOLE)))
    assert recipe == Recipe(
        task="synthetic",
        base="some/model",
        examples=7,
        start_from="adapters/other",
        streams=StreamConfig(streams=2, positions="same", mode="lossless"),
        training=TrainConfig(learning_rate=5e-4, warmup=3),
        loss=LossConfig(decay=0.5),
        expected={"main_loss": 1.5},
    )
    assert recipe.mode == "lossless"


def test_what_a_file_leaves_out_is_as_by_default(tmp_path: Path) -> None:
    assert Recipe.from_dict(recipes.read(write(tmp_path, "task: e2e\n"))) == Recipe(task="e2e")


def test_a_recipe_written_out_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipes.read(write(tmp_path, WHOLE)))
    assert Recipe.from_dict(recipes.read(write(tmp_path, yaml.safe_dump(recipe.values())))) == recipe


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("task: e2e\nepochs: 3\n", "unknown key epochs; known are base, examples, expected, loss, mode, start_from"),
        ("task: e2e\ntraining: {learning_rat: 1}\n", "unknown key learning_rat in training; known are accumulate, "),
        ("task: e2e\nstreams: {stream: 1}\n", "unknown key stream in streams; known are lora_alpha, lora_rank, "),
        ("task: e2e\nloss: {alpha: 1}\n", "unknown key alpha in loss; known are chunk, decay, main, scorer, soft_sh"),
        ("task: e2e\nstreams: {mode: joint}\n", "unknown key mode in streams (mode stands beside task); known are "),
        ("base: smollm2-135m\n", "names no task; expected task: NAME"),
    ],
)
def test_unknown_and_missing_keys_are_refused(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("task: 3", "task is 3; expected a text"),
        ("task: e2e\nbase: [a]", "base is ['a']; expected a text"),
        ("task: e2e\nstart_from: 1", "start_from is 1; expected a text"),
        ("task: e2e\nexamples: many", "examples is 'many'; expected a whole number"),
        ("task: e2e\nexamples: 1.5", "examples is 1.5; expected a whole number"),
        ("task: e2e\nmode: both", "mode is 'both'; expected one of 'joint', 'lossless'"),
        ("task: e2e\nstreams:", "streams is None; expected keys with values: lora_alpha"),
        ("task: e2e\ntraining: [1]", "training is [1]; expected keys with values"),
        ("task: e2e\nexpected: 1", "expected is 1; expected keys with values"),
        ("task: e2e\ntraining: {learning_rate: fast}", "learning_rate is 'fast'; expected a number"),
        ("task: e2e\ntraining: {batch_size: 1.5}", "batch_size is 1.5; expected a whole number"),
        ("task: e2e\ntraining: {batch_size: true}", "batch_size is True; expected a whole number"),
        ("task: e2e\ntraining: {seed: -1}", "seed is -1; expected a number from 0"),
        ("task: e2e\ntraining: {schedule: step}", "schedule is 'step'; expected one of 'linear', 'cosine'"),
        ("task: e2e\ntraining: {targets: prompt}", "targets is 'prompt'; expected one of 'completion', 'all'"),
        ("task: e2e\ntraining: {checkpointing: 1}", "checkpointing is 1; expected true or false"),
        ("task: e2e\ntraining: {stream_rate: -1}", "stream_rate is -1; expected a number from 0"),
        ("task: e2e\nloss: {decay: x}", "decay is 'x'; expected a number"),
        ("task: e2e\nstreams: {value_rotation: 1}", "value_rotation is 1; expected true or false"),
        ("- task", "holds a list; expected keys with values"),
        ("", "holds a NoneType; expected keys with values"),
    ],
)
def test_values_of_other_types_are_refused(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("task: e2e\nbase: a\ntask: sql\n", "found the key task twice; expected it once in line 3"),
        ("task: e2e\nloss:\n  main: 1\n  main: 2\n", "found the key main twice; expected it once in line 4"),
        ("task: [e2e\n", "is no YAML that can be read"),
        ("task: !!python/name:os.system\n", "could not determine a constructor"),
        ("[a]: 1\n[a]: 2\n", "is no YAML that can be read"),
    ],
)
def test_what_is_no_plain_yaml_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refused(tmp_path, text)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"task: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml cannot be read as UTF-8 text"):
        recipes.read(str(path))


def test_a_recipe_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="no recipe 'e3e'; expected the path of a YAML file, or one of chat, dialog"):
        recipes.read("e3e")


# --- changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "section", "key", "value"),
    [
        ("training.learning_rate=5e-4", "training", "learning_rate", 5e-4),
        ("training.learning_rate=2", "training", "learning_rate", 2),
        ("streams.stream_layers=8", "streams", "stream_layers", 8),
        ("streams.positions=same", "streams", "positions", "same"),
        ("streams.value_rotation=true", "streams", "value_rotation", True),
        ("streams.rotation_angle=null", "streams", "rotation_angle", None),
        ("loss.decay=.5", "loss", "decay", 0.5),
    ],
)
def test_changes_are_yaml(change: str, section: str, key: str, value: Any) -> None:
    before: dict[str, Any] = {"task": "e2e", section: {"kept": 1}}
    after = recipes.overridden(before, [change])
    assert after == {"task": "e2e", section: {"kept": 1, key: value}}
    assert type(after[section][key]) is type(value)
    assert before == {"task": "e2e", section: {"kept": 1}}


def test_later_changes_go_before_earlier_ones() -> None:
    assert recipes.overridden({}, ["task=e2e", "examples=5", "mode=lossless", "examples=6"]) == {
        "task": "e2e",
        "examples": 6,
        "mode": "lossless",
    }


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("learning_rate", "found 'learning_rate'; expected KEY=VALUE"),
        ("learning_rate=1", "unknown key learning_rate; known are base, examples, expected, mode, start_from, task"),
        ("training.rate=1", "unknown key training.rate; known are training.accumulate, training.batch_size"),
        ("streams.mode=joint", "unknown key streams.mode; known are streams.lora_alpha"),
        ("train.seed=1", "names the section 'train'; expected one of streams, training, loss"),
        ("training={}", "unknown key training; known are base"),
        ("examples=[1", "examples=\\[1 is no YAML"),
    ],
)
def test_changes_of_nothing_are_refused(change: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        recipes.overridden({"task": "e2e"}, [change])
