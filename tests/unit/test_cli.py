"""The commands on a tiny adapter: what they show, what they write, and how they fail."""

import json
import re
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import tiny
from forestream.checkpoint import LORA, PROVENANCE, STREAMS
from forestream.cli import app, options
from forestream.cli.demo import PROMPTS, Pair
from forestream.cli.stage import Side, Stage
from forestream.errors import CheckpointError
from forestream.generation import Generation, Generator
from forestream.steps import Counters, Step
from forestream.writing import Writing

FLOAT32 = ("--dtype", "float32")
PROMPT = "name[The Blue Door], eatType[pub] ->"
FIGURES = {
    "generated_tokens",
    "passes",
    "call_reduction",
    "mean_acceptance_length",
    "acceptance_by_position",
    "acceptance_given_previous",
    "nodes_per_pass",
    "prompt_seconds",
    "decode_seconds",
    "tokens_per_second",
}
HEADING = {"adapter", "base", "dtype", "quantise", "settings", "provenance"}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("cli") / "tiny")


def run(*arguments: object, stdin: str | None = None, **environment: str) -> Result:
    environment = {"COLUMNS": "100", "TERM": "xterm-256color", **environment}
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, env=environment)


def done(*arguments: object, **keywords: Any) -> Result:
    result = run(*arguments, **keywords)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object, **keywords: Any) -> str:
    """The one line on stderr that a refused command leaves."""
    result = run(*arguments, **keywords)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    line = result.stderr.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


# --- generate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--stream",),
        ("--tree", "full", "--k", 3),
        ("--nodes", 1),
        ("--nodes", 9, "--carriers", "fused"),
        ("--streams", 0),
        ("--prune-below", 0.02),
        ("--prune-to", 4),
    ],
)
def test_generate_writes_the_text_of_plain_decoding(adapter: Path, settings: tuple[object, ...]) -> None:
    common = ("generate", "--adapter", adapter, *FLOAT32, "--max-new-tokens", 40)
    plain = done(*common, "--plain", PROMPT)
    drafted = done(*common, *settings, PROMPT)
    assert drafted.stdout == plain.stdout
    assert len(plain.stdout) > 30
    assert "tokens/s" in drafted.stderr


def test_prompts_come_from_a_file_or_stdin_a_line_each(adapter: Path, tmp_path: Path) -> None:
    lines = "one ->\n\ntwo ->\r\n"
    (tmp_path / "prompts.txt").write_text(lines, newline="")
    common = ("generate", "--adapter", adapter, *FLOAT32, "--max-new-tokens", 8)
    apart = [done(*common, prompt).stdout for prompt in ("one ->", "two ->")]
    assert done(*common, "--file", tmp_path / "prompts.txt").stdout == "".join(apart)
    assert done(*common, stdin=lines).stdout == "".join(apart)


def test_generate_records_what_it_did(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "out.json"
    result = done("generate", "--adapter", adapter, *FLOAT32, "--max-new-tokens", 12, "--json", file, PROMPT)
    record = json.loads(file.read_text())
    assert set(record) == HEADING | {"method", "sampling", "generations", "total"}
    assert (record["adapter"], record["dtype"], record["method"]) == ("tiny", "float32", "forestream")
    (one,) = record["generations"]
    assert set(one) == FIGURES | {"prompt", "text", "tokens", "finish", "metrics"}
    assert one["metrics"]["num_spec_steps"] > 0
    assert one["text"] + "\n" == result.stdout
    assert (len(one["tokens"]), one["finish"], record["total"]["generated_tokens"]) == (12, "length", 12)
    assert list(file.parent.iterdir()) == [file]


def test_a_prompt_needs_one_source(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    common = ("generate", "--adapter", adapter)
    assert "found a prompt and --file" in refused(*common, "--file", tmp_path / "blank.txt", PROMPT)
    assert "blank.txt; expected one per line" in refused(*common, "--file", tmp_path / "blank.txt")
    assert "found no prompt in stdin" in refused(*common, stdin="")
    assert "latin.txt is no UTF-8 text" in refused(*common, "--file", tmp_path / "latin.txt")


# --- inspect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["P_j: G*D = 3*48 = 144", "exit scorer: 2*rank*D = 16*D = 16*48 = 768", "together: 19*D = 19*48 = 912"]),
        ({"streams": 4}, ["P_j: G*D = 4*48 = 192", "together: 20*D = 20*48 = 960 parameters"]),
        ({"value_rotation": True}, ["together: 16*D = 16*48 = 768"]),
        ({"start": "low_rank", "start_rank": 2, "scorer_rank": 0}, ["start map: 2*rank*D = 4*D = 4*48 = 192", " 336 "]),
    ],
)
def test_inspect_accounts_for_every_extra_parameter(tmp_path: Path, changes: dict[str, Any], lines: list[str]) -> None:
    adapter = tiny.tiny_adapter(tmp_path / "own", **changes)
    file = tmp_path / "own.json"
    output = done("inspect", "--adapter", adapter, "--passes", 0, "--max-new-tokens", 3, "--json", file).stdout
    for line in lines:
        assert line in output
    record = json.loads(file.read_text())["summary"]
    stored = sum(tensor.numel() for tensor in load_file(adapter / STREAMS).values())
    assert record["extra_parameters_total"] == sum(record["extra_parameters"].values()) == stored
    assert record["lora_parameters"] == sum(tensor.numel() for tensor in load_file(adapter / LORA).values())


