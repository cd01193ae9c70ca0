"""The main stream's choice: the most probable token, exact ties to the lowest id."""

import pytest
import torch

from forestream.sampling import greedy


def test_the_most_probable_token_of_each_row() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 2.0], [-3.0, -2.0, -1.0]])) == [1, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [3, 64, 50000])
def test_exact_ties_go_to_the_lowest_id(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, vocabulary, dtype=dtype)
    logits[1, 1:] = 1.0
    logits[2, [vocabulary - 1, vocabulary - 2]] = 1.0
    assert greedy(logits) == [0, 1, vocabulary - 2]


def test_minus_infinity_is_never_chosen_while_there_is_another() -> None:
    assert greedy(torch.tensor([[float("-inf"), -1e30, float("-inf")]])) == [1]


def test_no_rows_no_choices() -> None:
    assert greedy(torch.empty(0, 5)) == []
