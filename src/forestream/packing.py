"""What one pass holds: slots, their positions, and the one predicate that decides who sees whom.

A slot is a pair (node, index): index 0 is the node's main state, 1..G are its streams. Order of the slots: the main
slots of all nodes, then stream 1 of all carriers, then stream 2, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from forestream.topology import Topology

RECURRING = 128
"""Trees of so many slots are kept with all that is derived from them: most passes ask for one of a few shapes."""


@dataclass(frozen=True)
class Pack:
    """The slots of one pass, in B rows. Rows share one tree (R = 1) or have a tree each (R = B).

    Attributes:
        depths: steps of each node behind the committed text; the next uncommitted token has depth 0.
        ancestors: row n of a tree marks the nodes that node n may see: its ancestors and itself.
        carriers: nodes that carry streams, per row; repeats are allowed (padding of ragged rows).
        streams: G, streams per carrier.
        mains: N, main slots in the pass: all nodes, or 0 where the only node is committed already.
    """

    depths: Int[Tensor, "R nodes"]
    ancestors: Bool[Tensor, "R nodes nodes"]
    carriers: Int[Tensor, "B C"]
    streams: int
    mains: int

    @staticmethod
    def tree(topology: Topology, carriers: Sequence[int] = (), streams: int = 0) -> Pack:
        """One row: a draft tree whose `carriers` have `streams` streams each."""
        own, each = tuple(carriers), streams if carriers else 0
        return (_tree if len(topology) + each * len(own) <= RECURRING else _tree.__wrapped__)(topology, own, each)

    @staticmethod
    def forest(trees: Sequence[Topology], carriers: Sequence[Sequence[int]], streams: int = 0) -> Pack:
        """A row for each tree, whose `carriers` have `streams` streams each.

        Smaller trees are filled up with nodes that see themselves only, and carriers with repeats of the first: what
        such slots hold is of no use to anybody, and nobody sees them.
        """
        if len(trees) == 1:
            return Pack.tree(trees[0], carriers[0], streams)
        nodes, most = max(map(len, trees)), max(map(len, carriers))
        depths = torch.zeros(len(trees), nodes, dtype=torch.long)
        ancestors = torch.eye(nodes, dtype=torch.bool).repeat(len(trees), 1, 1)
        for row, tree in enumerate(trees):
            depths[row, : len(tree)] = tree.depth_tensor
            ancestors[row, : len(tree), : len(tree)] = tree.ancestors
        filled = [[*own, *[0] * (most - len(own))] for own in carriers]
        return Pack(depths, ancestors, torch.tensor(filled, dtype=torch.long), streams if most else 0, nodes)

    @staticmethod
    def text(length: int, carriers: Int[Tensor, "B C"], streams: int) -> Pack:
        """B rows of `length` tokens in order: prompts and training examples (padding at the right end)."""
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        return Pack(torch.arange(length)[None], causal[None], carriers, streams, length)

    @staticmethod
    def behind(streams: int, rows: int = 1) -> Pack:
        """Only the streams of each row's last committed token: the second pass of deferred streams."""
        return _behind(streams, rows)

    def __len__(self) -> int:
        """Q, slots in the pass."""
        return self.mains + self.streams * self.carriers.shape[1]

    @cached_property
    def nodes(self) -> Int[Tensor, "B Q"]:
        """The node of each slot."""
        rows = self.carriers.shape[0]
        return torch.cat([torch.arange(self.mains).expand(rows, -1), self.carriers.repeat(1, self.streams)], dim=1)

    @cached_property
    def indices(self) -> Int[Tensor, " Q"]:
        """0 for a main slot, j for a slot of stream j."""
        streams = torch.arange(1, self.streams + 1).repeat_interleave(self.carriers.shape[1])
        return torch.cat([torch.zeros(self.mains, dtype=torch.long), streams])

    @cached_property
    def visible(self) -> Bool[Tensor, "B Q Q"]:
        """The predicate (eqs. 1, 2 and 4), query slots by key slots; committed text is visible to all.

        A key slot is visible iff it is the main slot of an ancestor-or-self of the query's node, or a stream slot
        of the same node with an index not above the query's.
        """
        query, key = self.nodes[:, :, None], self.nodes[:, None, :]
        # Padding carriers repeat a node: slots of the same node but of two carrier places must not meet.
        places = torch.arange(self.carriers.shape[1]).repeat(self.streams)
        place = torch.cat([torch.full((self.mains,), -1), places])
        own = (place[:, None] == place[None, :]) & (self.indices[None, :] <= self.indices[:, None])
        tree = torch.arange(len(self.ancestors))[:, None, None]
        return torch.where(self.indices[None, None, :] == 0, self.ancestors[tree, query, key], own)

    def positions(self, committed: int | Int[Tensor, "B 1"], rule: Literal["ahead", "same"]) -> Int[Tensor, "B Q"]:
        """Position id of every slot behind `committed` tokens; "ahead" gives stream j of a node at t place t + j."""
        own = self.depths.expand(len(self.nodes), -1).gather(1, self.nodes) + committed
        return own + self.indices if rule == "ahead" else own

    def main_only(self) -> Pack:
        """The same nodes without streams: what the trunk layers see."""
        if not self.carriers.shape[1]:
            return self
        return Pack(self.depths, self.ancestors, self.carriers[:, :0], 0, self.mains)


@lru_cache(maxsize=64)
def _tree(topology: Topology, carriers: tuple[int, ...], streams: int) -> Pack:
    # Tensors that were made in inference mode could not be used in training.
    with torch.inference_mode(False):
        index = torch.tensor([list(carriers)], dtype=torch.long)
        return _derived(Pack(topology.depth_tensor[None], topology.ancestors[None], index, streams, len(topology)))


@lru_cache(maxsize=64)
def _behind(streams: int, rows: int) -> Pack:
    with torch.inference_mode(False):
        one = torch.ones(1, 1, 1, dtype=torch.bool)
        return _derived(Pack(torch.tensor([[-1]]), one, torch.zeros(rows, 1, dtype=torch.long), streams, 0))


def _derived(pack: Pack) -> Pack:
    """`pack`, once everything that is derived from it is there."""
    _ = pack.visible  # `nodes` and `indices` come with it
    return pack
