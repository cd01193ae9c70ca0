"""From stream logits to a draft tree: which continuations are worth checking."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from forestream.config import DecodeSettings
from forestream.errors import ConfigError
from forestream.topology import Topology, full


@dataclass(frozen=True)
class DraftTree:
    """A tree of tokens to check. Node 0 is the last verified token; siblings carry different tokens.

    Raises:
        ConfigError: tokens and nodes differ in number, or two siblings carry the same token.
    """

    topology: Topology
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.topology):
            raise ConfigError(f"{len(self.tokens)} tokens for a tree of {len(self.topology)} nodes")
        for node, children in enumerate(self.topology.children):
            if len({self.tokens[child] for child in children}) < len(children):
                raise ConfigError(f"children of node {node} carry the same token twice; siblings must differ")

    def subset(self, keep: Sequence[int]) -> DraftTree:
        """The tree of the nodes in `keep`, which must hold whole paths from the root."""
        return DraftTree(self.topology.subset(keep), tuple(self.tokens[node] for node in keep))


# A branch that may come next: -log p of its path, its tokens (they break ties), log p of the parent's path, the parent,
# and its rank among the tokens of its stream.
Branch = tuple[float, tuple[int, ...], float, int, int]


class Drafter(Protocol):
    """Turns what the streams say into a draft tree."""

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        """A tree whose root is text[-1] and whose level j comes from row j - 1 of `logits`.

        The number of rows bounds the depth; with no rows the tree is the root alone.
        """
        ...


@dataclass(frozen=True)
class FullTree:
    """The paper's form: the k best tokens of each stream, every one of them under every node of the level above."""

    k: int

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        depth = logits.shape[0]
        k = min(self.k, logits.shape[1])
        topology = full(depth, k)
        best = _best(logits, k)[1] if depth else []
        tokens = [text[-1]]
        for level in range(depth):
            tokens += best[level] * k**level
        return DraftTree(topology, tuple(tokens))


@dataclass(frozen=True)
class BudgetTree:
    """The `nodes` nodes (root included) with the largest product of stream probabilities.

    Streams do not see each other's choices, so the product is the streams' own estimate that a path is right.
    """

    nodes: int

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        depth = logits.shape[0]
        parents, tokens = [-1], [text[-1]]
        if depth and self.nodes > 1:
            log_probs, best = _best(logits, min(self.nodes - 1, logits.shape[1]))
            # Best first: taking a node offers its first child and its next sibling, neither of which scores higher.
            heap: list[Branch] = [(-log_probs[0][0], (best[0][0],), 0.0, 0, 0)]
            while heap and len(tokens) < self.nodes:
                cost, path, above, parent, rank = heapq.heappop(heap)
                level = len(path) - 1
                node = len(tokens)
                parents.append(parent)
                tokens.append(path[-1])
                if rank + 1 < len(best[level]):
                    sibling = (*path[:-1], best[level][rank + 1])
                    heapq.heappush(heap, (-(above + log_probs[level][rank + 1]), sibling, above, parent, rank + 1))
                if level + 1 < depth:
                    child = (*path, best[level + 1][0])
                    heapq.heappush(heap, (cost - log_probs[level + 1][0], child, -cost, node, 0))
        return DraftTree(Topology(tuple(parents)), tuple(tokens))


def _best(logits: Float[Tensor, "G V"], k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Log-probabilities and ids of the k best tokens per row, best first, exact ties to the lowest id."""
    logits = logits.float()
    norms = logits.logsumexp(dim=-1, keepdim=True)
    last = logits.topk(k, dim=-1).values[:, -1:]
    values, ids = [], []
    for row, able, norm in zip(logits, logits >= last, norms, strict=True):
        # topk picks any of the tokens tied for the last place, so all that reach it are sorted again, by id.
        places = able.nonzero().flatten()
        chosen = places[row[places].argsort(descending=True, stable=True)[:k]]
        values.append((row[chosen] - norm).tolist())
        ids.append(chosen.tolist())
    return values, ids


def drafter_for(settings: DecodeSettings) -> FullTree | BudgetTree:
    """The drafter that the settings ask for."""
    return FullTree(settings.k) if settings.tree == "full" else BudgetTree(settings.nodes)


def largest_tree(settings: DecodeSettings, streams: int) -> int:
    """Most nodes that a tree of these settings can have with `streams` streams."""
    return settings.nodes if settings.tree == "budget" else sum(settings.k**level for level in range(streams + 1))
