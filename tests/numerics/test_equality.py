"""EQ in float32: greedy text with speculation is the text of plain decoding, token for token, on every host.

Random hosts' streams know nothing, so a drafter that mixes the truth into their logits sees to it that drafts are
accepted at every depth, and refused at every depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import drafter_for
from forestream.errors import ConfigError, PromptError
from forestream.masks import additive
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.steps import Counters, Step, tokens_of
from oracle import Prophet, assert_equal_texts, first_difference
from wrapped import STREAMS, prompt, wrapped
from zoo import HOSTS, POSITIONS, WINDOW, custom

PRUNINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "off": ({},),
    # Random scorers are sure of nearly everything they say: this drops most edges and keeps some.
    "mild": ({"prune_below": 1e-4}, {"prune_to": 9}),
    "extreme": ({"prune_below": 1.0}, {"prune_to": 2}),
}
CARRIERS = ("deferred", "fused")


@dataclass
class Subject:
    """A model with a prompt and the text that plain decoding writes after it; counts what its runs accepted."""

    model: StreamingLM
    start: tuple[int, ...]
    text: tuple[int, ...]
    counters: Counters = field(default_factory=Counters)
    offered: int = 0

    def check(self, tokens: int, rate: float = 0.7, **settings: Any) -> list[Step]:
        """Decode under `settings`, with a prophet that is right at `rate`, and compare."""
        chosen = DecodeSettings(max_new_tokens=tokens, **settings)
        drafter = Prophet(drafter_for(chosen), self.start + self.text, rate)
        steps = list(decode(self.model, self.start, chosen, drafter=drafter))
        found, wanted = tokens_of(steps), self.text[:tokens]
        place = first_difference(found, wanted)
        assert found == wanted, f"{chosen} differs at {place}: {found[place:]}, {wanted[place:]} by plain decoding"
        assert steps[-1].finish == "length"
        self.counters.extend(steps)
        self.offered += sum(len(step.tree.topology) for step in steps if step.tree is not None)
        return steps


def subject(model: StreamingLM, start: Sequence[int], tokens: int) -> Subject:
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=tokens))))
    return Subject(model, tuple(start), text)


def lively(model: StreamingLM, tokens: int = 12) -> Subject:
    """A text that does not repeat itself: comparing one that does would be weak."""
    texts = (subject(model, prompt(6, seed=seed), tokens) for seed in range(40))
    return next(here for here in texts if len(set(here.text)) >= 5)


@cache
def model_of(host: str, mode: str) -> StreamingLM:
    """Decoding leaves nothing behind (tested below), so tests share models."""
    return wrapped(host, mode)


every_host = pytest.mark.parametrize("host", HOSTS)
both_modes = pytest.mark.parametrize("mode", ["joint", "lossless"])


# --- the grid -----------------------------------------------------------------------------------------------


@both_modes
@every_host
def test_full_trees_of_all_sizes_and_prunings(host: str, mode: str) -> None:
    """G 0..4 x k 1..4 x pruning; carriers and rules of pruning alternate over the grid."""
    here = lively(model_of(host, mode))
    for streams, k, (strength, rules) in product(range(STREAMS + 1), range(1, 5), PRUNINGS.items()):
        nodes = sum(k**level for level in range(streams + 1))
        rule = rules[(streams + k) % len(rules)]
        # Large trees are dear where every node carries streams: they take their turns at that below.
        carriers = CARRIERS[(streams + k // 2) % 2] if nodes < 100 or strength == "extreme" else "deferred"
        tokens = 12 if nodes < 100 else 8
        if streams == 0 and (k, strength) != (1, "off"):
            tokens = 3  # neither k nor pruning has any say
        seen = Subject(here.model, here.start, here.text)
        steps = seen.check(tokens, tree="full", k=k, streams=streams, carriers=carriers, **rule)
        assert all(step.tree is None or step.accepted <= streams for step in steps)
        assert max(len(step.kept) for step in steps) <= nodes
        if streams >= 2:
            here.counters.merge(seen.counters)
        if strength == "extreme" and "prune_below" in rule:
            assert all(len(step.kept) <= streams + 1 for step in steps), "only the first chain is sure"
    assert here.counters.mean_acceptance_length > 1.5, "too few drafts were accepted to call this a test"


@both_modes
@every_host
def test_budget_trees_of_all_sizes_and_carriers(host: str, mode: str) -> None:
    here = lively(model_of(host, mode))
    for place, (nodes, carriers) in enumerate(product((1, 5, 16, 32), CARRIERS)):
        for rule in ({}, PRUNINGS["mild"][place // 2 % 2], PRUNINGS["extreme"][place // 2 % 2])[:nodes]:
            seen = Subject(here.model, here.start, here.text)
            steps = seen.check(12, nodes=nodes, carriers=carriers, **rule)
            assert max(len(step.kept) for step in steps) <= nodes
            assert (len(steps) == 12) == (seen.counters.accepted == 0)
            if nodes > 1:
                here.counters.merge(seen.counters)
            else:
                assert seen.counters.accepted == 0
    assert here.counters.mean_acceptance_length > 1.5


@pytest.mark.parametrize("host", ["llama", "gemma3", "gpt2"])
def test_every_node_of_a_large_tree_can_carry_streams(host: str) -> None:
    here = subject(model_of(host, "lossless"), prompt(6), 8)
    here.check(8, tree="full", k=4, carriers="fused")
    here.check(8, tree="full", k=4, carriers="fused", prune_to=30)
    assert here.counters.mean_acceptance_length > 1.5


def test_the_prunings_of_the_grid_are_what_they_are_called() -> None:
    here = subject(model_of("llama", "joint"), prompt(6), 24)
    kept = {}
    for strength, rules in PRUNINGS.items():
        for rule in rules:
            seen = Subject(here.model, here.start, here.text)
            seen.check(24, tree="full", k=3, streams=3, **rule)
            kept.setdefault(strength, []).append(seen.counters.nodes / seen.offered)
    assert kept["off"] == [1.0]
    assert all(0.1 < share < 0.9 for share in kept["mild"])
    assert all(share < 0.25 for share in kept["extreme"])


@pytest.mark.parametrize(
    "changes",
    [
        {"value_rotation": True},
        {"value_rotation": True, "rotation_angle": 0.7, "mode": "lossless"},
        {"start": "low_rank"},
        {"start": "low_rank", "value_rotation": True, "positions": "same", "mode": "lossless"},
        {"positions": "same"},
        {"positions": "same", "mode": "lossless"},
        {"stream_layers": 1},
        {"stream_layers": 3, "mode": "lossless"},
        {"stream_layers": 4},
        {"scorer_rank": 0, "mode": "lossless"},
    ],
    ids=str,
)
@pytest.mark.parametrize("host", ["llama", "opt-pre", "gemma3", "gpt_neox-parallel"])
def test_every_kind_of_streams(host: str, changes: dict[str, Any]) -> None:
    here = lively(wrapped(host, **changes))
    prunings = ({}, {"prune_to": 5}) if here.model.scorer is not None else ({},)
    for carriers, rule in product(CARRIERS, prunings):
        here.check(12, carriers=carriers, nodes=16, **rule)
        here.check(12, carriers=carriers, tree="full", k=2, streams=3, **rule)
    assert here.counters.mean_acceptance_length > 1.5


def test_two_hundred_prompts() -> None:
    """Without a prophet: whatever the streams themselves propose."""
    model = model_of("llama", "lossless")
    for seed in range(200):
        assert_equal_texts(model, prompt(1 + seed % 17, seed=seed), DecodeSettings(max_new_tokens=4, nodes=4))


# --- plain decoding is the host's own -----------------------------------------------------------------------


@torch.no_grad()
def stock_text(model: StreamingLM, start: Sequence[int], tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([list(start)])
    out = model.port.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return tuple(out[0, len(start) :].tolist())


@every_host
def test_plain_decoding_equals_generate(host: str) -> None:
    """The joint adapter is merged into the host, so the host's own `generate` writes with it."""
    model = model_of(host, "joint")
    for length in (1, 6, 3 * WINDOW):
        start = prompt(length)
        text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=30))))
        assert text == stock_text(model, start, 30)


