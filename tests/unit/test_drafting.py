"""Draft trees from stream logits: full and static ones node by node, budget trees against all paths there are."""

from itertools import product
from math import exp, inf, log

import pytest
import torch
from torch import Tensor

from forestream.config import DecodeSettings
from forestream.drafting import BudgetTree, DraftTree, FullTree, StaticTree, drafter_for, largest_tree
from forestream.errors import ConfigError
from forestream.ranking import best_ids, best_tokens
from forestream.topology import Topology, chain
from oracle import best_paths
from strategies import paths_of

ROOT = 99


def ranked(row: Tensor) -> list[int]:
    """Token ids, best first, ties to the lowest id."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


# --- the tree itself ------------------------------------------------------------------------------------------


def test_siblings_must_differ_and_cousins_need_not() -> None:
    topology = Topology((-1, 0, 0, 1, 2))
    assert DraftTree(topology, (1, 2, 3, 4, 4)).tokens == (1, 2, 3, 4, 4)
    with pytest.raises(ConfigError, match="siblings must differ"):
        DraftTree(topology, (1, 2, 2, 4, 4))


@pytest.mark.parametrize("tokens", [(), (1, 2), (1, 2, 3, 4)])
def test_every_node_has_a_token(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{len(tokens)} tokens for a tree of 3 nodes"):
        DraftTree(chain(3), tokens)


def test_a_subset_takes_its_tokens_along() -> None:
    tree = DraftTree(Topology((-1, 0, 0, 1, 2)), (1, 2, 3, 4, 5))
    assert tree.subset((0, 2, 4)) == DraftTree(chain(3), (1, 3, 5))
    with pytest.raises(ConfigError, match="without their parents"):
        tree.subset((0, 4))


def logs(*shares: float) -> tuple[float, ...]:
    return tuple(log(share) if share else -inf for share in shares)


def test_where_a_pass_most_likely_ends() -> None:
    """At a node that is probable and whose children are not: shares of 0.2, 0.1, 0.3, 0.25 and 0.15 here."""
    topology, tokens = Topology((-1, 0, 0, 1, 2)), (1, 2, 3, 4, 5)
    tree = DraftTree(topology, tokens, logs(1.0, 0.35, 0.45, 0.25, 0.15))
    assert tree.ends == (2, 3, 0, 4, 1)
    assert tree == DraftTree(topology, tokens), "what was thought of a tree is none of what it is"
    assert DraftTree(topology, tokens).ends == (0, 1, 2, 3, 4)
    # Without node 4 all of node 2's share is its own.
    assert tree.subset((0, 2, 1, 3)).ends == (1, 3, 0, 2)
    # Nobody knows how often what was looked up is right: it comes last, and takes nothing from its parent.
    assert tree.joined((2, 4, 7, 8), 2).ends == (2, 3, 0, 4, 1, 5, 6)


def test_budget_trees_know_what_their_nodes_are_worth() -> None:
    logits = torch.randn(3, 9)
    tree = BudgetTree(12)([ROOT], logits)
    laws = logits.log_softmax(dim=-1)
    assert tree.log_probs is not None
    for node in range(12):
        path = tree.topology.path(node)[1:]
        wanted = sum(float(laws[depth, tree.tokens[each]]) for depth, each in enumerate(path))
        assert tree.log_probs[node] == pytest.approx(wanted, abs=1e-5)
    left = [exp(own) for own in tree.log_probs]
    for node, parent in enumerate(tree.topology.parents[1:], start=1):
        left[parent] -= exp(tree.log_probs[node])
    assert [left[node] for node in tree.ends] == sorted(left, reverse=True)


# --- ranking --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 5, 1024, 1025, 3000, 4096])
def test_the_best_are_those_of_sorting_the_whole_vocabulary(vocabulary: int, dtype: torch.dtype) -> None:
    """In bfloat16 most of the candidates are tied."""
    logits = torch.randn(3, vocabulary).to(dtype)
    for k in (1, 2, 31, 256, 300):
        assert best_ids(logits, k) == [ranked(row)[:k] for row in logits]


@pytest.mark.parametrize("levels", [1, 2, 40])
def test_ties_at_the_border_of_the_best_go_to_the_lowest_ids(levels: int) -> None:
    logits = torch.randint(levels, (4, 5000)).float()
    for k in (1, 7, 31):
        assert best_ids(logits, k) == [ranked(row)[:k] for row in logits]


def test_the_best_may_lie_anywhere_in_the_vocabulary() -> None:
    """The places where dealing out the vocabulary could go wrong: one stripe, one run of ids, both ends."""
    for places in (range(5, 5000, 1024), range(2040, 2060), (0, 4999), range(4990, 5000)):
        logits = torch.full((1, 5000), float("-inf"))
        logits[0, list(places)] = torch.randn(len(places))
        assert best_ids(logits, 30) == [ranked(logits[0])[:30]]


def test_log_probabilities_are_those_of_the_whole_vocabulary() -> None:
    logits = torch.randn(3, 2000) * 4
    ids, log_probs = best_tokens(logits, 9)
    assert ids == best_ids(logits, 9)
    torch.testing.assert_close(torch.tensor(log_probs), logits.log_softmax(dim=1).gather(1, torch.tensor(ids)))


@pytest.mark.parametrize(("rows", "k"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_rank(rows: int, k: int) -> None:
    assert best_tokens(torch.randn(rows, 7), k) == ([[]] * rows, [[]] * rows)


# --- full -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", range(4))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_full_tree_puts_the_k_best_of_each_stream_under_every_node_of_the_level_above(k: int, streams: int) -> None:
    logits = torch.randn(streams, 11)
    tree = FullTree(k)([3, ROOT], logits)
    assert len(tree.topology) == sum(k**level for level in range(streams + 1)) == len(tree.tokens)
    assert tree.tokens[0] == ROOT
    assert list(tree.topology.depths) == sorted(tree.topology.depths)
    for node, children in enumerate(tree.topology.children):
        depth = tree.topology.depths[node]
        expected = ranked(logits[depth])[:k] if depth < streams else []
        assert [tree.tokens[child] for child in children] == expected


def test_a_full_tree_has_at_most_the_vocabulary_as_siblings() -> None:
    tree = FullTree(5)([ROOT], torch.tensor([[1.0, 3.0, 2.0]]))
    assert tree.tokens == (ROOT, 1, 2, 0)


@pytest.mark.parametrize("vocabulary", [3, 5, 64, 1000])
def test_a_full_tree_breaks_exact_ties_by_the_lowest_id(vocabulary: int) -> None:
    logits = torch.zeros(2, vocabulary)
    logits[1, 1:] = 1.0
    assert FullTree(2)([ROOT], logits).tokens == (ROOT, 0, 1, 1, 2, 1, 2)


# --- budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 13, 40, 200])
def test_a_budget_tree_holds_the_most_probable_of_all_paths(nodes: int, streams: int) -> None:
    for scale in (0.5, 3.0):
        logits = torch.randn(streams, 4) * scale
        tree = BudgetTree(nodes)([ROOT], logits)
        assert set(paths_of(tree)) == set(best_paths(logits, nodes - 1))
        assert len(tree.tokens) == min(nodes, 1 + sum(4**level for level in range(1, streams + 1)))


def test_a_certain_stream_makes_a_chain_and_an_uncertain_one_a_bush() -> None:
    certain, flat = torch.tensor([9.0, 0.0, 0.0, 0.0]), torch.tensor([0.3, 0.2, 0.1, 0.0])
    assert BudgetTree(4)([ROOT], certain.expand(3, -1)).topology == chain(4)
    assert BudgetTree(5)([ROOT], flat.expand(3, -1)).topology == Topology((-1, 0, 0, 0, 0))


def test_the_first_children_are_the_most_probable_ones() -> None:
    """Pruning relies on it: the path of first children is the best draft."""
    logits = torch.randn(3, 6)
    tree = BudgetTree(12)([ROOT], logits)
    for node, children in enumerate(tree.topology.children):
        tokens = [tree.tokens[child] for child in children]
        best = ranked(logits[tree.topology.depths[node]]) if children else []
        assert tokens == best[: len(tokens)]


@pytest.mark.parametrize("vocabulary", [3, 5, 10, 64, 1000])
@pytest.mark.parametrize("nodes", [2, 3])
def test_exact_ties_among_siblings_go_to_the_lowest_id(nodes: int, vocabulary: int) -> None:
    tree = BudgetTree(nodes)([ROOT], torch.zeros(1, vocabulary))
    assert tree.tokens == (ROOT, *range(nodes - 1))


def test_exact_ties_behind_a_better_token_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 100)
    logits[0, 70] = 1.0
    assert BudgetTree(4)([ROOT], logits).tokens == (ROOT, 70, 0, 1)


def test_exact_ties_between_branches_go_to_the_path_of_lowest_ids() -> None:
    """Both streams say .5, .3, .2: the paths (0, 1) and (1, 0) are equally probable, and one is left over."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(2, -1)
    assert paths_of(BudgetTree(6)([ROOT], logits)) == [(0,), (1,), (0, 0), (2,), (0, 1)]


