"""Texts learned by heart are drafted whole, and what a run of training tells: weights, schedule, no private paths."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from forestream.cli import app
from forestream.config import DecodeSettings
from forestream.data import Tokens
from forestream.decode import decode
from forestream.objective import LossConfig
from forestream.steps import tokens_of
from forestream.training import TrainConfig, fit
from tiny import tiny_base
from wrapped import STREAMS, prompt, trainable

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_texts_known_by_heart_take_one_pass_for_every_streams_and_one_tokens(tmp_path: Path) -> None:
    """The most that a pass can deliver is G + 1 tokens: every pass of such a text does."""
    model = trainable("llama", lora_rank=16, lora_alpha=32, scorer_rank=0, stream_layers=3)
    passes = 4
    length = 1 + passes * (STREAMS + 1)
    texts = [Tokens(prompt(5, seed=seed), prompt(length, seed=10 + seed)) for seed in range(2)]
    config = TrainConfig(epochs=250, batch_size=2, learning_rate=0.01, warmup=10, dtype="float32", log_every=250)
    fit(model, texts, 0, tmp_path / "run", config, LossConfig(stream=1.0))
    model.eval()
    for settings in (
        DecodeSettings(tree="full", k=1, max_new_tokens=length),
        DecodeSettings(nodes=16, max_new_tokens=length, carriers="fused"),
    ):
        for text in texts:
            steps = list(decode(model, text.prompt, settings))
            assert tokens_of(steps) == text.completion
            assert [len(step.tokens) for step in steps] == [1, *[STREAMS + 1] * passes]


def test_the_weights_of_the_loss_are_told_before_training(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base")
    small = ("--stream-layers", "2", "--batch-size", "2", "--dtype", "float32", "--examples", "2")
    common = ("train", "--task", "synthetic", "--base", str(base), *small)
    for asked, told in (((), "0.1"), (("--stream-weight", "0.3"), "0.3")):
        output = tmp_path / f"adapter-{told}"
        result = CliRunner().invoke(app, [*common, *asked, "--output", str(output)], env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        streams = ", ".join(f"stream_{j} {told}" for j in range(1, 5))
        said = f"loss weights: main 1, {streams}, scorer 0.1"
        assert said in " ".join(result.stdout.split())
        assert result.stdout.index("loss weights") < result.stdout.index("wrote")
        assert json.loads((output / "provenance.json").read_text())["loss"]["stream"] == float(told)
    assert LossConfig().stream == 0.1


def test_there_is_one_schedule_up_over_the_warm_up_then_down_to_nothing(tmp_path: Path) -> None:
    model = trainable("llama")
    texts = [Tokens(prompt(3, seed=i), prompt(5, seed=50 + i)) for i in range(20)]
    config = TrainConfig(batch_size=2, learning_rate=0.01, warmup=4, dtype="float32", log_every=1)
    fit(model, texts, 0, tmp_path / "run", config, LossConfig())
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    up = [0.01 * n / 4 for n in range(4)]
    down = [0.01 * (10 - n) / 6 for n in range(4, 10)]
    assert rates == pytest.approx([*up, *down])


def test_no_file_of_the_repository_holds_a_path_of_somebodys_machine() -> None:
    """Records and adapters say commands and names, never where things lay."""
    private = re.compile(rb"(?<![\w.])/(?:home|root|Users|work|mnt|workspace|scratch)/\w")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout")
    files = [
        ROOT / name for name in listed.stdout.splitlines() if name.startswith(("src", "adapters", "benchmarks", "docs"))
    ]
    assert len(files) > 80
    guilty = [path for path in files if path.is_file() and path.suffix != ".png" and private.search(path.read_bytes())]
    assert guilty == []


def test_every_option_of_the_loss_changes_it() -> None:
    """Each weight scales its own term and no other; the size of chunks changes nothing."""
    from forestream.data import Collator
    from forestream.objective import joint_loss
    from forestream.packing import Pack

    model = trainable("llama")
    batch = Collator(STREAMS, pad=0).batch([Tokens(prompt(3, seed=i), prompt(7, seed=50 + i)) for i in range(3)])

    @torch.no_grad()
    def total(**weights: float) -> float:
        output = model(batch.ids, Pack.text(batch.ids.shape[1], batch.carriers, STREAMS))
        return float(joint_loss(model, output, batch, LossConfig(**weights)).total)  # type: ignore[arg-type]

    alone = {
        "main": total(main=1.0, stream=0.0, scorer=0.0),
        "stream": total(main=0.0, stream=1.0, scorer=0.0),
        "scorer": total(main=0.0, stream=0.0, scorer=1.0),
    }
    assert min(alone.values()) > 0.1
    whole = total(main=0.5, stream=0.2, scorer=0.3)
    assert whole == pytest.approx(0.5 * alone["main"] + 0.2 * alone["stream"] + 0.3 * alone["scorer"], rel=1e-5)
    assert total(main=0.5, stream=0.2, scorer=0.3, chunk=3) == pytest.approx(whole, rel=1e-5)