# --- lengths ------------------------------------------------------------------------------------------------


@every_host
def test_prompts_of_all_lengths_up_to_the_position_limit(host: str) -> None:
    model = model_of(host, "lossless" if len(host) % 2 else "joint")
    for length in (1, 2, 20, POSITIONS - STREAMS, POSITIONS - 2, POSITIONS - 1):
        room = POSITIONS - length
        here = subject(model, prompt(length), 10)
        assert len(here.text) == min(10, room)
        for carriers, rate in product(CARRIERS, (0.5, 1.0)):
            # asked for more than there is room for, both stop at the limit
            here.check(10, rate, nodes=12, carriers=carriers)


@pytest.mark.parametrize("host", ["llama", "gpt2"])
def test_prompts_without_room_are_refused_by_both(host: str) -> None:
    model = model_of(host, "joint")
    for run in (decode, plain):
        with pytest.raises(PromptError, match="empty"):
            next(iter(run(model, (), DecodeSettings())))
        for length in (POSITIONS, POSITIONS + 3):
            with pytest.raises(PromptError, match=f"{length} tokens.*{POSITIONS}"):
                next(iter(run(model, prompt(length), DecodeSettings())))


@pytest.mark.parametrize("host", ["llama", "opt-pre", "gemma3"])
def test_the_whole_context_is_written_to_its_end(host: str) -> None:
    here = subject(model_of(host, "lossless"), prompt(3), POSITIONS)
    assert len(here.text) == POSITIONS - 3
    here.check(POSITIONS - 3, nodes=10)
    here.check(POSITIONS - 3, nodes=10, carriers="fused", prune_below=1e-4)
    assert here.counters.mean_acceptance_length > 1.5


