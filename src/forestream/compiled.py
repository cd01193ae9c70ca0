"""Decoder layers as compiled code: one layer is compiled and serves all that are alike, or a whole span at once.

The compiled code takes the layer's weights as arguments, so a model of any depth costs the compilation of one layer
per number of rows. Passes of the sizes announced by `fix` get code of their own; passes of any other size, such as
prompts, share code that takes any number of rows. The length of the text is never part of the code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.func import functional_call

from forestream.cache import PassCache, StreamCache
from forestream.errors import ConfigError
from forestream.lowering import direct_calls
from forestream.ports import LayerInputs, Port, Rotary
from forestream.streams import SlotGate
from forestream.weights import merge_products

# Arguments of the compiled function that may differ from call to call; weights and modules never do.
_VARYING: Final = frozenset({"hidden", "masks", "positions", "tables", "stores", "where", "opened"})
_GRAPHS: Final = 64  # sizes of passes per kind of span


class EagerLayers:
    """Runs layers as they are."""

    def __init__(self, port: Port) -> None:
        self.port = port

    def __call__(
        self,
        layers: range,
        states: Float[Tensor, "B Q D"],
        inputs: Mapping[int, LayerInputs],
        cache: StreamCache | PassCache | None,
    ) -> Float[Tensor, "B Q D"]:
        """Run `layers` one after the other; `inputs` has an entry for each of them."""
        for i in layers:
            states = self.port.run(i, states, inputs[i], cache)
        return states

    def fix(self, rows: Iterable[int]) -> None:
        """Nothing to prepare for passes of so many rows."""

    def admit(self, cache: StreamCache) -> None:
        """Nothing to prepare for a cache."""


@dataclass(frozen=True)
class _Scratch:
    """The cache as one compiled layer sees it: stores to write to at `where`, of which `seen` slots are attended to."""

    keys: Float[Tensor, "B h cap d"]
    values: Float[Tensor, "B h cap e"]
    where: Int[Tensor, " Q"] | Int[Tensor, "B Q"]
    seen: int

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for store, own in ((self.keys, keys), (self.values, values)):
            if self.where.dim() == 1:
                store.index_copy_(2, self.where, own)
            else:
                # Every place by its own index: the compiler would copy the store to write through a transposed view.
                rows, heads = (torch.arange(size, device=store.device) for size in own.shape[:2])
                store.index_put_((rows[:, None, None], heads[:, None], self.where[:, None]), own)
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]


class CompiledLayers(EagerLayers):
    """Runs layers through compiled code, wherever a pass writes to a cache that stores values as they come.

    Passes over several texts share code for any number of rows and slots.

    The host must not be changed afterwards: the code assumes that its modules and weights stay what they are.

    Args:
        port: the host, with its weights packed and its adapter in place.
        gate: what keeps a lossless adapter from main slots.
        whole: compile the span of layers of a pass as one piece instead of layer by layer.

    Raises:
        ConfigError: there is no C++ compiler.
    """

    def __init__(self, port: Port, gate: SlotGate | None = None, whole: bool = False) -> None:
        super().__init__(port)
        device = next(port.model.parameters()).device
        _require_compiler(device)
        self.gate = gate
        self._direct = direct_calls(device)
        self.whole = whole
        self._weights = [_tensors(layer) for layer in port.layers]
        self._kinds = _alike(port, self._weights, gate)
        self._fixed = {1}
        self._full: set[range] = set()
        self._code: dict[tuple[tuple[int, ...], bool, bool], Callable[..., Tensor]] = {}

    def fix(self, rows: Iterable[int]) -> None:
        """Compile passes of these numbers of rows for exactly that number."""
        self._fixed.update(rows)

    def admit(self, cache: StreamCache) -> None:
        """Make the code independent of the cache's capacity."""
        for layer in range(self.port.num_layers):
            for store in cache.store(layer, 0):
                _free(store, 2)

    def __call__(
        self,
        layers: range,
        states: Float[Tensor, "B Q D"],
        inputs: Mapping[int, LayerInputs],
        cache: StreamCache | PassCache | None,
    ) -> Float[Tensor, "B Q D"]:
        keys = inputs[layers[0]].mask.shape[3] if layers else 0
        if not isinstance(cache, StreamCache) or cache.value_map is not None or keys < 2:
            return super().__call__(layers, states, inputs, cache)
        rows, slots = states.shape[:2]
        where = cache.scratch(slots)
        opened = self.gate.opened if self.gate is not None else None
        given = {id(inputs[i]): inputs[i] for i in layers}.values()
        loosened: bool | None = None
        for block in [layers] if self.whole else [range(i, i + 1) for i in layers]:
            # The compiler keeps so many pieces of code, for a span and in a process; beyond that, code for any size
            # or the layers as they are do the same.
            for fixed in (True, False):
                if (rows > 1 or slots not in self._fixed) if fixed else block in self._full:
                    continue
                if fixed is not loosened:
                    _loosen(given, where, opened, fixed)
                    loosened = fixed
                if not fixed:
                    _free(states, 1)
                try:
                    states = self._compiled(block, fixed, states, inputs, cache, where, opened)
                except torch._dynamo.exc.FailOnRecompileLimitHit:
                    if fixed:
                        self._fixed.discard(slots)
                    else:
                        self._full.add(block)
                    continue
                break
            else:
                states = super().__call__(block, states, inputs, cache)
        return states

    def _compiled(
        self,
        block: range,
        fixed: bool,
        states: Float[Tensor, "B Q D"],
        inputs: Mapping[int, LayerInputs],
        cache: StreamCache,
        where: Int[Tensor, " Q"] | Int[Tensor, "B Q"],
        opened: Tensor | None,
    ) -> Float[Tensor, "B Q D"]:
        given = [inputs[i] for i in block]
        return self._span(block, fixed, opened is not None)(
            [self._weights[i] for i in block],
            states,
            [one.mask for one in given],
            given[0].positions,
            [one.rotary for one in given],
            [cache.store(i, states.shape[1]) for i in block],
            where,
            opened,
        )

    def _span(self, block: range, fixed: bool, gated: bool) -> Callable[..., Tensor]:
        """Code for the layers of `block`, shared with blocks of the same kinds of layers."""
        key = tuple(self._kinds[i] for i in block), fixed, gated
        if key not in self._code:
            self._code[key] = torch.compile(  # type: ignore[call-overload]  # which lacks two of its arguments
                self._traced(key[0]),
                fullgraph=True,
                # Only what is marked as varying varies: another number of fixed rows is code of its own.
                dynamic=False,
                recompile_limit=_GRAPHS,
                isolate_recompiles=True,
                options={
                    "post_grad_custom_pre_pass": _MergeProducts(bool(self._direct)),
                    "guard_filter_fn": _varying,
                    **self._direct,
                    # Small passes gain nothing from threads between products, and lose to their waiting.
                    **({"cpp.threads": 1} if fixed else {}),
                },
            )
        return self._code[key]

    def _traced(self, kinds: Sequence[int]) -> Callable[..., Tensor]:
        port, gate = self.port, self.gate
        modules = [_hollow(port.layers[kind], port, gate) for kind in kinds]

        def span(
            weights: list[dict[str, Tensor]],
            hidden: Tensor,
            masks: list[Tensor],
            positions: Tensor,
            tables: list[Rotary | None],
            stores: list[tuple[Tensor, Tensor]],
            where: Tensor,
            opened: Tensor | None,
        ) -> Tensor:
            if gate is not None:
                gate.opened = opened
            for module, own, mask, table, (keys, values) in zip(modules, weights, masks, tables, stores, strict=True):
                scratch = _Scratch(keys, values, where, mask.shape[3])
                hidden = port.call(_standing_in(module, own), hidden, LayerInputs(mask, positions, table), scratch)
            return hidden

        return span


