"""Fixed draft trees: expected tokens against every outcome weighed, the best tree against every tree there is."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from forestream.cost import best_static_tree, expected_tokens
from forestream.errors import ConfigError

Table = tuple[tuple[float, ...], ...]
Ranks = tuple[int, ...]


@st.composite
def tables(draw: DrawFn, depth: int = 3, ranks: int = 2) -> Table:
    """Conditional acceptance by depth and rank, in no order, rows of any length; ties, zeros and ones are common."""
    chance = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0.0, 1.0))
    rows = draw(st.lists(st.lists(chance, min_size=1, max_size=ranks), min_size=1, max_size=depth))
    return tuple(tuple(row) for row in rows)


def shares(table: Table) -> Table:
    """The table with every row scaled to a sum of at most 1: chances of candidates that exclude each other."""
    return tuple(tuple(chance / max(sum(row), 1.0) for chance in row) for row in table)


def all_paths(accept: Table) -> list[Ranks]:
    """Ranks from the root to every node that the table allows."""
    rows = [range(len(row)) for row in accept]
    return [path for depth in range(1, len(rows) + 1) for path in product(*rows[:depth])]


def chance_of(path: Ranks, accept: Table) -> float:
    return prod(accept[depth][rank] for depth, rank in enumerate(path))


def all_trees(accept: Table, nodes: int) -> Iterator[tuple[Ranks, ...]]:
    """Every tree of `nodes` nodes as the paths of its nodes, the root left out."""
    for chosen in combinations(all_paths(accept), nodes - 1):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


def as_tree(paths: tuple[Ranks, ...]) -> tuple[list[int], list[int]]:
    """Parents and ranks of a tree given by its paths; shorter paths come first."""
    numbers = {(): 0, **{path: number for number, path in enumerate(paths, start=1)}}
    return [-1, *(numbers[path[:-1]] for path in paths)], [0, *(path[-1] for path in paths)]


def paths_of(parents: tuple[int, ...], ranks: tuple[int, ...]) -> list[Ranks]:
    paths: list[Ranks] = [()]
    for parent, rank in zip(parents[1:], ranks[1:], strict=True):
        paths.append((*paths[parent], rank))
    return paths[1:]


def simulated(paths: tuple[Ranks, ...], accept: Table) -> float:
    """Expected tokens as a sum over everything the main stream may choose: a rank per depth, or none of them."""
    outcomes = [[*enumerate(row), (None, 1 - sum(row))] for row in accept]
    total = 0.0
    for choices in product(*outcomes):
        walk: tuple[Any, ...] = ()
        for rank, _ in choices:
            if (*walk, rank) not in paths:
                break
            walk = (*walk, rank)
        total += prod(chance for _, chance in choices) * (1 + len(walk))
    return total


def test_expected_tokens_by_hand() -> None:
    accept = ((0.5, 0.25), (0.8, 0.1))
    assert expected_tokens((-1,), (0,), accept) == 1.0
    assert expected_tokens((-1,), (0,), ()) == 1.0
    assert expected_tokens((-1, 0, 1), (0, 0, 0), accept) == pytest.approx(1 + 0.5 + 0.5 * 0.8)
    assert expected_tokens((-1, 0, 0, 2, 1), (0, 0, 1, 1, 0), accept) == pytest.approx(
        1 + 0.5 + 0.25 + 0.25 * 0.1 + 0.5 * 0.8
    )


@given(tables(), st.integers(1, 5), st.data())
def test_expected_tokens_are_those_of_every_outcome_weighed(table: Table, nodes: int, data: st.DataObject) -> None:
    accept = shares(table)
    trees = list(all_trees(accept, nodes))
    assume(trees)
    tree = data.draw(st.sampled_from(trees))
    assert expected_tokens(*as_tree(tree), accept) == pytest.approx(simulated(tree, accept))


@settings(deadline=None)
@given(tables(), st.integers(1, 6))
def test_no_tree_of_that_size_brings_more(accept: Table, nodes: int) -> None:
    parents, ranks = best_static_tree(accept, nodes)
    size = min(nodes, 1 + len(all_paths(accept)))
    assert len(parents) == len(ranks) == size
    best = max(1 + sum(chance_of(path, accept) for path in tree) for tree in all_trees(accept, size))
    assert expected_tokens(parents, ranks, accept) == pytest.approx(best)


@given(tables(depth=4, ranks=4), st.integers(1, 40))
def test_the_best_tree_is_well_formed(accept: Table, nodes: int) -> None:
    parents, ranks = best_static_tree(accept, nodes)
    assert (parents[0], ranks[0]) == (-1, 0)
    assert all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
    paths = paths_of(parents, ranks)
    assert len(set(paths)) == len(paths)
    # Nodes come by falling chance, siblings by falling chance and then by rank, with none left out.
    chances = [chance_of(path, accept) for path in paths]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(chances))
    for parent in range(len(parents)):
        siblings = [rank for rank, above in zip(ranks[1:], parents[1:], strict=True) if above == parent]
        if siblings:
            row = accept[len(paths[parent - 1]) if parent else 0]
            assert siblings == sorted(range(len(row)), key=lambda r: (-row[r], r))[: len(siblings)]
    # A smaller budget gives a prefix.
    smaller = best_static_tree(accept, max(1, nodes - 1))
    assert smaller == (parents[: len(smaller[0])], ranks[: len(smaller[1])])


def test_a_row_out_of_order_keeps_its_ranks() -> None:
    assert best_static_tree(((0.1, 0.7, 0.2),), 3) == ((-1, 0, 0), (0, 1, 2))


def test_ties_go_to_the_lowest_rank_and_then_to_the_earliest_parent() -> None:
    assert best_static_tree(((0.5, 0.5),), 2) == ((-1, 0), (0, 0))
    # After both first-level nodes (0.5 each) four children tie at 0.25.
    level = ((0.5, 0.5), (0.5, 0.5))
    assert best_static_tree(level, 7) == ((-1, 0, 0, 1, 2, 1, 2), (0, 0, 1, 0, 0, 1, 1))


def test_a_table_that_ends_ends_the_tree() -> None:
    assert best_static_tree((), 8) == ((-1,), (0,))
    assert best_static_tree(((0.5,), (0.5,)), 8) == ((-1, 0, 1), (0, 0, 0))


@pytest.mark.parametrize(
    ("parents", "ranks", "told"),
    [
        ((), (), "expected -1 for node 0"),
        ((0,), (0,), "expected -1 for node 0"),
        ((-1, 1), (0, 0), "node 1 has parent 1; expected a node from 0 to 0"),
        ((-1, -1), (0, 0), "node 1 has parent -1"),
        ((-1, 0), (0,), "1 ranks for a tree of 2 nodes"),
        ((-1, 0, 0), (0, 1, 1), "children of node 0 have rank 1 twice"),
        ((-1, 0), (0, 2), r"rank 2 at depth 1; accept has no such entry \(its rows have 2, 1 ranks\)"),
        ((-1, 0), (0, -1), "rank -1 at depth 1"),
        ((-1, 0, 1, 2), (0, 0, 0, 0), "rank 0 at depth 3"),
    ],
)
def test_impossible_trees_are_refused(parents: tuple[int, ...], ranks: tuple[int, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        expected_tokens(parents, ranks, ((0.5, 0.2), (0.5,)))


@pytest.mark.parametrize("chance", [-0.1, 1.1, float("nan"), None])
def test_chances_lie_between_0_and_1(chance: Any) -> None:
    for ask in (lambda t: expected_tokens((-1,), (0,), t), lambda t: best_static_tree(t, 3)):
        with pytest.raises(ConfigError, match=r"accept at depth 2, rank 1, is .*; expected a number from 0 to 1"):
            ask(((0.5,), (0.5, chance)))
    with pytest.raises(ConfigError, match="nodes is 0; expected"):
        best_static_tree(((0.5,),), 0)
