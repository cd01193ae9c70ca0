"""Adapter folders that cannot be loaded: each is refused with a message that names what was found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forestream import checkpoint
from forestream.bases import fingerprint, load_base
from forestream.checkpoint import LORA, STREAMS
from forestream.errors import CheckpointError, ConfigError
from forestream.manifest import MANIFEST, Manifest
from tiny import tiny_adapter, tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base") / "own")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A joint adapter folder: 3 streams on 2 layers, LoRA of rank 4."""
    return tiny_adapter(tmp_path / "adapter", base)


def refusal(adapter: Path, **keywords: Any) -> str:
    """What loading is refused with."""
    with pytest.raises(CheckpointError) as refused:
        checkpoint.load(adapter, **keywords)
    return str(refused.value)


def test_missing_folders_and_files_are_named(adapter: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in refusal(tmp_path / "absent")
    for name in (STREAMS, LORA, MANIFEST):
        (adapter / name).unlink()
        assert name in refusal(adapter)


@pytest.mark.parametrize("name", [LORA, STREAMS])
def test_missing_unknown_and_misshapen_tensors_are_named(name: str, adapter: Path) -> None:
    whole = load_file(adapter / name)
    key = sorted(whole)[0]
    for spoilt in (
        {k: t for k, t in whole.items() if k != key},
        {**whole, key: whole[key][:1].clone()},
        {**whole, key: whole[key].T.contiguous()},
    ):
        save_file(spoilt, adapter / name)
        message = refusal(adapter)
        assert key in message
        assert str(adapter / name) in message
    save_file({**whole, "extra": torch.zeros(1)}, adapter / name)
    assert "'extra'" in refusal(adapter)
    save_file(whole, adapter / name)
    checkpoint.load(adapter)


@pytest.mark.parametrize("name", [LORA, STREAMS])
def test_corrupt_weights_are_named(name: str, adapter: Path) -> None:
    whole = (adapter / name).read_bytes()
    for broken in (b"", whole[:5], whole[: len(whole) // 2], whole[:-1], b"\xff" * 64 + whole[64:], b"{}" + whole):
        (adapter / name).write_bytes(broken)
        message = refusal(adapter)
        assert str(adapter / name) in message
        assert "corrupt" in message
    (adapter / name).write_bytes(whole)
    checkpoint.load(adapter)


def test_a_manifest_cut_anywhere_is_refused(adapter: Path) -> None:
    whole = (adapter / MANIFEST).read_text().rstrip()
    for length in range(len(whole)):
        (adapter / MANIFEST).write_text(whole[:length])
        with pytest.raises(CheckpointError, match=r"forestream\.json is malformed"):
            Manifest.read(adapter)


@pytest.mark.parametrize("junk", [b"[]", b"null", b"7", b'"text"', b"\xff\xfe\x00", b"{}"])
def test_a_manifest_of_another_kind_is_refused(junk: bytes, adapter: Path) -> None:
    (adapter / MANIFEST).write_bytes(junk)
    with pytest.raises(CheckpointError, match=r"forestream\.json"):
        Manifest.read(adapter)


def rewrite(adapter: Path, change: Any) -> None:
    values = json.loads((adapter / MANIFEST).read_text())
    change(values)
    (adapter / MANIFEST).write_text(json.dumps(values))


def test_unknown_keys_are_named(adapter: Path) -> None:
    whole = (adapter / MANIFEST).read_text()
    for place in ("config", "base"):
        rewrite(adapter, lambda values, place=place: values[place].update(speed=11))
        assert "speed" in refusal(adapter)
        (adapter / MANIFEST).write_text(whole)
    rewrite(adapter, lambda values: values.update(colour="red"))
    assert "colour" in refusal(adapter)


def test_missing_keys_are_named(adapter: Path) -> None:
    """What was trained is never guessed: a default in place of a lost "mode" would be another model."""
    whole = (adapter / MANIFEST).read_text()
    values = json.loads(whole)
    for place in ("config", "base"):
        # Folders of earlier releases lack these two: the model is the same without, and only a check is left out.
        for key in set(values[place]) - {"precision", "chat_template"}:
            rewrite(adapter, lambda values, place=place, key=key: values[place].pop(key))
            assert key in refusal(adapter)
            (adapter / MANIFEST).write_text(whole)
    for key in values:
        rewrite(adapter, lambda values, key=key: values.pop(key))
        assert key in refusal(adapter)
        (adapter / MANIFEST).write_text(whole)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("streams", -1),
        ("streams", "4"),
        ("streams", 2.5),
        ("streams", None),
        ("stream_layers", 0),
        ("mode", "lossy"),
        ("mode", ["joint"]),
        ("positions", None),
        ("start", "random"),
        ("value_rotation", "no"),
        ("rotation_angle", "0.1"),
        ("lora_rank", 4.5),
        ("scorer_rank", True),
    ],
)
def test_impossible_values_are_named(key: str, value: Any, adapter: Path) -> None:
    rewrite(adapter, lambda values: values["config"].update({key: value}))
    message = refusal(adapter)
    assert key in message
    assert repr(value) in message


@pytest.mark.parametrize("found", [0, 2, "1", None])
def test_other_formats_are_named(found: Any, adapter: Path) -> None:
    rewrite(adapter, lambda values: values.update(format=found))
    message = refusal(adapter)
    assert f"format {found}" in message
    assert "reads format 1" in message


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("streams", 4, "start.embedding"),
        ("lora_rank", 5, "lora_"),
        ("scorer_rank", 0, "scorer."),
        ("mode", "lossless", "layers.0."),
        ("start", "low_rank", "start.map."),
        ("value_rotation", True, "start.embedding"),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_named(key: str, value: Any, told: str, adapter: Path) -> None:
    rewrite(adapter, lambda values: values["config"].update({key: value}))
    message = refusal(adapter)
    assert told in message
    assert "does not fit" in message


def test_more_stream_layers_than_the_base_has_are_refused(adapter: Path) -> None:
    rewrite(adapter, lambda values: values["config"].update(stream_layers=9))
    with pytest.raises((CheckpointError, ConfigError), match="stream_layers is 9; the model has 4 layers"):
        checkpoint.load(adapter)


def test_a_foreign_base_is_named_with_both_fingerprints(adapter: Path, base: Path, tmp_path: Path) -> None:
    host, tokenizer = load_base(str(base))
    with torch.no_grad():
        host.lm_head.weight.add_(0.1)
    foreign = tmp_path / "foreign"
    host.save_pretrained(foreign)
    tokenizer.save_pretrained(foreign)
    message = refusal(adapter, base=str(foreign))
    assert Manifest.read(adapter).base.fingerprint[:12] in message
    assert fingerprint(host)[:12] in message
    assert str(base) in message
    checkpoint.load(adapter, str(base), torch.bfloat16)