class _MergeProducts(CustomGraphPass):
    """`merge_products` as a step of compilation; what it does is part of the key of the compiler's disk cache.

    Args:
        direct: whether products are lowered to the kernel afterwards, which the key has to tell as well.
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct

    def __call__(self, graph: torch.fx.Graph) -> None:
        merge_products(graph)

    def uuid(self) -> str:
        return f"forestream.merge_products.2.{'direct' if self.direct else 'operator'}"


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by every name they have: what is shared inside the layer is listed under each."""
    return dict(layer.named_parameters(remove_duplicate=False)) | dict(layer.named_buffers(remove_duplicate=False))


def _hollow(layer: nn.Module, port: Port, gate: SlotGate | None) -> nn.Module:
    """A copy of `layer` without its weights: code traced through it can only read those it is handed."""
    shared = {id(port.config): port.config, id(gate): gate}
    return copy.deepcopy(layer, shared | {id(t): torch.empty(0) for t in _tensors(layer).values()})


def _standing_in(module: nn.Module, weights: dict[str, Tensor]) -> Callable[..., Any]:
    """`module`, called with the weights of another layer like it."""

    def call(hidden: Tensor, **keywords: Any) -> Any:
        return functional_call(module, weights, (hidden,), keywords)

    return call


def _varying(guards: Sequence[Any]) -> list[bool]:
    """Which conditions are checked at every call: the global state's, and those of arguments that vary."""
    return [not guard.name or guard.name.split("[")[0].split(".")[0] in _VARYING for guard in guards]


