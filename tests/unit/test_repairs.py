"""What stands in for a faulty kernel of vLLM's: no vLLM is needed here."""

from __future__ import annotations

import pytest
import torch

from forestream.vllm.repairs import spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_spread_over_the_tokens_of_their_requests(dtype: torch.dtype) -> None:
    values = torch.tensor([3, 0, 7, 5], dtype=dtype)
    ends = torch.tensor([2, 5, 5, 6], dtype=torch.int32)  # the third request has no token
    output = torch.full((6,), -1, dtype=dtype)
    spread(output, values, ends, 0, 1)
    assert output.tolist() == [3, 3, 1, 1, 1, 5]


def test_fractions_stay_fractions() -> None:
    output = torch.empty(3)
    spread(output, torch.tensor([0.25, 1.5]), torch.tensor([1, 3]), 0, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [0.25, 1.5, 1.5]
