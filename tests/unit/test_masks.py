"""The rendered mask: width, values, committed text, and windows by hand."""

import pytest
import torch
from torch import Tensor

from forestream.masks import additive
from forestream.packing import Pack
from forestream.topology import Topology, chain

TREE = Pack.tree(Topology((-1, 0, 0, 1)), (1, 2), 2)
CPU = torch.device("cpu")


def render(pack: Pack, committed: int, window: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    return additive(pack, [committed], pack.positions(committed, "ahead"), window, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zero_where_visible_and_the_smallest_finite_number_elsewhere(dtype: torch.dtype) -> None:
    mask = render(TREE, 3, dtype=dtype)
    assert mask.dtype == dtype
    assert mask.isfinite().all()
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


@pytest.mark.parametrize("committed", [0, 1, 5])
def test_committed_text_is_visible_to_all_and_the_pass_by_its_predicate(committed: int) -> None:
    mask = render(TREE, committed)
    assert mask.shape == (1, 1, 8, committed + 8)
    assert (mask[..., :committed] == 0).all()
    assert torch.equal(mask[:, 0, :, committed:] == 0, TREE.visible)


def test_rows_of_a_batch_have_masks_of_their_own() -> None:
    pack = Pack.text(3, torch.tensor([[0], [2]]), 1)
    mask = render(pack, 0)
    assert mask.shape == (2, 1, 4, 4)
    assert (mask[0, 0, 3] == 0).tolist() == [True, False, False, True]
    assert (mask[1, 0, 3] == 0).tolist() == [True, True, True, True]


def test_a_window_of_three_sees_itself_and_two_before() -> None:
    seen = render(Pack.tree(chain(3)), 2, window=3)[0, 0] == 0
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_a_window_counts_distance_in_positions_not_in_slots() -> None:
    """Siblings stand at one position; streams look back from the position they are ahead at."""
    seen = render(TREE, 2, window=2)[0, 0] == 0
    # Committed 0, 1; nodes at 2, 3, 3, 4; stream 1 of nodes 1 and 2 at 4, stream 2 at 5.
    expected = [
        [0, 1, 1, 0, 0, 0, 0, 0, 0, 0],  # node 0
        [0, 0, 1, 1, 0, 0, 0, 0, 0, 0],  # node 1
        [0, 0, 1, 0, 1, 0, 0, 0, 0, 0],  # node 2, a child of node 0
        [0, 0, 0, 1, 0, 1, 0, 0, 0, 0],  # node 3, a child of node 1
        [0, 0, 0, 1, 0, 0, 1, 0, 0, 0],  # stream 1 of node 1
        [0, 0, 0, 0, 1, 0, 0, 1, 0, 0],  # stream 1 of node 2
        [0, 0, 0, 0, 0, 0, 1, 0, 1, 0],  # stream 2 of node 1
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 1],  # stream 2 of node 2
    ]
    assert seen.int().tolist() == expected


@pytest.mark.parametrize("window", [1, 2, 50])
def test_every_slot_sees_itself_whatever_the_window(window: int) -> None:
    mask = render(TREE, 4, window)[0, 0]
    assert (mask[:, 4:].diagonal() == 0).all()


def test_a_window_as_long_as_the_text_hides_nothing() -> None:
    assert torch.equal(render(TREE, 4, window=100), render(TREE, 4))
    assert not torch.equal(render(TREE, 4, window=3), render(TREE, 4))
