"""A fault of vLLM 0.32's CPU build that reaches every draw with speculation, mended where the fault is found.

Temperature, top_k and top_p of a request are spread over its drafts by a kernel whose CPU version converts its output
to 64-bit integers first, and so writes to a copy: whatever memory held is then taken for the temperature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mend() -> bool:
    """Replace the kernel before vLLM's workers take it up, if it is the faulty one; returns whether it was replaced.

    Nothing is changed where the kernel does what it should, nor where there is none to replace.
    """
    try:
        from vllm.utils import cpu_triton_utils as kernels
    except ImportError:  # another version, which is refused when an exported model is asked for
        return False
    found: Any = getattr(kernels, "_expand_kernel_impl", None)
    if found is None or _works(found):
        return False
    kernels._expand_kernel_impl = spread
    return True


def spread(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value as often as it has tokens, `replace_to` for `replace_from`.

    Args:
        output: [tokens], written to.
        input_val: [requests].
        cu_num_tokens: tokens of all requests up to each, itself included.
        MAX_NUM_TOKENS: a bound that the kernel's other versions need.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts.long()))


def _works(kernel: Any) -> bool:
    output = torch.full((3,), -1.0)
    try:
        kernel(output, torch.tensor([0.5, 0.0]), torch.tensor([2, 3], dtype=torch.int32), 0, 1)
    except (AttributeError, RuntimeError):  # its compiled part is not loaded yet, or not there
        return False
    return output.tolist() == [0.5, 0.5, 1.0]
