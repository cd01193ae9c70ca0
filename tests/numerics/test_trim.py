"""`forestream trim`: a draft vocabulary for a finished adapter, every other byte of whose weights stays."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import tiny
from forestream.checkpoint import LORA, PROVENANCE, STREAMS, VOCABULARY
from forestream.cli import app
from forestream.generation import Generator
from forestream.manifest import MANIFEST
from forestream.tasks import get_task

SAME = (LORA, MANIFEST, "adapter_config.json")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return tiny.tiny_adapter(tmp_path / "tiny")


def trim(adapter: Path, output: Path, *arguments: object) -> Result:
    given = ["trim", "--adapter", adapter, "--task", "synthetic", "--output", output, *arguments]
    return CliRunner().invoke(app, [str(one) for one in given])


def letters() -> dict[int, int]:
    """How often each token occurs in the task's training completions, with an end of text each."""
    tokenizer, counts = tiny.tiny_tokenizer(), dict[int, int]()
    for example in get_task("synthetic").examples("train"):
        for token in [*tokenizer(example.completion)["input_ids"], tokenizer.eos_token_id]:
            counts[token] = counts.get(token, 0) + 1
    return counts


def test_only_the_vocabulary_is_added(adapter: Path, tmp_path: Path) -> None:
    output = tmp_path / "trimmed"
    result = trim(adapter, output)
    assert result.exit_code == 0, result.output
    for name in SAME:
        assert (output / name).read_bytes() == (adapter / name).read_bytes(), name
    before, after = load_file(adapter / STREAMS), load_file(output / STREAMS)
    assert after.pop(VOCABULARY).tolist() == sorted(letters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    record = json.loads((output / PROVENANCE).read_text())
    own = record.pop("vocabulary")
    assert record == json.loads((adapter / PROVENANCE).read_text())
    assert (own["task"], own["size"], own["of"], own["completions"]) == ("synthetic", len(letters()), 98, 2048)
    assert own["coverage"] == {"train": 1.0, "validation": 1.0}
    assert f"Its streams draft {len(letters())} of 98 tokens" in (output / "README.md").read_text()
    assert "98" in result.output
    assert "100.000%" in result.output


def test_a_size_keeps_the_most_frequent_and_says_what_is_lost(adapter: Path, tmp_path: Path) -> None:
    assert trim(adapter, tmp_path / "b", "--size", 6, "--json", tmp_path / "record.json").exit_code == 0
    counts, end = letters(), tiny.tiny_tokenizer().eos_token_id
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    kept = {end, *[token for token in ranked if token != end][:5]}
    assert load_file(tmp_path / "b" / STREAMS)[VOCABULARY].tolist() == sorted(kept)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["coverage"]["train"] == pytest.approx(sum(counts[t] for t in kept) / sum(counts.values()), abs=1e-6)
    assert 0 < record["coverage"]["validation"] < 1


def test_texts_stay_and_trimming_again_replaces_it(adapter: Path, tmp_path: Path) -> None:
    prompts = [example.prompt for example in get_task("synthetic").examples("test")[:3]]

    def texts(folder: Path) -> list[str]:
        generator = Generator.from_pretrained(str(folder), dtype=torch.float32)
        return [generator.generate(prompt, max_new_tokens=24).text for prompt in prompts]

    wanted = texts(adapter)
    assert trim(adapter, adapter, "--size", 9).exit_code == 0
    assert texts(adapter) == wanted
    assert trim(adapter, adapter, "--size", 4).exit_code == 0
    assert len(load_file(adapter / STREAMS)[VOCABULARY]) == 4
    assert texts(adapter) == wanted


def test_training_the_scorer_keeps_it(adapter: Path, tmp_path: Path) -> None:
    assert trim(adapter, adapter, "--size", 9).exit_code == 0
    vocabulary = load_file(adapter / STREAMS)[VOCABULARY]
    given = ["--task", "synthetic", "--examples", "12", "--batch-size", "6", "--dtype", "float32"]
    output = tmp_path / "scored"
    result = CliRunner().invoke(app, ["train-scorer", "--adapter", str(adapter), "--output", str(output), *given])
    assert result.exit_code == 0, result.output
    assert torch.equal(load_file(output / STREAMS)[VOCABULARY], vocabulary)
    assert json.loads((output / PROVENANCE).read_text()).keys() >= {"vocabulary", "scorer"}


def test_inspect_says_how_many_tokens_are_drafted(adapter: Path) -> None:
    assert trim(adapter, adapter, "--size", 9).exit_code == 0
    given = ["--dtype", "float32", "--prompt", "up c ->"]
    result = CliRunner().invoke(app, ["inspect", "--adapter", str(adapter), *given])
    assert result.exit_code == 0, result.output
    assert "9 of 98 tokens" in result.output


def test_what_is_refused(adapter: Path, tmp_path: Path) -> None:
    twin = tiny.tiny_adapter(tmp_path / "twin", tmp_path / "tiny-base", streams=0)
    result = trim(twin, tmp_path / "out")
    assert result.exit_code == 1
    assert "0 streams" in result.stderr
    given = ["trim", "--adapter", str(adapter), "--output", str(tmp_path / "out"), "--task", "nothing"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 1
    assert "nothing" in result.stderr
    (tmp_path / "file").write_text("mine")
    assert "is no adapter folder" in trim(adapter, tmp_path / "file").stderr
    assert not (tmp_path / "out").exists()