@pytest.mark.parametrize("host", ["mistral-window", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 3])
def test_prompts_around_and_beyond_the_window(host: str, length: int) -> None:
    here = subject(model_of(host, "joint"), prompt(length), 2 * WINDOW)
    assert here.text == stock_text(here.model, here.start, 2 * WINDOW)
    for carriers, tree in product(CARRIERS, ({"nodes": 16}, {"tree": "full", "k": 2})):
        here.check(2 * WINDOW, carriers=carriers, **tree)
    assert here.counters.mean_acceptance_length > 1.5


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("host", ["llama", "opt-pre", "mistral-window", "gpt2"])
def test_the_cap_is_met_exactly(host: str, rate: float) -> None:
    model = model_of(host, "joint")
    text = tokens_of(list(plain(model, prompt(5), DecodeSettings(max_new_tokens=30))))
    for cap, carriers in product((0, 1, 2, 3, STREAMS, STREAMS + 1, STREAMS + 2, 11), CARRIERS):
        settings = DecodeSettings(max_new_tokens=cap, carriers=carriers)
        drafter = Prophet(drafter_for(settings), prompt(5) + text, rate)
        steps = assert_equal_texts(model, prompt(5), settings, drafter=drafter)
        assert tokens_of(steps) == text[:cap]
        assert [step.finish for step in steps] == [None] * (len(steps) - 1) + ["length"] * bool(cap)
        # never a draft that there is no room for
        written = 0
        for step in steps:
            assert step.offered_depth <= max(cap - written - 1, 0)
            written += len(step.tokens)


# --- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize(("host", "carriers"), [("llama", "fused"), ("opt-pre", "deferred"), ("gemma3", "fused")])
def test_every_token_of_a_text_can_be_its_end(host: str, carriers: Any, rate: float) -> None:
    model, start = model_of(host, "lossless"), prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=14))))
    settings = DecodeSettings(max_new_tokens=14, carriers=carriers)
    drafter = Prophet(drafter_for(settings), start + text, rate)
    for end in sorted(set(text)):
        steps = assert_equal_texts(model, start, settings, (end,), drafter)
        found = tokens_of(steps)
        assert found == text[: text.index(end) + 1]
        assert steps[-1].finish == "stop"
        assert all(step.finish is None for step in steps[:-1])
        assert sum(step.accepted for step in steps) <= len(found)


