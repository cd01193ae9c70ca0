"""What the compiler makes of a packed product: a call of oneDNN's kernel, without Python in between."""

from __future__ import annotations

from typing import Any

import torch

from forestream.weights import packed_linear


def lower_products() -> bool:
    """Teach the compiler to call the kernel itself; returns whether this build's compiler can be taught.

    The parts of it that this takes are private to torch. Without them compiled layers call our operator, which does
    the same at the cost of some microseconds a product.
    """
    try:
        from torch._inductor.ir import FixedLayout, TensorBox
        from torch._inductor.lowering import lowerings, register_lowering
        from torch._inductor.mkldnn_ir import LinearUnary, _create_output_node
    except ImportError:
        return False
    if packed_linear in lowerings:
        return True

    def lower(x: Any, weight: Any, bias: Any, width: int) -> Any:
        # The packed weight is passed as it is: its layout is oneDNN's own, and none that the compiler could ask for.
        inputs = [LinearUnary.require_contiguous(LinearUnary.realize_input(x)), LinearUnary.realize_input(weight)]
        if bias is not None:
            inputs.append(LinearUnary.require_contiguous(LinearUnary.realize_input(bias)))
        layout = FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=[*x.get_size()[:-1], width])
        nothing = [] if bias is not None else [None]
        product = LinearUnary(layout=layout, inputs=inputs, constant_args=[*nothing, "none", [-1], ""])
        return TensorBox.create(_create_output_node(product))

    register_lowering(packed_linear, type_promotion_kind=None)(lower)
    return packed_linear in lowerings


def direct_calls(device: torch.device) -> dict[str, bool]:
    """Options of the compiler for layers on `device`: where products are lowered, the code around them is C++ too."""
    return {"cpp_wrapper": True} if device.type == "cpu" and lower_products() else {}
