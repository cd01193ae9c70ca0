"""What the documents say is what the code does: snippets run, tables are the records', records keep their contract."""

import json
import re
import runpy
from pathlib import Path

import pytest

from forestream import Generator
from forestream.bench.paper import filled
from forestream.bench.report import refresh
from forestream.cli.options import SHIPPED
from forestream.manifest import MANIFEST
from forestream.tasks import get_task
from forestream.tasks.base import user

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results"
ADAPTERS = sorted(manifest.parent for manifest in (ROOT / SHIPPED).parent.glob(f"*/{MANIFEST}"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL))
]
METHOD_KEYS = {
    "generated_tokens",
    "passes",
    "call_reduction",
    "mean_acceptance_length",
    "acceptance_by_position",
    "decode_seconds",
    "tokens_per_second",
    "time_to_first_token",
    "nodes_per_pass",
    "equal_outputs",
    "prompts",
    "first_difference_margins",
    "speedup",
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, "snippet", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 5


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script), run_name="__main__")
    assert len(capsys.readouterr().out.split()) > 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_records(document: Path) -> None:
    text = document.read_text()
    assert filled(refresh(text, RECORDS), RECORDS) == text, "run benchmarks/refresh.py"


def test_there_are_records() -> None:
    assert {path.stem for path in RECORDS.glob("*.json")} >= {"e2e-test-float32", "e2e-test-bfloat16"}


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_records_keep_their_contract(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["provenance"]["commit"]
    assert record["provenance"]["command"].startswith(("forestream ", "benchmarks/"))
    assert record["settings"]["dtype"] in ("float32", "bfloat16")
    for row in record.get("methods", {}).values():
        assert set(row) >= METHOD_KEYS
        assert set(row["speedup"]) >= {"median", "min", "max"}
        assert row["call_reduction"] == pytest.approx(row["generated_tokens"] / row["passes"], abs=1e-3)
        assert sum(row["per_prompt"]["tokens"]) == row["generated_tokens"]
        assert row["equal_outputs"] + len(row["first_difference_margins"]) == row["prompts"]
        if record["settings"]["dtype"] == "float32":
            assert row["equal_outputs"] == row["prompts"]


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_shipped_adapters_are_small_and_say_where_they_come_from(folder: Path) -> None:
    files = list(folder.iterdir())
    assert sum(path.stat().st_size for path in files) <= 25e6
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
    provenance = json.loads((folder / "provenance.json").read_text())
    assert {"command", "commit", "packages", "machine", "training", "examples"} <= set(provenance)


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_shipped_adapters_write_what_plain_decoding_does(folder: Path) -> None:
    """In float32, and in fewer passes than tokens."""
    generator = Generator.from_pretrained(folder)
    task = get_task(json.loads((folder / "provenance.json").read_text())["task"])
    joint = generator.model.stream_config.mode == "joint"
    assert (task.source is None) != joint, "chats are of no single data set"
    prompt = [user("What is a good name for a cat?")] if task.source is None else task.source.prompt
    written = generator.generate(prompt, max_new_tokens=24)
    assert written.tokens == generator.collect(generator.plain_steps(prompt, max_new_tokens=24)).tokens
    assert written.counters.generated > (2 if joint else 1.2) * written.counters.passes


@pytest.mark.parametrize("document", [*DOCUMENTS, *ADAPTERS], ids=lambda path: path.name)
def test_pages_with_figures_of_sql_say_what_the_data_are(document: Path) -> None:
    text = (document / "README.md" if document.is_dir() else document).read_text()
    if re.search(r"^sql \w+ split, ", text, re.MULTILINE):
        assert "rebuilt from WikiSQL and Spider" in " ".join(text.split())
