"""Every port against the stock forward of its host."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forestream.errors import UnsupportedModel
from forestream.ports import SUPPORTED, KVShape, LayerInputs, Port, check_parity, port_for
from forestream.ports.parity import RecordingCache, causal_masks, drive
from zoo import FAMILIES, HOSTS, POSITIONS, WINDOW, custom

every_host = pytest.mark.parametrize("name", HOSTS)


class GrowingCache:
    """The simplest true cache: one tensor of keys and one of values per layer, each call appended."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.kept:
            keys, values = self.kept[layer_idx]
            key_states, value_states = torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        self.kept[layer_idx] = (key_states, value_states)
        return key_states, value_states


def text(port: Port, length: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    ids = torch.randint(port.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))
    return ids, torch.arange(length).expand(rows, -1)


def masks_of(port: Port, length: int) -> list[Tensor]:
    return causal_masks(port, length, torch.float32, torch.device("cpu"))


# --- the drive is the stock forward -------------------------------------------------------------------------


@every_host
@torch.no_grad()
def test_drive_equals_stock_forward(name: str) -> None:
    port = port_for(HOSTS[name]())
    ids, positions = text(port, 3 * WINDOW)
    masks = masks_of(port, 3 * WINDOW)
    given: Any = masks[0]
    if len({port.window(i) for i in range(port.num_layers)}) > 1:
        given = dict(zip(port.config.layer_types, masks, strict=True))
    stock = port.model(ids, attention_mask=given, position_ids=positions, use_cache=False).logits
    assert torch.equal(drive(port, ids, positions, masks), stock)


@every_host
@torch.no_grad()
def test_windows_are_those_of_the_stock_forward(name: str) -> None:
    port = port_for(HOSTS[name]())
    ids, positions = text(port, 3 * WINDOW)
    stock = port.model(ids, use_cache=False).logits
    torch.testing.assert_close(drive(port, ids, positions, masks_of(port, 3 * WINDOW)), stock, rtol=1e-4, atol=1e-4)


@every_host
def test_parity_check_passes(name: str) -> None:
    assert check_parity(port_for(HOSTS[name]())) < 1e-5


@every_host
@torch.no_grad()
def test_drive_in_two_steps_through_a_cache(name: str) -> None:
    port = port_for(HOSTS[name]())
    length, first = 2 * WINDOW, 7
    ids, positions = text(port, length)
    masks = masks_of(port, length)
    cache = GrowingCache()
    drive(port, ids[:, :first], positions[:, :first], [m[..., :first, :first] for m in masks], cache)
    rest = drive(port, ids[:, first:], positions[:, first:], [m[..., first:, :] for m in masks], cache)
    whole = drive(port, ids, positions, masks)
    torch.testing.assert_close(rest, whole[:, first:], rtol=1e-4, atol=1e-4)


@every_host
@torch.no_grad()
def test_every_layer_writes_once_per_run(name: str) -> None:
    port = port_for(HOSTS[name]())
    ids, positions = text(port, 5)
    cache = RecordingCache()
    for _ in range(2):
        drive(port, ids, positions, masks_of(port, 5), cache)
    assert cache.calls == [0, 1, 2, 3] * 2


@every_host
@torch.no_grad()
def test_what_layers_keep_is_noted(name: str) -> None:
    """Heads and sizes of keys and values, as a true cache finds them."""
    port = port_for(HOSTS[name]())
    ids, positions = text(port, 5)
    cache = GrowingCache()
    drive(port, ids, positions, masks_of(port, 5), cache)
    found = [cache.kept[i] for i in range(port.num_layers)]
    assert port.kept == tuple(KVShape(k.shape[1], k.shape[3], v.shape[3]) for k, v in found)
    grouped = getattr(port.config, "num_key_value_heads", None) or port.config.num_attention_heads
    assert {shape.heads for shape in port.kept} == {grouped}


