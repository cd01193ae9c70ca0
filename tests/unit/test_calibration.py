"""Pruning rules replayed on trees that were scored once, against real runs under each rule; and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from forestream.bench.report import markdown
from forestream.calibration import Kept, Scored, replay, score_text
from forestream.cli import app
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.errors import ConfigError
from forestream.pruning import KeepAbove, KeepBest, keep_rule
from forestream.steps import Counters, tokens_of
from forestream.topology import Topology
from subject import lively, model_of
from wrapped import wrapped

TOKENS = 24
TREES: dict[str, dict[str, Any]] = {
    "full": {"tree": "full", "k": 3, "streams": 3},
    "budget": {"nodes": 20},
    "static": {"tree": "static", "shape": ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (4, 0), (4, 3))},
}
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"prune_below": 1e-6},
    {"prune_below": 1e-3},
    {"prune_below": 0.3},
    {"prune_below": 1.0},
    {"prune_to": 2},
    {"prune_to": 7},
)


@pytest.mark.parametrize("carriers", ["deferred", "fused"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("host", "mode"), [("llama", "joint"), ("gpt2", "lossless")])
def test_a_replayed_rule_counts_what_a_real_run_counts(host: str, mode: str, tree: str, carriers: Any) -> None:
    """Trees that are cut short at the cap are among them."""
    subject = lively(model_of(host, mode), TOKENS)
    settings = DecodeSettings(carriers=carriers, max_new_tokens=TOKENS, **TREES[tree])
    places = score_text(subject.model, subject.start, settings)
    assert len(places) == TOKENS - 1
    sizes = set()
    for changes in RULES:
        rule = replace(settings, **changes)
        steps = list(decode(subject.model, subject.start, rule))
        counters = Counters.of(steps)
        found = replay(places, keep_rule(rule))
        assert tokens_of(steps) == subject.text
        assert (found.tokens, found.passes, found.kept) == (counters.generated, counters.passes, counters.nodes)
        assert found.offered == sum(len(step.tree.topology) for step in steps if step.tree is not None)
        assert found.good - found.lost == counters.accepted
        sizes.add(found.kept)
    assert len(sizes) > 3


def test_a_text_that_ends_by_itself_and_texts_of_one_token() -> None:
    subject = lively(model_of("llama", "joint"), TOKENS)
    settings = DecodeSettings(max_new_tokens=TOKENS, nodes=9)
    end = subject.text[7]
    places = score_text(subject.model, subject.start, settings, (end,))
    length = subject.text.index(end) + 1
    assert len(places) == length - 1
    counters = Counters.of(decode(subject.model, subject.start, settings, (end,)))
    assert (replay(places, None).passes, replay(places, None).kept) == (counters.passes, counters.nodes)
    assert score_text(subject.model, subject.start, replace(settings, max_new_tokens=1)) == ()


def test_good_edges_that_a_rule_drops_are_counted_and_cost_passes() -> None:
    """By hand: every place drafts a side branch of two right tokens, the second of which is badly scored."""
    tree = Topology((-1, 0, 0, 2))
    places = [Scored(tree, (1.0, 0.5, 0.2, 0.01), (0, 2, 3))] * 6
    assert replay(places, None) == Kept(tokens=7, passes=2, offered=8, kept=8, good=4, lost=0)
    assert replay(places, KeepAbove(0.1)) == Kept(tokens=7, passes=3, offered=12, kept=9, good=6, lost=3)
    assert replay(places, KeepAbove(0.3)) == Kept(tokens=7, passes=6, offered=24, kept=12, good=12, lost=12)
    assert replay(places, KeepBest(3)) == replay(places, KeepAbove(0.1))
    found = replay(places, KeepAbove(0.1))
    assert (found.call_reduction, found.nodes_per_pass, found.offered_per_pass, found.share_lost) == (7 / 3, 3, 4, 0.5)
    assert found + found == Kept(14, 6, 24, 18, 12, 6)


@pytest.mark.parametrize("changes", [{"scorer_rank": 0}, {"streams": 0}])
def test_without_scorer_or_streams_there_is_nothing_to_calibrate(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="exit scorer"):
        score_text(wrapped("llama", **changes), (1, 2), DecodeSettings(max_new_tokens=5))


# --- the command ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("calibrate") / "tiny")


def test_the_command_records_every_rule(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("--task", "synthetic", "--dtype", "float32", "--limit", 2, "--max-new-tokens", 8)
    rules = ("--thresholds", "0.5,0.001", "--sizes", "4,6", "--k", 2)
    result = CliRunner().invoke(
        app,
        ["calibrate", "--adapter", str(adapter), *map(str, (*arguments, *rules)), "--json", str(file)],
    )
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    names = ["all", "prune_below 0.001", "prune_below 0.5", "prune_to 6", "prune_to 4"]
    assert [row["rule"] for row in record["calibration"]] == names
    whole = record["calibration"][0]
    assert (whole["lost"], whole["kept"], whole["share_of_call_reduction"]) == (0, whole["offered"], 1.0)
    for row in record["calibration"]:
        assert row["tokens"] == 16
        assert row["passes"] <= row["kept"] <= row["offered"]
        assert row["rule"] in result.stdout
        assert f"| {row['rule']} |" in markdown(record)
    assert record["settings"]["decode"]["tree"] == "full"
    assert record["provenance"]["command"].startswith("forestream")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--thresholds", "often"), "expected numbers"),
        (("--thresholds", "2"), "prune_below is 2.0"),
        (("--sizes", "0"), "prune_to is 0"),
        (("--max-new-tokens", "1"), "nothing to prune"),
    ],
)
def test_impossible_rules_are_refused(adapter: Path, arguments: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(
        app, ["calibrate", "--adapter", str(adapter), "--task", "synthetic", "--limit", "1", *arguments]
    )
    assert result.exit_code == 1
    assert told in result.stderr
