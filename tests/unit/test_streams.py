"""How streams start, how values are rotated, and that the gate leaves main slots exactly alone."""

import math

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from forestream.config import StreamConfig
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.streams import LowRank, StreamStart, rotate_values
from forestream.topology import Topology
from oracle import prefilled
from wrapped import wrapped
from zoo import HOSTS

SIZE = 6
TREE = Topology((-1, 0, 0, 1))


# --- start ----------------------------------------------------------------------------------------------------


def test_the_low_rank_map_is_the_identity_until_it_is_trained() -> None:
    module = LowRank(SIZE, 2)
    x = torch.randn(3, 4, SIZE)
    assert torch.equal(module(x), x)
    with torch.no_grad():
        module.up.copy_(torch.randn(2, SIZE))
    torch.testing.assert_close(module(x), x + x @ (module.down @ module.up))


def test_the_map_can_learn_from_where_it_starts() -> None:
    """Both factors at zero would stay there for ever."""
    module = LowRank(SIZE, 2)
    module(torch.randn(3, SIZE)).square().sum().backward()
    assert module.up.grad is not None
    assert module.up.grad.any()


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_states_come_stream_by_stream_and_carrier_by_carrier(streams: int) -> None:
    """The order of the slots in a pack: stream 1 of all carriers, then stream 2; fewer streams than trained will do."""
    start = StreamStart(StreamConfig(streams=3), SIZE)
    assert start.embedding is not None
    mains = torch.randn(2, 4, SIZE)
    states = start(mains, streams)
    assert states.shape == (2, streams * 4, SIZE)
    pack = Pack.text(9, torch.tensor([[0, 3, 5, 7]] * 2), streams)
    for slot, (place, index) in enumerate((place, index) for index in range(1, streams + 1) for place in range(4)):
        assert int(pack.indices[9 + slot]) == index
        assert torch.equal(states[:, slot], mains[:, place] + start.embedding[index - 1])


def test_embeddings_start_small_and_differ() -> None:
    embedding = StreamStart(StreamConfig(streams=4), 4000).embedding
    assert embedding is not None
    assert embedding.std(dim=1).tolist() == pytest.approx([0.02] * 4, rel=0.1)
    assert len({row.sum().item() for row in embedding.detach()}) == 4


def test_a_low_rank_start_is_the_plain_start_until_it_is_trained() -> None:
    start = StreamStart(StreamConfig(streams=2, start="low_rank", start_rank=3), SIZE)
    assert start.map is not None
    assert start.embedding is not None
    mains = torch.randn(1, 1, SIZE)
    assert torch.equal(start(mains, 2)[0], mains[0] + start.embedding)
    with torch.no_grad():
        start.map.up.fill_(0.5)
    torch.testing.assert_close(start(mains, 2)[0], start.map(mains)[0] + start.embedding)


def test_with_value_rotation_streams_start_as_copies_and_add_no_parameter() -> None:
    start = StreamStart(StreamConfig(streams=3, value_rotation=True), SIZE)
    assert list(start.parameters()) == []
    mains = torch.randn(1, 2, SIZE)
    assert torch.equal(start(mains, 3), mains.repeat(1, 3, 1))


def test_states_keep_the_dtype_of_the_mains() -> None:
    start = StreamStart(StreamConfig(streams=2, start="low_rank"), SIZE)
    assert start(torch.randn(1, 2, SIZE).bfloat16(), 2).dtype == torch.bfloat16


# --- value rotation -------------------------------------------------------------------------------------------


