"""Reports of result files: what they tell, that they stand alone, and what they make of strange and broken files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from forestream.bench.details import details, reason
from forestream.bench.page import report_markdown, report_page, sections_of
from forestream.bench.paper import filled
from forestream.bench.report import markdown, refresh
from forestream.bench.results import read_all
from forestream.bench.series import series_of
from forestream.bench.tables import cell, code
from forestream.cli import app
from forestream.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted(path for path in (ROOT / "benchmarks" / "results").iterdir() if path.suffix in (".json", ".jsonl"))
EVIL = "<script>alert(1)</script>|`x` ![p](http://a/b.png) [l](http://a) $\\frac{1}{0}$ \"'&"
EMPTY = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


def entry(speed: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A method's entry of a bench file, as older records have it."""
    drafts = speed != 1.0
    return {
        "settings": {"nodes": 8} if drafts else None,
        "prompts": 4,
        "generated_tokens": 80,
        "passes": 40 if drafts else 76,
        "call_reduction": 2.0 if drafts else 1.05,
        "mean_acceptance_length": 1.9 if drafts else 1.0,
        "acceptance_by_position": [0.7, 0.2] if drafts else [],
        "nodes_per_pass": 8.0 if drafts else 1.0,
        "decode_seconds": 2.0,
        "tokens_per_second": 38.0 * speed,
        "seconds_per_pass": 0.05 if drafts else 0.026,
        "time_to_first_token": 0.1,
        "equal_outputs": 4,
        "first_difference_margins": [],
        "speedup": {"median": speed, "min": speed - 0.1, "max": speed + 0.1, "of_totals": speed},
        "per_prompt": {"tokens": [20] * 4, "passes": [10] * 4, "decode_seconds": [[0.5]] * 4},
        **changes,
    }


def bench(speed: float = 1.7, method: str = "forestream", **settings: Any) -> dict[str, Any]:
    return {
        "provenance": {
            "command": "forestream bench",
            "commit": "0123456789ab",
            "date": "2026-01-31T12:00:00+00:00",
            "packages": {"torch": "2"},
            "machine": {"processor": "some", "threads": 2},
        },
        "settings": {
            "adapter": "own",
            "task": "e2e",
            "split": "test",
            "dtype": "float32",
            "batch_size": 1,
            "temperature": 0.0,
            "sampling": {"temperature": settings.get("temperature", 0.0), "top_k": 0},
            "trained_streams": 4,
            "decode": {"streams": None, "nodes": 8},
            **settings,
        },
        "methods": {"plain": entry(), method: entry(speed)},
    }


def written(folder: Path, **records: Any) -> list[Path]:
    paths = [folder / f"{name}.json" for name in records]
    for path, record in zip(paths, records.values(), strict=True):
        path.write_text(json.dumps(record))
    return paths


def page(paths: list[Path]) -> str:
    return report_page(sections_of(read_all(paths)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "100"})


class Tags(HTMLParser):
    """Raises at a tag that is not closed where it should be; notes all tags and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# --- what it tells ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_every_recorded_file_is_told(path: Path) -> None:
    (result,) = read_all([path])
    text = report_markdown(sections_of([result]))
    assert f"## {path.stem}\n" in text
    if path.suffix == ".json":
        assert markdown(result.record) in text
        for name in result.record.get("methods", {}):
            assert f"| {name} | " in text
    else:
        assert "| main loss | " in text


def test_a_page_of_everything_is_whole_and_needs_nothing_else() -> None:
    text = page(RECORDS)
    tags = Tags(text)
    assert all(reference.startswith("#") for reference in tags.references)
    assert not tags.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert not re.search(r"@import|url\((?!#)", text)
    assert "width=device-width" in text
    assert "position: sticky" in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) > 10
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_older_and_newer_records_side_by_side(tmp_path: Path) -> None:
    newer = bench()
    newer["memory"] = {"of": "process", "loaded": 2e9, "peak": 2.5e9, "above_loaded": 5e8}
    newer["training"] = {"seconds": 3447.2, "examples": 10800, "updates": 900}
    waits = {"p50": 0.01, "p95": 0.02, "p99": 0.03}
    spread = {"median": 40.0, "min": 30.0, "max": 50.0}
    newer["methods"]["forestream"] |= {
        "latency": {"first_token": waits, "between_passes": waits, "between_tokens": None},
        "over_repeats": {"repeats": 3, "tokens_per_second": spread, "decode_seconds": spread},
        "extra_parameters": 11520,
        "extra_bytes": 2_000_000,
        "operations_per_pass": 4_000_000_000,
        "extra_operations_per_pass": 3_000_000_000,
        "accepted_histogram": [10, 20, 10],
        "passes_with_drafts": 38,
        "passes_without": {"last_token": 2},
        "scores": {"rouge1": 80.0},
    }
    text = details(newer)
    assert "| forestream | 10.0, 20.0 | 10.0, 20.0, 30.0 | - |" in text
    assert "| forestream | 3 | 40.0 (30.0 to 50.0) |" in text
    assert "| forestream | 11,520 | 2.00 | 4 | +3 |" in text
    assert "500 MB above the 2000 MB of the process" in text
    assert "Training took 3447 s, 10800 examples." in text
    assert "| 38 of 40 | last token 2 |" in text
    assert "| forestream | 80.00 |" in text
    assert "### Latency" not in details(bench())
    both = page(written(tmp_path, older=bench(), newer=newer))
    assert "Accepted drafts per pass." in both
    assert "lowest and highest of 3 repeats" in both
    assert "one repeat, so no spread" in both


def test_break_even_stands_beside_what_was_measured() -> None:
    """K01, K02, K03: a pass of 0.05 s where plain decoding's takes 0.026 s has to bring 1.92 tokens; 1.9 came."""
    text = details(bench(speed=0.98))
    assert "| forestream | 1.92 | 1.90 | 0.98 | no |" in text
    assert "| forestream | 1.92 | 1.90 | 1.70 | yes |" in details(bench())


