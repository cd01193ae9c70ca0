"""Budget trees against all paths there are, and full trees against their definition, on random logits."""

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forestream.drafting import BudgetTree, FullTree
from oracle import best_paths
from strategies import paths_of, stream_logits, tied_logits

ROOT = 99


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
    best = [sorted(range(len(row)), key=lambda t, r=row: (-r[t], t))[:k] for row in logits.tolist()]
    expected: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for tokens in best:
        level = [(*path, token) for path in level for token in tokens]
        expected += level
    assert paths_of(FullTree(k)([ROOT], logits)) == expected
