"""Mask = predicate, element by element, and positions, for random trees in random order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from forestream.masks import additive
from forestream.packing import Pack
from forestream.topology import Topology
from oracle import sees, slots, visible
from strategies import carriers_in, topologies

CPU = torch.device("cpu")


@given(st.data())
def test_visible_is_the_predicate(data: DataObject) -> None:
    tree = data.draw(topologies())
    carriers = data.draw(carriers_in(tree))
    streams = data.draw(st.integers(1, 3)) if carriers else 0
    assert torch.equal(Pack.tree(tree, carriers, streams).visible[0], visible(tree, carriers, streams))


@settings(max_examples=1000)
@given(topologies(most=40))
def test_without_streams_the_mask_is_the_relation_of_ancestors(tree: Topology) -> None:
    """Wide as committed text and candidates together, and nothing combined twice."""
    pack = Pack.tree(tree)
    mask = additive(pack, [3], pack.positions(3, "same"), None, torch.float32, CPU)
    expected = [[1] * 3 + [int(k in tree.path(q)) for k in range(len(tree))] for q in range(len(tree))]
    assert (mask[0, 0] == 0).int().tolist() == expected


@given(st.data())
def test_rows_with_ragged_carriers_are_each_their_own_tree(data: DataObject) -> None:
    """Texts of a batch: padding carriers repeat a node."""
    length = data.draw(st.integers(1, 8))
    streams = data.draw(st.integers(1, 3))
    width = data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, length - 1), min_size=width, max_size=width)
    carriers = data.draw(st.lists(row, min_size=1, max_size=3))
    pack = Pack.text(length, torch.tensor(carriers), streams)
    text = Topology(tuple(range(-1, length - 1)))
    for own, found in zip(carriers, pack.visible, strict=True):
        assert torch.equal(found, visible(text, own, streams))


@given(st.data())
def test_a_rendered_mask_is_the_predicate_within_the_window(data: DataObject) -> None:
    tree = data.draw(topologies(most=12))
    carriers = data.draw(carriers_in(tree))
    streams = data.draw(st.integers(1, 3)) if carriers else 0
    committed = data.draw(st.integers(0, 9))
    window = data.draw(st.none() | st.integers(1, 12))
    rule = data.draw(st.sampled_from(["ahead", "same"]))
    pack = Pack.tree(tree, carriers, streams)
    mask = additive(pack, [committed], pack.positions(committed, rule), window, torch.float32, CPU)

    def place(slot: tuple[int, ...]) -> int:
        return committed + len(tree.path(slot[0])) - 1 + (slot[1] if rule == "ahead" else 0)

    every = slots(tree, carriers, streams)
    assert mask.shape == (1, 1, len(every), committed + len(every))
    for q, query in enumerate(every):
        near = [window is None or place(query) - p < window for p in (*range(committed), *map(place, every))]
        seen = [True] * committed + [sees(tree, carriers, query, key) for key in every]
        expected = [a and b for a, b in zip(seen, near, strict=True)]
        assert (mask[0, 0, q] == 0).tolist() == expected


@given(st.data())
def test_positions_are_committed_length_plus_depth_in_whatever_order_nodes_come(data: DataObject) -> None:
    tree = data.draw(topologies())
    committed = data.draw(st.integers(0, 1000))
    # Another order of the same nodes, parents first: renumbered, each node has to stay where it was.
    order = [0]
    while len(order) < len(tree):
        ready = [n for n in range(len(tree)) if n not in order and tree.parents[n] in order]
        order.append(data.draw(st.sampled_from(ready)))
    shuffled = tree.subset(order)
    found = Pack.tree(shuffled).positions(committed, "ahead")[0].tolist()
    assert found == [committed + len(tree.path(node)) - 1 for node in order]


@given(st.data())
def test_streams_stand_ahead_of_their_carrier_or_where_it_is(data: DataObject) -> None:
    tree = data.draw(topologies(most=10))
    carriers = data.draw(carriers_in(tree))
    streams = data.draw(st.integers(1, 4)) if carriers else 0
    pack = Pack.tree(tree, carriers, streams)
    for slot, (node, index, *_) in enumerate(slots(tree, carriers, streams)):
        place = 5 + len(tree.path(node)) - 1
        assert int(pack.positions(5, "ahead")[0, slot]) == place + index
        assert int(pack.positions(5, "same")[0, slot]) == place


@given(st.data())
def test_a_subtree_sees_what_it_saw_in_the_whole_tree(data: DataObject) -> None:
    """After pruning, the survivors' rows of the predicate are those of the tree that was offered."""
    tree = data.draw(topologies())
    kept = [0]
    for node in range(1, len(tree)):
        if tree.parents[node] in kept and data.draw(st.booleans()):
            kept.append(node)
    rows = torch.tensor(kept)
    assert torch.equal(Pack.tree(tree.subset(kept)).visible[0], Pack.tree(tree).visible[0][rows][:, rows])
