"""Packed weights: the same products as the plain layers', alone, in groups and under adapters."""

import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forestream import weights
from forestream.packing import Pack
from forestream.weights import PackedLinear, can_pack, merge_products, pack, packed_linear
from wrapped import STREAMS, prompt, wrapped
from zoo import HOSTS

IN = 24
QKV = (("q", "k", "v"),)

pytestmark = [
    pytest.mark.skipif(not can_pack(nn.Linear(2, 2)), reason="this machine has no layout for packed weights"),
    pytest.mark.usefixtures("no_grad"),
]


@pytest.fixture
def no_grad() -> Any:
    with torch.no_grad():
        yield


def linear(kind: type[nn.Module], width: int, bias: bool = True) -> nn.Module:
    layer = nn.Linear(IN, width, bias=bias) if kind is nn.Linear else Conv1D(width, IN)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


class Siblings(nn.Module):
    """Three layers of different widths that read the same input."""

    def __init__(self, biases: tuple[bool, bool, bool] = (True, True, True), kind: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.q, self.k, self.v = (linear(kind, width, bias) for width, bias in zip((40, 8, 17), biases, strict=True))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    off, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    assert off <= tolerance * largest, f"differ by {off:.3g} of {largest:.3g}"


# --- one layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 7), (1, 33), (300,)], ids=str)
@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, True), (nn.Linear, False), (Conv1D, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_multiplies_as_the_plain_one(
    dtype: torch.dtype, kind: type[nn.Module], bias: bool, rows: tuple[int, ...]
) -> None:
    root = nn.Sequential(linear(kind, 40, bias)).to(dtype)
    if not can_pack(root):
        pytest.skip("this machine has no layout for packed weights in half precision")
    x = torch.randn(*rows, IN).to(dtype)
    exact = root.double()(x.double())
    root.to(dtype)
    plain = root(x)
    pack(root)
    assert isinstance(root[0], PackedLinear)
    found = root(x)
    close(found, plain, 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)
    # Half precision rounds once, at the end.
    unit = torch.finfo(dtype).eps
    assert bool(((found.double() - exact).abs() <= unit * exact.abs() + 4e-6 * exact.abs().max()).all())


def test_strided_input_is_read_rightly() -> None:
    root = nn.Sequential(linear(nn.Linear, 40))
    x = torch.randn(IN, 9, 2).transpose(0, 2)
    wanted = root(x)
    pack(root)
    close(root(x), wanted)
    close(root(x[:, ::3]), wanted[:, ::3])


def test_the_operator_knows_the_shape_of_its_product() -> None:
    root = nn.Sequential(linear(nn.Linear, 40))
    pack(root)
    layer = root[0]
    product = packed_linear(torch.empty(2, 3, IN, device="meta"), layer.packed.to_dense().to("meta"), None, 40)
    assert product.shape == (2, 3, 40)
    assert product.device.type == "meta"


def test_plain_copies_of_the_weights_are_let_go() -> None:
    root = nn.Sequential(linear(nn.Linear, 40), nn.ReLU(), Conv1D(IN, 40))
    held = [weakref.ref(p) for name, p in root.named_parameters() if "weight" in name]
    pack(root)
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert not list(root.parameters())
    assert not root.state_dict()


def test_only_plain_linear_layers_are_packed() -> None:
    """What is derived from one may do more; a norm, an embedding and a convolution are none."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    root = nn.ModuleDict(
        {"inner": nn.Sequential(Scaled(IN, 8), nn.LayerNorm(8), nn.Embedding(4, 4), nn.Conv1d(3, 3, 1))}
    )
    before = list(root.modules())
    pack(root)
    assert list(root.modules()) == before


# --- groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "biases"),
    [(nn.Linear, (True,) * 3), (nn.Linear, (False,) * 3), (Conv1D, (True,) * 3)],
)
def test_a_group_shares_one_matrix_and_each_member_takes_its_own_columns(
    kind: type[nn.Module], biases: tuple[bool, bool, bool]
) -> None:
    root = Siblings(biases, kind)
    x = torch.randn(2, 5, IN)
    wanted = root(x)
    pack(root, QKV)
    members: list[Any] = [root.q, root.k, root.v]
    assert all(member.packed is root.q.packed for member in members)
    assert [(m.width, m.first, m.end) for m in members] == [(65, 0, 40), (65, 40, 48), (65, 48, 65)]
    for found, right in zip(root(x), wanted, strict=True):
        close(found, right)


def test_without_groups_every_layer_has_its_own_matrix() -> None:
    root = Siblings()
    x = torch.randn(2, 5, IN)
    wanted = root(x)
    pack(root)
    members: list[Any] = [root.q, root.k, root.v]
    assert [(m.width, m.first, m.end) for m in members] == [(40, 0, 40), (8, 0, 8), (17, 0, 17)]
    for found, right in zip(root(x), wanted, strict=True):
        close(found, right)


@pytest.mark.parametrize("biases", [(True, True, False), (False, True, True)])
def test_a_group_of_which_only_some_have_a_bias_is_left_apart(biases: tuple[bool, bool, bool]) -> None:
    root = Siblings(biases)
    x = torch.randn(2, 5, IN)
    wanted = root(x)
    pack(root, QKV)
    members: list[Any] = [root.q, root.k, root.v]
    assert [m.width for m in members] == [40, 8, 17]
    assert [m.bias is not None for m in members] == list(biases)
    for found, right in zip(root(x), wanted, strict=True):
        close(found, right)


@pytest.mark.parametrize("groups", [(("q", "k", "w"),), (("q", "w"), ("k", "w")), ((),)], ids=str)
def test_a_group_that_is_not_all_there_is_left_apart(groups: tuple[tuple[str, ...], ...]) -> None:
    root = Siblings()
    x = torch.randn(3, IN)
    wanted = root(x)
    pack(root, groups)
    assert [m.width for m in (root.q, root.k, root.v)] == [40, 8, 17]
    for found, right in zip(root(x), wanted, strict=True):
        close(found, right)


def test_groups_are_found_in_every_module_of_the_tree() -> None:
    root = nn.ModuleList([Siblings(), nn.ModuleDict({"deep": Siblings()})])
    pack(root, QKV)
    first, second = [module for module in root.modules() if isinstance(module, Siblings)]
    assert first.q.packed is first.v.packed
    assert second.q.packed is second.v.packed
    assert first.q.packed is not second.q.packed


# --- adapters and ties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["q", "k", "v"], ["k"]], ids=str)
def test_below_an_adapter_the_frozen_weight_is_packed_and_the_branch_is_not(targets: list[str]) -> None:
    """A group may hold layers with a branch and layers without."""
    root = inject_adapter_in_model(LoraConfig(target_modules=targets, r=3, init_lora_weights=False), Siblings()).eval()
    x = torch.randn(2, 5, IN)
    wanted = root(x)
    branches = {id(p) for name, p in root.named_parameters() if "lora_" in name}
    pack(root, QKV)
    assert {id(p) for p in root.parameters()} == branches
    for found, right in zip(root(x), wanted, strict=True):
        close(found, right)
    layers: list[Any] = [root.q, root.k, root.v]
    assert [isinstance(layer, LoraLayer) for layer in layers] == [name in targets for name in "qkv"]
    bases = [layer.base_layer if isinstance(layer, LoraLayer) else layer for layer in layers]
    assert all(base.packed is bases[0].packed for base in bases)
    for layer in layers:
        if isinstance(layer, LoraLayer):
            assert type(layer.lora_A["default"]) is type(layer.lora_B["default"]) is nn.Linear


@pytest.mark.parametrize(("mode", "merge"), [("joint", True), ("joint", False), ("lossless", False)])
@pytest.mark.parametrize("host", HOSTS)
def test_a_packed_model_says_what_it_said(host: str, mode: str, merge: bool) -> None:
    """Main and stream logits, hence with the gate of a lossless adapter at work."""
    model = wrapped(host, mode, merge)
    ids, slots = torch.tensor([prompt(12)]), Pack.text(12, torch.tensor([[2, 11]]), STREAMS)
    told = []
    for groups in (None, model.port.shared_inputs):
        if groups is not None:
            pack(model.port.model, groups)
        output = model(ids, slots)
        told.append((model.logits(output.main), model.logits(output.streams), model.exit_logits(output.trunk)))
    for before, after in zip(*told, strict=True):
        close(after, before, 2e-5)
    left = [m for m in model.port.layers.modules() if type(m) in (nn.Linear, Conv1D)]
    adapted = [m for m in model.modules() if isinstance(m, LoraLayer)]
    branches = [b for m in adapted for part in (m.lora_A, m.lora_B) for b in part.values()]
    assert {id(m) for m in left} == {id(b) for b in branches}
    assert all(len(m.lora_B["default"]._forward_hooks) == (mode == "lossless") for m in adapted)


@pytest.mark.parametrize("host", HOSTS)
def test_projections_that_share_their_input_share_a_matrix(host: str) -> None:
    """All whose names say so, in every layer; families that fuse them have none."""
    model = wrapped(host)
    pack(model.port.model, model.port.shared_inputs)
    for layer in model.port.layers:
        members: dict[str, Any] = {path.rpartition(".")[2]: module for path, module in layer.named_modules()}
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if group[0] in members:
                assert len({id(members[name].packed) for name in group}) == 1, group


def test_a_tied_head_is_packed_and_the_embedding_keeps_the_matrix() -> None:
    host = HOSTS["llama-tied"]()
    embedding: Any = host.get_input_embeddings()
    assert host.lm_head.weight is embedding.weight
    matrix, copy = embedding.weight, embedding.weight.clone()
    ids = torch.tensor([prompt(9)])
    wanted = host(ids, use_cache=False).logits
    pack(host)
    assert isinstance(host.lm_head, PackedLinear)
    assert embedding.weight is matrix
    assert torch.equal(matrix, copy)
    close(host(ids, use_cache=False).logits, wanted, 2e-5)


# --- where it can be done -------------------------------------------------------------------------------------


def test_no_layout_for_other_types_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 4)
    assert can_pack(layer)
    assert not can_pack(nn.Linear(4, 4, device="meta"))
    assert not can_pack(nn.Linear(4, 4).half())
    assert not can_pack(nn.Linear(4, 4).double())
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda found=supported: found)
        assert can_pack(nn.Linear(4, 4).bfloat16()) == supported
        assert can_pack(layer)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(layer)


def test_a_model_that_cannot_be_packed_is_prepared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "can_pack", lambda model: False)
    model = wrapped("llama")
    before = [type(module) for module in model.port.model.modules()]
    model.prepare("off")
    assert [type(module) for module in model.port.model.modules()] == before


# --- equal products -------------------------------------------------------------------------------------------


def graph_of(*products: tuple[str, str, str | None, int]) -> torch.fx.Graph:
    """Products of named inputs, one after the other; product i is called "p<i>" and may be an input itself."""
    graph = torch.fx.Graph()
    names = {name: graph.placeholder(name) for name in ("x", "y", "w", "u", "b")}
    found = []
    for x, weight, bias, width in products:
        arguments = (names[x], names[weight], names[bias] if bias else None, width)
        names[f"p{len(found)}"] = graph.call_function(packed_linear, arguments)
        found.append(names[f"p{len(found)}"])
    graph.output(tuple(found))
    return graph


def products_of(graph: torch.fx.Graph) -> list[int]:
    """Which product, by its place among those left, each of the graph's outputs is."""
    left = [node for node in graph.nodes if node.target is packed_linear]
    return [left.index(node) for node in graph.output_node().args[0]]


@pytest.mark.parametrize(
    ("second", "merged"),
    [
        (("x", "w", None, 40), True),
        (("y", "w", None, 40), False),
        (("x", "u", None, 40), False),
        (("x", "w", "b", 40), False),
        (("x", "w", None, 41), False),
    ],
    ids=str,
)
def test_equal_products_and_no_others_are_merged(second: tuple[str, str, str | None, int], merged: bool) -> None:
    graph = graph_of(("x", "w", None, 40), second)
    merge_products(graph)
    graph.lint()
    assert products_of(graph) == ([0, 0] if merged else [0, 1])


def test_products_of_merged_products_are_merged_too() -> None:
    graph = graph_of(
        ("x", "w", None, 40),
        ("x", "w", "b", 40),
        ("x", "w", None, 40),
        ("p0", "u", None, 24),
        ("p2", "u", None, 24),
        ("p1", "u", None, 24),
        ("x", "w", None, 40),
    )
    merge_products(graph)
    graph.lint()
    assert products_of(graph) == [0, 1, 0, 2, 2, 3, 0]


def test_other_operations_are_not_merged() -> None:
    """Two equal draws of random numbers are two."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(torch.rand_like, (x,)) for _ in range(2)))
    merge_products(graph)
    assert sum(node.op == "call_function" for node in graph.nodes) == 2


def test_a_merged_graph_computes_what_it_computed() -> None:
    root = Siblings()
    pack(root, QKV)
    traced = torch.fx.symbolic_trace(root, concrete_args=None)
    x = torch.randn(2, 5, IN)
    wanted = root(x)
    before = sum(node.target is packed_linear for node in traced.graph.nodes)
    # Each member reads a buffer of its own name: told that these are one, as a compiler sees it, they merge.
    shared = {"q.packed": None, "q.bias": None}
    for node in list(traced.graph.nodes):
        if node.op == "get_attr":
            key = "q." + node.target.rpartition(".")[2].rpartition("_")[2]
            if shared.get(key) is None:
                shared[key] = node
            else:
                node.replace_all_uses_with(shared[key])
                traced.graph.erase_node(node)
    merge_products(traced.graph)
    traced.recompile()
    assert before == 3
    assert sum(node.target is packed_linear for node in traced.graph.nodes) == 1
    for found, right in zip(traced(x), wanted, strict=True):
        close(found, right)
