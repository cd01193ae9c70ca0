"""Latencies, spread and reasons on runs that are written down by hand (J03, J09, J11, K15, K18)."""

from __future__ import annotations

from typing import Any

import pytest

from forestream.bench.measures import Latency, arrivals, drafts_of, over_repeats, percentiles
from forestream.config import DecodeSettings
from forestream.drafting import DraftTree
from forestream.steps import Counters, Finish, Step
from forestream.topology import chain

TREE = DraftTree(chain(4), (9, 1, 2, 3))
ROOT = DraftTree(chain(1), (9,))


def first(seconds: float) -> Step:
    return Step((7,), 0, seconds)


def drafted(accepted: int, seconds: float, kept: int = 4, finish: Finish | None = None) -> Step:
    tokens = (*TREE.tokens[1 : accepted + 1], 8)
    return Step(tokens, accepted, seconds, TREE, tuple(range(kept)), tuple(range(accepted + 1)), finish)


def bare(seconds: float, finish: Finish | None = None) -> Step:
    return Step((8,), 0, seconds, ROOT, (0,), (0,), finish)


def test_tokens_of_a_pass_arrive_together_and_the_first_of_them_has_waited() -> None:
    latency = Latency()
    latency.add([[first(0.5), drafted(2, 0.3), drafted(0, 0.1), bare(0.2)]])
    assert latency.first == [0.5]
    assert latency.passes == pytest.approx([0.3, 0.1, 0.2])
    assert latency.tokens == pytest.approx([0.3, 0, 0, 0.1, 0.2])


def test_everybody_in_a_batch_waits_for_the_whole_pass() -> None:
    texts = [[first(0.1), drafted(3, 0.2), bare(0.3)], [first(0.4), bare(0.2)], []]
    assert arrivals(texts) == pytest.approx([0.5, 0.9, 1.2])
    latency = Latency()
    latency.add(texts)
    assert latency.first == pytest.approx([0.5, 0.5])
    assert latency.passes == pytest.approx([0.4, 0.3, 0.4])
    assert sum(latency.tokens) == pytest.approx(sum(latency.passes))


@pytest.mark.parametrize("kind", [(7,), (0,), (2**20,)])
def test_the_first_token_counts_whichever_it_is(kind: tuple[int, ...]) -> None:
    """J09: no kind of token is waited for, such as one that shows as text."""
    latency = Latency()
    latency.add([[Step(kind, 0, 0.25), bare(0.5)]])
    assert latency.record()["first_token"] == {"p50": 0.25, "p95": 0.25}


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentiles([1.0, 2.0, 3.0, 4.0, 5.0], (50, 95)) == {"p50": 3.0, "p95": 4.8}
    assert percentiles([], (50,)) is None
    nothing = Latency()
    nothing.add([[first(0.5)]])
    assert nothing.record()["between_tokens"] is None


def test_repeats_show_their_spread() -> None:
    """K18."""
    totals = [Counters.of([first(0.1), drafted(3, seconds)]) for seconds in (1.0, 2.0, 4.0)]
    assert over_repeats(totals) == {
        "repeats": 3,
        "decode_seconds": {"median": 2.0, "min": 1.0, "max": 4.0},
        "tokens_per_second": {"median": 2.0, "min": 1.0, "max": 4.0},
    }


@pytest.mark.parametrize(
    ("steps", "settings", "told"),
    [
        ([bare(1), bare(1)], None, {"settings": 2}),
        ([bare(1), drafted(1, 1), bare(1, "length")], None, {"nothing_to_draft": 1, "last_token": 1}),
        ([bare(1)], DecodeSettings(nodes=1), {"settings": 1}),
        ([bare(1)], DecodeSettings(streams=0), {"settings": 1}),
        ([drafted(0, 1, kept=1), drafted(2, 1)], DecodeSettings(prune_below=0.5), {"pruned": 1}),
        ([drafted(1, 1), bare(1, "length")], DecodeSettings(), {"last_token": 1}),
        ([drafted(1, 1), bare(1, "stop")], DecodeSettings(max_new_tokens=4), {"last_token": 1}),
        ([bare(1), drafted(1, 1)], DecodeSettings(), {"nothing_to_draft": 1}),
        ([drafted(1, 1)], DecodeSettings(), {}),
    ],
)
def test_passes_without_drafts_have_a_reason(steps: list[Step], settings: Any, told: dict[str, int]) -> None:
    """K15."""
    found = drafts_of([[first(1), *steps], []], settings)
    assert found == {"passes_with_drafts": len(steps) - sum(told.values()), "passes_without": told}