def test_several_ends_and_ends_that_never_come() -> None:
    model, start = model_of("llama", "joint"), prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=14))))
    settings = DecodeSettings(max_new_tokens=14)
    drafter = Prophet(drafter_for(settings), start + text, 0.9)
    absent = next(token for token in range(80) if token not in text)
    for first, second in product(text[::3], text[1::3]):
        steps = assert_equal_texts(model, start, settings, (second, absent, first), drafter)
        assert len(tokens_of(steps)) == min(text.index(first), text.index(second)) + 1
    steps = assert_equal_texts(model, start, settings, (absent,), drafter)
    assert (tokens_of(steps), steps[-1].finish) == (text, "length")


def test_an_end_at_the_cap_is_an_end() -> None:
    """Stop and cap in one place: the reason is that of plain decoding; behind the cap, the end does not count."""
    model, start = model_of("llama", "joint"), prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=14))))
    place = next(i for i in range(5, 14) if text[i] not in text[:i])
    for cap, reason in ((place, "length"), (place + 1, "stop"), (place + 2, "stop")):
        settings = DecodeSettings(max_new_tokens=cap)
        drafter = Prophet(drafter_for(settings), start + text, 1.0)
        steps = assert_equal_texts(model, start, settings, (text[place],), drafter)
        assert (tokens_of(steps)[-1] == text[place]) == (reason == "stop")
        assert steps[-1].finish == reason


# --- nothing is left behind ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_runs_repeat_and_an_abandoned_run_leaves_no_trace(mode: str) -> None:
    model, start, other = model_of("qwen3", mode), prompt(6), prompt(9, seed=1)
    settings = DecodeSettings(max_new_tokens=20, prune_to=7)

    def outline(first: Sequence[int]) -> list[tuple[Any, ...]]:
        steps = decode(model, first, settings)
        return [(s.tokens, s.accepted, s.kept, s.path, s.finish, s.tree and s.tree.tokens) for s in steps]

    alone = outline(start)
    assert outline(start) == alone
    for passes in (1, 2, 3):
        begun = decode(model, other, settings)
        for _ in range(passes):
            next(begun)
        begun.close()
        assert outline(start) == alone
    left_open = decode(model, other, settings)
    next(left_open)
    assert outline(start) == alone
    assert list(left_open), "an open run goes on beside another"
    assert outline(start) == alone


def test_runs_side_by_side_do_not_meet() -> None:
    model, settings = model_of("llama", "lossless"), DecodeSettings(max_new_tokens=10)
    starts = [prompt(4, seed=2), prompt(11, seed=3)]
    alone = [tokens_of(list(decode(model, start, settings))) for start in starts]
    runs = [decode(model, start, settings) for start in starts]
    together: list[list[int]] = [[], []]
    for _ in range(10):
        for run, text in zip(runs, together, strict=True):
            if (step := next(run, None)) is not None:
                text += step.tokens
    assert [tuple(text) for text in together] == alone


def test_settings_beyond_what_was_trained_are_refused() -> None:
    model = wrapped("llama", streams=2, scorer_rank=0)
    with pytest.raises(ConfigError, match="streams is 3; this adapter was trained with 2"):
        next(decode(model, prompt(3), DecodeSettings(streams=3)))
    with pytest.raises(ConfigError, match="needs the exit scorer"):
        next(decode(model, prompt(3), DecodeSettings(prune_to=4)))


def test_an_adapter_without_streams_decodes_plainly() -> None:
    model = wrapped("llama", streams=0)
    for settings in (DecodeSettings(max_new_tokens=9), DecodeSettings(max_new_tokens=9, tree="full", k=3)):
        steps = assert_equal_texts(model, prompt(6), settings)
        assert len(steps) == 9


# --- hosts whose rotary tables change with the length ---------------------------------------------------------


def stretched(kind: str) -> StreamingLM:
    """A host whose rotary frequencies change at position 32."""
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        return wrapped(custom("llama", num_key_value_heads=2, max_position_embeddings=32, rope_parameters=rope))
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 32,
    }
    keywords = {"num_key_value_heads": 2, "rope_parameters": rope, "original_max_position_embeddings": 32}
    return wrapped(custom("phi3", **keywords))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [1, 24, 28, 31])
def test_texts_up_to_the_border_of_rotary_frequencies(kind: str, length: int) -> None:
    here = subject(stretched(kind), prompt(length), 60)
    assert here.text == stock_text(here.model, here.start, len(here.text))
    assert length + len(here.text) <= 32
    for carriers, rate in product(CARRIERS, (0.0, 0.7, 1.0)):
        here.check(len(here.text), rate, nodes=16, carriers=carriers)


