"""One packed pass over a fixed tree of seven nodes: what the tests of exact streams look at."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.topology import Topology
from oracle import prefilled

TREE = Topology((-1, 0, 0, 1, 1, 2, 4))
TOKENS = (11, 5, 6, 7, 8, 9, 3)
CLOSE = 2e-5


def close(found: Tensor, wanted: Tensor, what: str, tolerance: float = CLOSE) -> None:
    largest, difference = float(wanted.abs().max()), float((found - wanted).abs().max())
    assert difference <= tolerance * largest, f"{what} differ by {difference:.3g}; the largest is {largest:.3g}"


@torch.no_grad()
def tree_pass(
    model: StreamingLM,
    text: Sequence[int],
    carriers: Sequence[int] = tuple(range(7)),
    streams: int = 3,
    tokens: Sequence[int] = TOKENS,
    topology: Topology = TREE,
    prune: Any = None,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Logits of main [N,V] and of streams [G,C,V] of a packed pass behind `text`, and the nodes that survived."""
    cache = prefilled(model, text, spare=len(topology) * (1 + streams))
    pack = Pack.tree(topology, carriers, streams)
    rows = None if prune is None else lambda trunk: (prune(trunk),)
    output = model(torch.tensor([list(tokens)]), pack, cache, rows, [topology])
    return model.logits(output.main[0]), model.logits(output.streams[0]), output.kept[0]
