"""Families without a port of their own: driven if exact, refused with a reason if not."""

from typing import Any

import pytest
import transformers

from forestream.errors import UnsupportedModel
from forestream.ports import check_parity, port_for
from forestream.ports.generic import GenericPort
from zoo import HOSTS, WINDOW, build, custom

# --- families without a port of their own -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "keywords"),
    [
        ("starcoder2", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
        ("olmo", {"num_key_value_heads": 2}),
        ("olmo2", {"num_key_value_heads": 2}),
        ("smollm3", {"num_key_value_heads": 2}),
        ("glm", {"num_key_value_heads": 2, "head_dim": 12}),
    ],
)
def test_unknown_family_is_driven_if_exact(family: str, keywords: dict[str, Any]) -> None:
    port = port_for(custom(family, **keywords))
    assert isinstance(port, GenericPort)
    assert port.family == family
    assert check_parity(port) < 1e-5
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= set(port.lora_targets)


def test_generic_port_of_a_long_window_was_tested_past_it() -> None:
    port = port_for(custom("starcoder2", num_key_value_heads=2, sliding_window=64))
    assert [port.window(i) for i in range(4)] == [64] * 4


@pytest.mark.parametrize(
    ("family", "keywords"),
    [
        ("granite", {"num_key_value_heads": 2, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
        ("cohere", {"num_key_value_heads": 2}),
    ],
)
def test_unknown_family_is_refused_with_numbers(family: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{family}: .* differ from the stock forward by \d.*llama, opt"):
        port_for(custom(family, **keywords))


def test_unknown_family_with_parts_too_many_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="it holds wte, wpe, drop, h, ln_f"):
        port_for(custom("gpt_neo", num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]]))


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_without_free_masks_is_refused(implementation: str) -> None:
    model = HOSTS["llama"]()
    model.config._attn_implementation = implementation
    with pytest.raises(UnsupportedModel, match=rf"{implementation}.*sdpa, eager.*Supported: llama, opt"):
        port_for(model)


def test_eager_is_accepted() -> None:
    model = HOSTS["llama"]()
    model.set_attn_implementation("eager")
    port = port_for(model)
    assert port.attention == "eager"
    assert check_parity(port) < 1e-5


def test_gemma2_needs_eager() -> None:
    model = HOSTS["gemma2"]()
    assert port_for(model).attention == "eager"
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModel, match="attn_implementation='eager'"):
        port_for(model)


@pytest.mark.parametrize(
    ("family", "keywords"),
    [("bloom", {}), ("mpt", {"d_model": 48, "n_layers": 2, "n_heads": 4}), ("falcon", {"alibi": True})],
)
def test_alibi_is_refused(family: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="ALiBi"):
        port_for(custom(family, **keywords))


def test_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=89, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        port_for(build(transformers.T5ForConditionalGeneration, config))


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("opt-pre", "layerdrop", 0.1),
        ("gpt2", "add_cross_attention", True),
        ("gemma3", "use_bidirectional_attention", True),
        ("llama", "is_causal", False),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(name: str, setting: str, value: Any) -> None:
    model = HOSTS[name]()
    setattr(model.config, setting, value)
    with pytest.raises(UnsupportedModel, match=setting):
        port_for(model)
