"""Budget trees against all paths there are, full and static trees against their definitions, on random logits.

The same where a path sampler makes what a stream foretells depend on the token before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from forestream.drafting import BudgetTree, FullTree, RankDrafter, StaticTree
from forestream.ranking import best_ids, best_tokens
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


# --- along paths ----------------------------------------------------------------------------------------------


@dataclass
class Ahead:
    """Logits [G, V before, V]: what stream `level` + 1 foretells behind each token; the root counts as token 0."""

    logits: Tensor
    asked: int = 0

    @property
    def depth(self) -> int:
        return self.logits.shape[0]

    def behind(self, level: int, tokens: Sequence[int]) -> Tensor:
        self.asked += len(tokens)
        return torch.stack([self.logits[level, 0 if token == ROOT else token] for token in tokens])

    def ids(self, level: int, tokens: Sequence[int], k: int) -> list[list[int]]:
        return best_ids(self.behind(level, tokens), k)

    def scored(self, level: int, tokens: Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        return best_tokens(self.behind(level, tokens), k)


@st.composite
def aheads(draw: DrawFn) -> Ahead:
    """Streams that are told the token before, flat to peaked, without ties."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width = draw(st.integers(1, 5))
    logits = torch.randn(draw(st.integers(1, 3)), width, width, generator=generator)
    return Ahead(logits * draw(st.sampled_from([0.1, 1.0, 4.0])))


def best_sampled(ahead: Ahead, count: int) -> list[tuple[int, ...]]:
    """Of all paths there are, the most probable ones."""
    log_probs, (depth, width, _) = ahead.logits.log_softmax(-1), ahead.logits.shape
    score = {}
    for length in range(1, depth + 1):
        for path in product(range(width), repeat=length):
            before = (0, *path[:-1])
            score[path] = sum(float(log_probs[level, before[level], token]) for level, token in enumerate(path))
    return sorted(score, key=lambda path: (-score[path], path))[:count]


@given(st.one_of(stream_logits(), tied_logits()), st.integers(1, 60), st.integers(1, 4), static_trees())
def test_where_the_token_before_does_not_matter_trees_are_those_of_independent_streams(
    logits: Tensor, nodes: int, k: int, static: StaticTree
) -> None:
    ahead = Ahead(logits[:, None].expand(-1, logits.shape[1], -1))
    drafters: list[RankDrafter] = [BudgetTree(nodes), FullTree(k), static]
    for drafter in drafters:
        assert drafter.follow(ROOT, ahead) == drafter([ROOT], logits)


@given(aheads(), st.integers(1, 60))
def test_a_sampled_budget_tree_is_that_of_brute_force(ahead: Ahead, nodes: int) -> None:
    assert set(paths_of(BudgetTree(nodes).follow(ROOT, ahead))) == set(best_sampled(ahead, nodes - 1))


@given(aheads(), static_trees())
def test_a_sampled_static_tree_holds_the_tokens_of_its_ranks_behind_the_token_before(
    ahead: Ahead, tree: StaticTree
) -> None:
    best = ahead.logits.argsort(dim=-1, descending=True, stable=True).tolist()
    expected = []
    for node in range(1, len(tree.parents)):
        ranks = [tree.ranks[step] for step in tree.topology.path(node)[1:]]
        if len(ranks) > ahead.depth or max(ranks) >= ahead.logits.shape[2]:
            continue
        path: list[int] = []
        for level, rank in enumerate(ranks):
            path.append(best[level][path[-1] if path else 0][rank])
        expected.append(tuple(path))
    assert paths_of(tree.follow(ROOT, ahead)) == expected


@given(aheads(), st.integers(1, 4))
def test_a_sampled_full_tree_holds_the_best_behind_every_node(ahead: Ahead, k: int) -> None:
    best = ahead.logits.argsort(dim=-1, descending=True, stable=True).tolist()
    expected: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for depth in range(ahead.depth):
        level = [(*path, token) for path in level for token in best[depth][path[-1] if path else 0][:k]]
        expected += level
    assert paths_of(FullTree(k).follow(ROOT, ahead)) == expected


@pytest.mark.parametrize("drafter", [BudgetTree(1), FullTree(2), StaticTree((-1, 0, 1), (0, 0, 0))])
def test_without_streams_a_tree_is_its_root(drafter: RankDrafter) -> None:
    nothing = Ahead(torch.zeros(0, 3, 3))
    assert drafter.follow(ROOT, nothing).tokens == (ROOT,)
    assert nothing.asked == 0


def test_a_tree_asks_about_no_more_nodes_than_it_may_hold() -> None:
    ahead = Ahead(torch.randn(4, 50, 50, generator=torch.Generator().manual_seed(0)))
    BudgetTree(8).follow(ROOT, ahead)
    assert ahead.asked <= 1 + 3 * 7
    ahead.asked = 0
    StaticTree((-1, 0, 1, 2, 0), (0, 0, 0, 0, 1)).follow(ROOT, ahead)
    assert ahead.asked == 3