@pytest.mark.parametrize("nodes", range(1, 14))
def test_with_exact_ties_a_budget_tree_is_still_that_of_brute_force(nodes: int) -> None:
    for levels in product([(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 1.0)], repeat=2):
        logits = torch.tensor(levels)
        assert set(paths_of(BudgetTree(nodes)([ROOT], logits))) == set(best_paths(logits, nodes - 1)), levels


def test_tokens_ruled_out_come_last() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    assert BudgetTree(3)([ROOT], logits).tokens == (ROOT, 2, 0)


# --- static ---------------------------------------------------------------------------------------------------


def test_a_static_tree_takes_each_nodes_rank_from_the_stream_of_its_depth() -> None:
    tree = StaticTree((-1, 0, 0, 1, 2, 3), (0, 0, 2, 1, 0, 4))
    logits = torch.randn(3, 11)
    a, b, c = (ranked(row) for row in logits)
    found = tree([3, ROOT], logits)
    assert found == DraftTree(Topology(tree.parents), (ROOT, a[0], a[2], b[1], b[0], c[4]))
    assert found.topology is tree([3, ROOT], -logits).topology, "masks are made once"


def test_a_static_tree_is_cut_where_streams_or_tokens_run_out() -> None:
    tree = StaticTree((-1, 0, 0, 1, 2, 3), (0, 3, 0, 0, 1, 0))
    assert tree.cut(1, 4) == StaticTree((-1, 0, 0), (0, 3, 0))
    assert tree.cut(3, 3) == StaticTree((-1, 0, 1), (0, 0, 1))
    assert tree.cut(3, 1) == StaticTree((-1, 0), (0, 0))
    assert tree.cut(0, 4) == tree.cut(3, 0) == StaticTree((-1,), (0,))
    assert tree.cut(9, 9) is tree
    assert tree.cut(2, 4) is tree.cut(2, 4), "masks of the cut trees are made once, too"
    assert tree([ROOT], torch.tensor([[1.0, 3.0, 2.0]])).tokens == (ROOT, 1)


