"""What tracing decides about compiled layers: whose weights, which sizes, whose code, and that nothing is traced twice.

Layers are traced and guarded as for compiling, but then run operation by operation: no kernels are made, and a graph
costs a second. test_compiled.py has the kernels.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from forestream import compiled, weights
from forestream.baseline import plain
from forestream.compiled import CompiledLayers, EagerLayers
from forestream.config import DecodeSettings
from forestream.decode import decode, streams_in_use, usual_passes
from forestream.drafting import BudgetTree, DraftTree
from forestream.packing import Pack
from forestream.steps import Counters, tokens_of
from forestream.topology import Topology, chain
from oracle import Prophet, assert_no_trace, assert_packed_equals_plain, prefilled
from passes import check, prompt_pass
from subject import CARRIERS, stock_text
from twins import Twins, graphs, outline, twins, written
from wrapped import STREAMS, prompt, wrapped
from zoo import HOSTS, POSITIONS, WINDOW, custom

TREE = DraftTree(Topology((-1, 0, 0, 1, 1, 2)), (5, 6, 7, 8, 9, 8))


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stops where kernels would be made, so that no compiler is needed; leaves nothing to other tests."""
    torch._dynamo.reset()  # where much was traced before, layers would run as they are
    right = torch.compile

    def trace(function: Callable[..., Any], *, options: dict[str, Any], **keywords: Any) -> Callable[..., Any]:
        kept = {"guard_filter_fn": options["guard_filter_fn"]}
        return right(function, backend="eager", options=kept, **keywords)

    monkeypatch.setattr(torch, "compile", trace)
    monkeypatch.setattr(compiled, "_require_compiler", lambda device: None)
    yield
    torch._dynamo.reset()


def gpt2_by_depth() -> Any:
    """Scores are divided by the number of the layer: no two layers are alike, though their weights could be swapped."""
    return custom("gpt2", num_attention_heads=4, scale_attn_by_inverse_layer_idx=True, n_positions=POSITIONS)


# --- the same text by the same trees --------------------------------------------------------------------------


@pytest.mark.slow
def test_fused_and_deferred_pruned_and_not() -> None:
    """Settings, prompts and caches take turns on one model, so that code for one must not be used for another."""
    here, found = twins("llama", "lossless"), Counters()
    for length in (5, 2 * WINDOW + 3, 2):
        for carriers, rule in zip(CARRIERS, ({}, {"prune_to": 2}), strict=True):
            found.extend(here.check(prompt(length, seed=length), 24, nodes=STREAMS, carriers=carriers, **rule))
    assert found.mean_acceptance_length > 1.5


@pytest.mark.parametrize("changes", [{"merge": False}, {"value_rotation": True, "rotation_angle": 0.7}], ids=str)
def test_every_kind_of_streams(changes: dict[str, Any]) -> None:
    """Passes with rotated values run as they are, between compiled ones of the same model."""
    here = twins("llama", **changes)
    before = graphs()
    for length in (6, 9):
        here.begin(prompt(length), 20, nodes=STREAMS, carriers="deferred")
    assert graphs() > before


def test_a_family_without_a_port() -> None:
    twins(lambda: custom("starcoder2", num_key_value_heads=1)).begin(prompt(6), 16, nodes=STREAMS, carriers="deferred")


def test_weights_without_a_layout_are_arguments_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "can_pack", lambda model: False)
    twins("gpt2").begin(prompt(6), 16, nodes=STREAMS, carriers="deferred")


@pytest.mark.parametrize(("host", "mode"), [("gemma3", "joint"), ("opt-post", "lossless"), ("mistral-window", "joint")])
def test_a_packed_pass_equals_ordinary_sequences(host: str, mode: str) -> None:
    """The slow oracle knows nothing of compiled layers; passes of one size with other nodes and carriers follow."""
    model = wrapped(host, mode)
    model.prepare("layer")
    assert_packed_equals_plain(model, prompt(7), TREE, (0, 2, 4), STREAMS)
    slots = len(TREE.tokens) + 3 * STREAMS
    longer = DraftTree(chain(slots - STREAMS), prompt(slots - STREAMS, seed=1))
    assert_packed_equals_plain(model, prompt(9), longer, (3,), STREAMS)
    assert_packed_equals_plain(model, prompt(5), DraftTree(chain(slots), prompt(slots, seed=2)), (), 0)


def test_the_text_reaches_the_end_of_the_cache_and_of_the_context() -> None:
    """Every length from a few tokens to all positions there are."""
    here = twins("mistral-window")
    steps = here.check(prompt(3), POSITIONS, nodes=STREAMS, carriers="deferred")
    assert len(tokens_of(steps)) == POSITIONS - 3
    assert tokens_of(steps) == stock_text(here.eager, prompt(3), POSITIONS - 3)


