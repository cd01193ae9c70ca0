"""Quantised bases: EQ in float32 activations, NT in bfloat16, what stays as it was, and what is warned of.

N01  greedy on quantised targets: near ties, and a control without streams
N02  8- and 4-bit bases with streams: they load, texts are equal, acceptance is reported
N03  trained on one precision, run on another: one warning, acceptance is reported

The control for every text is plain decoding of the same quantised model.
"""

import importlib.util
import json
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from forestream import checkpoint, weights
from forestream.bases import load_base
from forestream.compiled import has_compiler
from forestream.config import DecodeSettings, Quantise
from forestream.decode import decode
from forestream.drafting import drafter_for
from forestream.errors import CheckpointError, ConfigError, PrecisionWarning
from forestream.generation import Generator
from forestream.manifest import MANIFEST, BaseModel, Manifest
from forestream.model import StreamingLM
from forestream.quantised import quantise
from forestream.steps import Counters, tokens_of
from forestream.weights import PackedLinear, can_pack
from oracle import Prophet, near_tie, plain_logits
from subject import CARRIERS, lively, stock_text
from tiny import tiny_adapter, tiny_base
from twins import Twins, written
from wrapped import prompt, wrapped
from zoo import WINDOW, custom

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")

both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])
Report = Callable[[str, object], None]

# Wide enough for int4, whose kernel takes inputs in multiples of 32 and outputs in multiples of 16.
WIDE: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: custom("llama", hidden_size=64, num_key_value_heads=2),
    "qwen3": lambda: custom("qwen3", hidden_size=64, num_key_value_heads=2, head_dim=16),
    "gpt_neox": lambda: custom("gpt_neox", hidden_size=64),
}
SHAPES: tuple[dict[str, Any], ...] = ({"tree": "full", "k": 1}, {"nodes": 8}, {"tree": "full", "k": 2, "prune_to": 6})


def held(host: str | PreTrainedModel, to: Quantise, mode: str = "joint", **changes: Any) -> StreamingLM:
    model = wrapped(host, mode, **changes)
    quantise(model, to)
    return model


def linears(model: StreamingLM) -> dict[str, Any]:
    """The base's own linear layers inside the decoder layers, by name; what an adapter adds is left out."""
    return {
        f"{number}.{name.replace('.base_layer', '')}": module
        for number, layer in enumerate(model.port.layers)
        for name, module in layer.named_modules()
        if hasattr(module, "weight") and module.weight.dim() == 2 and ".lora_" not in name
        if not isinstance(module, LoraLayer)
    }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapter folders by mode, on one base that is wide enough for int4."""
    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_base(folder / "base", hidden_size=64)
    return {mode: tiny_adapter(folder / mode, base, mode=mode) for mode in ("joint", "lossless")}


# --- the same text as plain decoding --------------------------------------------------------------------------


def grid(model: StreamingLM) -> Counters:
    here = lively(model)
    for shape, carriers in product(SHAPES, CARRIERS):
        here.check(12, carriers=carriers, **shape)
    assert here.counters.mean_acceptance_length > 1.5, "too few drafts were accepted to call this a test"
    return here.counters


@both_modes
@pytest.mark.parametrize("host", ["llama-tied", "opt-pre", "phi3", "gemma3", "gpt_neox-parallel", "gpt2"])
def test_int8_texts_are_those_of_plain_decoding(host: str, mode: str, record_property: Report) -> None:
    """N02. Chains and trees, fused and deferred; as it is, and prepared."""
    model = held(host, "int8", mode)
    start = prompt(2 * WINDOW)
    before = written(model, start, 12)
    record_property("acceptance", grid(model).mean_acceptance_length)
    model.prepare()
    assert written(model, start, 12) == before
    grid(model)


@both_modes
@pytest.mark.parametrize("host", WIDE)
def test_int4_texts_are_those_of_plain_decoding(host: str, mode: str, record_property: Report) -> None:
    """N02."""
    model = held(WIDE[host](), "int4", mode)
    record_property("acceptance", grid(model).mean_acceptance_length)
    model.prepare()
    grid(model)


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_the_text_is_the_host_librarys_own_on_the_same_quantised_layers(to: Quantise) -> None:
    model = held(WIDE["llama"](), to)
    assert stock_text(model, prompt(6), 16) == written(model, prompt(6), 16)


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("host", WIDE)
def test_a_quantised_model_says_something_else(host: str, to: Quantise) -> None:
    """By far more than float32 rounds, so that the tests above are about quantised weights."""
    start, text = prompt(6), prompt(9, seed=1)
    plain, other = (plain_logits(model, start, text) for model in (wrapped(WIDE[host]()), held(WIDE[host](), to)))
    off = float((plain - other).abs().max() / plain.abs().max())
    assert off > 1e-3


@both_modes
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_in_half_precision_every_token_is_nearly_plain_decodings_choice(to: Quantise, mode: str) -> None:
    """N01. The control has no streams and writes plain decoding's text: what may differ comes of larger passes."""
    model = held(WIDE["llama"]().bfloat16(), to, mode)
    model.prepare()
    for seed, carriers in enumerate(CARRIERS):
        start, settings = prompt(6, seed=seed), DecodeSettings(max_new_tokens=30, carriers=carriers)
        truth = written(model, start, 30)
        control = DecodeSettings(max_new_tokens=30, streams=0)
        assert tokens_of(list(decode(model, start, control))) == truth
        drafter = Prophet(drafter_for(settings), start + truth, 0.7)
        steps = list(decode(model, start, settings, drafter=drafter))
        found = tokens_of(steps)
        near_tie(model, start, found, 0.03 * float(plain_logits(model, start, found).abs().max()))
        assert sum(step.accepted for step in steps) > 3


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="compiling needs a C++ compiler")
@pytest.mark.parametrize(("to", "mode"), [("int8", "lossless"), ("int4", "joint")])
def test_compiled_layers_write_the_same_by_the_same_trees(to: Quantise, mode: str) -> None:
    eager, compiled = (held(WIDE["llama"](), to, mode, stream_layers=4) for _ in range(2))
    compiled.prepare("layer")
    assert compiled.layers._kinds == [0] * 4, "one layer's code serves all"
    here, counters = Twins(eager, compiled), Counters()
    for length in (6, 9):
        counters.extend(here.begin(prompt(length), 16, nodes=4))
    assert counters.mean_acceptance_length > 1.5
    torch._dynamo.reset()


