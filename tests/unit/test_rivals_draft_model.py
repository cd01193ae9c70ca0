"""A draft model is trained from nothing: the host library's own loss, an ordinary folder, runs that can be resumed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, TrainerCallback
from typer.testing import CliRunner, Result

from forestream.bases import load_base
from forestream.cli import app
from forestream.data import Tokens
from forestream.errors import CheckpointError, ConfigError
from forestream.objective import IGNORED
from forestream.rivals import draft_model
from forestream.rivals.draft_model import DraftModelConfig, check_output, fit_draft_model, fresh_model, labelled
from forestream.runs import LOG, LogFile
from forestream.training import TrainConfig
from tiny import tiny_base
from zoo import custom

CONFIG = TrainConfig(batch_size=4, learning_rate=5e-3, warmup=0, dtype="float32", save_every=5, log_every=1)
SIZE = DraftModelConfig(width=32, layers=1)
EXAMPLES = [Tokens((1, 2, 3 + i % 5), (4 + i % 7, 9, 8, 7)) for i in range(48)]


def fresh(seed: int = 0) -> LlamaForCausalLM:
    return fresh_model(custom("llama").config, SIZE, seed)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("draft") / "base")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def train(base: Path, output: Path, *arguments: object) -> Result:
    small = ("--width", 32, "--layers", 1, "--batch-size", 8, "--warmup", 0)
    return run("train-draft-model", "--task", "synthetic", "--base", base, "--output", output, *small, *arguments)


def test_the_usual_size_is_about_ten_million_weights() -> None:
    """Counted by hand for a vocabulary of 49,152: the shared embedding, attention, MLP, norms."""
    width, layers = DraftModelConfig().width, DraftModelConfig().layers
    layer = 4 * width * width + 3 * width * 4 * width + 2 * width
    wanted = 49152 * width + layers * layer + width
    with torch.device("meta"):
        model = fresh_model(custom("llama", vocab_size=49152).config, DraftModelConfig())
    assert model.num_parameters() == wanted
    assert 9e6 < wanted < 11e6


def test_a_draft_model_has_its_bases_vocabulary_ends_and_context() -> None:
    host = custom("gpt2", vocab_size=77, n_positions=99, max_position_embeddings=99, eos_token_id=5)
    config = fresh_model(host.config, SIZE).config
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_id) == (77, 99, 5)
    assert config.tie_word_embeddings


def test_batches_ask_for_completions_or_for_all() -> None:
    examples = [Tokens((1, 2), (3, 4)), Tokens((5,), (6,))]
    found = labelled(examples, 0, "completion")
    assert found["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert found["labels"].tolist() == [[IGNORED, IGNORED, 3, 4], [IGNORED, 6, IGNORED, IGNORED]]
    assert labelled(examples, 0, "all")["labels"].tolist() == [[1, 2, 3, 4], [5, 6, IGNORED, IGNORED]]


def test_padding_changes_no_loss() -> None:
    model = fresh().eval()
    examples = [Tokens((1, 2), (3, 4, 5)), Tokens((5,), (6,))]
    losses = []
    for one in examples:
        text = torch.tensor([[*one.prompt, *one.completion]])
        logits, first = model(text).logits[0], len(one.prompt)
        losses.append(functional.cross_entropy(logits[first - 1 : -1], text[0, first:], reduction="none"))
    found = model(**labelled(examples, 0, "completion")).loss
    torch.testing.assert_close(found, torch.cat(losses).mean())


def test_training_lowers_the_loss_and_a_resumed_run_is_the_whole_one(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 8:
                raise Killed

    whole = fresh()
    report = fit_draft_model(whole, EXAMPLES, 0, tmp_path / "whole", CONFIG)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert report["updates"] == len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    stopped, trainer = fresh(), draft_model._Trainer
    killed = partial(trainer, callbacks=[LogFile(tmp_path / "parts" / LOG), Kill()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model, "_Trainer", lambda callbacks, **own: killed(**own))
        with pytest.raises(Killed):
            fit_draft_model(stopped, EXAMPLES, 0, tmp_path / "parts", CONFIG)
    with pytest.raises(CheckpointError, match="holds an earlier run"):
        fit_draft_model(fresh(), EXAMPLES, 0, tmp_path / "parts", CONFIG)
    with pytest.raises(CheckpointError, match="another setting of examples"):
        fit_draft_model(fresh(), EXAMPLES[1:], 0, tmp_path / "parts", CONFIG, resume=True)
    resumed = fresh(seed=9)
    fit_draft_model(resumed, EXAMPLES, 0, tmp_path / "parts", CONFIG, resume=True)
    for (name, own), (_, theirs) in zip(resumed.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(own, theirs, msg=name)


def test_the_command_writes_a_folder_that_everybody_loads(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft"
    result = train(base, output, "--examples", 40, "--epochs", 2, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "40 examples, 2 epochs, batch 8 x 1" in result.stdout
    record = json.loads((output / "provenance.json").read_text())
    assert (record["task"], record["base"], record["examples"], record["updates"]) == ("synthetic", "base", 40, 10)
    assert record["size"] == {"width": 32, "layers": 1}
    assert record["last_log"]["loss"] > 0
    assert record["command"].startswith("forestream")
    model = AutoModelForCausalLM.from_pretrained(output)
    assert record["parameters"] == model.num_parameters()
    own, theirs = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (output, base))
    assert own == theirs
    assert load_base(str(output))[0].config.vocab_size == load_base(str(base))[0].config.vocab_size
    assert not list(output.glob("*.bin")), "weights are safetensors"
    assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {0o644}
    assert "stream_rate" not in record["training"]
    again = train(base, output)
    assert again.exit_code == 1
    assert "exists; remove it or choose another output folder" in " ".join(again.stderr.split())


@pytest.mark.parametrize("changes", [{"width": 48}, {"width": 0}, {"layers": 0}])
def test_sizes_that_cannot_be_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        DraftModelConfig(**changes)


def test_an_empty_folder_is_no_obstacle(tmp_path: Path) -> None:
    check_output(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty")