def test_parts_where_it_does_not_pay_are_named_with_the_reason() -> None:
    record = bench()
    record["by_category"] = {
        name: {"prompts": 4, "nats_per_token": nats, "methods": {"plain": entry(), "forestream": entry(speed)}}
        for name, nats, speed in (("qa", 2.5, 0.9), ("rag", 0.5, 1.4))
    }
    record["entropy"] = {"nats_per_token": [1.0] * 80, "rank_correlation": {"forestream": -0.7}}
    text = details(record)
    assert "forestream does not pay on qa (0.90).\n" in text
    assert "| qa | forestream | 4 | 2.50 | 2.00 | 1.90 | 0.90 | 4 of 4 |" in text
    assert "correlation of -0.70: drafts are accepted less where the model is less certain" in text


@pytest.mark.parametrize(
    ("correlation", "prompts", "told"),
    [
        (-0.9, 100, "accepted less where the model is less certain"),
        (-0.1, 100, "says little"),
        (0.5, 100, "is not the reason"),
        (-0.4, 10, "by chance"),
    ],
)
def test_a_reason_says_no_more_than_its_figures(correlation: float, prompts: int, told: str) -> None:
    assert told in reason(correlation, prompts)


def test_the_settings_of_a_run_are_told() -> None:
    """J10, J15."""
    text = details(bench(temperature=0.8))
    assert "| temperature | `0.8` |" in text
    assert "| machine processor | `some` |" in text
    assert "| version of torch | `2` |" in text


# --- sweeps -------------------------------------------------------------------------------------------------


def test_clients_of_a_serving_engine() -> None:
    plain = {
        "tokens_per_second": {"median": 25.0, "all": [24.0, 25.0, 26.0]},
        "over_plain": {"median": 1.0, "min": 1.0, "max": 1.0},
        "seconds_a_text": {"p50": 1.2, "p95": 2.5},
        "equal_texts": 8,
        "steps": 80,
        "accepted_by_place": [],
        "mean_acceptance_length": 1.0,
    }
    drafting = {
        **plain,
        "over_plain": {"median": 2.1, "min": 1.9, "max": 2.3},
        "steps": 40,
        "accepted_by_place": [30, 20, 10, 0],
        "mean_acceptance_length": 2.5,
    }
    idle = {**drafting, "accepted_by_place": [0, 0, 0, 0], "mean_acceptance_length": 1.0}
    record = bench()
    del record["methods"]
    record["settings"]["prompts"] = 9
    record["served"] = {
        "1": {"vllm": plain, "vllm+forestream": drafting},
        "8": {"vllm": plain, "vllm+forestream": idle},
    }
    text = markdown(record)
    assert (
        "| 1 | vllm+forestream | 25.0 | 2.10 (1.90 to 2.30) | 1.20, 2.50 | 2.50 | 0.75, 0.50, 0.25 | 8 of 9 |" in text
    )
    assert "| 8 | vllm+forestream | 25.0 | 2.10 (1.90 to 2.30) | 1.20, 2.50 | 1.00 |  | 8 of 9 |" in text
    assert "| 1 | vllm | 25.0 | 1.00 (1.00 to 1.00) | 1.20, 2.50 | 1.00 |  | 8 of 9 |" in text


def test_documents_ask_for_sections_of_a_record() -> None:
    path = next(one for one in RECORDS if one.stem == "spec-bench-float32")
    text = "<!-- results: spec-bench-float32, By category -->\nold\n<!-- end -->\n"
    found = refresh(text, path.parent)
    assert "old" not in found
    assert found.count("\n| ") == 1 + 6 * 3, "six categories, three methods beside plain decoding"
    assert refresh(found, path.parent) == found
    with pytest.raises(DataError, match=r"'By colour' of .*; expected one of its sections: When it pays, By category"):
        refresh(text.replace("category", "colour"), path.parent)


