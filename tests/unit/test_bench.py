"""`forestream bench` on a tiny adapter: what its record holds (J01, J02, J10, J11, J13, J15, K15, K18)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

import tiny
from forestream.baseline import plain
from forestream.bench.asked import asked, evenly
from forestream.bench.entropy import mean_entropy, rank_correlation
from forestream.bench.log import differences
from forestream.bench.methods import method
from forestream.cli import app
from forestream.config import DecodeSettings
from forestream.data import prompt_ids
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.steps import tokens_of
from forestream.tasks import Example, get_task
from wrapped import prompt, wrapped

METHODS = ("plain", "forestream", "full-2+prune+G2+fused", "transformers")
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}a:"


def bench(adapter: Path, *arguments: object) -> tuple[dict[str, Any], Result]:
    file = adapter.parent / "bench.json"
    common = ("bench", "--adapter", adapter, "--dtype", "float32", "--compile", "off", "--json", file)
    given = [str(one) for one in (*common, *arguments)]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text()), result


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def run(adapter: Path) -> tuple[dict[str, Any], Result]:
    """Plain decoding, three others, three repeats."""
    asked = ("--task", "synthetic", "--limit", 2, "--max-new-tokens", 10, "--repeats", 3, "--steps", "--entropy")
    return bench(adapter, *asked, "--methods", ",".join(METHODS))


def test_the_baseline_and_every_method_ran_and_were_counted_alike(run: tuple[dict[str, Any], Result]) -> None:
    """J01, J02, J13: generated ids of every method by one counter; ratios prompt by prompt, and of the totals."""
    record, _ = run
    assert tuple(record["methods"]) == METHODS
    for row in record["methods"].values():
        assert row["equal_outputs"] == row["prompts"] == 2
        assert sum(row["per_prompt"]["tokens"]) == row["generated_tokens"] == 20
        assert sum(row["per_prompt"]["accepted"]) == round(row["passes"] * row["accepted_per_pass"])
        assert set(row["speedup"]) == {"median", "min", "max", "of_totals"}
    assert differences(record) == []


def test_a_name_says_how_many_streams_draft(run: tuple[dict[str, Any], Result], adapter: Path) -> None:
    record, _ = run
    assert record["methods"]["full-2+prune+G2+fused"]["settings"]["streams"] == 2
    generator = Generator.from_pretrained(adapter, dtype=torch.float32, settings=DecodeSettings(max_new_tokens=12))
    for name, levels in (("full-2", 3), ("full-2+G2", 2), ("full-2+G1", 1)):
        (steps,) = method(name, generator).run([prompt(8)])
        assert max(max(step.tree.topology.depths) for step in steps if step.tree) == levels


def test_what_was_drafted_stands_beside_what_was_accepted(run: tuple[dict[str, Any], Result]) -> None:
    """J11, K15."""
    record, result = run
    for name, row in record["methods"].items():
        assert row["drafted_per_pass"] == pytest.approx(row["nodes_per_pass"] - 1)
        assert row["passes_with_drafts"] + sum(row["passes_without"].values()) == row["passes"]
        drafts = name in ("forestream", "full-2+prune+G2+fused")
        assert (row["drafted_per_pass"] > 0) is drafts
        assert ("settings" in row["passes_without"]) is not drafts
    heading = " ".join(result.stdout.split())
    assert heading.index("accept.") < heading.index("nodes/")


def test_repeats_waits_and_costs_are_recorded(run: tuple[dict[str, Any], Result]) -> None:
    """K13, K18."""
    record, _ = run
    for name, row in record["methods"].items():
        assert row["over_repeats"]["repeats"] == record["settings"]["repeats"] == 3
        spread = row["over_repeats"]["decode_seconds"]
        assert spread["min"] <= spread["median"] <= spread["max"]
        assert row["decode_seconds"] == pytest.approx(sum(map(sum, row["per_prompt"]["decode_seconds"])) / 3, abs=1e-3)
        assert 0 <= row["latency"]["between_tokens"]["p50"] <= row["latency"]["between_passes"]["p99"]
        drafts = name in ("forestream", "full-2+prune+G2+fused")
        assert (row["extra_parameters"] > 0) is (row["extra_operations_per_pass"] > 0) is drafts
        assert set(row["scores"]) == {"exact_match"}
    assert record["memory"] is None or record["memory"]["peak"] >= record["memory"]["loaded"]


def test_configuration_and_environment_are_printed_and_recorded(run: tuple[dict[str, Any], Result]) -> None:
    """J10, J15."""
    record, result = run
    told = " ".join(result.stdout.split())
    assert "tiny, synthetic test split, float32, quantise off, compile off, batch 1, greedy, 3 repeats" in told
    assert record["settings"]["temperature"] == 0.0
    assert record["provenance"]["machine"]["processor"] in told
    assert (record["settings"]["trained_streams"], record["settings"]["mode"]) == (3, "joint")
    assert record["training"] == {"examples": 7, "updates": None, "seconds": None}


def test_entropy_stands_beside_acceptance(run: tuple[dict[str, Any], Result]) -> None:
    record, _ = run
    nats = record["entropy"]["nats_per_token"]
    assert len(nats) == 2
    assert all(0 < one < log(100) for one in nats)
    assert set(record["entropy"]["rank_correlation"]) == set(METHODS) - {"plain"}


# --- parts and turns ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lossless adapter of a base with a chat template."""
    base = tiny.tiny_base(tmp_path_factory.mktemp("chatty") / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    return tiny.tiny_adapter(base.parent / "lossless", base, mode="lossless")


def test_every_turn_runs_and_parts_have_figures_of_their_own(chatty: Path, tmp_path: Path) -> None:
    turns = [("writing", ["One?", "Two?", "Three?"]), ("qa", ["Who?"]), ("qa", ["Where?"])]
    (tmp_path / "spec_bench").mkdir()
    with gzip.open(tmp_path / "spec_bench" / "test.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"category": kind, "turns": said}) + "\n" for kind, said in turns)
    arguments = ("--task", "spec_bench", "--data-dir", tmp_path, "--max-new-tokens", 6, "--entropy")
    record, result = bench(chatty, *arguments)
    assert record["categories"] == ["mt_bench"] * 3 + ["qa"] * 2
    assert record["turns"] == [1, 2, 3, 1, 1]
    assert {name: part["prompts"] for name, part in record["by_category"].items()} == {"mt_bench": 3, "qa": 2}
    for name, row in record["methods"].items():
        parts = [part["methods"][name] for part in record["by_category"].values()]
        for key in ("prompts", "generated_tokens", "passes", "equal_outputs"):
            assert sum(part[key] for part in parts) == row[key]
        assert "scores" not in row
    nats = record["entropy"]["nats_per_token"]
    lengths = record["methods"]["plain"]["per_prompt"]["tokens"]
    mean = sum(n * length for n, length in zip(nats[3:], lengths[3:], strict=True)) / sum(lengths[3:])
    assert record["by_category"]["qa"]["nats_per_token"] == pytest.approx(mean, abs=1e-4)
    assert "by category" in result.stdout


def test_later_turns_come_behind_plain_decodings_answers(chatty: Path) -> None:
    generator = Generator.from_pretrained(chatty, dtype=torch.float32, settings=DecodeSettings(max_new_tokens=5))
    said = Example("One?", "", (), form="chat", turns=("Two?",), category="qa")
    given = asked(generator, [said])
    answer = generator.text(tokens_of(list(generator.plain_steps([{"role": "user", "content": "One?"}]))))
    messages = [("user", "One?"), ("assistant", answer), ("user", "Two?")]
    expected = prompt_ids(generator.tokenizer, [{"role": role, "content": text} for role, text in messages])
    assert given.prompts[1] == expected
    assert given.examples is None


# --- lengths of prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 20, 200])
def test_prompts_are_brought_to_a_length(adapter: Path, length: int) -> None:
    generator = Generator.from_pretrained(adapter, dtype=torch.float32)
    examples = get_task("synthetic").grouped("test")[:3]
    own, brought = asked(generator, examples).prompts, asked(generator, examples, length).prompts
    assert [len(one) for one in brought] == [length] * 3
    for short, long in zip(own, brought, strict=True):
        least = min(len(short), length)
        assert long[-least:] == short[-least:], "a prompt ends as it did"
    assert len(set(brought)) == 3


def test_chats_keep_their_length(chatty: Path) -> None:
    generator = Generator.from_pretrained(chatty, dtype=torch.float32)
    with pytest.raises(ConfigError, match="take a task of plain texts"):
        asked(generator, [Example("One?", "", (), form="chat")], 30)


# --- entropy ------------------------------------------------------------------------------------------------


def test_entropy_is_that_of_each_places_law() -> None:
    model, start = wrapped("llama"), prompt(5)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=6))))
    with torch.no_grad():
        logits = model.port.model(torch.tensor([[*start, *text[:-1]]])).logits[0, len(start) - 1 :]
    slow = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert mean_entropy(model, start, text) == pytest.approx(float(slow), rel=1e-4)


@pytest.mark.parametrize(
    ("x", "y", "found"),
    [
        ([1, 2, 3], [10, 20, 90], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 1, 2, 2], 0.8944),
        ([1, 1, 1], [1, 2, 3], None),
        ([1], [2], None),
    ],
)
def test_rank_correlation_by_hand(x: Sequence[float], y: Sequence[float], found: float | None) -> None:
    assert rank_correlation(x, y) == found


def test_a_limit_takes_every_category_alike() -> None:
    kinds = "aaaabbbcd"
    examples = [Example(f"prompt {place}", " text", ("text",), category=kind) for place, kind in enumerate(kinds)]
    for most, places in ((2, [0, 4]), (4, [0, 4, 7, 8]), (6, [0, 1, 4, 5, 7, 8]), (99, range(9)), (None, range(9))):
        assert evenly(examples, most) == [examples[place] for place in places]
    plain = [Example(f"prompt {place}", " text", ("text",)) for place in range(5)]
    assert evenly(plain, 3) == plain[:3]