@every_host
@torch.no_grad()
def test_another_layer_can_stand_in_for_a_stock_one(name: str) -> None:
    """It is called as the family's layers are, by whatever names they give their arguments."""
    port = port_for(HOSTS[name]())
    ids, positions = text(port, 5)
    hidden = port.embed(ids, positions)
    inputs = LayerInputs(masks_of(port, 5)[1], positions, port.rotary(hidden, positions, 1))
    calls: list[set[str]] = []

    def stand_in(*args: Any, **keywords: Any) -> Any:
        calls.append(set(keywords))
        return port.layers[1](*args, **keywords)

    assert torch.equal(port.call(stand_in, hidden, inputs, None), port.run(1, hidden, inputs, None))
    assert len(calls) == 1
    assert {"attention_mask", port.cache_keyword} <= calls[0]


@every_host
def test_positions_can_be_skewed_in_the_rotary_tables_alone(name: str) -> None:
    """Main and stream tables are made apart and joined: the parts equal the whole."""
    port = port_for(HOSTS[name]())
    hidden = torch.zeros(1, 6, port.hidden_size)
    positions = torch.tensor([[0, 1, 2, 5, 3, 4]])
    for i in range(port.num_layers):
        whole = port.rotary(hidden, positions, i)
        if whole is None:
            assert port.learned_positions
            assert port.rotary_kind(i) == "none"
            continue
        left, right = port.rotary(hidden, positions[:, :4], i), port.rotary(hidden, positions[:, 4:], i)
        assert left is not None
        assert right is not None
        for table, a, b in zip(whole, left, right, strict=True):
            assert torch.equal(table, torch.cat([a, b], dim=1))


# --- what a port says about its host ------------------------------------------------------------------------


def test_zoo_covers_every_supported_family() -> None:
    assert sorted(FAMILIES) == sorted(SUPPORTED)
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(HOSTS)
    for family, names in FAMILIES.items():
        for name in names:
            assert port_for(HOSTS[name]()).family == family


@every_host
@torch.no_grad()
def test_zoo_hosts_have_something_to_say(name: str) -> None:
    port = port_for(HOSTS[name]())
    ids, _ = text(port, 6, rows=1)
    out = port.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    assert len(set(out[0, 6:].tolist())) >= 8
    assert out.shape == (1, 46)


@every_host
def test_lora_targets_are_all_projections_of_every_layer(name: str) -> None:
    port = port_for(HOSTS[name]())
    for layer in port.layers:
        projections = {
            path.rpartition(".")[2]: module
            for path, module in layer.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
        }
        assert sorted(projections) == sorted(port.lora_targets)
        assert all(isinstance(m, Conv1D) == port.transposed_weights for m in projections.values())


@every_host
def test_limits_and_widths(name: str) -> None:
    port = port_for(HOSTS[name]())
    assert (port.num_layers, port.hidden_size, port.position_limit) == (4, 48, POSITIONS)
    assert port.room(10) == POSITIONS
    ids, positions = text(port, 4)
    hidden = port.embed(ids, positions + POSITIONS - 4)
    assert hidden.shape == (2, 4, 48)
    assert port.head(port.finish(hidden)).shape == (2, 4, port.config.vocab_size)


def test_windows_by_host() -> None:
    windows = {name: [port_for(host()).window(i) for i in range(4)] for name, host in HOSTS.items()}
    assert windows.pop("mistral-window") == [WINDOW] * 4
    assert windows.pop("gemma2") == [WINDOW, None] * 2
    assert windows.pop("gemma3") == [WINDOW, None] * 2
    assert all(window == [None] * 4 for window in windows.values())


def test_qwen_windows_start_at_a_layer() -> None:
    port = port_for(
        custom(
            "qwen2",
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
        )
    )
    assert [port.window(i) for i in range(4)] == [None, None, WINDOW, WINDOW]
    assert check_parity(port) < 1e-5


# --- adapters and training ----------------------------------------------------------------------------------