def _free(tensor: Tensor, slots: int) -> None:
    """Any number of slots, along `slots`, and of rows, if there are several."""
    torch._dynamo.maybe_mark_dynamic(tensor, slots)
    if slots and len(tensor) > 1:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _loosen(inputs: Iterable[LayerInputs], where: Tensor, opened: Tensor | None, fixed: bool) -> None:
    """Tell the compiler which sizes will differ next time."""
    mark = torch._dynamo.maybe_mark_dynamic
    for given in inputs:
        mark(given.mask, 3)
        if not fixed:
            _free(given.mask, 2)
            _free(given.positions, 1)
            for table in given.rotary or ():
                _free(table, 1)
    if not fixed:
        _free(where, where.dim() - 1)
        if opened is not None:
            mark(opened, 0)


@torch.no_grad()
def _alike(port: Port, weights: Sequence[dict[str, Tensor]], gate: SlotGate | None) -> list[int]:
    """For every layer the first one that, given its weights, does exactly the same."""
    slots = 4
    weight = next(port.model.parameters())
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(1, slots, port.hidden_size, generator=draw).to(weight.device, weight.dtype)
    positions = torch.arange(slots, device=weight.device)[None]
    mask = torch.full((1, 1, slots, slots), torch.finfo(weight.dtype).min, device=weight.device).triu(1)
    if gate is not None:
        gate.open(0, slots, weight.device)
    kinds: list[int] = []
    for i, own in enumerate(weights):
        inputs = LayerInputs(mask.to(weight.dtype), positions, port.rotary(states, positions, i))
        result = port.run(i, states, inputs, None)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        for kind in dict.fromkeys(kinds):
            if {name: (tensor.shape, tensor.dtype) for name, tensor in weights[kind].items()} == shapes and torch.equal(
                port.call(_standing_in(port.layers[kind], own), states, inputs, None), result
            ):
                kinds.append(kind)
                break
        else:
            kinds.append(i)
    return kinds


def has_compiler() -> bool:
    """Whether the compiler that turns layers into machine code for the CPU is there."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def _require_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not has_compiler():
        raise ConfigError(
            "compiling needs a C++ compiler, and none was found; install one (such as g++) or decode with compile off"
        )
