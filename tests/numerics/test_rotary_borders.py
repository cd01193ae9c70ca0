"""Hosts whose rotary frequencies change with the length of the text: passes and texts on both sides of the border."""

from itertools import product

import pytest
import torch

from forestream.model import StreamingLM
from forestream.packing import Pack
from oracle import prefilled
from stretched import BORDER, stretched
from subject import CARRIERS, stock_text, subject
from treepass import TOKENS, TREE, close, tree_pass
from wrapped import STREAMS, prompt
from zoo import HOSTS

every_host = pytest.mark.parametrize("host", HOSTS)
both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])


def mains_before_the_border(model: StreamingLM) -> None:
    """Depths 0 to 3 behind 20 tokens end at the last place before the border; streams reach beyond it."""
    text = prompt(BORDER - 4)
    alone, _, _ = tree_pass(model, text, (), 0)
    beside, _, _ = tree_pass(model, text, range(7), STREAMS)
    again, _, _ = tree_pass(model, text, (), 0)
    close(beside, alone, "main logits with and without streams", 1e-6)
    assert torch.equal(alone, again)
    path = TREE.path(6)
    with torch.no_grad():
        stock = model.port.model(torch.tensor([[*text, *(TOKENS[n] for n in path)]]), use_cache=False).logits
    close(alone[list(path)], stock[0, len(text) :], "main and stock logits")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_streams_beyond_the_border_do_not_disturb_the_main_states(kind: str) -> None:
    mains_before_the_border(stretched(kind))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_one_table_for_main_and_streams_would_be_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stretched(kind)
    monkeypatch.setattr(type(model.port), "_settled", lambda port, positions, i: positions)
    monkeypatch.setattr(type(model.port), "room", lambda port, prompt: 10**6)
    monkeypatch.setattr(model, "_rotary", lambda states, places, mains, i, rooms: model.port.rotary(states, places, i))
    with pytest.raises(AssertionError, match="main logits with and without streams differ"):
        mains_before_the_border(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@torch.no_grad()
def test_streams_near_the_border_are_the_same_fused_and_deferred(kind: str) -> None:
    """The root's three streams stay before the border; those of deeper nodes in the same pass do not."""
    model, text = stretched(kind), prompt(BORDER - 4)
    _, fused, _ = tree_pass(model, text, range(7), 3)
    cache = prefilled(model, text, spare=40)
    output = model(torch.tensor([TOKENS]), Pack.tree(TREE), cache)
    cache.commit(range(4), (0,))
    cache.advance(1)
    deferred = model.logits(model.streams_behind(output.trunk[:, :1], 3, cache)[0])
    close(fused[:, 0], deferred, "fused and deferred streams")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [1, 16, 20, BORDER - 1])
def test_texts_up_to_the_border_of_rotary_frequencies(kind: str, length: int) -> None:
    here = subject(stretched(kind), prompt(length), 60)
    assert here.text == stock_text(here.model, here.start, len(here.text))
    assert length + len(here.text) <= BORDER
    for carriers, rate in product(CARRIERS, (0.0, 0.7, 1.0)):
        here.check(len(here.text), rate, nodes=16, carriers=carriers)


def test_texts_beyond_the_border_of_rotary_frequencies() -> None:
    here = subject(stretched("longrope"), prompt(BORDER + 1), 40)
    assert len(here.text) == 40
    assert here.text == stock_text(here.model, here.start, 40)
    for carriers in CARRIERS:
        here.check(40, nodes=16, carriers=carriers)
    assert here.counters.mean_acceptance_length > 1.5
