"""Training the exit scorer of a finished adapter: it learns, and every other byte stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import tiny
from forestream import checkpoint
from forestream.checkpoint import LORA, PROVENANCE, STREAMS
from forestream.cli import app
from forestream.data import Tokens
from forestream.errors import ConfigError
from forestream.manifest import MANIFEST
from forestream.scorer import fit_scorer, save_scorer
from forestream.training import TrainConfig
from wrapped import prompt, shake, trainable

SAME = (LORA, MANIFEST, "adapter_config.json")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return tiny.tiny_adapter(tmp_path / "tiny")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train-scorer", *map(str, arguments)])


def common(adapter: Path, output: Path) -> tuple[object, ...]:
    settings = ("--task", "synthetic", "--examples", 60, "--batch-size", 6, "--learning-rate", 0.01)
    return ("--adapter", adapter, "--output", output, *settings, "--dtype", "float32")


def test_only_the_scorer_changes(adapter: Path, tmp_path: Path) -> None:
    output = tmp_path / "pruned"
    result = run(*common(adapter, output))
    assert result.exit_code == 0, result.output
    assert {path.name for path in output.iterdir()} == set(checkpoint.FILES)
    for name in SAME:
        assert (output / name).read_bytes() == (adapter / name).read_bytes(), name
    before, after = load_file(adapter / STREAMS), load_file(output / STREAMS)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"scorer.down", "scorer.up"}
    assert {tensor.dtype for tensor in after.values()} == {tensor.dtype for tensor in before.values()}
    record = json.loads((output / PROVENANCE).read_text())
    assert record.pop("scorer")["updates"] == 10
    assert record == json.loads((adapter / PROVENANCE).read_text())
    log = [json.loads(line) for line in (tmp_path / "pruned.run" / "log.jsonl").read_text().splitlines()]
    assert "scorer_loss" in log[0]
    checkpoint.load(output)


def test_an_adapter_may_be_written_over_its_own_folder(adapter: Path) -> None:
    lora = (adapter / LORA).read_bytes()
    scorer = load_file(adapter / STREAMS)["scorer.up"]
    assert run(*common(adapter, adapter)).exit_code == 0
    assert (adapter / LORA).read_bytes() == lora
    assert not torch.equal(load_file(adapter / STREAMS)["scorer.up"], scorer)


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_it_learns_and_nothing_else_gets_a_gradient(mode: str, tmp_path: Path) -> None:
    model = trainable("llama", mode=mode)
    shake(model, 1, 0.05)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    texts = [Tokens(prompt(3, seed=i % 4), prompt(8, seed=50 + i % 4)) for i in range(160)]
    config = TrainConfig(batch_size=4, learning_rate=0.02, warmup=2, dtype="float32", log_every=1)
    fit_scorer(model, texts, 0, tmp_path / "run", config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["scorer_loss"] for line in lines if "scorer_loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert all("main_loss" in line for line in lines if "scorer_loss" in line)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) <= name.startswith("scorer."), name
        assert torch.equal(parameter, before[name]) != name.startswith("scorer."), name


def test_an_interrupted_run_goes_on(adapter: Path, tmp_path: Path) -> None:
    output = tmp_path / "pruned"
    assert run(*common(adapter, output), "--save-every", 5).exit_code == 0
    whole = load_file(output / STREAMS)
    latest = tmp_path / "pruned.run" / "checkpoint-10"
    for path in sorted(latest.rglob("*"), reverse=True):
        path.unlink()
    latest.rmdir()
    refused = run(*common(adapter, output), "--save-every", 5)
    assert refused.exit_code == 1
    assert "--resume" in refused.stderr
    assert run(*common(adapter, output), "--save-every", 5, "--resume").exit_code == 0
    again = load_file(output / STREAMS)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize("changes", [{"scorer_rank": 0}, {"streams": 0}, {"stream_layers": 4}])
def test_without_a_scorer_there_is_nothing_to_train(changes: dict[str, Any], tmp_path: Path) -> None:
    model = trainable("llama", **changes)
    with pytest.raises(ConfigError, match="no exit scorer"):
        fit_scorer(model, [Tokens((1,), (2,))], 0, tmp_path / "run", TrainConfig())
    with pytest.raises(ConfigError, match="no exit scorer"):
        save_scorer(model, tmp_path, tmp_path / "out", {})