def test_exact_ties_in_a_static_tree_go_to_the_lowest_id() -> None:
    tree = StaticTree((-1, 0, 0, 1), (0, 1, 0, 2))
    assert tree([ROOT], torch.zeros(2, 5)).tokens == (ROOT, 1, 0, 2)


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((-1, 0), (0,), "1 ranks for a tree of 2 nodes"),
        ((-1, 0, 0), (0, 1, 1), "siblings of different ranks"),
        ((-1, 0), (0, -1), "rank of node 1 of shape is -1"),
        ((-1, 0), (1, 0), "the root has rank 1"),
        ((-1, 1), (0, 0), "node 1 has parent 1"),
        ((), (), "expected -1 for node 0"),
    ],
)
def test_a_static_tree_checks_its_shape(parents: tuple[int, ...], ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StaticTree(parents, ranks)


def test_a_static_tree_can_be_written_down_and_read_again() -> None:
    tree = StaticTree((-1, 0, 0, 1), (0, 1, 0, 2))
    assert tree.shape == ((0, 1), (0, 0), (1, 2))
    assert StaticTree.of(tree.shape) == tree
    assert StaticTree.of(()) == StaticTree((-1,), (0,))


# --- all ------------------------------------------------------------------------------------------------------

STATIC = StaticTree((-1, 0, 0, 1, 3, 4), (0, 0, 1, 0, 0, 0))


@pytest.mark.parametrize("drafter", [FullTree(2), BudgetTree(9), STATIC])
@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_the_rows_of_logits_bound_the_depth(drafter: FullTree | BudgetTree | StaticTree, rows: int) -> None:
    logits = torch.zeros(rows, 3)
    logits[:, 0] = 50.0  # certain: every budget tree would like to be deeper
    tree = drafter([1, 2, ROOT], logits)
    assert max(tree.topology.depths) == rows
    assert tree.tokens[0] == ROOT


@pytest.mark.parametrize("drafter", [BudgetTree(1), FullTree(3)])
def test_the_root_alone(drafter: FullTree | BudgetTree) -> None:
    rows = 2 if isinstance(drafter, BudgetTree) else 0
    assert drafter([ROOT], torch.randn(rows, 5)) == DraftTree(chain(1), (ROOT,))


@pytest.mark.parametrize("drafter", [FullTree(2), BudgetTree(9), STATIC])
def test_half_precision_logits_are_taken(drafter: FullTree | BudgetTree | StaticTree) -> None:
    logits = torch.tensor([[0.0, 4.0, 2.0], [1.0, 0.0, 5.0]])
    assert drafter([ROOT], logits.bfloat16()) == drafter([ROOT], logits)


def test_settings_name_the_drafter() -> None:
    assert drafter_for(DecodeSettings(tree="full", k=3, nodes=7)) == FullTree(3)
    assert drafter_for(DecodeSettings(tree="budget", k=3, nodes=7)) == BudgetTree(7)
    assert drafter_for(DecodeSettings(tree="static", shape=STATIC.shape)) == STATIC


@pytest.mark.parametrize("streams", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        DecodeSettings(tree="full", k=2),
        DecodeSettings(tree="full", k=1),
        DecodeSettings(nodes=5),
        DecodeSettings(tree="static", shape=STATIC.shape),
    ],
)
def test_no_tree_is_larger_than_announced(settings: DecodeSettings, streams: int) -> None:
    tree = drafter_for(settings)([ROOT], torch.randn(streams, 9))
    assert len(tree.tokens) <= largest_tree(settings, streams)
    if settings.tree != "budget":
        assert len(tree.tokens) == largest_tree(settings, streams)
