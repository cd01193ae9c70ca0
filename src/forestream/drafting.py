"""From stream logits to a draft tree: which continuations are worth checking."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import exp, inf
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from forestream.config import DecodeSettings, Shape, check_shape
from forestream.errors import ConfigError
from forestream.ranking import best_ids, best_tokens
from forestream.topology import Topology, full


@dataclass(frozen=True)
class DraftTree:
    """A tree of tokens to check. Node 0 is the last verified token; siblings carry different tokens.

    Attributes:
        log_probs: per node, what whoever drafted takes the log-probability of its path to be; minus infinity where
            nobody said. None if it is known of no node.

    Raises:
        ConfigError: tokens and nodes differ in number, or two siblings carry the same token.
    """

    topology: Topology
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.topology):
            raise ConfigError(f"{len(self.tokens)} tokens for a tree of {len(self.topology)} nodes")
        # Runs every pass: the whole tree at once, and node by node only to name the culprit.
        if len(set(zip(self.topology.parents, self.tokens, strict=True))) < len(self.tokens):
            for node, children in enumerate(self.topology.children):
                if len({self.tokens[child] for child in children}) < len(children):
                    raise ConfigError(f"children of node {node} carry the same token twice; siblings must differ")

    def subset(self, keep: Sequence[int]) -> DraftTree:
        """The tree of the nodes in `keep`, which must hold whole paths from the root."""
        known = self.log_probs
        log_probs = None if known is None else tuple(known[node] for node in keep)
        return DraftTree(self.topology.subset(keep), tuple(self.tokens[node] for node in keep), log_probs)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Nodes by the probability that the text follows their path and none of their children, likeliest first.

        Nodes whose path nobody gave a probability come last; where none has one, nodes come as they are numbered.
        """
        if self.log_probs is None:
            return tuple(range(len(self.tokens)))
        paths = [*map(exp, self.log_probs)]
        left = [*paths]
        for node, parent in enumerate(self.topology.parents[1:], start=1):
            left[parent] -= paths[node]
        return tuple(sorted(range(len(left)), key=lambda node: (paths[node] == 0.0, -left[node], node)))

    @property
    def first_choices(self) -> tuple[int, ...]:
        """Tokens of the path of first children, the root left out: of siblings drafters list the likeliest first."""
        path, node = [], 0
        while children := self.topology.children[node]:
            node = children[0]
            path.append(self.tokens[node])
        return tuple(path)

    def joined(self, path: Sequence[int], most: int) -> DraftTree:
        """The tree with the tokens of `path` behind its root, as far as `most` more nodes take them."""
        parents, tokens, node = [*self.topology.parents], [*self.tokens], 0
        places = dict(zip(zip(parents, tokens, strict=True), range(len(tokens)), strict=True))
        for token in path:
            if (known := places.get((node, token))) is None:
                if len(tokens) == len(self.tokens) + most:
                    break
                parents.append(node)
                tokens.append(token)
                known = len(tokens) - 1
            node = known
        if len(tokens) == len(self.tokens):
            return self
        log_probs = self.log_probs
        if log_probs is not None:
            log_probs += (-inf,) * (len(tokens) - len(log_probs))
        return DraftTree(Topology(tuple(parents)), tuple(tokens), log_probs)


# Tokens behind the root; the candidates behind a path with their log-probabilities, best first.
Path = tuple[int, ...]
Candidates = tuple[Sequence[int], Sequence[float]]

# A branch that may come next: -log p of its path, its tokens (they break ties), log p of the parent's path, the parent,
# and its rank among the tokens of its stream.
Branch = tuple[float, Path, float, int, int]


class Drafter(Protocol):
    """Turns what the streams say into a draft tree."""

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        """A tree whose root is text[-1] and whose level j comes from row j - 1 of `logits`.

        The number of rows bounds the depth; with no rows the tree is the root alone.
        """
        ...