def test_rotation_by_hand() -> None:
    """Width 4: entries 0 and 2 are a pair, and 1 and 3."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 1, 4, 4)
    found = rotate_values(values, torch.tensor([0, 1, 2, 4]), math.pi / 2)[0, 0]
    expected = [[1, 2, 3, 4], [-3, -4, 1, 2], [-1, -2, -3, -4], [1, 2, 3, 4]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_rotation_leaves_main_slots_bit_for_bit_and_keeps_lengths() -> None:
    values = torch.randn(2, 3, 5, 8)
    indices = torch.tensor([0, 0, 1, 2, 3])
    found = rotate_values(values, indices, 0.3)
    assert torch.equal(found[:, :, :2], values[:, :, :2])
    assert not torch.allclose(found[:, :, 2:], values[:, :, 2:], atol=1e-2)
    torch.testing.assert_close(found.norm(dim=-1), values.norm(dim=-1))
    back = rotate_values(found, -indices, 0.3)
    torch.testing.assert_close(back, values)


def test_rotation_of_stream_n_is_n_times_that_of_stream_1() -> None:
    values = torch.randn(1, 2, 1, 8)
    once = values
    for n in range(1, 5):
        once = rotate_values(once, torch.tensor([1]), 0.3)
        torch.testing.assert_close(rotate_values(values, torch.tensor([n]), 0.3), once)


def test_rotation_keeps_the_dtype() -> None:
    assert rotate_values(torch.randn(1, 1, 2, 4).bfloat16(), torch.tensor([0, 1]), 0.3).dtype == torch.bfloat16


# --- the gate -------------------------------------------------------------------------------------------------


def lora_outputs(model: StreamingLM) -> tuple[list[Tensor], int]:
    """Filled with what every LoRA branch yields after the gate, in the order of the calls; number of branches."""
    seen: list[Tensor] = []
    branches = [module.lora_B["default"] for module in model.modules() if isinstance(module, LoraLayer)]
    for branch in branches:
        branch.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    return seen, len(branches)


@torch.no_grad()
@pytest.mark.parametrize("host", ["llama", "opt-pre", "gpt2"])
def test_lora_yields_exact_zeros_on_main_slots_and_acts_on_streams(host: str) -> None:
    """OPT flattens rows and slots before its MLP: with two rows the slot axis has to be found again."""
    model = wrapped(host, "lossless")
    seen, branches = lora_outputs(model)
    ids = torch.randint(70, (2, 5))
    model(ids, Pack.text(5, torch.tensor([[1, 4], [0, 2]]), 3))
    assert len(seen) == branches > 0
    for output in seen:
        rows = output.view(2, 5 + 6, -1)
        assert not rows[:, :5].any()
        assert rows[:, 5:].abs().amax(dim=-1).min() > 0


@torch.no_grad()
def test_lora_acts_on_every_slot_of_a_pass_of_streams_alone() -> None:
    model = wrapped("llama", "lossless")
    cache = prefilled(model, (1, 2, 3), spare=4)
    seen, branches = lora_outputs(model)
    model.streams_behind(torch.randn(1, 1, model.port.hidden_size), 4, cache)
    assert len(seen) == branches > 0
    assert min(float(output.abs().amax(dim=-1).min()) for output in seen) > 0


@torch.no_grad()
@pytest.mark.parametrize("host", ["llama", "opt-pre", "gpt2"])
def test_in_lossless_mode_the_main_states_are_the_bases_own(host: str) -> None:
    """Bit for bit without streams; beside streams, the same up to the rounding of a pass of another size."""
    model, bare = wrapped(host, "lossless"), StreamingLM(HOSTS[host](), StreamConfig(stream_layers=2))
    ids = torch.tensor([[3, 1, 4, 1]])
    wanted = bare(ids, Pack.tree(TREE)).main
    assert torch.equal(model(ids, Pack.tree(TREE)).main, wanted)
    torch.testing.assert_close(model(ids, Pack.tree(TREE, range(4), 4)).main, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_gate_that_was_never_opened_lets_nothing_through() -> None:
    model = wrapped("llama", "lossless")
    assert model.gate is not None
    assert model.gate.opened is None
    seen, branches = lora_outputs(model)
    model.port.model(torch.tensor([[3, 1, 4]]), use_cache=False)
    assert len(seen) == branches > 0
    assert not any(output.any() for output in seen)


@pytest.mark.parametrize(("mains", "slots"), [(2, 5), (0, 3), (4, 4), (1, 2)])
def test_a_gate_is_open_to_the_slots_behind_the_mains(mains: int, slots: int) -> None:
    """And to none, and the branches not even computed, where there are no others."""
    model = wrapped("llama", "lossless")
    assert model.gate is not None
    for _ in range(2):
        model.gate.open(mains, slots, torch.device("cpu"))
        opened = model.gate.opened
        assert (opened is None) == (mains == slots)
        assert opened is None or opened.tolist() == [[slot >= mains] for slot in range(slots)]
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        assert all(layer.disable_adapters == (opened is None) for layer in layers)


@torch.no_grad()
def test_the_order_of_gating_is_the_passes_own() -> None:
    """A pass with streams, one without, and again: each is gated by its own slots."""
    model = wrapped("llama", "lossless")
    ids = torch.tensor([[3, 1, 4, 1]])
    first = model(ids, Pack.tree(TREE, (0, 2), 2)).streams
    model(ids, Pack.tree(TREE))
    model(ids[:, :1], Pack.tree(Topology((-1,)), (0,), 4))
    assert torch.equal(model(ids, Pack.tree(TREE, (0, 2), 2)).streams, first)
    assert first.abs().max() > 0
