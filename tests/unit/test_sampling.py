"""The main stream's choice: the most probable token, exact ties to the lowest id; or one drawn by seed, row, place."""

import pytest
import torch

from forestream.sampling import draw, greedy


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


# --- draws --------------------------------------------------------------------------------------------------------

SCORES = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 0.1, 0.6])


def draws(scores: torch.Tensor, count: int = 400, seed: int = 5) -> list[int]:
    return [draw(scores, seed, row, place) for row in range(count // 20) for place in range(20)]


def test_a_draw_depends_on_its_key_alone() -> None:
    """P01: not on the order of draws, on torch's or numpy's random state, and it leaves both as they were."""
    wanted = draws(SCORES)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    backwards = [draw(SCORES, 5, row, place) for row in reversed(range(20)) for place in reversed(range(20))]
    assert backwards[::-1] == wanted
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_part_of_the_key_counts_from_end_to_end() -> None:
    """P03: low bits and high bits of the seed; no pair of keys is mixed up."""
    keys = [(seed, row, place) for seed in (0, 1, 2**32, 2**64 - 1) for row in (0, 1, 2**31) for place in (0, 1, 4000)]
    flat = torch.zeros(50_000)
    assert len({draw(flat, *key) for key in keys}) > len(keys) - 3


def test_a_shift_of_all_scores_changes_nothing_and_rounding_next_to_nothing() -> None:
    """What passes of other shapes do to logits: an outcome flips only where two tokens come at nearly the same time."""
    noise = 1e-6 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    wanted = draws(SCORES, 4000)
    assert draws(SCORES + 4.0, 4000) == wanted
    assert sum(a != b for a, b in zip(draws(SCORES + noise, 4000), wanted, strict=True)) <= 1
    assert sum(a != b for a, b in zip(draws(SCORES + 1e4 * noise, 4000), wanted, strict=True)) > 1


def test_a_draw_that_is_sure_of_its_token_is_the_greedy_choice() -> None:
    assert set(draws(1e4 * SCORES)) == {2}
    only = torch.full((8,), -torch.inf)
    only[6] = -300.0
    assert set(draws(only)) == {6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_are_made_in_double_precision(dtype: torch.dtype) -> None:
    rounded = SCORES.to(dtype)
    assert draws(rounded) == draws(rounded.double())


def test_a_token_more_in_the_vocabulary_takes_only_what_is_its_own() -> None:
    """Races are run token by token: padding a vocabulary with forbidden tokens changes no draw."""
    padded = torch.cat([SCORES, torch.full((3,), -torch.inf)])
    assert draws(padded) == draws(SCORES)
