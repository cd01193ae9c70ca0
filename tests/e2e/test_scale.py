"""The same training in one process and in two: equal losses, weights and adapters; and errors that end runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from forestream import checkpoint
from forestream.checkpoint import LORA, STREAMS, VOCABULARY
from forestream.cli import app
from forestream.generation import Generator
from forestream.packing import Pack
from scaled import UPDATE, asked_for, lines, run, settings, subject, watching
from tiny import tiny_base

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PATIENCE = 600
UPDATES = 5


def torchrun(*command: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    return subprocess.run(
        [str(word) for word in (*launcher, *command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def weights(folder: Path) -> dict[str, Tensor]:
    return {**load_file(folder / LORA), **load_file(folder / STREAMS)}


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs in two processes."""
    folder = tmp_path_factory.mktemp("spread")
    done = torchrun(TESTS / "scaled.py", folder, "spread")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same runs in one process."""
    folder = tmp_path_factory.mktemp("alone")
    met: list[list[list[int]]] = []
    with watching(lambda inputs: met.append(asked_for(inputs))):
        run(folder / "whole", subject(), settings())
    (folder / "met.json").write_text(json.dumps(met))
    run(folder / "accumulated", subject(), settings(batch_size=UPDATE // 2, accumulate=2))
    run(folder / "lossless", subject(mode="lossless"), settings())
    run(folder / "vocabulary", subject(), settings(draft_vocabulary=20))
    return folder


def assert_same(found: Path, wanted: Path) -> None:
    """Equal within rounding: every line of the log and every weight; bounds are far below what an update changes."""
    assert len(lines(found)) == len(lines(wanted)) == UPDATES
    for one, other in zip(lines(found), lines(wanted), strict=True):
        for name in one.keys() - {"seconds", "epoch"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), (name, one["step"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for name, weight in weights(wanted).items():
        assert float((weights(found)[name] - weight).abs().max()) < 1e-4, name


@pytest.mark.parametrize("way", ["copies", "accumulated", "shards"])
def test_two_processes_train_as_one_does(spread: Path, alone: Path, way: str) -> None:
    assert_same(spread / way, alone / "whole")


def test_accumulated_passes_of_ragged_examples_train_as_one_large_pass_does(alone: Path) -> None:
    assert_same(alone / "accumulated", alone / "whole")


def test_lossless_streams_train_in_shards(spread: Path, alone: Path) -> None:
    assert_same(spread / "lossless", alone / "lossless")


def test_streams_with_a_draft_vocabulary_train_in_shards(spread: Path, alone: Path) -> None:
    assert_same(spread / "vocabulary", alone / "vocabulary")
    assert len(weights(alone / "vocabulary")[VOCABULARY]) == 20


def test_means_of_passes_are_noticed(spread: Path, alone: Path, tmp_path: Path) -> None:
    """Averaging over passes or processes weighs the targets of short examples more."""
    wanted = lines(alone / "whole")
    assert abs(lines(spread / "naive")[0]["grad_norm"] / wanted[0]["grad_norm"] - 1) > 0.01
    assert abs(lines(spread / "naive")[0]["loss"] / wanted[0]["loss"] - 1) > 0.001
    with pytest.raises(AssertionError):
        assert_same(spread / "naive", alone / "whole")


def test_an_update_has_the_same_examples_however_they_are_spread(spread: Path, alone: Path) -> None:
    wanted = json.loads((alone / "met.json").read_text())
    parts = [json.loads((spread / f"met-{index}.json").read_text()) for index in range(2)]
    assert [len(update) for update in wanted] == [UPDATE] * 4 + [2]
    assert [first + second for first, second in zip(*parts, strict=True)] == wanted
    assert parts[1][-1] == []  # a batch that asks for nothing


def test_schedules_count_updates(spread: Path, alone: Path) -> None:
    """Rates fall, checkpoints are written and lines are logged by updates, whatever passes an update has."""
    for run_of in (alone / "whole", alone / "accumulated", spread / "copies", spread / "accumulated"):
        found = lines(run_of)
        assert [line["step"] for line in found] == list(range(1, UPDATES + 1))
        assert [line["learning_rate"] for line in found] == pytest.approx(
            [1e-3 * (1 - u / UPDATES) for u in range(UPDATES)]
        )
        assert sorted(path.name for path in run_of.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def test_every_process_holds_a_part_of_the_frozen_weights(spread: Path) -> None:
    parts = [json.loads((spread / f"frozen-{index}.json").read_text()) for index in range(2)]
    whole = sum(p.numel() for p in subject(mode="lossless").parameters() if not p.requires_grad)
    assert sum(parts) == whole
    assert max(parts) < 0.6 * whole


@pytest.mark.parametrize("layout", ["copies", "shards"])
def test_a_run_of_two_processes_is_resumed_as_if_it_had_not_been_interrupted(spread: Path, layout: str) -> None:
    found, wanted = weights(spread / f"interrupted-{layout}"), weights(spread / layout)
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert [line["step"] for line in lines(spread / f"interrupted-{layout}")] == list(range(1, UPDATES + 1))


def test_every_process_reports_the_same(spread: Path) -> None:
    one, other = (json.loads((spread / f"report-{index}.json").read_text()) for index in range(2))
    assert one["processes"] == 2
    assert one["updates"] == UPDATES
    assert one["last_log"] == other["last_log"]


def test_all_processes_refuse_a_folder_with_an_earlier_run(spread: Path) -> None:
    for index in range(2):
        assert "holds an earlier run" in (spread / f"refused-{index}.txt").read_text()


def test_a_process_that_fails_ends_the_run_of_all(tmp_path: Path) -> None:
    done = torchrun(TESTS / "scaled.py", tmp_path, "broken")
    assert done.returncode != 0
    assert "this process has failed" in done.stderr
    assert not (tmp_path / "broken" / LORA).exists()


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """A folder with an adapter `alone`, trained by one process, and the command but for batch size and output."""
    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_base(folder / "base")
    words = ["train", "--task", "synthetic", "--base", base, "--examples", 26, "--dtype", "float32"]
    words += ["--stream-layers", 2, "--learning-rate", 5e-3]
    alone = (*words, "--batch-size", UPDATE, "--output", folder / "alone")
    done = CliRunner().invoke(app, [str(word) for word in alone])
    assert done.exit_code == 0, done.output
    return folder, words


@pytest.mark.parametrize("way", ["copies", "shards"])
def test_the_command_writes_the_same_adapter_from_two_processes(command: tuple[Path, list[object]], way: str) -> None:
    adapters, words = command
    changes = ("--batch-size", UPDATE // 2, "--layout", way, "--output", adapters / way)
    done = torchrun("-m", "forestream", *words, *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("wrote") == 1
    assert "in 5 updates of 2 processes;" in " ".join(done.stdout.split())
    record = json.loads((adapters / way / checkpoint.PROVENANCE).read_text())
    assert record["processes"] == 2
    # Five updates, and no line of the log before the last one: what it says is gathered at the very end.
    lone = json.loads((adapters / "alone" / checkpoint.PROVENANCE).read_text())
    for name in ("train_loss", "main_loss", "stream_1_loss"):
        assert record["last_log"][name] == pytest.approx(lone["last_log"][name], rel=1e-4)
    ids = torch.arange(3, 23)[None]
    pack = Pack.text(20, torch.arange(20)[None], 4)
    states: list[tuple[Tensor, Tensor]] = []
    texts: list[Any] = []
    for name in ("alone", way):
        model, tokenizer = checkpoint.load(adapters / name)
        with torch.no_grad():
            output = model(ids, pack)
            states.append((model.logits(output.main), model.logits(output.streams)))
        written = Generator(model, tokenizer).generate("ab cd", max_new_tokens=16)
        texts.append((written.tokens, [step.path for step in written.steps], written.counters.passes))
    for found, wanted in zip(*states, strict=True):
        # the adapter is stored in bfloat16, where a rounding error may become one step of its grid
        assert float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
    assert texts[0] == texts[1]
