"""Trees, drafts and numbers: every small tree there is, and random ones for the property tests."""

from collections.abc import Iterator
from itertools import product

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from forestream.drafting import DraftTree
from forestream.topology import Topology


def all_trees(nodes: int) -> Iterator[Topology]:
    """Every tree of exactly `nodes` nodes."""
    for parents in product(*(range(node) for node in range(1, nodes))):
        yield Topology((-1, *parents))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens behind the root on the way to each node, the root left out."""
    paths = [tree.topology.path(node) for node in range(1, len(tree.topology))]
    return [tuple(tree.tokens[node] for node in path[1:]) for path in paths]


@st.composite
def topologies(draw: DrawFn, most: int = 24) -> Topology:
    """From chains over bushes to stars, with nodes in any order that puts parents first."""
    nodes = draw(st.integers(1, most))
    reach = draw(st.sampled_from([1, 2, 5, most]))  # how far back a parent may lie: 1 makes a chain
    parents = [draw(st.integers(max(0, node - reach), node - 1)) for node in range(1, nodes)]
    return Topology((-1, *parents))


@st.composite
def draft_trees(draw: DrawFn, most: int = 16, vocabulary: int = 70) -> DraftTree:
    """A random tree with random tokens; siblings differ."""
    topology = draw(topologies(most))
    tokens = [draw(st.integers(0, vocabulary - 1))] * len(topology)
    for children in topology.children:
        chosen = draw(
            st.lists(st.integers(0, vocabulary - 1), min_size=len(children), max_size=len(children), unique=True)
        )
        for child, token in zip(children, chosen, strict=True):
            tokens[child] = token
    return DraftTree(topology, tuple(tokens))


@st.composite
def carriers_in(draw: DrawFn, topology: Topology) -> tuple[int, ...]:
    """Some of the nodes, in any order."""
    nodes = draw(st.lists(st.integers(0, len(topology) - 1), unique=True, max_size=6))
    return tuple(nodes)


@st.composite
def stream_logits(draw: DrawFn, rows: int = 3, vocabulary: int = 5) -> Tensor:
    """Logits of streams, flat to peaked, without ties."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, rows)), draw(st.integers(1, vocabulary)))
    return torch.randn(shape, generator=generator) * draw(st.sampled_from([0.1, 1.0, 4.0]))


@st.composite
def tied_logits(draw: DrawFn, rows: int = 3, vocabulary: int = 5) -> Tensor:
    """Logits of streams that are whole numbers: full of exact ties."""
    width = draw(st.integers(1, vocabulary))
    row = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=rows)), dtype=torch.float32)


def edges_of(topology: Topology) -> SearchStrategy[tuple[float, ...]]:
    """A score for every edge, 1 at the root; ties, zeros and ones are common."""
    score = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0.0, 1.0))
    others = st.lists(score, min_size=len(topology) - 1, max_size=len(topology) - 1)
    return others.map(lambda found: (1.0, *found))