def test_texts_beyond_the_border_of_rotary_frequencies() -> None:
    here = subject(stretched("longrope"), prompt(33), 40)
    assert len(here.text) == 40
    assert here.text == stock_text(here.model, here.start, 40)
    for carriers in CARRIERS:
        here.check(40, nodes=16, carriers=carriers)
    assert here.counters.mean_acceptance_length > 1.5


# --- the comparison notices ---------------------------------------------------------------------------------


def one_wrong_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's first child, which the prophet makes the likeliest, sees its sibling."""
    right = Pack.visible.func  # type: ignore[attr-defined]

    def wrong(pack: Pack) -> torch.Tensor:
        seen: torch.Tensor = right(pack).clone()
        if pack.mains > 2 and pack.depths[2] == 1:  # plain decoding and prompts have no siblings
            seen[:, 1, 2] = True
        return seen

    monkeypatch.setattr(Pack, "visible", property(wrong))


def positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of depth 1 and more stand one place too far."""
    right = Pack.positions

    def wrong(pack: Pack, committed: int, rule: Any) -> torch.Tensor:
        places = right(pack, committed, rule)
        return places + (places > committed) if committed else places

    monkeypatch.setattr(Pack, "positions", wrong)


def commit_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last accepted node's neighbour is committed in its place."""
    from forestream.cache import StreamCache

    right = StreamCache.commit

    def wrong(cache: StreamCache, layers: range, path: Sequence[int]) -> None:
        right(cache, layers, [*path[:-1], path[-1] + 1] if len(path) > 1 else path)

    monkeypatch.setattr(StreamCache, "commit", wrong)


def trunk_paths_for_stream_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After pruning, trunk layers commit the survivors' numbers in place of the nodes' own."""
    from forestream import decode as loop

    right = loop.check

    def wrong(model: StreamingLM, tree: Any, cache: Any, *rest: Any) -> Any:
        commit, paths = cache.commit, {}

        def record(layers: range, path: Sequence[int]) -> None:
            paths[layers] = list(path)
            if layers == model.stream_layers:
                commit(model.trunk_layers, path)
                commit(layers, path)

        cache.commit = record
        try:
            return right(model, tree, cache, *rest)
        finally:
            cache.commit = commit

    monkeypatch.setattr(loop, "check", wrong)


def window_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tree passes see one key more than the window."""

    def wrong(pack: Pack, committed: int, positions: Any, window: int | None, *rest: Any) -> torch.Tensor:
        wider = window + 1 if window is not None and pack.mains > 1 and committed else window
        return additive(pack, committed, positions, wider, *rest)

    monkeypatch.setattr("forestream.model.additive", wrong)


def accepts_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first child is accepted whatever the main stream says."""
    from forestream import decode as loop

    right = loop.verify

    def wrong(tree: Any, choices: Sequence[int]) -> Any:
        verdict = right(tree, choices)
        children = tree.topology.children[verdict.path[-1]]
        if not children or len(verdict.path) > 1:
            return verdict
        return type(verdict)((*verdict.path, children[0]), choices[children[0]])

    monkeypatch.setattr(loop, "verify", wrong)


@pytest.mark.parametrize(
    ("fault", "host", "settings"),
    [
        (one_wrong_edge, "llama", {"tree": "full", "k": 2, "streams": 2}),
        (one_wrong_edge, "gpt2", {"tree": "full", "k": 2, "streams": 2, "carriers": "fused"}),
        (positions_off_by_one, "llama", {}),
        (positions_off_by_one, "gpt2", {}),
        (commit_shifted, "llama", {}),
        (commit_shifted, "opt-pre", {}),
        (trunk_paths_for_stream_layers, "llama", {"tree": "full", "prune_to": 6}),
        (window_too_wide, "mistral-window", {}),
        (window_too_wide, "gemma3", {}),
        (accepts_too_much, "llama", {}),
    ],
)
def test_equality_notices(fault: Any, host: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 60
    here = lively(model_of(host, "lossless"), tokens)
    here.check(tokens, **settings)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="differs at"):
        here.check(tokens, **settings)
