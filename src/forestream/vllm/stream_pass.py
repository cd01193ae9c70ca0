"""The pass of streams through the target's top layers, compiled as vLLM compiles the target.

Imported by vLLM alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context


@support_torch_compile(dynamic_arg_dims={"states": 0, "positions": 0})
class StreamPass(nn.Module):
    """`run_streams` of a target; eager where vLLM was started eagerly.

    Attributes:
        vllm_config: given by the decorator, which keeps it.
    """

    vllm_config: VllmConfig

    def __init__(self, *, vllm_config: VllmConfig, target: Any) -> None:
        super().__init__()
        vars(self)["target"] = target  # no submodule: the weights are the target's

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        target: Any = self.target
        streamed: Tensor = target.run_streams(states, positions)
        return streamed

    def warm(self, rows: int) -> None:
        """Compile now what the first request would wait for: a pass of `rows` streams that keeps nothing."""
        if self.do_not_compile:
            return
        target: Any = self.target
        like = next(target.start.parameters())
        states = torch.zeros(rows, like.shape[-1], dtype=like.dtype, device=like.device)
        positions = torch.arange(rows, device=like.device)
        with torch.inference_mode(), set_forward_context(None, self.vllm_config, num_tokens=rows):
            self(states, positions)
