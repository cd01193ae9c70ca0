"""Weights laid out once for the CPU's matrix units, by oneDNN: small passes read them at the speed of memory.

A stock linear layer hands oneDNN a plain matrix, which is read badly when a pass has few rows. A packed one keeps
the matrix in oneDNN's own blocked layout instead of the plain one. Projections that read the same input can share
one packed matrix, so that a compiled layer multiplies once where the host's code does so two or three times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forestream.bases import multiplies_bfloat16

_LIBRARY: Final = torch.library.Library("forestream", "DEF")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int width) -> Tensor")
_DTYPES: Final = (torch.float32, torch.bfloat16)
_ROWS: Final = 8  # of the passes that the layout is chosen for


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


# An operator of our own is opaque to the compiler, which would otherwise insist on packing constants itself.
_LIBRARY.impl("packed_linear", _multiply, "CPU")
_LIBRARY.impl("packed_linear", _multiply, "MkldnnCPU")
_LIBRARY.impl("packed_linear", _shape, "Meta")

packed_linear = torch.ops.forestream.packed_linear.default
"""x [*, in] by a packed weight [width, in] plus bias [width]: [*, width]."""


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's layout, alone or as rows `first` to `end` of a shared matrix.

    A member of a group multiplies the whole group's matrix and takes its own columns: the compiler merges the equal
    products of a layer into one. For inference only.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, packed: Tensor, bias: Tensor | None, width: int, first: int = 0, end: int | None = None) -> None:
        super().__init__()
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.width = width
        self.first, self.end = first, width if end is None else end

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        product: Tensor = packed_linear(x, self.packed, self.bias, self.width)
        return product if self.end - self.first == self.width else product[..., self.first : self.end]


def can_pack(model: nn.Module) -> bool:
    """Whether this build and this machine have the layout for the model's weights."""
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or multiplies_bfloat16()


@torch.no_grad()
def pack(root: nn.Module, groups: Sequence[tuple[str, ...]] = ()) -> None:
    """Replace every linear layer below `root` by a packed one; plain copies of the weights are let go.

    Matrices that are also used elsewhere, such as a head tied to the embedding, stay there as they are. LoRA
    branches are left alone: they are small, and one in front of a frozen weight may be gated. So are quantised layers.

    Args:
        groups: names of sibling layers that read the same input and share one matrix.
    """
    for parent in list(root.modules()):
        # A group's layers are children of one module, possibly each below a LoRA layer of its own.
        found = {name: place(parent, name) for name, _ in parent.named_children()}
        for group in groups:
            places = [found.get(name) for name in group]
            if all(places) and len({_linear(*one)[1] is None for one in places if one}) == 1:
                _replace([one for one in places if one])
        for name in found:
            if (alone := place(parent, name)) is not None:
                _replace([alone])


def place(parent: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """Where the plain linear layer that `parent` calls `name` is kept, or None if that is none."""
    if isinstance(parent, LoraLayer | nn.ModuleDict):
        return None
    child = getattr(parent, name)
    if isinstance(child, LoraLayer):
        parent, name, child = child, "base_layer", child.base_layer
    # A weight of another type is quantised, and the layer around it multiplies in its own way.
    plain = type(child) in (nn.Linear, Conv1D) and type(child.weight) is nn.Parameter
    return (parent, name) if plain else None


def _linear(parent: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias of a plain linear layer."""
    layer: Any = getattr(parent, name)
    weight: Tensor = layer.weight
    return (weight.T if isinstance(layer, Conv1D) else weight), layer.bias


def _replace(places: Sequence[tuple[nn.Module, str]]) -> None:
    weights = [_linear(*one)[0] for one in places]
    biases = [bias for _, bias in (_linear(*one) for one in places) if bias is not None]
    bias = torch.cat(biases) if biases else None
    matrix = torch.cat(weights) if len(weights) > 1 else weights[0].contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, _ROWS)
    width, first = matrix.shape[0], 0
    for (parent, name), weight in zip(places, weights, strict=True):
        setattr(parent, name, PackedLinear(packed, bias, width, first, first + weight.shape[0]))
        first += weight.shape[0]


def merge_products(graph: torch.fx.Graph) -> None:
    """Compute equal packed products of a traced layer once."""
    seen: dict[Any, torch.fx.Node] = {}
    for node in _products(graph):
        if (earlier := seen.setdefault(node.args, node)) is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _products(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    yield from [node for node in graph.nodes if node.op == "call_function" and node.target is packed_linear]