# --- what is quantised, and what is not -----------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("host", ["llama", "llama-tied", "opt-post", "gpt2"])
def test_only_linear_layers_of_the_decoder_layers_are_quantised(host: str, mode: str) -> None:
    model, as_loaded = held(host, "int8", mode), wrapped(host, mode)
    names = linears(as_loaded)
    changed = {
        name: module for name, module in linears(model).items() if type(module.weight) is not type(names[name].weight)
    }
    assert len(changed) == len(names) > 8
    for name, module in changed.items():
        assert type(module) is nn.Linear
        assert module.weight.qdata.dtype == torch.int8, name
    base = {id(module.weight) for module in changed.values()}
    own = [parameter for parameter in model.parameters() if id(parameter) not in base]
    assert all(type(parameter) is nn.Parameter for parameter in own)
    assert sum(p.numel() for p in own) + sum(m.weight.numel() for m in changed.values()) == sum(
        p.numel() for p in as_loaded.parameters()
    )
    tied = model.port.model.config.tie_word_embeddings
    assert (model.port.model.get_output_embeddings().weight is model.port.model.get_input_embeddings().weight) == tied


@both_modes
@pytest.mark.parametrize("compile", ["off", "layer"])
def test_packing_leaves_quantised_layers_alone(mode: str, compile: str) -> None:
    model = held("llama", "int8", mode)
    if not can_pack(model.port.model):
        pytest.skip("this machine has no layout for packed weights")
    before = {name: module.weight for name, module in linears(model).items()}
    weights.pack(model.port.model, model.port.shared_inputs if compile == "layer" else ())
    assert {name: module.weight for name, module in linears(model).items()} == before
    packed = [name for name, module in model.port.model.named_modules() if isinstance(module, PackedLinear)]
    assert packed == ["lm_head"]


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_the_compilers_settings_are_left_as_they_were(to: Quantise) -> None:
    """They are the whole process's, and torchao changes them unless it is told not to."""
    from torch._inductor import config

    before = config.save_config_portable()
    held(WIDE["llama"](), to)
    assert config.save_config_portable() == before


def test_off_changes_nothing() -> None:
    model = wrapped("llama")
    before = list(model.modules())
    quantise(model, "off")
    assert list(model.modules()) == before
    assert model.quantised == "off"


# --- loading --------------------------------------------------------------------------------------------------


