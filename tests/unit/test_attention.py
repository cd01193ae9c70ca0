"""Folding grouped heads: what the host library computes with repeated keys and values, and only where it may be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from forestream.attention import GROUPED, group_heads, grouped_attention
from forestream.packing import Pack
from forestream.ports import port_for
from forestream.ports.parity import probe
from forestream.topology import Topology
from subject import stock_text
from wrapped import prompt, wrapped
from zoo import HOSTS, custom

TREE = Topology((-1, 0, 0, 1))
QUERIES, KEYS = 8, 13
MIN = torch.finfo(torch.float32).min


def additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, MIN)


def tree_mask() -> Tensor:
    """A tree with streams behind committed text: rows see different keys, in no particular order."""
    seen = torch.ones(1, QUERIES, KEYS, dtype=torch.bool)
    seen[:, :, KEYS - QUERIES :] = Pack.tree(TREE, (1, 3), 2).visible
    return additive(seen)[:, None]


MASKS = {
    "causal": additive(torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)),
    "tree": tree_mask(),
    "own key only": additive(torch.eye(QUERIES, KEYS, dtype=torch.bool)[None, None]),
    "row by row": additive(torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(0)) < 0.6),
    "finite": torch.randn(1, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)),
    "none": None,
}


def module(groups: int, training: bool = False) -> Any:
    """What attention functions read off the attention module."""
    return SimpleNamespace(num_key_value_groups=groups, training=training, is_causal=True)


def tensors(heads: int, groups: int, value: int = 16, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    kept = heads // groups
    return (
        torch.randn(rows, heads, QUERIES, 16),
        torch.randn(rows, kept, KEYS, 16),
        torch.randn(rows, kept, KEYS, value),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scaling", [None, 0.07])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (6, 3), (8, 8)])
def test_folded_heads_attend_as_repeated_keys_and_values(
    heads: int, groups: int, scaling: float | None, mask: str
) -> None:
    query, key, value = tensors(heads, groups)
    found, weights = grouped_attention(module(groups), query, key, value, MASKS[mask], scaling)
    wanted, _ = eager_attention_forward(module(groups), query, key, value, MASKS[mask], scaling or 16**-0.5)
    assert weights is None
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_values_may_be_wider_than_keys() -> None:
    query, key, value = tensors(6, 3, value=20)
    found, _ = grouped_attention(module(3), query, key, value, MASKS["tree"])
    wanted, _ = eager_attention_forward(module(3), query, key, value, MASKS["tree"], 0.25)
    assert found.shape == (2, QUERIES, 6, 20)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_one_slot_attends_as_many_do() -> None:
    query, key, value = tensors(8, 4)
    mask = MASKS["causal"]
    whole, _ = grouped_attention(module(4), query, key, value, mask)
    for slot in range(QUERIES):
        one, _ = grouped_attention(module(4), query[:, :, slot : slot + 1], key, value, mask[:, :, slot : slot + 1])
        torch.testing.assert_close(one, whole[:, slot : slot + 1], rtol=1e-5, atol=1e-5)


def test_keys_and_values_are_read_where_they_lie() -> None:
    """A cache hands out views of its stores; strided queries come from the hosts' transposed projections."""
    query, key, value = tensors(4, 2)
    mask = MASKS["tree"]
    wanted, _ = grouped_attention(module(2), query, key, value, mask)
    store = torch.full((2, 2, 50, 16), float("nan"))
    store[:, :, :KEYS] = key
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    found, _ = grouped_attention(module(2), strided, store[:, :, :KEYS], value, mask)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float64, 1e-6)])
def test_other_types_stay_what_they_are(dtype: torch.dtype, tolerance: float) -> None:
    query, key, value = (tensor.to(dtype) for tensor in tensors(8, 4))
    mask = torch.zeros(1, 1, QUERIES, KEYS, dtype=dtype).masked_fill(MASKS["tree"] != 0, torch.finfo(dtype).min)
    found, _ = grouped_attention(module(4), query, key, value, mask)
    wanted, _ = eager_attention_forward(module(4), query.double(), key.double(), value.double(), mask.double(), 0.25)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_dropout_is_for_training() -> None:
    query, key, value = tensors(4, 2)
    at_rest, _ = grouped_attention(module(2), query, key, value, None, None, dropout=0.5)
    plain, _ = grouped_attention(module(2), query, key, value, None)
    training, _ = grouped_attention(module(2, training=True), query, key, value, None, None, dropout=0.5)
    assert torch.equal(at_rest, plain)
    assert not torch.allclose(training, plain, atol=0.1)


