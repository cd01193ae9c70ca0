"""What vLLM is told before it has loaded a model: each a clear error, however deep vLLM wraps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forestream import vllm
from forestream.export import export_hf
from forestream.vllm.exported import KEY
from forestream.vllm.exported import STREAMS as TENSORS
from served import STREAMS, exported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("refused"))[0]


def refusal(engine: Any, folder: Path, drafts: int = STREAMS, **changes: Any) -> str:
    with pytest.raises(Exception) as refused:  # noqa: PT011 (vLLM wraps errors in its own)
        engine(folder, drafts, **changes)
    return str(refused.value)


def test_more_drafts_than_streams(folder: Path, engine: Any) -> None:
    assert f"expected 1 to {STREAMS}" in refusal(engine, folder, STREAMS + 1)


def test_a_model_that_was_not_exported(folder: Path, engine: Any) -> None:
    export_hf(folder.parent / "adapter", folder.parent / "plain", dtype=torch.float32)
    assert f"no entry {KEY!r}" in refusal(engine, folder.parent / "plain")


def test_another_format(folder: Path, engine: Any, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    values[KEY]["format"] = 2
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "format 2" in refusal(engine, tmp_path)


def test_a_part_of_a_path_sampler(engine: Any, tmp_path: Path) -> None:
    folder, _ = exported(tmp_path, sampler=True)
    tensors = load_file(folder / TENSORS)
    del tensors["sampler.token"]
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    assert "path sampler has tensors" in refusal(engine, folder)


def test_another_version_of_vllm(folder: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "TESTED", "0.31")
    assert "expected 0.31" in refusal(engine, folder)
    with pytest.raises(Exception, match=r"expected 0\.31"):  # nor is the model loaded without drafts
        engine(folder)