def test_after_every_step_the_cache_is_that_of_a_fresh_prefill() -> None:
    """INV, against caches that the model as it was loaded has filled."""
    here, start = twins("llama"), prompt(5)
    settings = DecodeSettings(max_new_tokens=30, carriers="fused")
    truth = start + written(here.eager, start, 30)
    draft, text = Prophet(BudgetTree(5), truth, rate=0.8), [*start]
    cache = here.prepared.new_cache(len(truth) + 60)
    token, logits = prompt_pass(here.prepared, start, STREAMS, cache)
    while len(text) < len(start) + 20:
        assert_no_trace(cache, prefilled(here.eager, text))
        checked = check(here.prepared, draft([*text, token], logits), cache, STREAMS, settings, None)
        logits = here.prepared.logits(checked.streams[0, :, checked.verdict.path[-1]])
        text += [checked.tree.tokens[node] for node in checked.verdict.path]
        token = checked.verdict.next_token
    assert tuple(text) == truth[: len(text)]


def test_a_pass_that_broke_in_the_middle_leaves_a_usable_model(monkeypatch: pytest.MonkeyPatch) -> None:
    here = twins("llama")
    settings = DecodeSettings(max_new_tokens=12, nodes=STREAMS, carriers="deferred")
    wanted = outline(list(decode(here.eager, prompt(6), settings)))
    right, left = CompiledLayers._span, [9]

    def breaks(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise InterruptedError
        return right(*args)

    monkeypatch.setattr(CompiledLayers, "_span", breaks)
    with pytest.raises(InterruptedError):
        list(decode(here.prepared, prompt(6), settings))
    assert outline(list(decode(here.prepared, prompt(6), settings))) == wanted


# --- which layers share code ----------------------------------------------------------------------------------


def kinds(host: Any, mode: str = "joint", **changes: Any) -> list[int]:
    model = wrapped(HOSTS[host]() if isinstance(host, str) else host, mode, **changes)
    model.prepare("layer")
    assert isinstance(model.layers, CompiledLayers)
    return model.layers._kinds


@pytest.mark.parametrize("host", HOSTS)
def test_all_layers_of_a_host_are_alike_but_for_their_adapters(host: str) -> None:
    """Windows and rotary tables are handed in, so that layers with and without a window are alike, too."""
    assert kinds(host) == [0] * 4
    assert kinds(host, "lossless") == [0, 0, 2, 2]
    assert kinds(host, "lossless", stream_layers=1) == [0, 0, 0, 3]


def test_layers_that_differ_in_more_than_their_weights_are_told_apart() -> None:
    assert kinds(gpt2_by_depth()) == [0, 1, 2, 3]
    host = HOSTS["llama"]()
    host.model.layers[2].mlp.act_fn = torch.nn.Tanh()
    host.model.layers[3].input_layernorm.variance_epsilon = 0.5
    assert kinds(host) == [0, 0, 2, 3]


def test_code_holds_no_weights() -> None:
    """A copy of a layer stays in memory for each kind; it must be empty."""
    model = wrapped("llama", "lossless")
    model.prepare("layer")
    before = model.port.layers[3].state_dict()
    hollow = compiled._hollow(model.port.layers[3], model.port, model.gate)
    assert all(t.numel() == 0 for t in (*hollow.parameters(), *hollow.buffers()))
    after = model.port.layers[3].state_dict()
    assert all(after[name] is not None and torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(module.config is model.port.config for module in hollow.modules() if hasattr(module, "config"))


# --- nothing is traced twice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "carriers", "compile"), [("llama", "fused", "layer"), ("gemma3", "deferred", "full")])
def test_further_prompts_trace_nothing_more(host: str, carriers: Any, compile: Any) -> None:
    """Whatever their lengths, and those of the texts and caches."""
    here = twins(host, compile=compile)
    settings: dict[str, Any] = {"nodes": 5, "carriers": carriers}
    here.check(prompt(6), 24, **settings)
    here.check(prompt(11), 24, **settings)
    before = graphs()
    for length in (1, 2, 3, 5, 17, 30, 61):
        here.check(prompt(length, seed=length), 9 + length % 7, **settings)
    assert graphs() == before


def test_passes_of_any_size_share_code() -> None:
    """What pruning by a threshold leaves differs from pass to pass."""
    here, sizes = twins("llama"), set()
    settings: dict[str, Any] = {"nodes": 12, "carriers": "fused", "prune_below": 1e-3}
    here.check(prompt(6), 24, **settings)
    before = graphs()
    for seed in range(8):
        sizes |= {len(step.kept) for step in here.check(prompt(5 + seed, seed=seed), 24, **settings)}
    assert len(sizes) > 4
    assert graphs() <= before + 1


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": 6, "carriers": "fused"},
        {"nodes": 9, "carriers": "fused", "prune_to": 6},
        {"nodes": 6, "carriers": "deferred"},
        {"nodes": 9, "carriers": "deferred", "prune_to": 5, "streams": 3},
        {"tree": "full", "k": 2, "streams": 2, "carriers": "fused"},
        {"nodes": 1},
        {"nodes": 1, "lookup_beside": 3},
        {"nodes": 5, "lookup_beside": 2, "lookup_behind": 3},
        {"nodes": 5, "lookup_behind": 3, "carriers": "fused"},
        {"nodes": 6, "carriers": "fused", "carried": 2},
        {"nodes": 4, "lookup_behind": 3, "carriers": "fused", "carried": 1},
    ],
    ids=str,
)
def test_the_sizes_of_usual_passes_are_foreseen(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They get code of their own; other sizes are met at the very end of a text only, where drafts get short."""
    model, chosen = wrapped("llama"), DecodeSettings(max_new_tokens=60, **settings)
    met: list[int] = []
    right = EagerLayers.__call__

    def noting(layers: EagerLayers, block: range, states: Tensor, *rest: Any) -> Tensor:
        met.append(states.shape[1])
        return right(layers, block, states, *rest)

    monkeypatch.setattr(EagerLayers, "__call__", noting)
    steps = list(decode(model, prompt(6), chosen, drafter=None))
    foreseen = usual_passes(chosen, streams_in_use(model, chosen))
    usual = met[2 : -4 * (1 + STREAMS)]  # behind the prompt's two spans, before the last drafts
    assert len(steps) > 20
    assert set(usual) == foreseen


def test_layers_of_one_kind_are_traced_once() -> None:
    here = twins("llama")
    list(plain(here.eager, prompt(1), DecodeSettings(max_new_tokens=4)))
    before = graphs()
    list(plain(here.prepared, prompt(1), DecodeSettings(max_new_tokens=4)))
    assert graphs() == before + 1


# --- whose code and whose weights -----------------------------------------------------------------------------


def take_turns(models: list[Twins]) -> None:
    for turn in range(2):
        for number, here in enumerate(models):
            here.begin(prompt(6, seed=turn), 16, nodes=STREAMS, carriers="deferred")
            here.begin(prompt(6 + number), 16, nodes=STREAMS, carriers="deferred")


def test_models_of_the_same_shape_do_not_meet() -> None:
    """Other weights, as adapters of another scale leave them, prepared in one process and used in turns."""
    take_turns([twins("llama"), twins("llama", lora_alpha=1)])


@pytest.mark.slow
def test_models_of_the_same_shape_that_compute_something_else_do_not_meet() -> None:
    """Nothing but the code itself knows of activations, epsilons and scales."""
    common: dict[str, Any] = {"num_key_value_heads": 2}
    take_turns(
        [
            twins(lambda: custom("llama", **common)),
            twins(lambda: custom("llama", **common, rms_norm_eps=0.5)),
            twins(lambda: custom("llama", **common, hidden_act="relu")),
        ]
    )


def test_code_that_is_shared_between_models_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards on what is no argument are dropped: only isolation keeps models apart."""
    apart = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: apart(f, **{**k, "isolate_recompiles": False}))
    models = [twins(lambda eps=eps: custom("llama", num_key_value_heads=2, rms_norm_eps=eps)) for eps in (1e-6, 0.5)]
    with pytest.raises(AssertionError, match="differs"):
        take_turns(models)