@every_host
@torch.no_grad()
def test_drive_follows_an_adapter_put_in_afterwards(name: str) -> None:
    port = port_for(HOSTS[name]())
    ids, positions = text(port, 6)
    masks = masks_of(port, 6)
    before = drive(port, ids, positions, masks)
    lora = LoraConfig(
        target_modules=list(port.lora_targets),
        init_lora_weights=False,
        fan_in_fan_out=port.transposed_weights,
    )
    adapted = get_peft_model(port.model, lora).eval()
    stock = adapted(input_ids=ids, use_cache=False).logits
    ours = drive(port, ids, positions, masks)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, before, atol=1e-2)
    assert port_for(adapted.get_base_model()).family == port.family


@pytest.mark.parametrize("name", ["llama", "opt-post", "gpt_neox-parallel", "gpt2", "gemma3"])
def test_activation_checkpointing_changes_no_gradient(name: str) -> None:
    gradients, runs = [], []
    for checkpointing in (False, True):
        port = port_for(HOSTS[name]())
        port.model.train()
        if checkpointing:
            port.model.activation_checkpointing_enable()
        calls: list[int] = []
        next(port.layers[0].children()).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        ids, positions = text(port, 6)
        drive(port, ids, positions, masks_of(port, 6)).square().mean().backward()
        gradients.append([p.grad for p in port.model.parameters() if p.grad is not None])
        runs.append(len(calls))
    assert runs == [1, 2]
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# --- the parity check notices -------------------------------------------------------------------------------


def test_parity_notices_a_wrong_window(monkeypatch: pytest.MonkeyPatch) -> None:
    port = port_for(HOSTS["mistral-window"]())
    monkeypatch.setattr(type(port), "window", lambda self, i: WINDOW + 1)
    with pytest.raises(UnsupportedModel, match="under its own"):
        check_parity(port)


@pytest.mark.parametrize("name", ["gemma2", "opt-post", "llama"])
def test_parity_notices_the_slightest_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = port_for(HOSTS[name]())
    finish = port.finish
    monkeypatch.setattr(port, "finish", lambda hidden: finish(hidden) * (1 + 1e-6))
    with pytest.raises(UnsupportedModel, match=r"differ from the stock forward by .*0 expected"):
        check_parity(port)


@pytest.mark.parametrize(("name", "wrong"), [("llama", "layer_past"), ("gpt_neox-parallel", "cache")])
def test_parity_notices_a_swallowed_cache_keyword(name: str, wrong: str) -> None:
    port = port_for(HOSTS[name]())
    port.cache_keyword = wrong
    with pytest.raises(UnsupportedModel, match=r"of 4 layers, \[\] wrote to the cache"):
        check_parity(port)


def test_parity_leaves_the_model_as_it_was() -> None:
    model = custom("mistral", num_key_value_heads=2, sliding_window=50)
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    check_parity(port_for(model))
    assert [module.training for module in model.modules()] == before
    assert model.config.sliding_window == 50


# --- rotary scalings ----------------------------------------------------------------------------------------


def test_streams_past_the_limit_leave_dynamic_rotary_alone() -> None:
    port = port_for(custom("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))
    last = torch.tensor([[POSITIONS - 1]])
    hidden = torch.zeros(1, 1, port.hidden_size)
    before = port.rotary(hidden, last, 0)
    port.rotary(hidden, last + 3, 0)
    after = port.rotary(hidden, last, 0)
    assert before is not None
    assert after is not None
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_long_rotary_leaves_room_up_to_the_border() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 32,
    }
    port = port_for(custom("phi3", num_key_value_heads=4, rope_parameters=rope, original_max_position_embeddings=32))
    assert check_parity(port) < 1e-5
    assert port.room(10) == 32
    assert port.room(33) == POSITIONS
    hidden, positions = torch.zeros(1, 4, port.hidden_size), torch.arange(28, 32)[None]
    before = port.rotary(hidden, positions, 0)
    port.rotary(hidden, positions + 4, 0)  # streams ahead of the border
    after = port.rotary(hidden, positions, 0)
    assert before is not None
    assert after is not None
    assert torch.equal(before[0], after[0])
