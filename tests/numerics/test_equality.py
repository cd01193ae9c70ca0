"""EQ in float32: greedy text with speculation is the text of plain decoding, token for token, on every host."""

from itertools import product
from typing import Any

import pytest

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.steps import Counters, tokens_of
from oracle import AlwaysDrafter, NeverDrafter, SometimesDrafter, assert_equal_texts
from subject import CARRIERS, PRUNINGS, WHO, Subject, lively, model_of, stock_text, subject
from wrapped import STREAMS, prompt, wrapped
from zoo import HOSTS, WINDOW, custom

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
        if streams < 2 and (k, strength) != (1, "off"):
            tokens = 3 + 3 * streams  # with no streams, neither k nor pruning has any say
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
    for place, (nodes, who) in enumerate(product((1, 5, 16, 32), WHO)):
        for rule in ({}, PRUNINGS["mild"][place // 2 % 2], PRUNINGS["extreme"][place // 2 % 2])[:nodes]:
            seen = Subject(here.model, here.start, here.text)
            steps = seen.check(12, nodes=nodes, **who, **rule)
            assert max(len(step.kept) for step in steps) <= nodes
            assert (len(steps) == 12) == (seen.counters.accepted == 0)
            if nodes > 1:
                here.counters.merge(seen.counters)
            else:
                assert seen.counters.accepted == 0
    assert here.counters.mean_acceptance_length > 1.5


LOOKED_UP = ({"lookup_beside": 3}, {"lookup_behind": 4}, {"lookup_beside": 2, "lookup_behind": 3})
TREES: tuple[dict[str, Any], ...] = (
    {"nodes": 1},
    {"nodes": 5},
    {"tree": "full", "k": 2, "streams": 2},
    {"tree": "static", "shape": ((0, 0), (0, 1), (1, 0))},
    {"nodes": 5, "prune_to": 4},
)


@both_modes
@every_host
def test_drafts_that_are_looked_up(host: str, mode: str) -> None:
    """Beside any tree, behind its first choices, and with no tree at all."""
    here, deepest = lively(model_of(host, mode), 30), 0
    for looked_up, who, tree in product(LOOKED_UP, WHO, TREES):
        if who != WHO[0] and tree == {"nodes": 1}:
            continue  # no streams, no carriers
        seen = Subject(here.model, here.start, here.text)
        steps = seen.check(30 if tree == {"nodes": 1} else 12, **who, **tree, **looked_up)
        extra = sum(looked_up.values())
        assert max(len(step.tree.tokens) for step in steps if step.tree) <= tree.get("nodes", 7) + extra
        deepest = max(deepest, *(step.offered_depth for step in steps))
    assert deepest > STREAMS, "no draft was longer than there are streams"


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
@pytest.mark.parametrize("host", ["llama", "opt-pre", "gemma3"])
def test_every_kind_of_streams(host: str, changes: dict[str, Any]) -> None:
    here = lively(wrapped(host, **changes))
    prunings = ({}, {"prune_to": 5}) if here.model.scorer is not None else ({},)
    for carriers, rule in product(CARRIERS, prunings):
        here.check(12, carriers=carriers, nodes=16, **rule)
        here.check(12, carriers=carriers, tree="full", k=2, streams=3, **rule)
    assert here.counters.mean_acceptance_length > 1.5


@every_host
def test_drafts_that_always_and_never_hit(host: str) -> None:
    """A model that is given its own text as a draft accepts all of it, and nothing of any other."""
    here = lively(model_of(host, "joint" if len(host) % 2 else "lossless"), 26)
    settings = DecodeSettings(max_new_tokens=26, nodes=STREAMS + 1)
    whole = here.start + here.text
    for drafter, passes in ((AlwaysDrafter(whole), 5), (NeverDrafter(whole), 25), (SometimesDrafter(whole), None)):
        counters = Counters()
        counters.extend(assert_equal_texts(here.model, here.start, settings, drafter=drafter))
        assert passes is None or counters.passes == passes
        assert counters.generated == counters.prompts + counters.passes + counters.accepted == 26
    assert 1.5 < counters.mean_acceptance_length < STREAMS + 1


def test_a_long_text() -> None:
    model = wrapped(custom("llama", num_key_value_heads=2, max_position_embeddings=1100), "lossless")
    here = subject(model, prompt(5), 1000)
    here.check(1000, nodes=8, carriers="fused", prune_to=6)
    assert here.counters.mean_acceptance_length > 1.5


def test_two_hundred_prompts() -> None:
    """Without a prophet: whatever the streams themselves propose."""
    model = model_of("llama", "lossless")
    for seed in range(200):
        assert_equal_texts(model, prompt(1 + seed % 17, seed=seed), DecodeSettings(max_new_tokens=3, nodes=4))


# --- plain decoding is the host's own -----------------------------------------------------------------------


@every_host
def test_plain_decoding_equals_generate(host: str) -> None:
    """The joint adapter is merged into the host, so the host's own `generate` writes with it."""
    model = model_of(host, "joint")
    for length in (1, 6, 3 * WINDOW):
        start = prompt(length)
        text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=30))))
        assert text == stock_text(model, start, 30)