def test_inspect_says_where_the_adapter_comes_from(adapter: Path, tmp_path: Path) -> None:
    output = done("inspect", "--adapter", adapter, "--max-new-tokens", 2).stdout
    assert "2 of 4, the top ones" in output
    assert "2026-01-31T12:00:00+00:00, commit 0123456789ab, 7 examples" in output
    other = tiny.tiny_adapter(tmp_path / "other")
    for torn in ("{", "[]"):
        (other / PROVENANCE).write_text(torn)
        assert "not recorded" in done("inspect", "--adapter", other, "--max-new-tokens", 2).stdout


def test_inspect_draws_every_pass(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "passes.json"
    settings = (*FLOAT32, "--nodes", 8, "--prune-to", 5, "--max-new-tokens", 20, "--prompt", PROMPT)
    output = done("inspect", "--adapter", adapter, *settings, "--passes", 3, "--json", file).stdout
    record = json.loads(file.read_text())
    passes, figures = record["passes"], record["figures"]
    assert output.count("accepted") > output.count("\npass ") == 3
    assert f"{figures['passes'] - 3} more passes are not drawn" in output
    assert set(record) == HEADING | {"summary", "prompt", "text", "passes", "figures"}
    assert set(figures) == FIGURES
    assert len(passes) == figures["passes"]
    assert 1 + sum(len(one["wrote"]) for one in passes) == figures["generated_tokens"] == 20
    for one in passes:
        path = one["accepted_path"]
        assert set(path) <= set(one["kept"])
        assert [one["tokens"][node] for node in path[1:]] == one["wrote"][: len(path) - 1]
        assert all(one["parents"][child] == parent for parent, child in pairwise(path))
    drawn = done("inspect", "--adapter", adapter, *settings, "--passes", 99).stdout
    assert drawn.count("\npass ") == figures["passes"]
    assert drawn.count("✓") - 1 == sum(len(one["accepted_path"]) - 1 for one in passes)
    assert drawn.count("✗") - 1 == sum(len(one["parents"]) - len(one["kept"]) for one in passes)
    assert drawn.count("→") - 1 == sum(len(one["wrote"]) - len(one["accepted_path"]) + 1 for one in passes)


def test_inspect_names_both_kinds_of_acceptance_by_position(adapter: Path) -> None:
    settings = (*FLOAT32, "--nodes", 8, "--max-new-tokens", 20, "--prompt", PROMPT)
    output = " ".join(done("inspect", "--adapter", adapter, *settings, "--passes", 0, COLUMNS="200").stdout.split())
    assert re.search(r"accepted by position stream 1 \d+%, .* of all passes that drafted so far", output)
    assert re.search(r"given the previous stream 1 \d+%, .* whose drafts before it were accepted", output)


def test_inspect_shows_an_adapter_without_streams(tmp_path: Path) -> None:
    twin = tiny.tiny_adapter(tmp_path / "twin", streams=0)
    output = done("inspect", "--adapter", twin, "--max-new-tokens", 4).stdout
    assert "together: 0*D = 0*48 = 0 parameters" in output
    assert "nothing was drafted" in output


# --- demo ---------------------------------------------------------------------------------------------------


def test_demo_writes_identical_texts(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = done("demo", "--adapter", adapter, *FLOAT32, "--max-new-tokens", 24, "--json", file)
    record = json.loads(file.read_text())
    assert set(record) == HEADING | {"prompts", "total"}
    assert [entry["prompt"] for entry in record["prompts"]] == list(PROMPTS)
    for entry in record["prompts"]:
        assert set(entry) == {"prompt", "plain", "forestream", "speedup", "identical", "first_difference_margin"}
        assert set(entry["plain"]) == set(entry["forestream"]) == FIGURES | {"text"}
        assert entry["plain"]["text"] == entry["forestream"]["text"]
        assert entry["identical"] is True
        assert entry["first_difference_margin"] is None
        assert result.stdout.count(entry["plain"]["text"].strip()) >= 2
    total = record["total"]
    assert set(total) == {"plain", "forestream", "speedup", "identical"}
    assert total["identical"] is True
    for side in ("plain", "forestream"):
        assert total[side]["passes"] == sum(entry[side]["passes"] for entry in record["prompts"])
    ratio = total["forestream"]["tokens_per_second"] / total["plain"]["tokens_per_second"]
    assert total["speedup"] == pytest.approx(ratio, rel=1e-2)
    assert "5 of 5" in result.stdout
    assert result.stderr == ""


def test_demo_draws_on_a_terminal(adapter: Path) -> None:
    result = done("demo", "--adapter", adapter, *FLOAT32, "--prompt", PROMPT, "--max-new-tokens", 4, FORCE_COLOR="1")
    assert "╭" in result.stdout
    assert "3 passes, " in result.stdout


@pytest.mark.parametrize(("home", "told"), [(True, "bfloat16"), (False, "float32")])
def test_without_a_dtype_the_machine_decides(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: bool, told: str
) -> None:
    monkeypatch.setattr("forestream.bases.multiplies_bfloat16", lambda: home)
    monkeypatch.setattr("forestream.weights.multiplies_bfloat16", lambda: False)
    file = tmp_path / "demo.json"
    result = run(
        "demo", "--adapter", adapter, "--max-new-tokens", 2, "--prompt", PROMPT, "--compile", "off", "--json", file
    )
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["dtype"] == told


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_a_difference_is_an_error_in_float32_and_told_in_bfloat16(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, code: int
) -> None:
    def wrong(self: Generator, prompt: str) -> Iterator[Step]:
        text = self.generate(prompt, max_new_tokens=1).tokens
        yield Step(text, 0, 0.1)
        yield Step(((text[0] + 7) % 90 + 2,), 0, 0.1, finish="length")

    monkeypatch.setattr(Generator, "plain_steps", wrong)
    file = tmp_path / "demo.json"
    common = ("demo", "--adapter", adapter, "--dtype", dtype, "--max-new-tokens", 2, "--prompt", PROMPT)
    result = run(*common, "--json", file)
    assert result.exit_code == code
    assert "no (margin" in result.stdout
    assert "1 of 1 texts differ" in result.stderr
    assert json.loads(file.read_text())["total"]["identical"] is False


@pytest.mark.parametrize(
    ("margin", "told"), [(None, "yes"), (0.0, "no (near tie)"), (0.125, "no (near tie)"), (2.5, "no (margin 2.50)")]
)
def test_only_a_small_margin_is_called_a_near_tie(margin: float | None, told: str) -> None:
    nothing = Generation("", (), (), Counters())
    assert Pair(PROMPT, nothing, nothing, margin).identical == told


def test_the_shipped_adapter_is_looked_for_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "SHIPPED", Path("adapters", "absent"))
    with pytest.raises(CheckpointError, match=r"found no .*absent \(looked at .* and .*\); .*--adapter"):
        options.shipped_adapter()
    (tmp_path / "adapters" / "absent").mkdir(parents=True)
    assert options.shipped_adapter() == tmp_path / "adapters" / "absent"
    assert options.shipped_adapter(Path("given")) == Path("given")


# --- errors -------------------------------------------------------------------------------------------------

COMMANDS = pytest.mark.parametrize("command", ["generate", "inspect", "demo"])


def prompted(command: str, prompt: str = PROMPT) -> tuple[str, ...]:
    return (command, prompt) if command == "generate" else (command, "--prompt", prompt)


@COMMANDS
def test_a_missing_folder_is_named(command: str, tmp_path: Path) -> None:
    line = refused(*prompted(command), "--adapter", tmp_path / "absent", "--json", tmp_path / "out.json")
    assert f"CheckpointError: no adapter folder at {tmp_path / 'absent'}" in line
    assert list(tmp_path.iterdir()) == []


@COMMANDS
@pytest.mark.parametrize("name", [LORA, STREAMS])
def test_a_torn_file_is_named(command: str, name: str, tmp_path: Path) -> None:
    adapter = tiny.tiny_adapter(tmp_path / "torn")
    whole = (adapter / name).read_bytes()
    (adapter / name).write_bytes(whole[: len(whole) // 2])
    line = refused(*prompted(command), "--adapter", adapter, "--json", tmp_path / "out.json")
    assert f"{adapter / name} is corrupt" in line
    assert not (tmp_path / "out.json").exists()


@COMMANDS
def test_a_foreign_base_is_refused(command: str, adapter: Path, tmp_path: Path) -> None:
    other = tiny.tiny_base(tmp_path / "other", initializer_range=0.2)
    line = refused(*prompted(command), "--adapter", adapter, "--base", other, "--json", tmp_path / "out.json")
    assert "fingerprint" in line
    assert "load the base it was trained on" in line
    assert not (tmp_path / "out.json").exists()


@COMMANDS
def test_an_empty_prompt_is_refused(command: str, adapter: Path, tmp_path: Path) -> None:
    result = run(*prompted(command, ""), "--adapter", adapter, "--json", tmp_path / "out.json")
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines() == [
        "error: PromptError: the prompt is empty; give some text to go on from"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--prune-below", 0.1, "--prune-to", 3), "two pruning rules"),
        (("--streams", 9), "streams is 9; this adapter was trained with 3"),
        (("--device", "nowhere"), "device 'nowhere' cannot be used"),
    ],
)
def test_impossible_settings_are_refused(adapter: Path, arguments: tuple[object, ...], told: str) -> None:
    assert told in refused("generate", PROMPT, "--adapter", adapter, *arguments)


# --- drawing ------------------------------------------------------------------------------------------------


def decoded(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_comes_when_its_last_token_does() -> None:
    tokens = tuple("a£b\N{EURO SIGN}".encode())
    writing = Writing(decoded)
    pieces = [*writing.add(Step(tokens[:2], 1, 0.1)), *writing.add(Step(tokens[2:6], 3, 0.1))]
    assert [piece.text for piece in pieces] == ["a", "", "£", "b", "", ""]
    assert [piece.drafted for piece in pieces] == [True, False, True, True, True, False]
    assert writing.add(Step(tokens[6:], 0, 0.1, finish="length"))[-1].text == "\N{EURO SIGN}"


def test_a_text_cut_inside_a_character_shows_what_there_is() -> None:
    tokens = tuple("a£".encode())[:2]
    pieces = Writing(decoded).add(Step(tokens, 0, 0.1, finish="length"))
    assert "".join(piece.text for piece in pieces) == decoded(list(tokens))


def test_the_stage_hands_steps_on_and_draws_both_sides() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=60)
    left, right = Side("left", decoded), Side("right", decoded)
    steps = [Step(tuple(f" {word}".encode()), 2, 0.5) for word in ("some", "words", "that", "fill", "several", "lines")]
    with Stage(console, [left, right]) as stage:
        assert list(stage.watch(left, iter(steps))) == steps
        assert list(stage.watch(right, iter(steps[:2]))) == steps[:2]
    assert left.text.plain == "some words that fill several lines"
    assert right.text.plain == "some words"
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(title in output for title in ("left", "right", "0 passes, 0.0 tokens/s"))


# --- quantised bases ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default::forestream.errors.PrecisionWarning")
def test_a_quantised_base_writes_its_own_plain_text_and_a_line_warns(adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    common = ("generate", "--adapter", adapter, *FLOAT32, "--max-new-tokens", 24, "--quantise", "int8")
    plain = done(*common, "--plain", PROMPT)
    drafted = done(*common, "--json", tmp_path / "out.json", PROMPT)
    assert drafted.stdout == plain.stdout
    warned = " ".join(drafted.stderr.split())
    assert warned.count("was trained on its base in floating point and runs on it in int8") == 1
    assert "PrecisionWarning" not in warned
    assert json.loads((tmp_path / "out.json").read_text())["quantise"] == "int8"


@pytest.mark.filterwarnings("default::forestream.errors.PrecisionWarning")
def test_bench_records_what_weights_are_held_in(adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    arguments = ("--task", "synthetic", "--limit", 1, "--max-new-tokens", 6, "--quantise", "int8", "--json")
    methods = ("--methods", "plain,forestream,transformers")
    result = done("bench", "--adapter", adapter, *FLOAT32, *methods, *arguments, tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["settings"]["quantise"] == "int8"
    assert all(row["equal_outputs"] == 1 for row in record["methods"].values())
    assert " ".join(result.stderr.split()).count("runs on it in int8") == 1
