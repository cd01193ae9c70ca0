"""Saving, fetching and sending an adapter: its own files and no others, and never a network."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import tiny
from forestream.checkpoint import FILES, STREAMS, copy_adapter
from forestream.errors import CheckpointError
from forestream.generation import Generator
from forestream.hub import find
from forestream.manifest import MANIFEST

PROMPT = "name[Zizzi] ->"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter folder with files beside it that are nobody else's business."""
    folder = tiny.tiny_adapter(tmp_path / "tiny")
    (folder / "decoding.json").write_text("{}")
    (folder / "notes.txt").write_text("private")
    (folder / ".env").write_text("TOKEN=secret")
    return folder


def load(folder: str | Path) -> Generator:
    return Generator.from_pretrained(folder, dtype=torch.float32)


class FakeHub:
    """What a hub would hold."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, token: str | None = None) -> "FakeHub":
        self.calls.append(("api", {"token": token}))
        return self

    def create_repo(self, repo_id: str, **how: Any) -> huggingface_hub.RepoUrl:
        self.calls.append(("create", {"repo_id": repo_id, **how}))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, **how: Any) -> Any:
        self.calls.append(("upload", {"repo_id": repo_id, **how}))
        for path in Path(folder_path).rglob("*"):
            self.files[str(path.relative_to(folder_path))] = path.read_bytes()
        return type("Sent", (), {"commit_url": f"https://huggingface.co/{repo_id}/commit/1"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    return fake


def test_a_saved_adapter_is_the_same_adapter(adapter: Path, tmp_path: Path) -> None:
    """Byte for byte, so its drafts are accepted as often as before."""
    first = load(adapter)
    first.save_pretrained(tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} == set(FILES)
    for name in FILES:
        assert (tmp_path / "copy" / name).read_bytes() == (adapter / name).read_bytes()
    one, other = (own.generate(PROMPT, max_new_tokens=12, nodes=8) for own in (first, load(tmp_path / "copy")))
    assert one.tokens == other.tokens
    assert [step.tree for step in one.steps] == [step.tree for step in other.steps]
    assert one.counters.accepted == other.counters.accepted


def test_nothing_but_the_adapters_own_files_is_sent(adapter: Path, hub: FakeHub) -> None:
    url = load(adapter).push_to_hub("me/mine", private=True, token="a token", commit_message="first", create_pr=True)
    assert url == "https://huggingface.co/me/mine/commit/1"
    assert set(hub.files) == set(FILES)
    assert all(hub.files[name] == (adapter / name).read_bytes() for name in FILES)
    assert [name for name, _ in hub.calls] == ["api", "create", "upload"]
    calls = dict(hub.calls)
    assert calls["api"]["token"] == "a token"
    assert calls["create"] == {"repo_id": "me/mine", "private": True, "exist_ok": True}
    assert (calls["upload"]["commit_message"], calls["upload"]["create_pr"]) == ("first", True)


def test_an_incomplete_adapter_is_neither_saved_nor_sent(adapter: Path, hub: FakeHub, tmp_path: Path) -> None:
    generator = load(adapter)
    (adapter / STREAMS).unlink()
    for call in (lambda: generator.push_to_hub("me/mine"), lambda: generator.save_pretrained(tmp_path / "copy")):
        with pytest.raises(CheckpointError, match=r"streams\.safetensors is missing"):
            call()
    assert not hub.files
    assert not (tmp_path / "copy").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_foreign_folders_are_not_written_over(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("only copy")
    with pytest.raises(CheckpointError, match="is no adapter folder"):
        copy_adapter(adapter, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "only copy"


def test_a_generator_without_a_folder_says_so(adapter: Path, tmp_path: Path) -> None:
    loaded = load(adapter)
    own = Generator(loaded.model, loaded.tokenizer)
    for call in (lambda: own.save_pretrained(tmp_path / "copy"), lambda: own.push_to_hub("me/mine")):
        with pytest.raises(CheckpointError, match="not loaded from an adapter folder"):
            call()


# --- fetching -------------------------------------------------------------------------------------------------


def test_a_hub_name_is_fetched(adapter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(name: str, **how: Any) -> str:
        asked.append((name, how["allow_patterns"]))
        return str(adapter)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert load("me/mine").generate(PROMPT, max_new_tokens=4).text
    assert asked == [("me/mine", list(FILES))]
    load(adapter)
    (tmp_path / "owner" / "local").mkdir(parents=True)
    assert find("owner/local") == Path("owner/local")  # a folder goes before the hub
    assert len(asked) == 1


def test_what_the_hub_does_not_give_is_named(adapter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no adapter folder at me/absent, and the hub gave none"):
        load("me/absent")
    with pytest.raises(CheckpointError, match="no adapter folder at"):
        load(tmp_path / "absent" / "folder")
    (adapter / MANIFEST).unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: str(adapter))
    with pytest.raises(CheckpointError, match=r"me/other on the hub holds no forestream\.json"):
        load("me/other")
