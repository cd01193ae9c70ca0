"""`forestream evaluate`: scores per example, saved texts scored again, and the guard with its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tiny
from forestream.bench.report import markdown
from forestream.cli import app
from forestream.tasks import get_task

TASK = get_task("synthetic")
SYNTHETIC = ("--task", "synthetic", "--split", "train", "--dtype", "float32")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter and its twin on one base."""
    folder = tmp_path_factory.mktemp("evaluate")
    base = tiny.tiny_base(folder / "base")
    return tiny.tiny_adapter(folder / "joint", base), tiny.tiny_adapter(folder / "twin", base, streams=0)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], env={"COLUMNS": "160"})


def saved(path: Path, right: int, count: int = 20, **changes: Any) -> Path:
    """A record of texts of which the first `right` are right."""
    examples = TASK.grouped("train")[:count]
    texts = [one.references[0] if number < right else "a" for number, one in enumerate(examples)]
    settings = {"adapter": path.stem, "task": "synthetic", "split": "train", "inputs": count, "dtype": "float32"}
    record = {"settings": {**settings, "max_new_tokens": 24, **changes}, "outputs": texts}
    path.write_text(json.dumps(record))
    return path


def test_texts_are_scored_one_by_one_and_again_from_the_record(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    file, again = tmp_path / "one.json", tmp_path / "two.json"
    result = run("--adapter", adapters[0], *SYNTHETIC, "--limit", 3, "--max-new-tokens", 6, "--json", file)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert set(record) == {"provenance", "settings", "scores", "each", "outputs"}
    assert len(record["each"]["exact_match"]) == len(record["outputs"]) == record["settings"]["inputs"] == 3
    assert run("--texts", file, *SYNTHETIC, "--json", again).exit_code == 0
    second = json.loads(again.read_text())
    for key in ("settings", "scores", "each", "outputs"):
        assert second[key] == record[key]


def test_an_adapter_is_held_against_its_twin(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "guard.json"
    common = (*SYNTHETIC, "--limit", 3, "--max-new-tokens", 6, "--way", "batched", "--json", file)
    result = run("--adapter", adapters[0], "--against", adapters[1], *common)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert (record["settings"]["adapter"], record["against"]["settings"]["adapter"]) == ("joint", "twin")
    assert record["settings"]["prompts"] == record["against"]["settings"]["prompts"]
    assert record["guard"]["exact_match"]["difference"] == 0.0
    assert "holds" in result.stdout
    told = markdown(record)
    assert "| exact_match | 0.00 | 0.00 (0.00 to 0.00) | +0.00 (+0.00 to +0.00) | inside the twin's" in told


@pytest.mark.parametrize(
    ("joint", "bound", "code", "told"),
    [
        (20, 0.02, 0, "above the twin's"),
        (16, 0.02, 0, "inside the twin's"),
        (15, 0.02, 1, "may have lost more than 2 points: the difference is -5.00"),
        (15, 0.3, 0, "inside the twin's"),
        (2, 0.02, 1, "exact_match lost more than 2 points"),
    ],
)
def test_the_exit_code_answers(joint: int, bound: float, code: int, told: str, tmp_path: Path) -> None:
    own, twin = saved(tmp_path / "own.json", joint), saved(tmp_path / "twin.json", 16)
    result = run("--texts", own, "--against", twin, *SYNTHETIC, "--bound", bound, "--json", tmp_path / "out.json")
    assert result.exit_code == code, result.output
    assert told in result.output
    assert json.loads((tmp_path / "out.json").read_text())["guard"]["exact_match"]["held"] == (code == 0)


def test_records_say_how_many_inputs_there_are(tmp_path: Path) -> None:
    own, twin = saved(tmp_path / "own.json", 9, 12), saved(tmp_path / "twin.json", 16, 20)
    out = tmp_path / "out.json"
    assert run("--texts", own, "--against", twin, *SYNTHETIC, "--json", out).exit_code == 1
    record = json.loads(out.read_text())
    assert len(record["outputs"]) == len(record["against"]["outputs"]) == 12
    assert (record["scores"]["exact_match"], record["against"]["scores"]["exact_match"]) == (75.0, 100.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "e2e"}, "are for e2e, split train; expected synthetic, split train"),
        ({"split": "test"}, "are for synthetic, split test"),
        ({"prompts": "0" * 16}, "were written for other inputs"),
        ({"inputs": 19}, "holds 20 texts for 19 inputs"),
        ({"dtype": "bfloat16"}, "written with dtype bfloat16 and float32; write both alike"),
        ({"quantise": "int8"}, "written with quantise int8 and off"),
        ({"max_new_tokens": 9}, "written with max_new_tokens 9 and 24"),
    ],
)
def test_texts_of_other_inputs_or_made_otherwise_are_refused(changes: Any, told: str, tmp_path: Path) -> None:
    own, twin = saved(tmp_path / "own.json", 16, **changes), saved(tmp_path / "twin.json", 16)
    result = run("--texts", own, "--against", twin, *SYNTHETIC)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_what_is_no_record_is_refused(adapters: tuple[Path, Path], tmp_path: Path) -> None:
    torn = tmp_path / "torn.json"
    for content in ("{", "[]", '{"outputs": ["a"]}', '{"outputs": ["a"], "settings": {}}'):
        torn.write_text(content)
        result = run("--texts", torn, *SYNTHETIC)
        assert result.exit_code == 2
        assert "torn.json" in result.stderr
    for neither in ((), ("--adapter", adapters[0], "--texts", torn)):
        result = run(*neither, *SYNTHETIC)
        assert result.exit_code == 2
        assert "give either --adapter" in result.stderr


def test_a_limit_beyond_the_record_is_refused(tmp_path: Path) -> None:
    own = saved(tmp_path / "own.json", 3, 5)
    assert "expected 9 of them" in run("--texts", own, *SYNTHETIC, "--limit", 9).stderr
