"""Pruning keeps ancestors and the first chain, for random trees and scores."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from forestream.pruning import KeepAbove, KeepBest, first_chain
from forestream.topology import Topology
from strategies import edges_of, topologies


def assert_whole_paths(tree: Topology, kept: tuple[int, ...]) -> None:
    assert list(kept) == sorted(set(kept))
    assert {step for node in kept for step in tree.path(node)} == set(kept)
    assert set(first_chain(tree)) <= set(kept)
    assert len(tree.subset(kept)) == len(kept)


@given(st.data())
def test_an_edge_below_the_threshold_takes_its_subtree_along(data: DataObject) -> None:
    tree = data.draw(topologies())
    edges = data.draw(edges_of(tree))
    threshold = data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.0, 1.0))
    kept = KeepAbove(threshold)(tree, edges)
    assert_whole_paths(tree, kept)
    chain = first_chain(tree)
    for node in range(len(tree)):
        falls = [step for step in tree.path(node) if edges[step] < threshold and step not in chain]
        assert (node in kept) == (not falls)


@given(st.data())
def test_a_lower_threshold_keeps_more(data: DataObject) -> None:
    tree = data.draw(topologies())
    edges = data.draw(edges_of(tree))
    low, high = sorted(data.draw(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0))))
    assert set(KeepAbove(high)(tree, edges)) <= set(KeepAbove(low)(tree, edges))


@given(st.data())
def test_the_best_nodes_are_a_tree_of_the_size_asked_for(data: DataObject) -> None:
    tree = data.draw(topologies())
    edges = data.draw(edges_of(tree))
    nodes = data.draw(st.integers(1, 30))
    kept = KeepBest(nodes)(tree, edges)
    assert_whole_paths(tree, kept)
    chain = first_chain(tree)
    assert len(kept) == max(min(nodes, len(tree)), len(chain))
    score = [prod(edges[step] for step in tree.path(node)) for node in range(len(tree))]
    worst = min((score[node] for node in kept if node not in chain), default=1.0)
    assert all(score[node] <= worst for node in range(len(tree)) if node not in kept)
