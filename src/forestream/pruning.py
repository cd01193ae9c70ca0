"""Pruning: a small early exit scores every edge of the draft tree, and a rule says which branches go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.config import DecodeSettings
from forestream.streams import LowRank
from forestream.topology import Topology


class ExitScorer(LowRank):
    """Rank-r adapter between the trunk's output and the model's own final norm and head.

    Before training it is the identity: a plain early exit, which is no good guess. Train it before pruning with it.
    """


class Keep(Protocol):
    """A rule that picks the surviving nodes of a tree from the scores of its edges."""

    def __call__(self, topology: Topology, edges: Sequence[float]) -> tuple[int, ...]:
        """Nodes to keep, in increasing order; `edges[n]` is p(token of n | state of its parent), 1 at the root."""
        ...


def first_chain(topology: Topology) -> tuple[int, ...]:
    """The path of first children from the root: the most probable draft, which pruning never drops."""
    path = [0]
    while children := topology.children[path[-1]]:
        path.append(children[0])
    return tuple(path)


@dataclass(frozen=True)
class KeepAbove:
    """The paper's rule: an edge below `threshold` drops its whole subtree."""

    threshold: float

    def __call__(self, topology: Topology, edges: Sequence[float]) -> tuple[int, ...]:
        kept = set(first_chain(topology))
        for node, parent in enumerate(topology.parents):
            if node == 0 or (parent in kept and edges[node] >= self.threshold):
                kept.add(node)
        return tuple(sorted(kept))


@dataclass(frozen=True)
class KeepBest:
    """Fixed size: the `nodes` nodes with the largest product of edge scores from the root."""

    nodes: int

    def __call__(self, topology: Topology, edges: Sequence[float]) -> tuple[int, ...]:
        scores = [1.0] * len(topology)
        for node, parent in enumerate(topology.parents[1:], start=1):
            scores[node] = scores[parent] * edges[node]
        kept = set(first_chain(topology))
        # A child never scores above its parent, so taking nodes by score keeps whole paths; ties go by node order.
        for node in sorted(range(len(topology)), key=lambda n: (-scores[n], n)):
            if len(kept) >= self.nodes:
                break
            kept.add(node)
        return tuple(sorted(kept))


def keep_rule(settings: DecodeSettings) -> Keep | None:
    """The rule that the settings ask for, or None where nothing is pruned."""
    if settings.prune_to is not None:
        return KeepBest(settings.prune_to)
    return KeepAbove(settings.prune_below) if settings.prune_below > 0 else None


def edge_scores(topology: Topology, tokens: Sequence[int], logits: Float[Tensor, "N V"]) -> list[float]:
    """p(token of node n | state of its parent) for every node, 1 for the root."""
    if len(topology) == 1:
        return [1.0]
    parents = torch.tensor(topology.parents[1:], device=logits.device)
    children = torch.tensor(tokens[1:], device=logits.device)
    log_norm = torch.logsumexp(logits.float(), dim=-1)
    scores = (logits[parents, children].float() - log_norm[parents]).exp()
    return [1.0, *scores.tolist()]
