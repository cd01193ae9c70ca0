"""What `generate` and `bench` can be asked beside the prompt: laws, samples, stops, batches, log-probabilities."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import tiny
from forestream.cli import app

FLOAT32 = ("--dtype", "float32", "--nodes", "6")
WARM = ("--temperature", "0.8")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("sampling") / "tiny")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "140", "TERM": "dumb"})


def generations(adapter: Path, tmp_path: Path, *arguments: object) -> list[dict[str, Any]]:
    file = tmp_path / "out.json"
    common = ("generate", "--adapter", adapter, *FLOAT32, "--max-new-tokens", 16, "--json", file)
    result = run(*common, *arguments)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(file.read_text())["generations"]
    return found


def texts(adapter: Path, tmp_path: Path, *arguments: object) -> list[list[int]]:
    return [one["tokens"] for one in generations(adapter, tmp_path, *arguments)]


def test_samples_differ_and_are_those_of_plain_decoding(adapter: Path, tmp_path: Path) -> None:
    drawn = texts(adapter, tmp_path, *WARM, "-n", 3, "one ->")
    assert len({tuple(text) for text in drawn}) == 3
    assert drawn == texts(adapter, tmp_path, *WARM, "-n", 3, "--plain", "one ->")
    assert drawn == texts(adapter, tmp_path, *WARM, "-n", 3, "--batch-size", 3, "one ->")
    assert drawn != texts(adapter, tmp_path, *WARM, "-n", 3, "--seed", 1, "one ->")


def test_prompts_of_a_file_written_together_are_those_written_apart(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one ->\nanother prompt ->\nx\n")
    assert texts(adapter, tmp_path, "--file", file, "--batch-size", 2) == texts(adapter, tmp_path, "--file", file)


def test_a_text_ends_behind_a_stop_string(adapter: Path, tmp_path: Path) -> None:
    (whole,) = generations(adapter, tmp_path, "one ->")
    (cut,) = generations(adapter, tmp_path, "--stop", whole["text"][4:6], "one ->")
    assert cut["text"] == whole["text"][: whole["text"].index(whole["text"][4:6]) + 2]
    assert cut["finish"] == "stop"


def test_log_probabilities_are_recorded_for_every_token(adapter: Path, tmp_path: Path) -> None:
    (one,) = generations(adapter, tmp_path, "--logprobs", 2, "one ->")
    assert len(one["logprobs"]) == len(one["tokens"])
    for token, score in zip(one["tokens"], one["logprobs"], strict=True):
        assert score["top"][0] == [token, pytest.approx(score["logprob"])]
        assert len(score["top"]) == 2


def test_two_grammars_are_refused(adapter: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    result = run("generate", "--adapter", adapter, "--json-schema", schema, "--regex", "a*", "one ->")
    assert result.exit_code == 1
    assert "a text follows one grammar" in result.stderr


@pytest.mark.parametrize("law", [(), WARM])
def test_bench_of_batches_finds_equal_texts(adapter: Path, tmp_path: Path, law: tuple[str, ...]) -> None:
    file = tmp_path / "bench.json"
    methods = "plain,forestream,full-2+fused" + ("" if law else ",transformers")
    common = ("bench", "--adapter", adapter, *FLOAT32, "--task", "synthetic", "--limit", 5, "--max-new-tokens", 9)
    result = run(*common, "--batch-size", 2, "--methods", methods, *law, "--json", file)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert (record["settings"]["batch_size"], record["settings"]["temperature"]) == (2, 0.8 if law else 0.0)
    for row in record["methods"].values():
        assert row["equal_outputs"] == row["prompts"] == 5


def test_the_host_librarys_draws_cannot_be_compared(adapter: Path) -> None:
    result = run("bench", "--adapter", adapter, "--task", "synthetic", "--methods", "plain,transformers", *WARM)
    assert result.exit_code == 1
    assert "randomness of its own" in result.stderr


def test_tune_chooses_for_batches_too_and_generate_follows(adapter: Path, tmp_path: Path) -> None:
    file, record = tmp_path / "decoding.json", tmp_path / "tune.json"
    common = ("--adapter", adapter, "--dtype", "float32")
    tuning = ("--task", "synthetic", "--limit", 2, "--candidates", 2, "--batches", "2,4")
    result = run("tune", *common, *tuning, "--output", file, "--json", record)
    assert result.exit_code == 0, result.output
    assert [rows for rows, _ in json.loads(file.read_text())["batches"]] == [2, 4]
    assert set(json.loads(record.read_text())["together"]) == {"2", "4"}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one ->\ntwo ->\nthree ->\n")
    asked = ("generate", *common, "--file", prompts, "--max-new-tokens", 8, "--settings", file)
    assert run(*asked, "--batch-size", 3).stdout == run(*asked).stdout


@pytest.mark.parametrize("batches", ["1,2", "4,2", "two", "2,2"])
def test_batches_that_do_not_increase_are_refused(adapter: Path, batches: str) -> None:
    result = run("tune", "--adapter", adapter, "--task", "synthetic", "--batches", batches)
    assert result.exit_code == 1
    assert "expected numbers from 2 that increase" in result.stderr
