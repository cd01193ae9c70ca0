"""Counters of a bench file worked out again, by another function, from the log of every pass (J05)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from batch import alone, requests, together
from forestream.bench import PLAIN
from forestream.bench.log import EXACT, TIMES, differences, log_of, passes_of, recount
from forestream.bench.methods import Method
from forestream.bench.runner import run
from forestream.config import DecodeSettings
from forestream.errors import DataError
from forestream.steps import Step, tokens_of
from subject import CARRIERS, model_of

SETTINGS: list[dict[str, Any]] = [{"nodes": 9}, {"tree": "full", "k": 2, "streams": 3}, {"nodes": 9, "prune_to": 3}]


@cache
def _recorded() -> dict[str, Any]:
    return recorded(nodes=9)


def recorded(rate: float = 0.7, repeats: int = 2, **settings: Any) -> dict[str, Any]:
    """A bench record with its log, of drafts that hit at `rate`."""
    model, asked = model_of("llama", "joint"), requests((5, 1, 9), 14)
    truths = [tokens_of(alone(model, one)) for one in asked]
    chosen = DecodeSettings(max_new_tokens=14, **settings)

    def plainly(prompts: Sequence[Sequence[int]]) -> list[list[Step]]:
        return [alone(model, next(one for one in asked if one.prompt == tuple(prompt))) for prompt in prompts]

    def drafting(prompts: Sequence[Sequence[int]]) -> list[list[Step]]:
        places = [next(i for i, one in enumerate(asked) if one.prompt == tuple(prompt)) for prompt in prompts]
        return together(model, [asked[i] for i in places], chosen, [truths[i] for i in places], rate)

    methods = [Method(PLAIN, None, plainly), Method("forestream", chosen, drafting)]
    records = run(model, methods, [one.prompt for one in asked], repeats)
    entries = {name: {**own.summary(records[PLAIN]), "steps": own.log()} for name, own in records.items()}
    return {"methods": entries}


@pytest.mark.parametrize("carriers", CARRIERS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_both_counts_agree(settings: dict[str, Any], carriers: Any, rate: float) -> None:
    assert differences(recorded(rate, carriers=carriers, **settings)) == []


@pytest.mark.parametrize("key", [*EXACT, *TIMES])
def test_a_wrong_figure_is_named(key: str) -> None:
    record = deepcopy(_recorded())
    entry = record["methods"]["forestream"]
    value = entry[key]
    entry[key] = [*value[:-1], value[-1] + 1] if isinstance(value, list) else 1.01 * value
    (told,) = differences(record)
    assert told.startswith(f"forestream: {key} is ")
    entry.pop(key)
    assert len(differences(record)) == 1


def test_a_wrong_line_of_the_log_is_noticed() -> None:
    record = deepcopy(_recorded())
    log = record["methods"]["forestream"]["steps"]
    first, *rest = log[0][0].split(";")
    log[0][0] = ";".join([first, re.sub(r"^(\d+) \d+", r"\1 9", rest[0]), *rest[1:]])
    assert {re.findall(r": (\w+) is", line)[0] for line in differences(record)} >= {
        "mean_acceptance_length",
        "acceptance_by_position",
        "accepted_histogram",
    }


def test_the_definitions_on_a_log_that_is_written_by_hand() -> None:
    """J03: a pass that accepts 3 drafts gives 4 tokens; acceptance length is 1 + drafts; the prompt's is no pass."""
    log = [["1 0 0 0 500000;4 3 8 3 200000;1 0 8 3 100000;2 1 4 1 100000"]]
    found = recount(log)
    assert found["generated_tokens"] == 8
    assert found["passes"] == 3
    assert found["call_reduction"] == 8 / 3
    assert found["mean_acceptance_length"] == 1 + 4 / 3
    assert found["acceptance_by_position"] == [2 / 3, 1 / 2, 1 / 2]
    assert found["acceptance_given_previous"] == [2 / 3, 1, 1]
    assert found["accepted_histogram"] == [1, 1, 0, 1]
    assert found["tokens_per_second"] == pytest.approx(7 / 0.4)
    assert found["time_to_first_token"] == 0.5


def test_a_log_reads_back() -> None:
    model, (one,) = model_of("llama", "joint"), requests((5,), 9)
    steps = alone(model, one)
    found = passes_of(log_of(steps))
    assert [(own.tokens, own.nodes) for own in found] == [(1, len(step.kept)) for step in steps]
    assert passes_of("") == []


@pytest.mark.parametrize("broken", ["1 2 3", "a b c d e", "1 0 0 0 5;", 7, None])
def test_a_broken_log_is_an_error(broken: Any) -> None:
    record = deepcopy(_recorded())
    record["methods"]["forestream"]["steps"] = [[broken]]
    if broken is None:
        record["methods"]["forestream"]["steps"] = []
    with pytest.raises(DataError, match="log"):
        differences(record)


def test_a_record_without_a_log_says_how_to_get_one() -> None:
    with pytest.raises(DataError, match="forestream bench --steps"):
        differences({"methods": {"plain": {"passes": 3}}})
