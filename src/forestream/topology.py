"""The shape of a draft tree: who is whose parent. Integers only."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from forestream.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """A rooted tree of N nodes; node 0 is the root and parents precede children.

    Raises:
        ConfigError: the root is missing, or a parent does not precede its child.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ConfigError(f"parents are {self.parents}; expected -1 for node 0, the root")
        # Runs every pass: all nodes at once, and one by one only to name the culprit.
        if min(self.parents[1:], default=0) >= 0 and all(map(operator.lt, self.parents, count())):
            return
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ConfigError(f"node {node} has parent {parent}; expected a node from 0 to {node - 1}")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root, per node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children per node, in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def ancestors(self) -> Bool[Tensor, "N N"]:
        """Row n marks the ancestors of node n and n itself."""
        # Bytes, not tensor operations: a budget tree is a new one every pass.
        size = len(self)
        rows = bytearray(size * size)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                rows[node * size : (node + 1) * size] = rows[parent * size : (parent + 1) * size]
            rows[node * size + node] = 1
        return torch.frombuffer(rows, dtype=torch.bool).view(size, size)

    @cached_property
    def depth_tensor(self) -> Int[Tensor, " N"]:
        """`depths` as an integer tensor."""
        return torch.frombuffer(array("q", self.depths), dtype=torch.long)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return tuple(reversed(path))

    def subset(self, keep: Sequence[int]) -> Topology:
        """The tree of the nodes in `keep`, renumbered in their order.

        Raises:
            ConfigError: a kept node's parent is not kept before it.
        """
        renumbered = {node: i for i, node in enumerate(keep)}
        if missing := [n for n in keep if n != 0 and self.parents[n] not in renumbered]:
            raise ConfigError(f"nodes {missing} are kept without their parents; keep whole paths from the root")
        return Topology(tuple(-1 if node == 0 else renumbered[self.parents[node]] for node in keep))


def renumbered(nodes: Iterable[int], kept: Sequence[int]) -> tuple[int, ...]:
    """Those of `nodes` that are kept, by their numbers among `kept`, each once."""
    places = {node: place for place, node in enumerate(kept)}
    return tuple(dict.fromkeys(places[node] for node in nodes if node in places))


def chain(length: int) -> Topology:
    """A path of `length` nodes: plain text."""
    return Topology(tuple(range(-1, length - 1)))


def full(depth: int, k: int) -> Topology:
    """Every node above the leaves has k children: 1 + k + ... + k^depth nodes, level by level."""
    parents, level = [-1], [0]
    for _ in range(depth):
        first = len(parents)
        parents += [node for node in level for _ in range(k)]
        level = list(range(first, len(parents)))
    return Topology(tuple(parents))
