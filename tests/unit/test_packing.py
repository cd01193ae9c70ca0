"""Order of slots, positions, and the predicate against the oracle, for every small tree."""

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from forestream.packing import Pack
from forestream.topology import Topology, chain
from oracle import slots, visible
from strategies import all_trees


def subsets(nodes: int) -> Iterator[tuple[int, ...]]:
    for size in range(nodes + 1):
        yield from combinations(range(nodes), size)


def small_packs() -> Iterator[tuple[Topology, tuple[int, ...], int]]:
    for nodes in range(1, 5):
        for tree in all_trees(nodes):
            for carriers in subsets(nodes):
                for streams in (1, 2) if carriers else (0,):
                    yield tree, carriers, streams


def test_slots_are_mains_then_stream_1_of_all_carriers_then_stream_2() -> None:
    pack = Pack.tree(Topology((-1, 0, 0, 1)), (1, 3), 2)
    assert len(pack) == 8
    assert pack.mains == 4
    assert pack.nodes.tolist() == [[0, 1, 2, 3, 1, 3, 1, 3]]
    assert pack.indices.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


def test_slots_of_every_small_tree_are_in_the_agreed_order() -> None:
    for tree, carriers, streams in small_packs():
        pack = Pack.tree(tree, carriers, streams)
        found = list(zip(pack.nodes[0].tolist(), pack.indices.tolist(), strict=True))
        assert found == [slot[:2] for slot in slots(tree, carriers, streams)]
        assert len(pack) == len(found)


def test_the_predicate_is_the_oracles_for_every_small_tree() -> None:
    for tree, carriers, streams in small_packs():
        found = Pack.tree(tree, carriers, streams).visible
        assert torch.equal(found, visible(tree, carriers, streams)[None]), (tree, carriers, streams)


def test_a_main_slot_never_sees_a_stream() -> None:
    for tree, carriers, streams in small_packs():
        pack = Pack.tree(tree, carriers, streams)
        assert not pack.visible[:, : pack.mains, pack.mains :].any()


def test_without_carriers_there_are_no_streams() -> None:
    pack = Pack.tree(chain(3), (), 4)
    assert (len(pack), pack.streams) == (3, 0)
    assert torch.equal(pack.visible[0], chain(3).ancestors)


def test_text_is_causal_and_rows_may_differ_in_their_carriers() -> None:
    carriers = torch.tensor([[2, 3], [1, 0]])
    pack = Pack.text(4, carriers, 2)
    assert len(pack) == 8
    for row in range(2):
        assert torch.equal(pack.visible[row], visible(chain(4), carriers[row].tolist(), 2))
    assert pack.nodes.tolist() == [[0, 1, 2, 3, 2, 3, 2, 3], [0, 1, 2, 3, 1, 0, 1, 0]]


def test_padding_carriers_repeat_a_node_and_their_streams_do_not_meet() -> None:
    repeated = Pack.text(3, torch.tensor([[1, 0, 0]]), 2)
    assert torch.equal(repeated.visible[0], visible(chain(3), (1, 0, 0), 2))
    first, second = 3 + 1, 3 + 2  # stream 1 of node 0, twice
    assert repeated.nodes[0, first] == repeated.nodes[0, second] == 0
    assert not repeated.visible[0, first, second]
    assert not repeated.visible[0, second, first]


def test_streams_behind_a_committed_token_see_their_lower_streams() -> None:
    pack = Pack.behind(3)
    assert (len(pack), pack.mains) == (3, 0)
    assert pack.indices.tolist() == [1, 2, 3]
    assert torch.equal(pack.visible[0], torch.ones(3, 3, dtype=torch.bool).tril())
    assert pack.positions(10, "ahead").tolist() == [[10, 11, 12]]
    assert pack.positions(10, "same").tolist() == [[9, 9, 9]]


def test_behind_places_streams_where_the_pass_itself_would() -> None:
    """Committed up to and including the carrier, its streams have the positions they had beside it."""
    fused = Pack.tree(chain(1), (0,), 4)
    for rule in ("ahead", "same"):
        assert torch.equal(fused.positions(7, rule)[:, 1:], Pack.behind(4).positions(8, rule))


def test_positions_are_committed_length_plus_depth_and_streams_may_go_ahead() -> None:
    pack = Pack.tree(Topology((-1, 0, 0, 1)), (1, 3), 2)
    assert pack.positions(5, "same").tolist() == [[5, 6, 6, 7, 6, 7, 6, 7]]
    assert pack.positions(5, "ahead").tolist() == [[5, 6, 6, 7, 7, 8, 8, 9]]


@pytest.mark.parametrize("streams", [0, 1, 3])
def test_main_only_is_the_same_pass_without_its_streams(streams: int) -> None:
    tree = Topology((-1, 0, 0, 1))
    trunk = Pack.tree(tree, (0, 3), streams).main_only()
    assert (len(trunk), trunk.streams) == (4, 0)
    assert trunk.nodes.tolist() == [[0, 1, 2, 3]]
    assert trunk.indices.tolist() == [0, 0, 0, 0]
    assert torch.equal(trunk.visible[0], tree.ancestors)
    assert trunk.positions(2, "ahead").tolist() == [[2, 3, 3, 4]]


def test_main_only_keeps_the_number_of_rows() -> None:
    trunk = Pack.text(3, torch.tensor([[0], [2]]), 2).main_only()
    assert trunk.visible.shape == (2, 3, 3)
