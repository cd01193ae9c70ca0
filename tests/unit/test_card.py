"""The model card: front matter, what the provenance says, scores of records alone, and snippets that run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner, Result

import tiny
from forestream import card, checkpoint
from forestream.bench.report import markdown
from forestream.cli import app
from forestream.config import StreamConfig
from forestream.manifest import Manifest
from forestream.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
MADE: dict[str, Any] = {
    "command": "forestream train --task sql --data-dir data --output my-sql",
    "commit": "0123456789ab",
    "date": "2026-01-31T12:00:00+00:00",
    "packages": {"torch": "2.13.0"},
    "machine": {"processor": "a processor", "gpu": None},
    "task": "sql",
    "stream": {"streams": 4},
    "training": {"learning_rate": 0.001},
    "loss": {"stream": 0.1},
    "examples": 7200,
    "updates": 600,
    "last_log": {
        "loss": 2.5,
        "train_loss": 3.5,
        "main_loss": 1.1,
        "main_accuracy": 0.7,
        "stream_1_loss": 2.0,
        "stream_1_accuracy": 0.5,
    },
}
SCORES = {
    "provenance": {
        "command": "forestream evaluate",
        "commit": "ab",
        "date": "2026-02-01",
        "machine": {"processor": "p", "threads": 1},
    },
    "settings": {"adapter": "my-sql", "task": "sql", "split": "test", "inputs": 9, "dtype": "float32"},
    "scores": {"exact_match": 61.25},
}


def front(text: str) -> dict[str, Any]:
    found: dict[str, Any] = ModelCard(text).data.to_dict()
    return found


def test_front_matter_is_what_hubs_read() -> None:
    text = card.render("my-sql", StreamConfig(), "owner/base", MADE, licence="apache-2.0")
    found = front(text)
    assert found["license"] == "apache-2.0"
    assert found["base_model"] == "owner/base"
    assert found["datasets"] == ["b-mc2/sql-create-context"]
    assert found["library_name"] == "peft"
    assert found["pipeline_tag"] == "text-generation"
    assert {"lora", "speculative-decoding", "joint"} <= set(found["tags"])
    assert "model-index" not in found


def test_the_body_says_what_the_provenance_says() -> None:
    text = card.render("my-sql", StreamConfig(), "owner/base", MADE)
    assert "license" not in front(text)
    for told in (
        "`forestream train --task sql --data-dir data --output my-sql`",
        "| examples | 7200 |",
        "| training.learning_rate | 0.001 |",
        "| loss.stream | 0.1 |",
        "| machine | a processor |",
        "| torch version | 2.13.0 |",
        "| main | 1.1 | 0.7 |",
        "| stream 1 | 2.0 | 0.5 |",
        "licence cc-by-4.0",
    ):
        assert told in text
    assert "| loss | 2.5" not in text
    assert "| train |" not in text
    assert "## Measured" not in text


def test_local_rows_that_stand_in_for_the_hubs_are_told_of() -> None:
    told = "9,991 of the 86,722 are the hub's"
    assert told in card.render("my-sql", StreamConfig(), "owner/base", MADE)
    hub = {**MADE, "command": "forestream train --task sql"}
    assert told not in card.render("my-sql", StreamConfig(), "owner/base", hub)


def test_scores_come_from_records_alone() -> None:
    text = card.render("my-sql", StreamConfig(), "owner/base", MADE, [SCORES], [markdown(SCORES)])
    (entry,) = front(text)["model-index"]
    assert entry["name"] == "my-sql"
    (result,) = entry["results"]
    assert result["dataset"]["type"] == "b-mc2/sql-create-context"
    assert result["metrics"] == [{"type": "exact_match", "value": 61.25}]
    assert "| my-sql | 9 | 61.25 |" in text
    assert "commit ab: `forestream evaluate`" in text


@pytest.mark.parametrize(
    ("config", "told", "missing"),
    [
        (StreamConfig(), "learned the task together", "the twin"),
        (StreamConfig(mode="lossless"), "the base model's own", "PeftModel"),
        (StreamConfig(streams=0), "a twin to compare quality with", "drafts its own"),
    ],
)
def test_each_kind_of_adapter_is_called_what_it_is(config: StreamConfig, told: str, missing: str) -> None:
    text = card.render("mine", config, "owner/base", {})
    assert told in text
    assert missing not in text


def test_the_packaged_base_is_named_with_its_reservation(tmp_path: Path) -> None:
    text = card.render("mine", StreamConfig(), "smollm2-135m", {})
    assert front(text)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "not quite those it was trained on" in text
    local = card.render("mine", StreamConfig(), str(tmp_path), {})
    assert "base_model" not in front(local)
    assert str(tmp_path.parent) not in local


def test_every_task_with_real_rows_says_where_they_are_from() -> None:
    for task in TASKS:
        if task.name == "synthetic":
            assert task.source is None
        elif task.source is not None:
            assert task.source.hub.count("/") == 1
            assert re.fullmatch(r"[a-z0-9.-]+", task.source.licence)
            assert "prompt" not in task.source.credit


# --- in a folder ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("card") / "tiny")


def test_saving_writes_a_card_whose_snippets_run(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(adapter.parent)
    text = (adapter / card.FILE).read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 3
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, "snippet", "exec"), names)
    assert capsys.readouterr().out.strip()
    assert (adapter.parent / "tiny-merged" / "model.safetensors").is_file()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["card", *map(str, arguments)])


def test_the_command_adds_what_was_measured(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    settings = {**SCORES["settings"], "adapter": "tiny"}
    file.write_text(json.dumps({**SCORES, "settings": settings}))
    assert run("--adapter", adapter, "--record", file, "--licence", "mit").exit_code == 0
    text = (adapter / card.FILE).read_text()
    assert "| tiny | 9 | 61.25 |" in text
    assert front(text)["license"] == "mit"
    assert run("--adapter", adapter).exit_code == 0
    assert "61.25" not in (adapter / card.FILE).read_text()


def test_records_of_other_adapters_and_of_nothing_are_refused(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    before = (adapter / card.FILE).read_text()
    for content, told in (
        (json.dumps(SCORES), "is a record of my-sql; expected one of tiny"),
        ("{", "is no record of an adapter"),
        ("[]", "is no record of an adapter"),
        (json.dumps({"settings": {"adapter": "tiny"}}), "holds neither scores nor methods"),
    ):
        file.write_text(content)
        result = run("--adapter", adapter, "--record", file)
        assert result.exit_code == 1
        assert told in " ".join(result.stderr.split())
    assert (adapter / card.FILE).read_text() == before


@pytest.mark.parametrize(
    ("name", "evaluations", "runs", "licence"),
    [
        ("smollm2-135m-e2e", ["e2e-quality-joint"], ["e2e-test-float32"], "apache-2.0"),
        ("smollm2-135m-sql", ["sql-quality-joint"], ["sql-test-float32"], "apache-2.0"),
        # As the data's, which may not be used commercially.
        ("smollm2-135m-dialogsum", ["dialogsum-quality-joint"], ["dialogsum-test-float32"], "cc-by-nc-sa-4.0"),
        ("smollm2-135m-chat", [], ["spec-bench-float32"], "cc-by-nc-4.0"),
    ],
)
def test_shipped_cards_are_what_their_records_say(
    name: str, evaluations: list[str], runs: list[str], licence: str
) -> None:
    """Written by the command, never by hand."""
    folder = ROOT / "adapters" / name
    manifest = Manifest.read(folder)
    made = json.loads((folder / checkpoint.PROVENANCE).read_text())
    scores, others = (
        [json.loads((ROOT / "benchmarks" / "results" / f"{one}.json").read_text()) for one in records]
        for records in (evaluations, runs)
    )
    tables = [markdown(record) for record in (*scores, *others)]
    wanted = card.render(folder.name, manifest.config, manifest.base.name, made, scores, tables, licence)
    assert (folder / card.FILE).read_text(encoding="utf-8") == wanted
