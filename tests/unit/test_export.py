"""Exported folders: the merged model to every engine, with its streams beside it for vLLM; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from forestream import checkpoint
from forestream.cli import app
from forestream.config import StreamConfig
from forestream.errors import CheckpointError, ConfigError, ForestreamError, UnsupportedModel
from forestream.export import export_hf, export_vllm
from forestream.packing import Pack
from forestream.vllm.exported import COPIES, KEY, SAMPLER, STREAMS, VOCABULARY, check_drafts, read, stream_config
from tiny import tiny_adapter, tiny_base

IDS = torch.arange(3, 23)[None]


def exported(folder: Path, base: dict[str, Any] | None = None, **changes: Any) -> tuple[Path, Path]:
    """A random adapter and its export in float32; `changes` go to its StreamConfig, `base` to its base's settings."""
    adapter = tiny_adapter(folder / "adapter", tiny_base(folder / "base", **(base or {})), **changes)
    export_vllm(adapter, folder / "exported", dtype=torch.float32)
    return adapter, folder / "exported"


def stock_logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the host library, which knows nothing of streams, makes of a folder."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits: Tensor = model.eval()(IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_export_is_the_merged_model_with_its_streams_beside_it(tmp_path: Path, tied: bool) -> None:
    adapter, folder = exported(tmp_path, {"tie_word_embeddings": tied}, start="low_rank")
    model, tokenizer = checkpoint.load(adapter)
    with torch.no_grad():
        wanted = model.logits(model(IDS, Pack.text(IDS.shape[1], torch.zeros(1, 0, dtype=torch.long), 0)).main)
    assert torch.equal(stock_logits(folder), wanted)
    assert not torch.equal(stock_logits(tmp_path / "base"), wanted)  # the adapter does something
    found = load_file(folder / STREAMS)
    own = {name: t for name, t in checkpoint.own_tensors(model).items() if name.startswith("start.")}
    assert set(found) == set(own) == {"start.embedding", "start.map.down", "start.map.up"}
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    text = "name[Aromi], eatType[pub] ->"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_a_path_sampler_and_a_draft_vocabulary_lie_beside_the_streams(tmp_path: Path, mode: str) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", mode=mode)
    own = load_file(adapter / checkpoint.STREAMS)
    generator = torch.Generator().manual_seed(1)
    sampler = {
        f"{SAMPLER}{name}": torch.randn(shape, generator=generator)
        for name, shape in {"state": (48, 8), "token": (48, 8), "up": (8, 48)}.items()
    }
    ids = torch.tensor([1, 5, 40, 97], dtype=torch.int32)
    save_file({**own, **sampler, VOCABULARY: ids}, adapter / checkpoint.STREAMS, {"format": "pt"})
    export_vllm(adapter, tmp_path / "exported", dtype=torch.float32)
    found = load_file(tmp_path / "exported" / STREAMS)
    assert {name for name in found if not name.startswith(COPIES)} == {"start.embedding", VOCABULARY, *sampler}
    assert torch.equal(found[VOCABULARY], ids)
    assert all(torch.equal(found[name], tensor) for name, tensor in sampler.items())
    read(tmp_path / "exported")
    export_vllm(adapter, tmp_path / "half", dtype=torch.bfloat16)
    half = load_file(tmp_path / "half" / STREAMS)
    assert half.pop(VOCABULARY).dtype == torch.int32
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def test_config_json_names_the_class_and_tells_of_the_streams(tmp_path: Path) -> None:
    _, folder = exported(tmp_path, positions="same")
    config, values = read(folder)
    assert config == StreamConfig(**values[KEY]["config"])
    assert (config.streams, config.stream_layers, config.positions) == (3, 2, "same")
    assert values["architectures"] == ["ForestreamLlamaForCausalLM"]
    assert values["dtype"] == "float32"
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors") == [
        "model.safetensors",  # in one piece: beside an index vLLM would overlook the streams
        STREAMS,
    ]
    assert not (folder / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(("family", "name"), [("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("mistral", "Mistral")])
def test_other_families_have_classes_of_their_own(tmp_path: Path, family: str, name: str) -> None:
    import zoo
    from tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    windowless = {"sliding_window": None} if family == "mistral" else {}
    zoo.custom(family, vocab_size=len(tokenizer), num_key_value_heads=2, **windowless).save_pretrained(
        tmp_path / "base"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    export_vllm(tiny_adapter(tmp_path / "adapter", tmp_path / "base"), tmp_path / "exported", dtype=torch.float32)
    _, values = read(tmp_path / "exported")
    assert values["architectures"] == [f"Forestream{name}ForCausalLM"]


def test_the_dtype_is_that_of_the_weights_and_of_the_streams(tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter")
    export_vllm(adapter, tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("model.safetensors", STREAMS):
        assert {t.dtype for t in load_file(tmp_path / "exported" / name).values()} == {torch.bfloat16}


def test_for_other_engines_there_are_no_streams(tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter")
    export_hf(adapter, tmp_path / "plain", dtype=torch.float32)
    export_vllm(adapter, tmp_path / "exported", dtype=torch.float32)
    assert torch.equal(stock_logits(tmp_path / "plain"), stock_logits(tmp_path / "exported"))
    values = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"]
    assert KEY not in values
    with pytest.raises(CheckpointError, match="no entry 'forestream'"):
        read(tmp_path / "plain")


def test_of_a_lossless_adapter_the_model_is_the_base_and_its_stream_layers_are_there_twice(tmp_path: Path) -> None:
    adapter, folder = exported(tmp_path, mode="lossless")
    assert torch.equal(stock_logits(folder), stock_logits(tmp_path / "base"))
    base, found = load_file(tmp_path / "base" / "model.safetensors"), load_file(folder / STREAMS)
    copies = {name.removeprefix(COPIES): tensor for name, tensor in found.items() if name.startswith(COPIES)}
    lora = load_file(adapter / checkpoint.LORA)
    for number, layer in enumerate((2, 3)):
        names = [name for name in base if f"layers.{layer}." in name]
        assert len(names) == 9
        for name in names:
            place, part = name.split(f"layers.{layer}.")[1], name.removesuffix(".weight")
            down, up = (lora.get(f"base_model.model.{part}.lora_{side}.weight") for side in "AB")
            change = 0 if down is None or up is None else 2.0 * up.float() @ down.float()
            torch.testing.assert_close(copies.pop(f"{number}.{place}"), base[name] + change)
    assert not copies
    with pytest.raises(CheckpointError, match="nothing to merge"):
        export_hf(adapter, tmp_path / "plain")


# --- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"streams": 0}, CheckpointError, "without streams"),
        ({"value_rotation": True}, UnsupportedModel, "rotates the values"),
    ],
)
def test_adapters_that_vllm_could_not_run_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[ForestreamError], message: str
) -> None:
    with pytest.raises(error, match=message):
        exported(tmp_path, **changes)
    assert not (tmp_path / "exported").exists()


def test_bases_that_vllm_could_not_run_are_refused(tmp_path: Path) -> None:
    import zoo
    from tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    for name, family, changes in (
        ("gpt_neox", "gpt_neox", {}),
        ("is a phi;", "phi", {"num_key_value_heads": 2}),
        ("sliding windows", "mistral", {"sliding_window": 8, "num_key_value_heads": 2}),
    ):
        base = tmp_path / family
        zoo.custom(family, vocab_size=len(tokenizer), **changes).save_pretrained(base)
        tokenizer.save_pretrained(base)
        adapter = tiny_adapter(tmp_path / f"{family}-adapter", base)
        with pytest.raises(UnsupportedModel, match=name):
            export_vllm(adapter, tmp_path / "exported", dtype=torch.float32)
        export_hf(adapter, tmp_path / f"{family}-plain", dtype=torch.float32)
    assert not (tmp_path / "exported").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter")
    for write in (export_vllm, export_hf):
        with pytest.raises(CheckpointError, match="not empty"):
            write(adapter, adapter)
    assert (adapter / "forestream.json").is_file()


def test_folders_that_are_no_export_are_named(tmp_path: Path) -> None:
    _, folder = exported(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no entry"):
        read(tmp_path / "base")
    values = json.loads((folder / "config.json").read_text())
    for spoilt, message in (
        ({**values[KEY], "format": 7}, "format 7"),
        ({"format": 1}, "malformed"),
        ({"format": 1, "config": {"streams": -1}}, "malformed"),
        ("text", "no entry"),
    ):
        with pytest.raises(CheckpointError, match=message):
            stream_config(spoilt, "here")
    (folder / STREAMS).unlink()
    with pytest.raises(CheckpointError, match=STREAMS):
        read(folder)


@pytest.mark.parametrize("drafts", [0, 4])
def test_no_more_drafts_than_there_are_streams(drafts: int) -> None:
    check_drafts(StreamConfig(streams=3), 3)
    with pytest.raises(ConfigError, match="expected 1 to 3"):
        check_drafts(StreamConfig(streams=3), drafts)


def test_the_command_writes_and_refuses(tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter")
    for form in ("vllm", "hf"):
        arguments = ["export", form, "--adapter", str(adapter), "--output", str(tmp_path / form), "--dtype", "float32"]
        first, second = (CliRunner().invoke(app, arguments) for _ in range(2))
        assert first.exit_code == 0, first.output
        assert "wrote" in first.stdout
        assert second.exit_code == 1
        assert "not empty" in second.stderr
    assert torch.equal(stock_logits(tmp_path / "vllm"), stock_logits(tmp_path / "hf"))
