"""EQ in float32 for compiled layers: text, trees and acceptances are those of the same model as it was loaded.

Here layers become machine code; what tracing alone decides is tested in test_traced.py, in seconds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import run_and_get_code
from transformers import PreTrainedModel

from batch import accepted, assert_as_alone, requests, together
from forestream.config import DecodeSettings, StreamConfig
from forestream.decode import decode
from forestream.drafting import BudgetTree
from forestream.model import StreamingLM
from forestream.ports import SUPPORTED
from forestream.steps import Counters, tokens_of
from oracle import Prophet, near_tie, plain_logits
from subject import stock_text
from twins import graphs, outline, twins, written
from wrapped import SMALL, STREAMS, prompt, wrapped
from zoo import HOSTS, WINDOW, custom


def _compiler() -> bool:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not _compiler(), reason="compiling needs a C++ compiler"),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """Nothing that one test traced is left to another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qwen_window() -> PreTrainedModel:
    return custom("qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)


# As many nodes as streams: passes over trees and over deferred streams share their code, which saves compilations.
DEFERRED: dict[str, Any] = {"nodes": STREAMS, "carriers": "deferred"}
PRUNED: dict[str, Any] = {**DEFERRED, "prune_below": 1e-3}

FAMILIES: dict[str, tuple[str | Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "llama": ("llama", DEFERRED),
    "opt": ("opt-pre", DEFERRED),
    "phi": ("phi", DEFERRED),
    "phi3": ("phi3", DEFERRED),
    "mistral": ("mistral-window", PRUNED),
    "qwen2": (qwen_window, DEFERRED),
    "qwen3": ("qwen3", DEFERRED),
    "gemma": ("gemma", DEFERRED),
    "gemma2": ("gemma2", DEFERRED),
    "gemma3_text": ("gemma3", DEFERRED),
    "gpt_neox": ("gpt_neox-parallel", DEFERRED),
    "gpt2": ("gpt2", DEFERRED),
}


def test_all_families_are_compiled() -> None:
    assert sorted(FAMILIES) == sorted(SUPPORTED)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_layer_by_layer(family: str) -> None:
    """Prompts of several lengths, so that capacities change; long enough that windows are left behind."""
    host, settings = FAMILIES[family]
    here, counters = twins(host), Counters()
    assert here.prepared.layers._kinds == [0] * 4
    for seed, (length, tokens) in enumerate(((6, 12), (2 * WINDOW + 3, 18), (3, 7))):
        counters.extend(here.begin(prompt(length, seed=seed), tokens, **settings))
    assert counters.mean_acceptance_length > 1.5
    assert (counters.nodes < STREAMS * counters.passes) == ("prune_below" in settings)


def test_a_lossless_adapter() -> None:
    """Random, so that a gate that is open or shut at the wrong time shows; the text is the bare base's."""
    here, counters = twins("gpt_neox-sequential", "lossless", stream_layers=4), Counters()
    bare = StreamingLM(HOSTS["gpt_neox-sequential"](), StreamConfig(**SMALL))
    assert here.prepared.layers._kinds == [0] * 4, "test_traced.py has hosts with and without adapters below"
    for length in (7, 12, 3):
        steps = here.begin(prompt(length), 20, **DEFERRED)
        assert tokens_of(steps)[:20] == stock_text(bare, prompt(length), 20)
        counters.extend(steps)
    assert counters.mean_acceptance_length > 1.5


def test_up_to_the_context_limit() -> None:
    """Prompts that leave room for 1, 2, G and G + 1 tokens: the last passes offer fewer drafts."""
    here = twins("llama")
    limit = here.eager.port.position_limit
    for room in (1, 2, STREAMS, STREAMS + 1):
        start = prompt(limit - room, seed=room)
        steps = here.check(start, STREAMS + 9, **DEFERRED)
        assert len(tokens_of(steps)) == room
        assert steps[-1].finish == "length"


def test_without_the_compilers_private_parts_products_are_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forestream.compiled.direct_calls", lambda device: {})
    here = twins("llama")
    assert here.begin(prompt(5), 9, **DEFERRED)


def test_whole_spans_at_once() -> None:
    """Layers of two windows in one piece of code."""
    here, counters = twins("gemma3", compile="full"), Counters()
    for length in (7, 2 * WINDOW, 3):
        counters.extend(here.begin(prompt(length), 20, **DEFERRED))
    assert counters.mean_acceptance_length > 1.5


def test_in_half_precision_every_token_is_nearly_plain_decodings_choice() -> None:
    """NT in bfloat16 against the model as it was loaded: four units in the last place of the largest logit."""
    dtype, start, steps = torch.bfloat16, prompt(6), []
    eager, model = (wrapped(HOSTS["llama"]().to(dtype)).to(dtype) for _ in range(2))
    model.prepare("layer")
    drafter = Prophet(BudgetTree(STREAMS), start + written(eager, start, 40), 0.8)
    for step in decode(model, start, DecodeSettings(max_new_tokens=60, **DEFERRED), drafter=drafter):
        steps.append(step)
        if len(text := tokens_of(steps)) >= 40:
            break
    largest = float(plain_logits(eager, start, text).abs().max())
    near_tie(eager, start, text, margin=4 * torch.finfo(dtype).eps * largest)
    assert sum(step.accepted for step in steps) > 5


@pytest.mark.parametrize(("host", "mode"), [("llama", "joint"), ("mistral-window", "lossless")])
def test_batches_of_ragged_prompts_share_code_for_any_number(host: str, mode: str) -> None:
    """Texts end one by one, down to a single one; drafts are those of the model as it was loaded."""
    model = wrapped(host, mode)
    model.prepare("layer")
    asked, settings = requests((5, 1, 14, 9), (12, 20, 1, 7)), DecodeSettings(nodes=6, carriers="fused")
    found = assert_as_alone(model, asked, settings)
    truths = [tokens_of(steps) for steps in found]
    again = together(wrapped(host, mode), asked, settings, truths)
    assert [outline(steps) for steps in found] == [outline(steps) for steps in again]
    assert accepted(found) > 5
    # Drafts that never hit: all texts end with the same pass, so none is left alone and gets code of its own. A prompt
    # of 2 tokens and 4 streams would, too: it has as many slots as a usual pass.
    assert_as_alone(model, requests((5, 3, 9), 9), settings, rate=0.0)
    before = graphs()
    assert_as_alone(model, requests((4, 3, 7, 8, 1, 5), 9), settings, rate=0.0)
    assert graphs() == before


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("lengths", [(5,), (5, 9, 7), (6, 6)])
def test_the_cache_is_written_where_it_stays(lengths: tuple[int, ...]) -> None:
    """Code that copies a whole store and then puts it back hides behind equal texts."""
    model = wrapped("llama")
    model.prepare("layer")
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(together, model, requests(lengths, 6), DecodeSettings(nodes=4))
    assert any("cpp_fused_" in code for code in codes)
    assert not any("cpp_fused_copy_" in code for code in codes)
