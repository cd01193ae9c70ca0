"""Keep rules on every small tree, the scores of edges, and the scorer before training."""

from itertools import product

import pytest
import torch

from forestream.config import DecodeSettings
from forestream.pruning import ExitScorer, KeepAbove, KeepBest, edge_scores, first_chain, keep_rule
from forestream.topology import Topology, chain
from strategies import all_trees

SMALL_TREES = [tree for nodes in range(1, 6) for tree in all_trees(nodes)]
#        0
#      1   2
#     3 4   5
#     6
TREE = Topology((-1, 0, 0, 1, 1, 2, 3))


def scored() -> list[tuple[Topology, tuple[float, ...]]]:
    """Every small tree with every choice of edges among three scores."""
    return [(tree, (1.0, *edges)) for tree in SMALL_TREES for edges in product((0.25, 0.5, 1.0), repeat=len(tree) - 1)]


def closed(tree: Topology, kept: tuple[int, ...]) -> bool:
    return 0 in kept and all(tree.parents[node] in kept for node in kept if node)


def test_the_first_chain_follows_first_children() -> None:
    assert first_chain(TREE) == (0, 1, 3, 6)
    assert first_chain(Topology((-1, 0, 0, 2))) == (0, 1)
    assert first_chain(chain(1)) == (0,)


def test_an_edge_below_the_threshold_drops_its_whole_subtree() -> None:
    edges = (1.0, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9)
    assert KeepAbove(0.5)(TREE, edges) == (0, 1, 3, 4, 6)


def test_the_first_chain_survives_any_threshold() -> None:
    assert KeepAbove(0.5)(TREE, (1.0, *[0.0] * 6)) == (0, 1, 3, 6)
    # What hangs on the surviving chain is judged by its own edge.
    assert KeepAbove(0.5)(TREE, (1.0, 0.0, 0.0, 0.0, 0.5, 0.9, 0.0)) == (0, 1, 3, 4, 6)


def test_keep_above_keeps_a_node_iff_nothing_on_its_way_is_dropped() -> None:
    for tree, edges in scored():
        chain_nodes = first_chain(tree)
        expected = [
            node
            for node in range(len(tree))
            if all(step in chain_nodes or edges[step] >= 0.5 for step in tree.path(node))
        ]
        assert KeepAbove(0.5)(tree, edges) == tuple(expected)


def test_threshold_0_keeps_all_and_threshold_1_keeps_the_certain() -> None:
    for tree, edges in scored():
        assert KeepAbove(0.0)(tree, edges) == tuple(range(len(tree)))
        kept = KeepAbove(1.0)(tree, edges)
        assert all(edges[node] == 1.0 or node in first_chain(tree) for node in kept)
        assert closed(tree, kept)
    assert KeepAbove(1.0)(TREE, (1.0, 1.0, 1.0, 0.99, 1.0, 0.99, 1.0)) == (0, 1, 2, 3, 4, 6)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 9])
def test_keep_best_keeps_the_best_products_along_with_the_first_chain(nodes: int) -> None:
    for tree, edges in scored():
        kept = KeepBest(nodes)(tree, edges)
        assert len(kept) == max(min(nodes, len(tree)), len(first_chain(tree)))
        assert set(first_chain(tree)) <= set(kept)
        assert closed(tree, kept)
        assert list(kept) == sorted(kept)
        score = [float(torch.tensor([edges[step] for step in tree.path(n)]).prod()) for n in range(len(tree))]
        chosen = [score[node] for node in kept if node not in first_chain(tree)]
        dropped = [score[node] for node in range(len(tree)) if node not in kept]
        assert min(chosen, default=1.0) >= max(dropped, default=0.0)


def test_keep_best_breaks_ties_by_node_order() -> None:
    assert KeepBest(5)(TREE, (1.0, *[0.5] * 6)) == (0, 1, 2, 3, 6)
    assert KeepBest(6)(TREE, (1.0, *[1.0] * 6)) == (0, 1, 2, 3, 4, 6)


def test_settings_name_the_rule() -> None:
    assert keep_rule(DecodeSettings()) is None
    assert keep_rule(DecodeSettings(prune_below=0.25)) == KeepAbove(0.25)
    assert keep_rule(DecodeSettings(prune_to=3)) == KeepBest(3)


def test_edge_scores_are_probabilities_of_the_child_at_its_parent() -> None:
    logits = torch.randn(4, 6)
    tokens = (5, 2, 3, 2)
    scores = edge_scores(Topology((-1, 0, 0, 2)), tokens, logits)
    law = logits.softmax(dim=-1)
    expected = [1.0, float(law[0, 2]), float(law[0, 3]), float(law[2, 2])]
    assert scores == pytest.approx(expected, abs=1e-6)


def test_edge_scores_of_the_root_alone() -> None:
    assert edge_scores(chain(1), (3,), torch.randn(1, 6)) == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edge_scores_never_exceed_1(dtype: torch.dtype) -> None:
    """A child that scored above its parent could be kept without it."""
    logits = torch.zeros(8, 50, dtype=dtype)
    logits[:, 7] = torch.tensor([0.0, 1.0, 5.0, 10.0, 15.0, 20.0, 50.0, 1000.0])
    scores = edge_scores(chain(8), (7,) * 8, logits)
    assert max(scores) <= 1.0
    assert scores[1:] == sorted(scores[1:])
    assert scores[7] == 1.0


def test_the_scorer_is_the_identity_until_it_is_trained() -> None:
    scorer = ExitScorer(12, 3)
    states = torch.randn(2, 5, 12)
    assert torch.equal(scorer(states), states)
    with torch.no_grad():
        scorer.up.fill_(0.5)
    assert not torch.allclose(scorer(states), states, atol=1e-2)
    assert sum(p.numel() for p in scorer.parameters()) == 2 * 3 * 12