def test_the_weights_of_another_layer_would_be_noticed() -> None:
    here = twins("llama")
    here.text(prompt(6), 12)
    layers: Any = here.prepared.layers
    layers._weights[1] = layers._weights[0]
    with pytest.raises(AssertionError, match="differs"):
        here.text(prompt(6), 12)


def test_layers_taken_for_alike_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_alike", lambda port, weights, gate: [0] * port.num_layers)
    here = twins(gpt2_by_depth)
    with pytest.raises(AssertionError, match="differ"):
        here.begin(prompt(6), 12, nodes=STREAMS, carriers="deferred")


def test_a_guard_that_must_be_kept_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without guards on what varies, code for another number of slots is run."""
    monkeypatch.setattr(compiled, "_varying", lambda guards: [False] * len(guards))
    here = twins("llama")
    with pytest.raises((AssertionError, RuntimeError)):
        here.check(prompt(6), 12, nodes=STREAMS)


def test_a_scratch_place_off_by_one_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from forestream.cache import StreamCache

    right = StreamCache.scratch
    monkeypatch.setattr(StreamCache, "scratch", lambda cache, slots: (right(cache, slots) - 1).clamp(min=0))
    here = twins("llama")
    with pytest.raises(AssertionError, match="differs"):
        here.text(prompt(6), 12)


# --- more code than a process keeps ---------------------------------------------------------------------------


def test_more_sizes_than_code_is_kept_for_are_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_GRAPHS", 2)
    here = twins("llama")
    for nodes in (2, 3, 5, 6):
        here.check(prompt(6), 12, nodes=nodes, carriers="deferred")


def test_more_models_than_code_is_kept_for_are_run_all_the_same() -> None:
    with torch._dynamo.config.patch(accumulated_recompile_limit=3):
        for _ in range(4):
            twins("llama").text(prompt(1), 6)


def test_the_host_itself_is_left_as_it_is() -> None:
    """Its own layers stay where they are: what reads the host afterwards, such as `generate`, sees no compiled code."""
    model = wrapped("llama")
    model.prepare("layer")
    before = list(model.port.layers.modules())
    text = written(model, prompt(6), 12)
    assert list(model.port.layers.modules()) == before
    assert stock_text(model, prompt(6), 12) == text
    with torch.no_grad():
        assert model(torch.tensor([prompt(6)]), Pack.text(6, torch.empty(1, 0, dtype=torch.long), 0)).main.shape[1] == 6
