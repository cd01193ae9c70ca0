"""Every verdict on every tree of up to five nodes, against a search among all paths."""

from itertools import pairwise, product

import pytest

from forestream.drafting import DraftTree
from forestream.topology import Topology, chain
from forestream.verify import Verdict, verify
from strategies import all_trees

ROOT_TOKEN = 7


def numbered(topology: Topology) -> DraftTree:
    """Siblings carry 0, 1, 2, ... in node order."""
    tokens = [ROOT_TOKEN] * len(topology)
    for children in topology.children:
        for rank, child in enumerate(children):
            tokens[child] = rank
    return DraftTree(topology, tuple(tokens))


def search(tree: DraftTree, choices: tuple[int, ...]) -> Verdict:
    """Of all paths whose every token is the choice at the node before, the longest."""
    paths = [tree.topology.path(node) for node in range(len(tree.topology))]
    right = [path for path in paths if all(tree.tokens[b] == choices[a] for a, b in pairwise(path))]
    longest = max(right, key=len)
    return Verdict(longest, choices[longest[-1]])


@pytest.mark.parametrize("nodes", range(1, 6))
def test_every_verdict_on_every_tree(nodes: int) -> None:
    for topology in all_trees(nodes):
        tree = numbered(topology)
        # At each node the main stream chooses one of the children or a token that no child carries.
        for choices in product(*(range(len(children) + 1) for children in topology.children)):
            assert verify(tree, choices.__getitem__) == search(tree, choices), (topology, choices)


def test_all_accepted_some_accepted_none_accepted() -> None:
    tree = DraftTree(chain(4), (5, 6, 7, 8))
    assert verify(tree, (6, 7, 8, 9).__getitem__) == Verdict((0, 1, 2, 3), 9)
    assert verify(tree, (6, 7, 1, 9).__getitem__) == Verdict((0, 1, 2), 1)
    assert verify(tree, (1, 7, 8, 9).__getitem__) == Verdict((0,), 1)


def test_a_right_token_behind_a_wrong_one_does_not_count() -> None:
    tree = DraftTree(Topology((-1, 0, 0, 1, 2)), (5, 6, 7, 8, 8))
    assert verify(tree, (7, 8, 0, 0, 0).__getitem__) == Verdict((0, 2), 0)


def test_the_root_alone_gives_plain_decoding() -> None:
    assert verify(DraftTree(Topology((-1,)), (5,)), (9,).__getitem__) == Verdict((0,), 9)
