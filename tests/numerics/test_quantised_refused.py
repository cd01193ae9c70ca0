"""Quantising that is refused: by name, with what was found and what to do; and everything else without torchao."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forestream import quantised
from forestream.bases import load_base
from forestream.errors import ConfigError, UnsupportedModel
from forestream.quantised import quantise
from tiny import tiny_adapter, tiny_base
from wrapped import wrapped
from zoo import custom

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


@pytest.mark.parametrize(
    "settings", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "torchao"}]
)
def test_a_base_saved_quantised_is_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = tiny_base(tmp_path / "base") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
    with pytest.raises(UnsupportedModel, match=f"quantised by {settings['quant_method']} before they were saved"):
        load_base(str(tmp_path / "base"))


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantise is 'int3'; expected one of 'off', 'int8', 'int4'"):
        quantise(wrapped("llama"), "int3")  # type: ignore[arg-type]


def test_an_unmerged_joint_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="not merged, and cannot be merged into integers; call `merge` first"):
        quantise(wrapped("llama", merge=False), "int8")


def test_a_prepared_model_is_refused() -> None:
    model = wrapped("llama")
    model.prepare()
    with pytest.raises(ConfigError, match="prepared already and its plain weights are gone"):
        quantise(model, "int8")


@needs_torchao
def test_quantising_twice_is_refused() -> None:
    model = wrapped("llama")
    quantise(model, "int8")
    with pytest.raises(ConfigError, match="no plain linear layer in llama to quantise to int4"):
        quantise(model, "int4")


@needs_torchao
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"hidden_size": 48},
            "does not take a layer of 48 inputs and 48 outputs .* int4 on cpu: not in multiples of 32",
        ),
        (
            {"hidden_size": 64, "intermediate_size": 72},
            r"cannot hold a layer of 64 inputs and 72 outputs.* int4 on cpu",
        ),
    ],
)
def test_shapes_that_the_kernel_does_not_take_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        quantise(wrapped(custom("llama", **sizes)), "int4")


@needs_torchao
def test_a_release_without_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.prototype.quantization.int4", None)
    with pytest.raises(ConfigError, match="this release of torchao cannot do int4 on cpu"):
        quantise(wrapped(custom("llama", hidden_size=64)), "int4")


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torchao, which is not installed; run: pip install 'forestream\[quan"):
        quantise(wrapped("llama"), "int8")


_WITHOUT = """
import sys
sys.modules["torchao"] = None
from forestream import ForestreamError, Generator
generator = Generator.from_pretrained(sys.argv[1])
generator.generate("some text ->", max_new_tokens=4)
try:
    Generator.from_pretrained(sys.argv[1], quantise="int8")
except ForestreamError as error:
    print(error)
"""


def test_everything_else_works_without_torchao(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT, tiny_adapter(tmp_path / "adapter")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "pip install 'forestream[quantised]'" in run.stdout
