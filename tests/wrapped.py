"""Tiny random hosts wrapped as streaming models, with adapters that do something."""

from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from transformers import PreTrainedModel

import zoo
from forestream.config import StreamConfig
from forestream.model import StreamingLM
from forestream.streams import SlotGate
from forestream.training import training_model

STREAMS = 4
SMALL: dict[str, Any] = {
    "streams": STREAMS,
    "stream_layers": 2,
    "start_rank": 4,
    "lora_rank": 4,
    "lora_alpha": 8,
    "scorer_rank": 4,
}


def wrapped(host: str | PreTrainedModel, mode: str = "joint", merge: bool = True, **changes: Any) -> StreamingLM:
    """A host of the zoo, by name, or another one, with a random adapter; a joint one is merged unless told not to.

    `changes` go to the StreamConfig.
    """
    base = zoo.HOSTS[host]() if isinstance(host, str) else host
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = StreamingLM(base, StreamConfig(**{**SMALL, "mode": mode, **changes}))
        model.add_lora()
        shake(model, 1)
    if merge and mode == "joint":
        model.merge()
    return model.eval()


def trainable(host: str | PreTrainedModel, seed: int = 0, **changes: Any) -> StreamingLM:
    """A host with an adapter as fresh as training makes it."""
    base = zoo.HOSTS[host]() if isinstance(host, str) else host
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return training_model(base, StreamConfig(**{**SMALL, **changes}))


def shake(model: StreamingLM, seed: int, scale: float = 0.1) -> None:
    """Fill everything that training would change with random values: fresh LoRA and start maps are the identity."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # by name, so that models of other make-up get the same weights where they have the same parts
                generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def ajar(gate: SlotGate) -> Tensor | None:
    """What a gate that takes the last main slot for a stream's would let the branch act on."""
    return gate.opened if gate.opened is None else torch.cat([gate.opened[1:], gate.opened[-1:]])


def trained(model: StreamingLM) -> dict[str, Tensor]:
    """Copies of everything that training changes, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def prompt(length: int, vocabulary: int = 70, seed: int = 0) -> tuple[int, ...]:
    """Random token ids that every host of the zoo knows."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())
