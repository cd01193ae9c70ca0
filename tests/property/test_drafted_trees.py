"""Budget trees against all paths there are, full and static trees against their definitions, on random logits."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from forestream.drafting import BudgetTree, FullTree, StaticTree
from oracle import best_paths
from strategies import paths_of, stream_logits, tied_logits, topologies

ROOT = 99


def ranked(logits: Tensor) -> list[list[int]]:
    """Token ids of each row, best first, ties to the lowest id."""
    return [sorted(range(len(row)), key=lambda t, r=row: (-r[t], t)) for row in logits.tolist()]


@st.composite
def static_trees(draw: DrawFn) -> StaticTree:
    """A random shape whose ranks are in any order."""
    topology = draw(topologies(12))
    ranks = [0] * len(topology)
    for children in topology.children:
        size = len(children)
        chosen = draw(st.lists(st.integers(0, size + 2), min_size=size, max_size=size, unique=True))
        for child, rank in zip(children, chosen, strict=True):
            ranks[child] = rank
    return StaticTree(topology.parents, tuple(ranks))


@given(stream_logits(), st.integers(1, 60))
def test_a_budget_tree_is_that_of_brute_force(logits: Tensor, nodes: int) -> None:
    tree = BudgetTree(nodes)([ROOT], logits)
    assert tree.tokens[0] == ROOT
    assert set(paths_of(tree)) == set(best_paths(logits, nodes - 1))


@given(tied_logits(), st.integers(1, 60))
def test_with_exact_ties_it_is_that_of_brute_force_with_the_lowest_ids(logits: Tensor, nodes: int) -> None:
    tree = BudgetTree(nodes)([ROOT], logits)
    assert set(paths_of(tree)) == set(best_paths(logits, nodes - 1))


@given(stream_logits(), st.integers(2, 60))
def test_a_larger_budget_adds_nodes_and_takes_none_away(logits: Tensor, nodes: int) -> None:
    smaller, larger = (paths_of(BudgetTree(size)([ROOT], logits)) for size in (nodes - 1, nodes))
    assert larger[: len(smaller)] == smaller


@given(st.one_of(stream_logits(), tied_logits()), st.integers(1, 4))
def test_a_full_tree_holds_every_combination_of_the_best(logits: Tensor, k: int) -> None:
    best = [row[:k] for row in ranked(logits)]
    expected: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for tokens in best:
        level = [(*path, token) for path in level for token in tokens]
        expected += level
    assert paths_of(FullTree(k)([ROOT], logits)) == expected


@given(st.one_of(stream_logits(), tied_logits()), st.integers(1, 60))
def test_a_static_tree_of_a_budget_trees_shape_is_that_budget_tree(logits: Tensor, nodes: int) -> None:
    budget = BudgetTree(nodes)([ROOT], logits)
    best, depths = ranked(logits), budget.topology.depths
    ranks = [best[depth - 1].index(token) for depth, token in zip(depths[1:], budget.tokens[1:], strict=True)]
    assert StaticTree(budget.topology.parents, (0, *ranks))([ROOT], logits) == budget


@given(st.one_of(stream_logits(), tied_logits()), static_trees())
def test_a_static_tree_holds_the_tokens_of_its_ranks_as_far_as_there_are_streams_and_tokens(
    logits: Tensor, tree: StaticTree
) -> None:
    expected = []
    for node in range(1, len(tree.parents)):
        ranks = [tree.ranks[step] for step in tree.topology.path(node)[1:]]
        if len(ranks) <= logits.shape[0] and max(ranks) < logits.shape[1]:
            expected.append(tuple(row[rank] for row, rank in zip(ranked(logits), ranks, strict=False)))
    assert paths_of(tree([ROOT], logits)) == expected
