"""What the modes promise: lossless leaves the base's weights and text alone, joint merges into the base unchanged."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from forestream.baseline import plain
from forestream.config import DecodeSettings, StreamConfig
from forestream.data import Tokens
from forestream.decode import decode
from forestream.drafting import drafter_for
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.objective import LossConfig
from forestream.packing import Pack
from forestream.steps import Counters, tokens_of
from forestream.streams import SlotGate
from forestream.training import TrainConfig, fit
from oracle import Prophet
from wrapped import STREAMS, prompt, shake, trainable, trained, wrapped
from zoo import HOSTS

every_host = pytest.mark.parametrize("host", HOSTS)


def checksum(module: nn.Module) -> str:
    """Of every parameter and buffer that is not an adapter's, under the names of the bare host."""
    digest = hashlib.sha256()
    tensors = {name.replace(".base_layer", ""): t for name, t in module.state_dict().items() if ".lora_" not in name}
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(model: StreamingLM, folder: Path, updates: int = 4, learning_rate: float = 0.02) -> None:
    texts = [Tokens(prompt(3, seed=i), prompt(7, seed=90 + i)) for i in range(2 * updates)]
    config = TrainConfig(batch_size=2, warmup=0, dtype="float32", learning_rate=learning_rate)
    fit(model, texts, 0, folder, config, LossConfig(stream=1.0))


def generated(host: Any, start: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([start])
    out = host.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return tuple(out[0, len(start) :].tolist())


# --- lossless -------------------------------------------------------------------------------------------------


@every_host
def test_text_after_training_is_that_of_the_untouched_base(host: str, tmp_path: Path) -> None:
    base = HOSTS[host]()
    start, untouched = prompt(6), checksum(base)
    wanted = generated(base, start, 16)
    model = trainable(base, mode="lossless")
    fresh = trained(model)
    train(model, tmp_path)
    model.eval()
    assert all(not torch.equal(p, fresh[name]) for name, p in trained(model).items()), "nothing was learned"
    assert checksum(model.port.model) == untouched
    assert tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=16)))) == wanted
    counters = Counters()
    for carriers in ("fused", "deferred"):
        settings = DecodeSettings(max_new_tokens=16, carriers=carriers)
        drafter = Prophet(drafter_for(settings), start + wanted, 0.7)
        steps = list(decode(model, start, settings, drafter=drafter))
        assert tokens_of(steps) == wanted
        counters.extend(steps)
    assert counters.mean_acceptance_length > 1.5
    assert checksum(model.port.model) == untouched
    assert generated(HOSTS[host](), start, 16) == wanted


@every_host
@torch.no_grad()
def test_main_states_are_the_bases_bit_for_bit(host: str) -> None:
    """Whatever the adapter holds, in passes with and without streams and behind a cache."""
    model = wrapped(host, "lossless")
    ids = torch.tensor([prompt(12)])
    carriers = torch.tensor([[2, 11]])
    main, ahead = [], []
    for seed, scale in ((0, 0.0), (1, 0.1), (2, 3.0)):
        shake(model, seed, scale)
        for streams in (0, STREAMS):
            output = model(ids, Pack.text(12, carriers, streams), model.new_cache(24))
            main.append(model.logits(output.main))
            if streams:
                ahead.append(model.logits(output.streams))
    assert all(torch.equal(main[i], main[0]) for i in (2, 4))
    assert all(torch.equal(main[i], main[1]) for i in (3, 5))
    assert all(float((ahead[i] - ahead[0]).abs().max()) > 0.1 for i in (1, 2))
    with model.host.disable_adapter():
        stock = model.port.model(ids, use_cache=False).logits
    torch.testing.assert_close(main[0], stock, rtol=1e-4, atol=1e-4)


@every_host
def test_the_adapter_sits_in_the_stream_layers_only(host: str) -> None:
    for mode, layers in (("lossless", [2, 3]), ("joint", [0, 1, 2, 3])):
        model = wrapped(host, mode, merge=False)
        for i, layer in enumerate(model.port.layers):
            adapted = {path.rpartition(".")[2] for path, m in layer.named_modules() if isinstance(m, LoraLayer)}
            assert adapted == (set(model.port.lora_targets) if i in layers else set())
        everywhere = sum(isinstance(m, LoraLayer) for m in model.modules())
        assert everywhere == sum(isinstance(m, LoraLayer) for i in layers for m in model.port.layers[i].modules())
        own = {id(p) for part in (model.start, model.scorer) if part is not None for p in part.parameters()}
        assert all("lora_" in name or id(p) in own for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("target", ["hard", "soft", "both"])
def test_streams_learn_what_the_base_itself_writes(target: Literal["hard", "soft", "both"], tmp_path: Path) -> None:
    """Trained on the base's own greedy texts, streams are accepted more often; the base and its texts stay."""
    base = HOSTS["llama"]()
    untouched = checksum(base)
    starts = [prompt(5, seed=i) for i in range(6)]
    texts = [generated(base, start, 12) for start in starts]
    model = trainable(base, mode="lossless")
    settings = DecodeSettings(max_new_tokens=12, nodes=6)

    def accepted() -> float:
        counters = Counters()
        model.eval()
        for start, text in zip(starts, texts, strict=True):
            steps = list(decode(model, start, settings))
            assert tokens_of(steps) == text == tokens_of(list(plain(model, start, settings)))
            counters.extend(steps)
        return counters.mean_acceptance_length

    before = accepted()
    own = [Tokens(start, text) for start, text in zip(starts, texts, strict=True)]
    config = TrainConfig(epochs=40, batch_size=6, warmup=0, dtype="float32", learning_rate=0.03, log_every=10)
    report = fit(model, own, 0, tmp_path, config, LossConfig(stream=1.0, target=target))
    assert report["updates"] == 40
    assert accepted() > before + 0.3
    assert checksum(model.port.model) == untouched
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines() if "stream_1_loss" in line]
    assert log[-1]["stream_1_accuracy"] > log[0]["stream_1_accuracy"]
    told = "stream_1_soft_loss" if target == "soft" else "stream_1_loss"
    assert log[-1][told] < log[0][told]
    assert ("stream_1_soft_loss" in log[0]) == (target != "hard")


