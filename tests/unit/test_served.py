"""How vLLM's server is started, and what is refused before: no vLLM is needed here."""

import json
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from forestream import vllm
from forestream.cli import app
from forestream.errors import CheckpointError, ConfigError
from forestream.export import export_hf, export_vllm
from forestream.vllm.exported import KEY
from forestream.vllm.server import by_load, launch
from tiny import tiny_adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("served")
    adapter = tiny_adapter(parent / "adapter")
    export_vllm(adapter, parent / "model", dtype=torch.float32)
    export_hf(adapter, parent / "plain", dtype=torch.float32)
    return parent / "model"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were there."""
    monkeypatch.setattr(vllm, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm, "version", lambda name: f"{vllm.TESTED}.1")


def options(command: tuple[str, ...]) -> dict[str, str]:
    return {a: b for a, b in pairwise(command) if a.startswith("--")}


def test_importing_loads_neither_vllm_nor_a_model_library() -> None:
    script = "import sys, forestream.vllm; print([m for m in ('vllm', 'torch', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_proposer_is_named_and_the_plugin_declared() -> None:
    module, name = vllm.PROPOSER.rsplit(".", 1)
    path = Path(vllm.__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    assert f"class {name}" in path.read_text()
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nforestream = "forestream.vllm:register"' in project
    for one in entry_points(group="vllm.general_plugins", name="forestream"):
        assert one.value == "forestream.vllm:register"


def test_the_server_is_started_with_all_that_streams_need(folder: Path, installed: None) -> None:
    started = launch(folder, port=8123, further=("--max-num-seqs", "4"))
    found = options(started.command)
    assert started.command[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert found["--model"] == str(folder)
    assert found["--served-model-name"] == "model"
    assert found["--dtype"] == "float32"
    assert json.loads(found["--speculative-config"]) == {
        "method": "custom_class",
        "model": vllm.PROPOSER,
        "num_speculative_tokens": 3,
    }
    assert started.command[-2:] == ("--max-num-seqs", "4")
    assert "--enforce-eager" not in started.command
    assert started.health == "http://127.0.0.1:8123/health"


def test_fewer_drafts_none_and_eager(folder: Path, installed: None) -> None:
    two = options(launch(folder, drafts=2).command)
    assert json.loads(two["--speculative-config"])["num_speculative_tokens"] == 2
    assert "--speculative-config" not in launch(folder, drafts=0).command
    assert "--enforce-eager" in launch(folder, eager=True).command


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("rows", [2, 8, 10, 33])
def test_drafts_by_load_fill_the_rows_and_no_more(drafts: int, rows: int) -> None:
    schedule = by_load(drafts, rows)
    assert schedule[0][0] == 1
    assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(schedule))
    assert all(more > fewer for (_, _, more), (_, _, fewer) in pairwise(schedule))
    assert schedule[-1][2] == 0  # and so for more requests than that
    for first, last, count in schedule:
        for requests in range(first, last + 1):
            assert count == 0 or requests * (1 + count) <= rows
            assert count == drafts or requests * (2 + count) > rows


def test_a_bound_on_rows_reaches_vllm(folder: Path, installed: None) -> None:
    told = json.loads(options(launch(folder, rows=8).command)["--speculative-config"])
    assert told["num_speculative_tokens"] == 3
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 2, 3], [3, 4, 1], [5, 8, 0]]


def test_rows_without_room_for_a_draft_are_refused(folder: Path, installed: None) -> None:
    with pytest.raises(ConfigError, match="expected at least 2"):
        launch(folder, rows=1)


def test_the_command_prints_what_it_would_run(folder: Path, installed: None) -> None:
    arguments = ["serve", "--model", str(folder), "--drafts", "1", "--rows", "4", "--dry-run", "--"]
    arguments += ["--max-model-len", "256"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout)
    assert words[-2:] == ["--max-model-len", "256"]
    assert str(folder) in words
    assert "num_speculative_tokens_per_batch_size" in result.stdout


def test_the_settings_of_the_cpu_build_are_those_the_user_has_not_made(
    folder: Path, installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from forestream.vllm import server

    library = tmp_path / "libiomp5.so"
    library.touch()
    monkeypatch.setattr(server, "version", lambda name: "0.32.0")
    monkeypatch.setattr(server, "_PRELOADED", (library, tmp_path / "absent.so"))
    for name in ("LD_PRELOAD", "KMP_BLOCKTIME", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "5")
    settings = launch(folder).environment
    assert settings == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "LD_PRELOAD": str(library)}


# --- refused --------------------------------------------------------------------------------------------------


def test_folders_that_were_not_exported_are_refused(folder: Path, installed: None, tmp_path: Path) -> None:
    for wrong in (tmp_path / "absent", folder.parent / "plain", folder.parent / "adapter"):
        with pytest.raises(CheckpointError, match="forestream export vllm"):
            launch(wrong)


def test_more_drafts_than_streams_are_refused(folder: Path, installed: None) -> None:
    with pytest.raises(ConfigError, match="trained with 3 streams"):
        launch(folder, drafts=4)


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.32.0"])
def test_other_versions_are_refused(found: str, folder: Path, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "version", lambda name: found)
    with pytest.raises(ConfigError, match=rf"found vLLM {found}; expected {vllm.TESTED}"):
        launch(folder)


def test_without_vllm_the_command_says_so_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "--model", str(folder), "--dry-run"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "vLLM is not installed" in result.stderr


def test_another_format_is_refused(folder: Path, installed: None, tmp_path: Path) -> None:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    values[KEY]["format"] = 2
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="format 2"):
        launch(tmp_path)
