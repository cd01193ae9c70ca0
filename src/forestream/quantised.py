"""The precision of a base: its linear layers as they were loaded, or their weights as integers of 8 or 4 bits.

Weights are quantised by torchao, activations and everything else stay as they are: embedding, head, norms, the cache,
the streams' own parts, and the LoRA of a lossless adapter, which stays beside the quantised weight. Plain decoding and
drafting run the same quantised layers, so drafting changes the text no more than it does on the base as it was loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from peft import PeftModel
from torch import nn
from transformers.pytorch_utils import Conv1D

from forestream.config import Quantise, one_of
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.weights import place

_GROUP: Final = 32  # inputs that share a scale at 4 bits: the smallest that torchao's kernels take


@torch.no_grad()
def quantise(model: StreamingLM, to: Quantise) -> None:
    """Hold the linear layers of the host's decoder layers in integers, for decoding; before `StreamingLM.prepare`.

    "int8" has one scale per output, "int4" one per group of 32 inputs. The weights go where they are: move the model
    to its device first. What was changed stays changed if an error is raised halfway: load the model anew then.

    Raises:
        ConfigError: torchao is missing or cannot do it on this machine or with these shapes, a joint adapter was not
            merged, or there is nothing left to quantise.
    """
    one_of("quantise", to, ("off", "int8", "int4"))
    if to == "off":
        return
    if model.prepared is not None:
        raise ConfigError("the model is prepared already and its plain weights are gone; quantise it before `prepare`")
    if model.stream_config.mode == "joint" and isinstance(model.host, PeftModel):
        raise ConfigError("the joint adapter is not merged, and cannot be merged into integers; call `merge` first")
    convert = _converter(to, model.device)
    found = [place(parent, name) for layer in model.port.layers for parent, name in _children(layer)]
    places = [one for one in found if one is not None]
    if not places:
        raise ConfigError(
            f"found no plain linear layer in {model.port.family} to quantise to {to}; load the base unquantised"
        )
    for parent, name in places:
        layer = _linear(getattr(parent, name))
        _convert(layer, convert, f"{to} on {model.device.type}")
        setattr(parent, name, layer)
    model.quantised = to


def _convert(layer: nn.Linear, convert: Callable[[nn.Linear], None], what: str) -> None:
    """Quantise one layer in place, or say why it cannot be done."""
    shape = f"a layer of {layer.in_features} inputs and {layer.out_features} outputs in {layer.weight.dtype}"
    advice = "use int8, or leave the base as it is"
    try:
        convert(layer)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(f"torchao cannot hold {shape} in {what} ({why}); {advice}") from error
    # Shapes that do not fit are passed over in silence.
    if type(layer.weight) is nn.Parameter:
        raise ConfigError(f"torchao does not take {shape} for {what}: not in multiples of {_GROUP} inputs; {advice}")


def _children(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for parent in list(layer.modules()):
        yield from [(parent, name) for name, _ in parent.named_children()]


def _linear(layer: Any) -> nn.Linear:
    """`layer` itself, or a transposed one as an ordinary one: torchao knows no other."""
    if not isinstance(layer, Conv1D):
        assert isinstance(layer, nn.Linear)
        return layer
    inputs, outputs = layer.weight.shape
    straight = nn.Linear(inputs, outputs, device="meta").eval()
    straight.weight = nn.Parameter(layer.weight.T.contiguous(), requires_grad=False)
    straight.bias = layer.bias
    return straight


def _converter(to: Quantise, device: torch.device) -> Callable[[nn.Linear], None]:
    """What quantises one linear layer in place.

    Raises:
        ConfigError: torchao is not installed, or this release has no way to do it.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"quantise {to!r} needs torchao, which is not installed; run: pip install 'forestream[quantised]'"
        )
    try:
        from torchao.quantization import quantize_

        config = _configuration(to, device)
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"this release of torchao cannot do {to} on {device.type} ({error}); run: pip install -U "
            "'forestream[quantised]'"
        ) from error

    def convert(layer: nn.Linear) -> None:
        quantize_(layer, config)

    return convert


def _configuration(to: Quantise, device: torch.device) -> Any:
    """torchao's settings; none of them may change the compiler's, which are the whole process's."""
    if to == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig(set_inductor_config=False)
    if device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=_GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    # The other layouts need kernels of further packages.
    return Int4WeightOnlyConfig(group_size=_GROUP, set_inductor_config=False, int4_packing_format="tile_packed_to_4d")