def test_the_papers_first_table_is_made_of_the_records_of_its_tasks(tmp_path: Path) -> None:
    def methods(**speeds: float) -> dict[str, Any]:
        return {
            name: {
                "speedup": {"median": speed, "min": speed - 0.5, "max": speed + 0.5},
                "call_reduction": 2 * speed,
                "extra_parameters": 1234 if name == "forestream" else 0,
            }
            for name, speed in speeds.items()
        }

    def write(name: str, **record: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(record))

    write("a-test-float32", methods=methods(plain=1.0, forestream=2.5))
    write("a-quality-joint", scores={"rouge1": 50.0})
    interval = {"low": 48.5, "high": 51.5}
    write("a-quality-guard", guard={"rouge1": {"joint": 50.0, "twin": 50.2, "twin_interval": interval}})
    write("b-test-float32", methods=methods(plain=1.0))
    write("b-quality-joint", scores={"exact_match": 61.0})
    write("c-test-float32", methods=methods(plain=1.0))
    told = filled("<!-- paper: table 1 of a, b, c -->\nold\n<!-- end -->\n", tmp_path)
    assert "old" not in told
    assert "| a | plain | 1.00 (0.50 to 1.50) | 2.00 | rouge1 50.0, twin 50.2 (48.5 to 51.5) | 0 |" in told
    assert "| a | forestream | 2.50 (2.00 to 3.00) | 5.00 | the same | 1,234 |" in told
    assert "| b | plain | 1.00 (0.50 to 1.50) | 2.00 | exact_match 61.0 | 0 |" in told
    assert "| c | plain | 1.00 (0.50 to 1.50) | 2.00 | - | 0 |" in told
    assert filled(told, tmp_path) == told
    with pytest.raises(DataError, match="table 1 asks for d"):
        filled("<!-- paper: table 1 of a, d -->\n<!-- end -->", tmp_path)


def test_ablations_are_told_against_the_first_and_against_chance() -> None:
    def row(variant: str, tokens: float) -> dict[str, Any]:
        known = {"main_loss": 1.5, "stream_losses": [2.0, 3.0], "speedup": 1.25, "training_seconds": 90.0}
        return {"variant": variant, "call_reduction": tokens, **known}

    rows = [row("as it is", 2.0), row("another seed", 1.9), row("G = 2", 2.08), row("alpha = 0", 1.5)]
    settings = {"dtype": "float32", "base": ["training.share=0.5"], "examples": 600, "method": "budget-8", "prompts": 9}
    machine = {"processor": "a processor", "threads": 2}
    made = {"machine": machine, "date": "2026-12-01", "commit": "abc", "command": "benchmarks/ablations.py"}
    told = markdown({"provenance": made, "settings": settings, "ablations": rows})
    assert "| as it is | 1.50 | 2.00, 3.00 | 2.00 |  | 1.25 | 1.5 |" in told
    assert "| another seed | 1.50 | 2.00, 3.00 | 1.90 | -0.10 (no more than a seed) | 1.25 | 1.5 |" in told
    assert "| 2.08 | +0.08 (no more than a seed) |" in told
    assert "| 1.50 | -0.50 |" in told
    assert "600 examples each, with `training.share=0.5`; budget-8 on 9 prompts." in told


def test_records_that_differ_in_one_setting_are_a_series(tmp_path: Path) -> None:
    paths = written(
        tmp_path,
        four=bench(1.5, batch_size=4),
        one=bench(1.8),
        sixteen=bench(0.9, batch_size=16),
        warm=bench(1.3, temperature=0.8),
        other=bench(1.1, task="sql", batch_size=2),
        again=bench(1.75),
    )
    found = {one.axis: one for one in series_of(read_all(paths))}
    assert set(found) == {"batch size", "temperature"}
    assert [value for value, _ in found["batch size"].points] == [1, 4, 16]
    assert found["batch size"].left_out == (("again", "one"),)
    text = report_markdown(sections_of(read_all(paths)))
    assert "## By batch size: forestream" in text
    assert "| 16 | 0.90 | 2.00 | sixteen |" in text
    assert "again is left out: one has the same settings." in text
    assert "by batch size." in page(paths)


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("precision", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantise": "int8"}]),
        ("streams", [{"trained_streams": 8, "adapter": "eight"}, {"decode": {"streams": 2, "nodes": 8}}]),
        ("prompt tokens", [{"prompt_tokens": 128}, {"prompt_tokens": 4096}]),
    ],
)
def test_every_axis(tmp_path: Path, axis: str, values: list[dict[str, Any]]) -> None:
    records = {f"r{number}": bench(**value) for number, value in enumerate(values)}
    found = series_of(read_all(written(tmp_path, **records)))
    assert [one.axis for one in found] == [axis]


