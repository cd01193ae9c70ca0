"""Packed products in compiled code: the compiler calls the kernel itself, where its private parts are as expected."""

import sys

import pytest
import torch

from forestream.lowering import direct_calls, lower_products
from forestream.weights import packed_linear


def test_products_are_lowered_once() -> None:
    from torch._inductor.lowering import lowerings

    assert lower_products()
    lowering = lowerings[packed_linear]
    assert lower_products()
    assert lowerings[packed_linear] is lowering


def test_code_around_lowered_products_is_compiled_too() -> None:
    assert direct_calls(torch.device("cpu")) == {"cpp_wrapper": True}
    assert direct_calls(torch.device("meta")) == {}


def test_a_compiler_without_these_parts_keeps_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.mkldnn_ir", None)
    assert not lower_products()
    assert direct_calls(torch.device("cpu")) == {}
