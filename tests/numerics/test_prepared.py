"""Prepared models: what they write, with packed weights and folded heads, and which preparations are refused."""

from typing import Any

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler

from forestream.attention import GROUPED
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import BudgetTree
from forestream.errors import ConfigError
from forestream.steps import Counters, tokens_of
from forestream.weights import PackedLinear, can_pack
from oracle import Prophet, near_tie, plain_logits
from subject import CARRIERS, stock_text
from twins import outline, twins, written
from wrapped import prompt, wrapped
from zoo import HOSTS, WINDOW

every_host = pytest.mark.parametrize("host", HOSTS)
both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])


# --- what they write ------------------------------------------------------------------------------------------


@both_modes
@every_host
def test_a_prepared_model_writes_what_it_wrote(host: str, mode: str) -> None:
    """EQ in float32, and the same trees and acceptances; the text is the host's own."""
    here, counters = twins(host, mode, compile="off"), Counters()
    if can_pack(here.eager.port.model):
        assert isinstance(here.prepared.port.model.lm_head, PackedLinear | type(None)) or host.startswith("gpt_neox")
    assert (here.prepared.port.config._attn_implementation == GROUPED) == (host != "gemma2")
    for carriers, rule in zip(CARRIERS, ({}, {"prune_to": 5}), strict=True):
        for length in (5, 3 * WINDOW):
            counters.extend(here.check(prompt(length), 20, nodes=8, carriers=carriers, **rule))
    assert counters.mean_acceptance_length > 1.5
    if mode == "joint":
        assert stock_text(here.prepared, prompt(5), 20) == written(here.eager, prompt(5), 20)


@pytest.mark.parametrize(
    "changes",
    [{"merge": False}, {"value_rotation": True, "rotation_angle": 0.7, "mode": "lossless"}, {"stream_layers": 4}],
    ids=str,
)
def test_every_kind_of_streams(changes: dict[str, Any]) -> None:
    here = twins("llama", compile="off", **changes)
    for carriers in CARRIERS:
        here.check(prompt(6), 20, nodes=8, carriers=carriers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("host", ["llama", "gpt2"])
def test_in_half_precision_every_token_is_nearly_plain_decodings_choice(host: str, dtype: torch.dtype) -> None:
    """NT against the model as it was loaded: four units in the last place of the largest logit."""
    eager, model = (wrapped(HOSTS[host]().to(dtype)).to(dtype) for _ in range(2))
    model.prepare()
    start, truth = prompt(6), written(eager, prompt(6), 60)
    drafter = Prophet(BudgetTree(12), start + truth, 0.8)
    steps = list(decode(model, start, DecodeSettings(max_new_tokens=60, nodes=12), drafter=drafter))
    text = tokens_of(steps)
    largest = float(plain_logits(eager, start, text).abs().max())
    assert len(near_tie(eager, start, text, margin=4 * torch.finfo(dtype).eps * largest)) == 60
    assert sum(step.accepted for step in steps) > 5


def test_a_model_is_prepared_for_evaluation() -> None:
    model = wrapped("llama").train()
    assert model.prepared is None
    model.prepare()
    assert model.prepared == "off"
    assert not any(module.training for module in model.modules() if not isinstance(module, PackedLinear))


@pytest.mark.parametrize("host", ["phi", "gpt2"])
def test_a_lossless_model_may_be_prepared_after_it_has_decoded(host: str) -> None:
    model, start = wrapped(host, "lossless"), prompt(6)
    settings = DecodeSettings(max_new_tokens=12, nodes=5, carriers="fused")
    before = list(decode(model, start, settings))
    next(decode(model, start, settings))  # stops where the gate is open to some slots
    model.prepare()
    assert outline(list(decode(model, start, settings))) == outline(before)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", ["off", "layer"])
def test_a_model_is_prepared_once(compile: Any) -> None:
    model = wrapped("llama")
    model.prepare()
    with pytest.raises(ConfigError, match="prepared already, with compile 'off'; load it anew"):
        model.prepare(compile)


def test_an_unknown_way_to_compile_is_refused_before_anything_is_changed() -> None:
    model = wrapped("llama")
    modules = list(model.modules())
    with pytest.raises(ConfigError, match="compile is 'fast'; expected one of 'off', 'layer', 'full'"):
        model.prepare("fast")  # type: ignore[arg-type]
    assert list(model.modules()) == modules
    assert model.prepared is None


@pytest.mark.parametrize("compile", ["layer", "full"])
def test_without_a_compiler_compiling_is_refused_and_the_rest_still_works(
    compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    here = twins("llama", "lossless", compile="off")
    model = wrapped("llama", "lossless")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and none was found; install one"):
        model.prepare(compile)
    assert model.prepared is None
    settings = DecodeSettings(max_new_tokens=12)
    wanted = outline(list(decode(here.eager, prompt(6), settings)))
    assert outline(list(decode(model, prompt(6), settings))) == wanted
    model.prepare("off")
    assert outline(list(decode(model, prompt(6), settings))) == wanted