def test_training_moves_streams_and_adapter_and_nothing_else(tmp_path: Path) -> None:
    for mode in ("lossless", "joint"):
        model = trainable("llama", mode=mode)
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        train(model, tmp_path / mode)
        assert frozen
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_a_lossless_adapter_is_never_merged() -> None:
    model = wrapped("llama", "lossless")
    with pytest.raises(ConfigError, match="lossless adapter acts on stream slots only"):
        model.merge()
    assert isinstance(model.host, PeftModel)


def test_lossless_without_streams_is_refused() -> None:
    with pytest.raises(ConfigError, match="lossless mode with 0 streams"):
        StreamConfig(mode="lossless", streams=0)


def test_the_promise_is_noticed_when_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gate, the same adapter changes the text."""
    monkeypatch.setattr("forestream.streams.SlotGate._gate", lambda gate, module, inputs, output: output)
    model = wrapped("llama", "lossless")
    start = prompt(6)
    settings = DecodeSettings(max_new_tokens=16, nodes=8, carriers="fused")
    text = tokens_of(list(decode(model, start, settings)))
    assert text != generated(HOSTS["llama"](), start, 16)


def test_plain_decoding_pays_nothing_for_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without streams in the pass the LoRA branches are not even computed; with streams they are, again."""
    calls: list[int] = []
    right = SlotGate._gate
    monkeypatch.setattr(SlotGate, "_gate", lambda gate, *rest: calls.append(1) or right(gate, *rest))
    model = wrapped("llama", "lossless")
    settings = DecodeSettings(max_new_tokens=6, nodes=4)
    tokens_of(list(plain(model, prompt(6), settings)))
    assert not calls
    tokens_of(list(decode(model, prompt(6), settings)))
    assert calls
    calls.clear()
    tokens_of(list(plain(model, prompt(6), settings)))
    assert not calls


# --- joint ----------------------------------------------------------------------------------------------------


@every_host
@torch.no_grad()
def test_merging_changes_nothing(host: str) -> None:
    """Up to rounding, in main and stream logits, and against PEFT's own forward."""
    model = wrapped(host, merge=False)
    ids = torch.tensor([prompt(12)])
    pack = Pack.text(12, torch.tensor([[2, 11]]), STREAMS)
    told = []
    peft = model.host(input_ids=ids, use_cache=False).logits
    for _ in range(2):
        output = model(ids, pack)
        told.append((model.logits(output.main), model.logits(output.streams), model.exit_logits(output.trunk)))
        model.merge()
    assert not isinstance(model.host, PeftModel)
    assert not any(isinstance(module, LoraLayer) for module in model.modules())
    for before, after in zip(*told, strict=True):
        assert float((before - after).abs().max()) <= 1e-4 * max(1.0, float(before.abs().max()))
    torch.testing.assert_close(told[0][0], peft, rtol=1e-4, atol=1e-4)
    bare = HOSTS[host]()(ids, use_cache=False).logits
    assert float((told[0][0] - bare).abs().max()) > 0.1, "the adapter does nothing"


def test_merging_twice_is_merging_once() -> None:
    model = wrapped("llama")
    before = checksum(model.port.model)
    model.merge()
    assert checksum(model.port.model) == before


@pytest.mark.parametrize("host", ["llama", "opt-pre", "gpt2"])
def test_unmerged_adapters_decode_too(host: str) -> None:
    model = wrapped(host, merge=False)
    start = prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=16))))
    assert text == generated(model.host, start, 16)
    settings = DecodeSettings(max_new_tokens=16, prune_to=6)
    drafter = Prophet(drafter_for(settings), start + text, 0.7)
    assert tokens_of(list(decode(model, start, settings, drafter=drafter))) == text
    model.merge()
    assert tokens_of(list(decode(model, start, settings, drafter=drafter))) == text


def test_joint_training_keeps_the_base_under_the_adapter(tmp_path: Path) -> None:
    base = HOSTS["llama"]()
    untouched = checksum(base)
    model = trainable(base)
    train(model, tmp_path)
    assert checksum(model.port.model) == untouched
    model.merge()
    assert checksum(model.port.model) != untouched
