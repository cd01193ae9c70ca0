"""The processes that train one model together: who writes files, and weights that are sharded among them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from forestream.errors import ConfigError


def join(device: str) -> None:
    """Join the processes that a launcher started together, each with a GPU of its own unless `device` is the CPU.

    Raises:
        ConfigError: the launcher announced another number of processes than there are.
    """
    check_number(PartialState(cpu=device == "cpu").num_processes)


def leave() -> None:
    """Part with the other processes, if there are any; nothing can be asked of them any more."""
    if dist.is_initialized():
        dist.destroy_process_group()


def number() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process writes files and talks to the user."""
    return not dist.is_initialized() or dist.get_rank() == 0


def check_number(found: int) -> None:
    """See to it that the processes a launcher announced are the ones that train together.

    Raises:
        ConfigError: the launcher announced another number than `found`.
    """
    told = os.environ.get("WORLD_SIZE", "1")
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= set(os.environ) and "WORLD_SIZE" not in os.environ:
        told = "several"  # asked for several processes on the CPU, accelerate launch names a port and starts one
    if told != str(found):
        raise ConfigError(
            f"the launcher announced {told} processes, but {found} would train; start several with torchrun, as "
            "docs/cluster.md shows, and a single one without WORLD_SIZE and MASTER_ADDR in the environment"
        )


def shard(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Shard the weights of `model` among all processes (FSDP2), in place; frozen ones too.

    Each of `layers` is gathered when it runs, what is outside of them for as long as `model` runs: whatever needs
    weights has to happen in its forward, and gradients have to reach the same layers in every process. What is trained
    starts as it is in the first process; frozen weights have to be equal in all of them.

    Raises:
        ConfigError: there are no other processes.
    """
    if number() == 1:
        raise ConfigError("weights can be sharded among several processes only; start the run with torchrun")
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, src=0)
    mesh = init_device_mesh(next(model.parameters()).device.type, (number(),))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)


@contextmanager
def deferred(model: nn.Module) -> Iterator[None]:
    """Backward passes in this context add up gradients of a sharded model in every process, without exchanging them."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process has to ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def keep_whole(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer of a sharded model take and give state as if nothing were sharded.

    Every process has to ask for the state at the same time. It may go on in runs with other numbers of processes.
    """

    def gathered(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": tree_map(lambda x: whole(x) if isinstance(x, Tensor) else x, state["state"])}

    def sharded(own: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for group in own.param_groups for p in group["params"]]
        parts = {i: {k: _like(v, parameters[i]) for k, v in values.items()} for i, values in state["state"].items()}
        return {**state, "state": parts}

    optimizer.register_state_dict_post_hook(gathered)
    optimizer.register_load_state_dict_pre_hook(sharded)


def _like(value: Any, parameter: Tensor) -> Any:
    """`value` sharded as `parameter` is, if it has its shape; counters stay as they are."""
    if isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value