def test_other_trees_are_no_series(tmp_path: Path) -> None:
    paths = written(tmp_path, a=bench(batch_size=1), b=bench(batch_size=2, decode={"streams": None, "nodes": 9}))
    assert series_of(read_all(paths)) == []


# --- strange and broken files -------------------------------------------------------------------------------


def test_whatever_records_hold_is_shown_as_text(tmp_path: Path) -> None:
    record = bench(method=EVIL, adapter=EVIL)
    record["provenance"] |= {"command": EVIL, "commit": EVIL, "packages": {EVIL: EVIL}}
    record["by_category"] = {EVIL: {"prompts": 4, "methods": {"plain": entry(), EVIL: entry(0.5)}}}
    record["methods"][EVIL] |= {"passes_with_drafts": 1, "passes_without": {EVIL: 1}}
    other = bench(method=EVIL, adapter=EVIL, batch_size=2)
    paths = [tmp_path / f"{name} <b>&.json" for name in ("one", "two")]
    for path, one in zip(paths, (record, other), strict=True):
        path.write_text(json.dumps(one))
    text = page(paths)
    tags = Tags(text)
    assert not tags.tags & {"script", "img", "b"}
    assert all(reference.startswith("#") for reference in tags.references)
    assert "&lt;script&gt;alert(1)" in text
    assert "<script" not in report_markdown(sections_of(read_all(paths))).replace(code(EVIL), "")


def test_cells_and_spans_hold_anything() -> None:
    assert cell("a | b\n<i>") == "a \\| b &lt;i>"
    assert cell("plain  text") == "plain  text"
    assert code("a `b`") == "`` a `b` ``"
    assert code("a\nb") == "`a b`"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.json", "{", "is no JSON"),
        ("a.json", "[1]", "holds no record with its provenance"),
        ("a.json", '{"provenance": {}, "settings": {}, "verdict": 1}', "of no known kind: found the keys provenance"),
        ("a.json", '{"provenance": {}, "settings": {}, "methods": {}}', "is no whole record of its kind"),
        ("a.json", '{"provenance": {}, "settings": 3, "scores": 4}', "is no whole record of its kind"),
        ("a.jsonl", '{"step": 1}\n{', "line 2 of "),
        ("a.jsonl", '{"loss": 1}', "is no log of a training"),
        ("a.jsonl", "", "is no log of a training"),
        ("a.json", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_broken_file_is_one_error_that_names_it(tmp_path: Path, name: str, text: str | bytes, told: str) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run(path, "--output", tmp_path / "out")
    assert result.exit_code == 2
    line = result.stderr.strip()
    assert line.startswith("error: DataError: ")
    assert "\n" not in line
    assert str(path) in line
    assert told in line
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json cannot be read"):
        read_all([tmp_path / "absent.json"])


def test_files_of_one_name_keep_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, same=bench())
    names = [one.name for one in read_all([tmp_path / "a" / "same.json", tmp_path / "b" / "same.json"])]
    assert names == ["same", "same (2)"]


def test_no_model_library_is_loaded() -> None:
    """Records are told where no model runs."""
    modules = "forestream.bench.page, forestream.bench.results, forestream.bench.log"
    script = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the command --------------------------------------------------------------------------------------------


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    paths = written(tmp_path, one=bench(), four=bench(1.2, batch_size=4))
    log = next(path for path in RECORDS if path.suffix == ".jsonl")
    assert run(*paths, log, "--output", tmp_path / "here").exit_code == 0
    # Another process, with another order of sets.
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    command = [sys.executable, "-m", "forestream", "report", *map(str, [*paths, log])]
    subprocess.run([*command, "--output", str(tmp_path / "there")], check=True, env=environment, capture_output=True)
    for name in ("report.md", "report.html"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["report.html", "report.md"]


def test_check_compares_with_the_log(tmp_path: Path) -> None:
    record = bench()
    line = "1 0 0 0 100000;2 1 8 2 50000;1 0 8 2 50000"
    record["methods"]["forestream"]["steps"] = [[line]]
    (path,) = written(tmp_path, own=record)
    result = run("--check", path)
    assert result.exit_code == 1
    assert f"{path}: forestream: generated_tokens is 80 in the record and 4 by its log" in result.stdout
    (bare,) = written(tmp_path, bare=bench())
    refused = run("--check", bare)
    assert refused.exit_code == 2
    assert f"{bare}: found no log of passes" in refused.stderr
    asked = run(bare)
    assert asked.exit_code == 2
    assert "nothing is asked for" in asked.stderr