class RankDrafter(Drafter, Protocol):
    """A drafter that looks at nothing but the best candidates of each stream, so that a record of them is enough."""

    def __call__(
        self, text: Sequence[int], logits: Float[Tensor, "G K"], ids: Int[Tensor, " K"] | None = None
    ) -> DraftTree:
        """As of any drafter, where the columns of `logits` are all V tokens, or those that `ids` names in order."""
        ...

    @property
    def width(self) -> int:
        """Most candidates of a stream that a tree can take."""
        ...

    def grow(self, root: int, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> DraftTree:
        """A tree behind the token `root`; row j - 1 of `ids` and `log_probs` holds the candidates of stream j.

        Rows are best first and of one length: `width`, or the vocabulary where that is smaller.
        """
        ...

    def follow(self, root: int, ahead: Ahead) -> DraftTree:
        """The same, where what a stream foretells depends on the token that a path has before it."""
        ...


class Ahead(Protocol):
    """What streams foretell along paths, asked level by level: of stream `level` + 1, behind each of `tokens`."""

    @property
    def depth(self) -> int:
        """Streams that may be used."""
        ...

    def ids(self, level: int, tokens: Sequence[int], k: int) -> list[list[int]]:
        """The k best tokens behind each, as `best_ids`."""
        ...

    def scored(self, level: int, tokens: Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        """These, and their log-probabilities, as `best_tokens`."""
        ...


@dataclass(frozen=True)
class FullTree:
    """The paper's form: the k best tokens of each stream, every one of them under every node of the level above."""

    k: int

    @property
    def width(self) -> int:
        return self.k

    def __call__(
        self, text: Sequence[int], logits: Float[Tensor, "G K"], ids: Int[Tensor, " K"] | None = None
    ) -> DraftTree:
        return self.grow(text[-1], best_ids(logits, self.k, ids), ())

    def grow(self, root: int, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> DraftTree:
        k = len(ids[0]) if ids else self.k
        tokens = [root]
        for level, best in enumerate(ids):
            tokens += [*best] * k**level
        return DraftTree(_full(len(ids), k), tuple(tokens))

    def follow(self, root: int, ahead: Ahead) -> DraftTree:
        tokens, level = [root], [root]
        k = self.k
        for depth in range(ahead.depth):
            best = ahead.ids(depth, level, self.k)
            level, k = [token for own in best for token in own], len(best[0])
            tokens += level
        return DraftTree(_full(ahead.depth, k), tuple(tokens))


@dataclass(frozen=True)
class BudgetTree:
    """The `nodes` nodes (root included) with the largest product of stream probabilities.

    Streams do not see each other's choices, so the product is the streams' own estimate that a path is right; with a
    path sampler they do. With a draft vocabulary, probabilities are relative to it.
    """

    nodes: int

    @property
    def width(self) -> int:
        return self.nodes - 1

    def __call__(
        self, text: Sequence[int], logits: Float[Tensor, "G K"], ids: Int[Tensor, " K"] | None = None
    ) -> DraftTree:
        return self.grow(text[-1], *best_tokens(logits, self.width, ids))

    def grow(self, root: int, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> DraftTree:
        rows = list(zip(ids, log_probs, strict=True))
        return self._best_first(root, len(ids), lambda path: rows[len(path)])

    def follow(self, root: int, ahead: Ahead) -> DraftTree:
        known: dict[Path, Candidates] = {}
        beam: list[tuple[float, Path]] = [(0.0, ())]
        # A path among the best `nodes` of all is among the best `nodes` of its length: only these are asked about.
        for depth in range(ahead.depth if self.nodes > 1 else 0):
            best = ahead.scored(depth, [path[-1] if path else root for _, path in beam], self.width)
            longer = []
            for (cost, path), own in zip(beam, zip(*best, strict=True), strict=True):
                known[path] = own
                longer += [(cost - log_prob, (*path, token)) for token, log_prob in zip(*own, strict=True)]
            beam = heapq.nsmallest(self.width, longer)
        return self._best_first(root, ahead.depth, known.__getitem__)

    def _best_first(self, root: int, depth: int, behind: Callable[[Path], Candidates]) -> DraftTree:
        """The best nodes, where `behind` tells the candidates behind a path, best first."""
        parents, tokens, costs = [-1], [root], [0.0]
        if depth and self.nodes > 1:
            # Taking a node offers its first child and its next sibling, neither of which scores higher.
            ids, log_probs = behind(())
            heap: list[Branch] = [(-log_probs[0], (ids[0],), 0.0, 0, 0)]
            while heap and len(tokens) < self.nodes:
                cost, path, above, parent, rank = heapq.heappop(heap)
                node = len(tokens)
                parents.append(parent)
                tokens.append(path[-1])
                costs.append(cost)
                ids, log_probs = behind(path[:-1])
                if rank + 1 < len(ids):
                    sibling = (*path[:-1], ids[rank + 1])
                    heapq.heappush(heap, (-(above + log_probs[rank + 1]), sibling, above, parent, rank + 1))
                if len(path) < depth and len(tokens) < self.nodes:
                    ids, log_probs = behind(path)
                    heapq.heappush(heap, (cost - log_probs[0], (*path, ids[0]), -cost, node, 0))
        return DraftTree(Topology(tuple(parents)), tuple(tokens), tuple(-cost for cost in costs))


@dataclass(frozen=True)
class StaticTree:
    """The same shape every pass: node n takes the candidate of rank `ranks[n]` of the stream of its depth.

    The shape is chosen beforehand, from measured acceptance, so a pass costs no search and masks are made once. With
    fewer streams than the tree is deep, or fewer tokens than a rank asks for, the nodes beyond are left out with all
    that hangs from them. Of siblings list the likeliest first: pruning never drops the chain of first children.

    Attributes:
        parents: as in `Topology`.
        ranks: per node, 0 for the best candidate; 0 for the root, which is no candidate.

    Raises:
        ConfigError: parents are no tree, ranks and nodes differ in number, or two siblings have the same rank.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.topology):
            raise ConfigError(f"{len(self.ranks)} ranks for a tree of {len(self.topology)} nodes; expected one a node")
        if self.ranks[0] != 0:
            raise ConfigError(f"the root has rank {self.ranks[0]}; expected 0: it is the verified token")
        check_shape(self.shape)

    @staticmethod
    def of(shape: Shape) -> StaticTree:
        """The tree that `DecodeSettings.shape` writes down: (parent, rank) of every node but the root."""
        return StaticTree((-1, *(parent for parent, _ in shape)), (0, *(rank for _, rank in shape)))

    @property
    def shape(self) -> Shape:
        """(parent, rank) of every node but the root."""
        return tuple(zip(self.parents[1:], self.ranks[1:], strict=True))

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.parents)

    @cached_property
    def depth(self) -> int:
        """Streams that the tree makes use of."""
        return max(self.topology.depths)

    @cached_property
    def width(self) -> int:
        return max(self.ranks[1:], default=-1) + 1

    def __call__(
        self, text: Sequence[int], logits: Float[Tensor, "G K"], ids: Int[Tensor, " K"] | None = None
    ) -> DraftTree:
        return self.grow(text[-1], best_ids(logits[: self.depth], self.width, ids), ())

    def grow(self, root: int, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> DraftTree:
        tree = self.cut(len(ids), len(ids[0]) if ids else 0)
        return DraftTree(tree.topology, (root, *[ids[level][rank] for level, rank in tree._sources]))

    def follow(self, root: int, ahead: Ahead) -> DraftTree:
        tree, tokens = self.cut(ahead.depth, self.width), {0: root}
        for depth, parents in enumerate(tree._inner):
            best = ahead.ids(depth, [tokens[node] for node in parents], tree.width)
            if len(best[0]) < tree.width:
                return self.cut(ahead.depth, len(best[0])).follow(root, ahead)
            for node, own in zip(parents, best, strict=True):
                tokens |= {child: own[tree.ranks[child]] for child in tree.topology.children[node]}
        return DraftTree(tree.topology, tuple(tokens[node] for node in range(len(tree.topology))))

    @cached_property
    def _inner(self) -> tuple[tuple[int, ...], ...]:
        """Nodes with children, level by level."""
        topology = self.topology
        inner = [node for node, children in enumerate(topology.children) if children]
        return tuple(tuple(node for node in inner if topology.depths[node] == depth) for depth in range(self.depth))

    @cached_property
    def _sources(self) -> tuple[tuple[int, int], ...]:
        """Row and place of each node's token among the candidates, the root left out."""
        return tuple((depth - 1, rank) for depth, rank in zip(self.topology.depths[1:], self.ranks[1:], strict=True))

    def cut(self, depth: int, width: int) -> StaticTree:
        """What is left of the tree with `depth` streams of `width` candidates each."""
        if depth >= self.depth and width >= self.width:
            return self
        return _cut(self, depth, width)


# Shapes recur pass after pass and text after text; whoever gets the same tree again gets its masks with it.
_full = lru_cache(maxsize=64)(full)


@lru_cache(maxsize=256)
def _cut(tree: StaticTree, depth: int, width: int) -> StaticTree:
    stays = [True]
    for parent, rank, level in zip(tree.parents[1:], tree.ranks[1:], tree.topology.depths[1:], strict=True):
        stays.append(stays[parent] and rank < width and level <= depth)
    keep = [node for node, kept in enumerate(stays) if kept]
    return StaticTree(tree.topology.subset(keep).parents, tuple(tree.ranks[node] for node in keep))


def drafter_for(settings: DecodeSettings) -> FullTree | BudgetTree | StaticTree:
    """The drafter that the settings ask for."""
    if settings.tree == "static":
        return StaticTree.of(settings.shape or ())
    return FullTree(settings.k) if settings.tree == "full" else BudgetTree(settings.nodes)


def largest_tree(settings: DecodeSettings, streams: int) -> int:
    """Most nodes that a tree of `streams` streams can have under these settings, those that are looked up left out."""
    if settings.tree == "static":
        return sum(depth <= streams for depth in StaticTree.of(settings.shape or ()).topology.depths)
    return settings.nodes if settings.tree == "budget" else sum(settings.k**level for level in range(streams + 1))
