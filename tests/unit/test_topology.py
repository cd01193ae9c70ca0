"""Every tree of up to six nodes against definitions that walk from node to parent."""

from itertools import combinations

import pytest
import torch

from forestream.errors import ConfigError
from forestream.topology import Topology, chain, full
from strategies import all_trees

EVERY_TREE = [tree for nodes in range(1, 7) for tree in all_trees(nodes)]


def walk(tree: Topology, node: int) -> list[int]:
    """Nodes from `node` up to the root."""
    nodes = [node]
    while nodes[-1] != 0:
        nodes.append(tree.parents[nodes[-1]])
    return nodes


def test_there_are_as_many_trees_as_there_should_be() -> None:
    assert len(EVERY_TREE) == 1 + 1 + 2 + 6 + 24 + 120
    assert len({tree.parents for tree in EVERY_TREE}) == len(EVERY_TREE)


def test_depths_and_paths_and_ancestors_are_those_of_a_walk_to_the_root() -> None:
    for tree in EVERY_TREE:
        walks = [walk(tree, node) for node in range(len(tree))]
        assert tree.depths == tuple(len(nodes) - 1 for nodes in walks)
        assert tree.depth_tensor.tolist() == list(tree.depths)
        assert [tree.path(node) for node in range(len(tree))] == [tuple(reversed(nodes)) for nodes in walks]
        expected = [[other in nodes for other in range(len(tree))] for nodes in walks]
        assert tree.ancestors.dtype == torch.bool
        assert tree.ancestors.tolist() == expected


def test_children_are_the_inverse_of_parents_in_node_order() -> None:
    for tree in EVERY_TREE:
        expected = [tuple(n for n in range(1, len(tree)) if tree.parents[n] == node) for node in range(len(tree))]
        assert tree.children == tuple(expected)


def test_a_subset_keeps_ancestry_or_is_refused() -> None:
    for tree in EVERY_TREE:
        for size in range(len(tree)):
            for others in combinations(range(1, len(tree)), size):
                keep = (0, *others)
                if any(tree.parents[node] not in keep for node in others):
                    with pytest.raises(ConfigError, match="kept without their parents"):
                        tree.subset(keep)
                    continue
                rows = torch.tensor(keep)
                assert torch.equal(tree.subset(keep).ancestors, tree.ancestors[rows][:, rows])


def test_a_subset_is_renumbered_in_the_order_asked_for() -> None:
    tree = Topology((-1, 0, 0, 1, 1, 2))
    assert tree.subset((0, 2, 5)).parents == (-1, 0, 1)
    assert tree.subset((0, 2, 1, 3)).parents == (-1, 0, 0, 2)
    assert tree.subset(range(6)) == tree


@pytest.mark.parametrize("keep", [(), (1,), (1, 0), (0, 3, 1)])
def test_a_subset_needs_the_root_first_and_parents_before_children(keep: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Topology((-1, 0, 0, 1, 1, 2)).subset(keep)


@pytest.mark.parametrize("parents", [(), (0,), (-2,), (0, -1), (-1, 1), (-1, 2, 0), (-1, -1), (-1, 0, 3)])
def test_parents_must_form_a_rooted_tree_in_order(parents: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Topology(parents)


@pytest.mark.parametrize("length", range(1, 8))
def test_a_chain_is_plain_text(length: int) -> None:
    assert chain(length).depths == tuple(range(length))
    assert torch.equal(chain(length).ancestors, torch.ones(length, length, dtype=torch.bool).tril())


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("k", range(1, 5))
def test_a_full_tree_gives_every_node_above_the_leaves_k_children_level_by_level(depth: int, k: int) -> None:
    tree = full(depth, k)
    assert len(tree) == sum(k**level for level in range(depth + 1))
    assert list(tree.depths) == sorted(tree.depths)
    for node, children in enumerate(tree.children):
        assert len(children) == (k if tree.depths[node] < depth else 0)
    assert list(tree.parents) == sorted(tree.parents)
