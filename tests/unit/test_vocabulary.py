"""The draft vocabulary alone: which tokens it takes, and how columns and tokens are told apart."""

import math
from typing import Any

import pytest
import torch

from forestream.drafting import BudgetTree, DraftTree, FullTree, StaticTree
from forestream.errors import ConfigError
from forestream.ranking import best_ids, best_tokens
from forestream.vocabulary import OUTSIDE, DraftVocabulary

END = 2
TEXTS = [(5, 5, 7, END), (7, 5, 9, END), (8, 3, 9)]


# --- counting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "wanted"),
    [(None, [2, 3, 5, 7, 8, 9]), (1, [2]), (2, [2, 5]), (3, [2, 5, 7]), (4, [2, 5, 7, 9]), (5, [2, 3, 5, 7, 9])],
)
def test_the_most_frequent_tokens_are_taken_and_ties_go_to_the_lowest_id(size: int | None, wanted: list[int]) -> None:
    assert DraftVocabulary.counted(TEXTS, END, 10, size).ids.tolist() == wanted


def test_more_tokens_than_occur_are_not_taken() -> None:
    assert DraftVocabulary.counted(TEXTS, END, 10, 100).same(DraftVocabulary.counted(TEXTS, END, 10))


def test_the_end_of_text_is_always_in() -> None:
    assert DraftVocabulary.counted([(5, 5, 6)], END, 10, 2).ids.tolist() == [2, 5]
    assert DraftVocabulary.counted([], END, 10).ids.tolist() == [2]


def test_the_share_of_tokens_inside() -> None:
    vocabulary = DraftVocabulary([2, 5], 10)
    assert vocabulary.coverage(TEXTS) == 5 / 11
    assert vocabulary.coverage([]) == 1.0


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([], "shape \\(0,\\)"),
        ([[1, 2]], "shape \\(1, 2\\)"),
        ([1.0, 2.0], "float32"),
        ([True, False], "bool"),
        ([3, 1], "not increasing"),
        ([1, 1], "not increasing"),
        ([-1, 4], "ids -1 to 4; the model knows 0 to 9"),
        ([3, 10], "ids 3 to 10; the model knows 0 to 9"),
    ],
)
def test_what_is_no_vocabulary(ids: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        DraftVocabulary(torch.tensor(ids), 10)


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="size of a draft vocabulary is 0; expected 1"):
        DraftVocabulary.counted(TEXTS, END, 10, 0)


# --- columns and tokens ---------------------------------------------------------------------------------------


def test_columns_of_tokens() -> None:
    vocabulary = DraftVocabulary([2, 5, 9], 12)
    tokens = torch.tensor([[2, 9, 3], [11, -100, 5]])
    assert vocabulary.columns(tokens).tolist() == [[0, 2, OUTSIDE], [OUTSIDE, OUTSIDE, 1]]


def test_logits_spread_over_all_tokens() -> None:
    vocabulary = DraftVocabulary([1, 3], 5)
    assert vocabulary.spread(torch.tensor([[7.0, 8.0]])).tolist() == [[-math.inf, 7.0, -math.inf, 8.0, -math.inf]]
    assert vocabulary.spread(torch.empty(0, 48)).shape == (0, 5)


def test_vocabularies_are_the_same_by_their_tokens() -> None:
    assert DraftVocabulary([1, 3], 5).same(DraftVocabulary(torch.tensor([1, 3], dtype=torch.int32), 5))
    for other in (DraftVocabulary([1, 4], 5), DraftVocabulary([1], 5), DraftVocabulary([1, 3], 6), None):
        assert not DraftVocabulary([1, 3], 5).same(other)


# --- drafting out of one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 40, 1500])
def test_the_best_of_some_columns_are_the_best_of_all_where_the_others_are_shut(size: int) -> None:
    """Rounded logits tie often; 1500 columns are ranked in stripes."""
    draw = torch.Generator().manual_seed(size)
    vocabulary = DraftVocabulary(torch.randperm(3000, generator=draw)[:size].sort().values, 3000)
    logits = (torch.randn(4, size, generator=draw) * 3).round()
    whole, k = vocabulary.spread(logits), min(size, 9)
    assert best_ids(logits, k, vocabulary.ids) == best_ids(whole, k)
    ids, scores = best_tokens(logits, k, vocabulary.ids)
    wanted, likewise = best_tokens(whole, k)
    assert ids == wanted
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(likewise))


@pytest.mark.parametrize("drafter", [BudgetTree(9), FullTree(2), StaticTree((-1, 0, 0, 1), (0, 0, 1, 0))])
def test_trees_hold_tokens_and_not_columns(drafter: BudgetTree | FullTree | StaticTree) -> None:
    vocabulary = DraftVocabulary(range(1000, 1500, 7), 2000)
    logits = torch.randn(3, len(vocabulary), generator=torch.Generator().manual_seed(1))
    tree = drafter([3, 4], logits, vocabulary.ids)
    assert tree == drafter([3, 4], vocabulary.spread(logits))
    assert tree.tokens[0] == 4
    assert set(tree.tokens[1:]) <= set(vocabulary.ids.tolist())


@pytest.mark.parametrize("drafter", [BudgetTree(9), FullTree(2), StaticTree((-1, 0), (0, 0))])
def test_without_streams_the_tree_is_its_root(drafter: BudgetTree | FullTree | StaticTree) -> None:
    ids = DraftVocabulary([1, 3], 5).ids
    assert drafter([4], torch.empty(0, 2), ids) == DraftTree(drafter([4], torch.empty(0, 5)).topology, (4,))


def test_fewer_tokens_than_a_tree_takes() -> None:
    vocabulary = DraftVocabulary([1, 3], 5)
    assert best_ids(torch.tensor([[1.0, 2.0]]), 8, vocabulary.ids) == [[3, 1]]
    assert FullTree(4)([0], torch.tensor([[1.0, 2.0]]), vocabulary.ids).tokens == (0, 3, 1)
