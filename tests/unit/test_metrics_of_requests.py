"""The figures of a request under the names that clients read, against a slow count over its steps (J03, J05)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from batch import alone, requests, together
from forestream.config import DecodeSettings
from forestream.steps import Counters, Step, tokens_of
from subject import CARRIERS, PRUNINGS, model_of

NAMES = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
    "num_spec_tokens",
}


def slowly(steps: Sequence[Step]) -> dict[str, Any]:
    """One number after the other, each from its definition."""
    passes = [step for step in steps if step.tree is not None]
    accepted = [len(step.path) - 1 for step in passes]
    drafts = sum(1 for step in passes for node in step.kept if node != 0)
    depths = [len(step.tree.topology.path(node)) - 1 for step in passes if step.tree for node in step.kept]
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(passes) if passes else 1.0,
        "draft_acceptance_rate": sum(accepted) / drafts if drafts else 0.0,
        "acceptance_histogram": [accepted.count(number) for number in range(max(accepted, default=-1) + 1)],
        "num_spec_steps": sum(1 for step in passes if any(node != 0 for node in step.kept)),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": drafts,
        "num_spec_tokens": max(depths, default=0),
    }


def counted(steps: Sequence[Step]) -> Counters:
    counters = Counters()
    counters.extend(steps)
    return counters


def texts(rate: float = 0.7, eos: tuple[int, ...] = (), **settings: Any) -> list[list[Step]]:
    model, asked = model_of("llama", "joint"), requests((5, 1, 9), 20, eos=eos)
    truths = [tokens_of(alone(model, one)) for one in asked]
    return together(model, asked, DecodeSettings(**settings), truths, rate)


@pytest.mark.parametrize("rule", [rule for rules in PRUNINGS.values() for rule in rules], ids=str)
@pytest.mark.parametrize("carriers", CARRIERS)
@pytest.mark.parametrize("shape", [{"nodes": 9}, {"tree": "full", "k": 2, "streams": 3}], ids=["budget", "full"])
def test_they_are_what_a_slow_count_says(shape: dict[str, Any], carriers: Any, rule: dict[str, Any]) -> None:
    """J03."""
    for steps in texts(carriers=carriers, **shape, **rule):
        found = counted(steps).request_metrics
        assert found == slowly(steps)
        assert set(found) == NAMES


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_drafts_that_never_and_always_hit(rate: float) -> None:
    for steps in texts(rate, tree="full", k=1):
        found = counted(steps).request_metrics
        assert found == slowly(steps)
        assert found["num_spec_tokens"] == 4
        if rate:
            # 1 token of the prompt pass, 3 passes of 5, 4 tokens of the last one.
            assert found["acceptance_histogram"] == [0, 0, 0, 1, 3]
            assert found["mean_acceptance_length"] == 1 + 15 / 4
            assert found["draft_acceptance_rate"] == 1.0


def test_plain_decoding_drafts_nothing() -> None:
    for one in requests((5, 1), 9):
        found = counted(alone(model_of("llama", "joint"), one)).request_metrics
        assert found == slowly(alone(model_of("llama", "joint"), one))
        assert (found["num_spec_steps"], found["num_draft_tokens"], found["draft_acceptance_rate"]) == (0, 0, 0.0)
        assert found["acceptance_histogram"] == [8]


def test_sums_agree_with_what_was_delivered() -> None:
    """J05: each pass gives its accepted drafts and a token; where a draft ended the text, none comes behind it."""
    free = texts(1.0, nodes=6)
    for end in {token for steps in free for token in tokens_of(steps)[5:9]}:
        for steps in texts(1.0, (end,), nodes=6):
            counters = counted(steps)
            found, histogram = counters.request_metrics, counters.request_metrics["acceptance_histogram"]
            assert found == slowly(steps)
            ended_by_draft = steps[-1].tree is not None and steps[-1].accepted == len(steps[-1].tokens)
            delivered = counters.prompts + counters.passes + found["num_accepted_draft_tokens"] - ended_by_draft
            assert len(tokens_of(steps)) == counters.generated == delivered
            assert sum(histogram) == counters.passes
            assert sum(number * count for number, count in enumerate(histogram)) == counters.accepted


def test_counters_of_several_texts_add_up_in_any_order() -> None:
    found = texts(0.7, nodes=7)
    whole = counted([step for steps in found for step in steps])
    for order in (found, found[::-1]):
        merged = Counters()
        for steps in order:
            merged.merge(counted(steps))
        assert merged.request_metrics == whole.request_metrics == slowly([step for steps in found for step in steps])
        assert merged.decode_seconds == pytest.approx(whole.decode_seconds)
        assert merged.acceptance_by_position == whole.acceptance_by_position


def test_merging_leaves_the_other_as_it_was() -> None:
    first, second, *_ = map(counted, texts(0.7, nodes=7))
    before = second.request_metrics
    first.merge(second)
    first.merge(second)
    assert second.request_metrics == before
    assert Counters().request_metrics == slowly([])


def test_the_histogram_that_is_handed_out_is_a_copy() -> None:
    counters = counted(texts(0.7, nodes=7)[0])
    counters.request_metrics["acceptance_histogram"].append(99)
    assert 99 not in counters.histogram
