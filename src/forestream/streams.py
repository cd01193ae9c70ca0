"""The streams' own parts: how they start and end, how their values may be rotated, and LoRA that acts on them alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from forestream.config import StreamConfig


class StreamStart(nn.Module):
    """Eq. 3: S_tj = f(M_t) + P_j at the entry of the first stream layer.

    f is the identity, or the identity plus a rank-r linear map that starts at zero. With value rotation (eq. 7)
    there is no P_j and streams start as copies.
    """

    def __init__(self, config: StreamConfig, hidden_size: int) -> None:
        super().__init__()
        self.embedding: nn.Parameter | None = None
        if not config.value_rotation:
            self.embedding = nn.Parameter(torch.randn(config.streams, hidden_size) * 0.02)
        self.map: LowRank | None = None
        if config.start == "low_rank":
            self.map = LowRank(hidden_size, config.start_rank)

    def begin_as(self, other: StreamStart) -> None:
        """Take over the weights of a start of the same kind for any number of streams.

        Streams that it lacks begin as its last one, which has learned to look ahead already.
        """
        if self.embedding is not None and other.embedding is not None:
            last = len(other.embedding) - 1
            self.embedding.data.copy_(other.embedding.data[[min(j, last) for j in range(len(self.embedding))]])
        if self.map is not None and other.map is not None:
            self.map.load_state_dict(other.map.state_dict())

    def forward(self, mains: Float[Tensor, "B C D"], streams: int) -> Float[Tensor, "B GC D"]:
        """States of streams 1..G of every carrier, stream by stream, from the carriers' main states."""
        start = mains if self.map is None else self.map(mains)
        states = start[:, None].expand(-1, streams, -1, -1)
        if self.embedding is not None:
            states = states + self.embedding[None, :streams, None].to(states.dtype)
        return states.flatten(1, 2)


class LowRank(nn.Module):
    """x + up(down(x)) with a [D, r] and an [r, D] matrix; the identity until it is trained."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(size, rank) / math.sqrt(size))
        self.up = nn.Parameter(torch.zeros(rank, size))

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        return x + (x @ self.down.to(x.dtype)) @ self.up.to(x.dtype)


class PathSampler(nn.Module):
    """A stream's state, once the token is chosen that comes before the one it foretells.

    Streams do not see each other's choices, nor the root, which the main stream chose beside them: each foretells a
    mean over all that may come before. x + |x| up(silu(down [x / |x|, e / |e|])), with the embedding e of the token
    before, turns that into what comes behind this token. |.| is the root mean square: states and embeddings differ in
    size by far. It is x until it is trained.

    Args:
        hidden_size: D, of the streams' final states.
        embedding_size: of the host's input embeddings, which a few families keep narrower than D.
        width: of the layer in between.
    """

    def __init__(self, hidden_size: int, embedding_size: int, width: int) -> None:
        super().__init__()
        self.state = nn.Parameter(torch.randn(hidden_size, width) / math.sqrt(hidden_size))
        self.token = nn.Parameter(torch.randn(embedding_size, width) / math.sqrt(embedding_size))
        self.up = nn.Parameter(torch.zeros(width, hidden_size))

    @property
    def width(self) -> int:
        return self.up.shape[0]

    def forward(self, states: Float[Tensor, "*rows D"], embedded: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows D"]:
        """The states behind the tokens whose input embeddings are given."""
        size, dtype = _size(states), states.dtype
        inner = states / size @ self.state.to(dtype) + (embedded / _size(embedded)).to(dtype) @ self.token.to(dtype)
        return states + size * (functional.silu(inner) @ self.up.to(dtype))


def _size(rows: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows 1"]:
    # Padding may be embedded as zeros, which are not divided by nothing.
    return rows.float().square().mean(-1, keepdim=True).add(1e-12).sqrt().to(rows.dtype)


def rotate_values(
    values: Float[Tensor, "B h Q d"], indices: Int[Tensor, " Q"], angle: float
) -> Float[Tensor, "B h Q d"]:
    """Eq. 7: rotate the value vectors of stream n by `angle` * n radians; main slots (n = 0) stay as they are.

    The two halves of each head are paired up, the way rotary embeddings do it.
    """
    turn = (indices * angle)[:, None].to(values.device)
    cos, sin = torch.cos(turn).to(values.dtype), torch.sin(turn).to(values.dtype)
    left, right = values.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class SlotGate:
    """Lossless mode: the LoRA branch of the stream layers yields exact zeros on main slots.

    Call `open` before each pass through the layers it is attached to.

    Attributes:
        opened: of the pass under way, which slots the branch acts on; None where it acts on none.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.opened: Bool[Tensor, "Q 1"] | None = None
        self._branches = [m for layer in layers for m in layer.modules() if isinstance(m, LoraLayer)]
        self._on = True
        for module in self._branches:
            for branch in module.lora_B.values():
                branch.register_forward_hook(self._gate)

    def open(self, mains: int, slots: int, device: torch.device) -> None:
        """Announce a pass of `slots` slots, the first `mains` of them main ones."""
        on = slots > mains
        self.opened = (torch.arange(slots, device=device) >= mains)[:, None] if on else None
        # Without streams the branch would compute zeros only: plain decoding must not pay for that.
        if on != self._on:
            for module in self._branches:
                module.enable_adapters(on)
            self._on = on

    def _gate(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if self.opened is None:
            return torch.zeros_like(output)
        # Some hosts flatten rows and slots before their MLP, so the slot axis is restored first.
        rows = output.view(-1, self.opened.shape[0], output.shape[-1])
        return rows.masked_fill(~self.opened, 0.0).view(output.shape)