# --- in hosts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTS)
@torch.no_grad()
def test_every_host_with_the_stock_function_takes_the_folded_one(name: str) -> None:
    port = port_for(HOSTS[name]())
    attention, before = port.attention, probe(port)
    group_heads(port)
    assert (attention, port.config._attn_implementation) in (("sdpa", GROUPED), ("eager", "eager"))
    assert (attention == "eager") == (name == "gemma2")
    assert float((probe(port) - before).abs().max()) <= 1e-5 * float(before.abs().max())


def test_a_host_with_another_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even asked: eager attention that caps its scores could pass on texts that stay below the cap."""
    monkeypatch.setattr("forestream.attention.probe", None)
    host = HOSTS["llama"]()
    host.set_attn_implementation("eager")
    for port in (port_for(host), port_for(HOSTS["gemma2"]())):
        group_heads(port)
        assert port.config._attn_implementation == "eager"


@pytest.mark.parametrize("answer", [1.001, float("nan"), float("inf")])
def test_a_host_that_says_something_else_is_put_back(answer: float, monkeypatch: pytest.MonkeyPatch) -> None:
    port = port_for(HOSTS["llama"]())
    before, answers = probe(port), [1.0, answer]
    monkeypatch.setattr("forestream.attention.probe", lambda port: before * answers.pop(0))
    group_heads(port)
    assert not answers
    assert port.config._attn_implementation == "sdpa"
    assert torch.equal(probe(port), before)


def interleaved(query: Tensor, kept: int) -> Tensor:
    """Heads as if head i belonged to key head i modulo h, not to i // (H / h)."""
    return query.unflatten(1, (-1, kept)).transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("wrong", ["heads", "mask", "scaling"])
def test_a_wrong_way_to_fold_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: Any = None, **rest: Any
    ) -> Any:
        if wrong == "heads":
            query = interleaved(query, key.shape[1])
        elif wrong == "mask":
            # as if the groups of a query were neighbours on the query axis
            folded = mask.repeat_interleave(query.shape[1] // key.shape[1], 2)
            mask = folded[:, :, : mask.shape[2]]
        else:
            scaling = None if scaling is None else scaling * 1.02
        return grouped_attention(module, query, key, value, mask, scaling, **rest)

    monkeypatch.setitem(AttentionInterface._global_mapping, GROUPED, attention)
    port = port_for(HOSTS["llama"]())
    group_heads(port)
    assert port.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", HOSTS)
@torch.no_grad()
def test_the_hosts_own_forward_and_generate_stay_right(name: str) -> None:
    """They leave the mask to sdpa where it is causal, which a function that needs one must not take for no mask."""
    model, start = wrapped(name), prompt(20)
    ids = torch.tensor([start])
    told, text = model.port.model(ids, use_cache=False).logits, stock_text(model, prompt(6), 20)
    model.prepare()
    again = model.port.model(ids, use_cache=False).logits
    torch.testing.assert_close(again, told, rtol=1e-4, atol=1e-4)
    assert stock_text(model, prompt(6), 20) == text


@torch.no_grad()
def test_a_family_without_a_port_is_served_too() -> None:
    port = port_for(custom("starcoder2", num_key_value_heads=1))
    before = probe(port)
    group_heads(port)
    assert port.config._attn_implementation == GROUPED
    assert float((probe(port) - before).abs().max()) <= 1e-5 * float(before.abs().max())