def rows_apart(quantised_weight: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """How far every weight is from what it was rounded to, and half a step of its row."""
    return (quantised_weight.dequantize() - weight).abs(), quantised_weight.scale.reshape(-1, 1) / 2


@pytest.mark.filterwarnings("ignore::forestream.errors.PrecisionWarning")
def test_a_joint_adapter_is_merged_before_weights_are_rounded(adapters: dict[str, Path]) -> None:
    """Every weight is within half a step of the merged one, and some are further than that from the base's own."""
    merged, _ = checkpoint.load(adapters["joint"])
    model, _ = checkpoint.load(adapters["joint"], quantise="int8")
    base, _ = load_base(str(adapters["joint"].parent / "base"))
    moved = 0
    for name, module in linears(model).items():
        off, half = rows_apart(module.weight, linears(merged)[name].weight)
        assert bool((off <= 1.001 * half).all()), name
        number, _, inner = name.partition(".")
        off, half = rows_apart(module.weight, base.model.layers[int(number)].get_submodule(inner).weight)
        moved += int((off > 2 * half).sum())
    assert moved > 100
    quantise(merged, "int8")
    assert torch.equal(plain_logits(model, prompt(6), prompt(9)), plain_logits(merged, prompt(6), prompt(9)))


@pytest.mark.filterwarnings("ignore::forestream.errors.PrecisionWarning")
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_lossless_adapter_stays_beside_quantised_weights(adapters: dict[str, Path], to: Quantise) -> None:
    """The text is that of the quantised base alone."""
    model, _ = checkpoint.load(adapters["lossless"], quantise=to)
    lora = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert lora
    assert all(type(module.get_base_layer().weight) is not nn.Parameter for module in lora)
    assert all(type(branch.weight) is nn.Parameter for module in lora for branch in module.lora_A.values())
    grid(model)
    with model.as_host() as host, torch.no_grad():
        ids = torch.tensor([prompt(6)])
        text = host.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tuple(text[0, 6:].tolist()) == written(model, prompt(6), 12)[: text.shape[1] - 6]


@both_modes
def test_a_generator_writes_what_it_writes_plainly(adapters: dict[str, Path], mode: str) -> None:
    with pytest.warns(PrecisionWarning):
        generator = Generator.from_pretrained(adapters[mode], dtype=torch.float32, quantise="int8")
    assert generator.model.quantised == "int8"
    found = generator.generate("some text ->", max_new_tokens=24)
    assert found.tokens == generator.collect(generator.plain_steps("some text ->", max_new_tokens=24)).tokens


def test_the_base_is_recognised_before_it_is_quantised(adapters: dict[str, Path], tmp_path: Path) -> None:
    other = tiny_base(tmp_path / "other", hidden_size=64, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"was trained on .*, but the base given has"):
        checkpoint.load(adapters["joint"], str(other), quantise="int8")


# --- another precision than trained on ------------------------------------------------------------------------


def trained_in(precision: str | None, like: Path, folder: Path) -> Path:
    """A copy of an adapter whose manifest records `precision`, or nothing at all."""
    folder.mkdir()
    for file in like.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / MANIFEST).read_text())
    values["base"].pop("precision")
    if precision is not None:
        values["base"]["precision"] = precision
    (folder / MANIFEST).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("trained", "dtype", "to", "words"),
    [
        (None, torch.float32, "int8", "in floating point and runs on it in int8"),
        ("bfloat16", torch.float32, "int8", "in bfloat16 and runs on it in int8"),
        ("float32", torch.bfloat16, "int4", "in float32 and runs on it in int4"),
        ("int8", torch.float32, "off", "in int8 and runs on it in float32"),
        ("int8", torch.float32, "int4", "in int8 and runs on it in int4"),
        ("int8", torch.float32, "int8", None),
        ("bfloat16", torch.float32, "off", None),
        ("float32", torch.bfloat16, "off", None),
        (None, torch.bfloat16, "off", None),
    ],
    ids=str,
)
def test_another_precision_is_warned_of_once(
    adapters: dict[str, Path],
    tmp_path: Path,
    record_property: Report,
    trained: str | None,
    dtype: torch.dtype,
    to: Quantise,
    words: str | None,
) -> None:
    """N03."""
    folder = trained_in(trained, adapters["lossless"], tmp_path / "copy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        model, _ = checkpoint.load(folder, dtype=dtype, quantise=to)
    said = [str(one.message) for one in caught if issubclass(one.category, PrecisionWarning)]
    assert len(said) == (words is not None)
    if words is not None:
        assert words in said[0]
        assert "accepted less often" in said[0]
    counters = Counters()
    counters.extend(list(decode(model, prompt(6), DecodeSettings(max_new_tokens=16))))
    record_property("acceptance", counters.mean_acceptance_length)


def test_training_records_its_precision(tmp_path: Path) -> None:
    model, tokens = wrapped("llama", merge=False), {"command": "forestream train"}
    origin = BaseModel("some/base", "llama", "0" * 64, "bfloat16")
    checkpoint.save(model, tmp_path / "adapter", origin, tokens)
    assert Manifest.read(tmp_path / "adapter").base == origin


# --- bases that the host library quantised --------------------------------------------------------------------


@both_modes
def test_a_host_that_arrives_quantised_is_driven_as_it_is(tmp_path: Path, mode: str, record_property: Report) -> None:
    """N02. Its adapter stays beside the weights; it cannot be quantised once more."""
    from torchao.quantization import Int8WeightOnlyConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    folder = tiny_base(tmp_path / "base")
    host = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings).eval()
    model = wrapped(host, mode, merge=False)
    assert all(type(module.weight) is not nn.Parameter for module in linears(model).values())
    record_property("acceptance", grid(model).mean_acceptance_length)
    if mode == "lossless":
        with pytest.raises(ConfigError, match="no plain linear layer in llama to quantise to int8"):
            quantise(model, "int8")
    model.prepare()
    grid(model)
