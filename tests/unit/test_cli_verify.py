"""`forestream verify` on a tiny adapter: the claim holds, a broken rule of acceptance is caught, inputs are checked."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tiny
from forestream.cli import app
from forestream.cli.demo import PROMPTS
from forestream.cli.prompts import Prompt, read_prompts
from forestream.cli.verify import _nothing_accepted
from forestream.data import prompt_ids
from forestream.decode import decode
from forestream.drafting import DraftTree, drafter_for
from forestream.errors import PromptError
from forestream.generation import Generator
from forestream.steps import Counters, Step
from forestream.verify import Verdict, verify
from oracle import Prophet

TEXTS = "name[The Blue Door], eatType[pub] ->\n\nname[Zizzi], food[Thai] ->\n"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("verify") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text(TEXTS)
    return file


@pytest.fixture
def gifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that often know what comes next: those of a random adapter know nothing."""

    def steps(self: Generator, prompt: Sequence[int]) -> Iterator[Step]:
        truth = (*prompt, *self.collect(self.plain_steps(prompt)).tokens)
        drafter = Prophet(drafter_for(self.settings), truth, 0.8)
        return decode(self.model, prompt, self.settings, self.eos, drafter)

    monkeypatch.setattr(Generator, "steps", steps)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of acceptance that takes the root's last child, whatever the main stream says."""

    def wrong(tree: DraftTree, choose: Callable[[int], int], over: Callable[[], bool]) -> Verdict:
        if not (children := tree.topology.children[0]):
            return verify(tree, choose, over)
        choose(0)
        return Verdict((0, children[-1]), choose(children[-1]))

    monkeypatch.setattr("forestream.rows.verify", wrong)


def run(adapter: Path, *arguments: object) -> Result:
    common = ("verify", "--adapter", adapter, "--max-new-tokens", 24)
    return CliRunner().invoke(app, [str(a) for a in (*common, *arguments)], env={"COLUMNS": "120"})


def refused(adapter: Path, *arguments: object) -> str:
    """The one line of an error; 1 would be an answer."""
    result = run(adapter, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


def recorded(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text(), parse_constant=pytest.fail)
    return record


# --- the claim holds --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gifted")
@pytest.mark.parametrize("settings", [(), ("--tree", "full", "--k", 2, "--carriers", "fused"), ("--prune-to", 4)])
def test_in_float32_texts_are_equal(adapter: Path, prompts: Path, tmp_path: Path, settings: tuple[object, ...]) -> None:
    result = run(adapter, "--prompts", prompts, "--json", tmp_path / "out.json", *settings)
    assert result.exit_code == 0, result.output
    assert "2 of 2" in result.stdout
    assert "first differences" not in result.stdout
    assert "warning" not in result.stderr
    record = recorded(tmp_path / "out.json")
    assert (record["claim"], record["holds"], record["margin"], record["dtype"]) == ("equal", True, None, "float32")
    total = record["total"]
    assert (total["prompts"], total["equal"]) == (2, 2)
    assert 24 < total["tokens"] == total["generated_tokens"]
    assert f"The claim holds: in float32 all 2 texts, {total['tokens']} tokens, are those of plain" in result.stdout
    assert f"{total['accepted']} drafts were accepted in {total['passes']} passes" in result.stdout
    assert total["accepted"] > 5
    assert [entry["prompt"] for entry in record["prompts"]] == [line for line in TEXTS.split("\n") if line]
    assert [entry["where"] for entry in record["prompts"]] == [f"line {n} of {prompts}" for n in (1, 3)]
    for number, entry in enumerate(record["prompts"], start=1):
        assert (entry["number"], entry["first_difference"], entry["worst"]) == (number, None, 0.0)


@pytest.mark.usefixtures("gifted")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_texts_are_equal_or_near(adapter: Path, tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "out.json"
    result = run(adapter, "--dtype", dtype, "--json", file)
    assert result.exit_code == 0, result.output
    assert f"The claim holds: in {dtype} " in result.stdout
    record = recorded(file)
    assert (record["claim"], record["holds"], record["dtype"]) == ("near tie", True, dtype)
    assert [entry["prompt"] for entry in record["prompts"]] == list(PROMPTS)
    for entry in record["prompts"]:
        assert entry["worst"] <= entry["allowed"] == 4 * entry["unit"]


def test_prompts_of_a_task(adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = run(adapter, "--task", "synthetic", "--limit", 2, "--json", file)
    assert result.exit_code == 0, result.output
    wheres = [entry["where"] for entry in recorded(file)["prompts"]]
    assert wheres == [f"prompt {n} of synthetic, validation" for n in (1, 2)]


# --- and does not ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_draft_that_is_accepted_is_named(adapter: Path, prompts: Path, tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "out.json"
    result = run(adapter, "--prompts", prompts, "--dtype", dtype, "--json", file)
    assert result.exit_code == 1, result.output
    record = recorded(file)
    assert record["holds"] is False
    assert record["total"]["equal"] == 0
    for entry in record["prompts"]:
        assert 0 < entry["first_difference"] < 24
        assert entry["plain"] != entry["written"]
        assert entry["margin"] > 0
        assert entry["worst"] > entry["allowed"]
    first = record["prompts"][0]
    words = " ".join(result.stdout.split())
    assert f"The first difference is at token {first['first_difference']} (from 0) after line 1 of {prompts}" in words
    for token in (first["plain"], first["written"]):
        assert f"({token})" in result.stdout
    assert f"{first['margin']:.3g} apart" in words
    assert "first differences" in result.stdout


@pytest.mark.usefixtures("broken")
def test_a_stated_margin_goes_before_the_usual_one(adapter: Path, prompts: Path) -> None:
    common = ("--prompts", prompts, "--dtype", "bfloat16", "--margin")
    held = run(adapter, *common, 100)
    assert held.exit_code == 0
    assert "0 of 2 texts are those of plain decoding, and in the others no token is more than" in held.stdout
    assert "(100 allowed)" in held.stdout
    failed = run(adapter, *common, 0)
    assert failed.exit_code == 1
    assert "0 allowed" in failed.stdout


def test_a_text_that_ends_early_is_a_difference(adapter: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(self: Generator, prompt: Sequence[int]) -> Iterator[Step]:
        return iter(list(self.plain_steps(prompt))[:5])

    monkeypatch.setattr(Generator, "steps", steps)
    result = run(adapter, "--prompts", prompts, "--dtype", "bfloat16", "--margin", 100)
    assert result.exit_code == 1
    assert "at token 5 (from 0) after line 1" in " ".join(result.stdout.split())
    assert "forestream wrote ended, inf apart" in " ".join(result.stdout.split())


# --- a run that verified nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        (("--nodes", 1), "look at --nodes and --streams"),
        (("--max-new-tokens", 1), "raise --max-new-tokens"),
    ],
)
def test_nothing_drafted_is_told(adapter: Path, prompts: Path, settings: tuple[object, ...], hint: str) -> None:
    result = run(adapter, "--prompts", prompts, *settings)
    assert result.exit_code == 0, result.output
    assert "warning: " in result.stderr
    assert hint in result.stderr


def test_fifty_passes_without_an_accepted_draft_are_no_accident(adapter: Path, prompts: Path) -> None:
    generator = Generator.from_pretrained(adapter)
    step = list(generator.steps(prompt_ids(generator.tokenizer, TEXTS[:20]), max_new_tokens=4))[1]
    refused = Step(step.tokens[-1:], 0, 0.1, step.tree, step.kept, (0,))
    for passes, few in ((49, True), (50, False)):
        counters = Counters()
        counters.extend([refused] * passes)
        told = _nothing_accepted(counters)
        assert told.startswith(f"no draft was accepted in {passes} passes")
        assert "the form that the adapter was trained on" in told
        assert ("these are few passes" in told) == few


# --- inputs ------------------------------------------------------------------------------------------------------


def test_json_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb", "id": 7}\n\n  \n{"prompt": "{c"}\r\n')
    assert read_prompts(file) == [Prompt("a\nb", f"line 1 of {file}"), Prompt("{c", f"line 4 of {file}")]
    assert [one.text for one in read_prompts(file.rename(tmp_path / "prompts.txt"))] == [
        '{"prompt": "a\\nb", "id": 7}',
        '{"prompt": "{c"}',
    ]


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.txt", b"", "found no prompt in "),
        ("a.txt", b"one\n\ncaf\xe9\n", "line 3 of .* is no UTF-8 text"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "line 2 of .* is no JSON .*expected one JSON object a line"),
        ("a.jsonl", b'{"prompt": "x"}\n\n["x"]\n', "line 3 of .* holds a list; expected one JSON object"),
        ("a.jsonl", b'{"text": "x"}\n', 'line 1 of .* has no key "prompt"; expected'),
        ("a.jsonl", b'{"prompt": 5}\n', 'line 1 of .* has 5 under the key "prompt"; expected'),
        ("a.jsonl", b'{"prompt": ""}\n', "line 1 of .* has '' under the key"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, data: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(PromptError, match=told):
        read_prompts(tmp_path / name)


def test_inputs_are_refused_before_anything_is_written(adapter: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("short ->\n" + "x" * 600 + "\n")
    (tmp_path / "bad.jsonl").write_text("[]\n")
    json_file = tmp_path / "out.json"
    for arguments, told in (
        (("--prompts", tmp_path / "long.txt"), "line 2 of .*long.txt: the prompt has 600 tokens"),
        (("--prompts", tmp_path / "bad.jsonl"), "line 1 of .*bad.jsonl holds a list"),
        (("--prompts", prompts, "--task", "synthetic"), "found --prompts and --task"),
        (("--prompts", prompts, "--split", "test"), "found --split without --task"),
        (("--task", "nothing"), "found task 'nothing'"),
        (("--prompts", prompts, "--margin", 1), "found --margin with float32"),
    ):
        assert re.search(told, refused(adapter, *arguments, "--json", json_file))
        assert not json_file.exists()
    assert "no adapter folder" in refused(tmp_path / "absent")
    assert run(adapter, "--prompts", tmp_path / "absent.txt").exit_code == 2
    late = run(adapter, "--prompts", prompts, "--streams", 9)
    assert late.exit_code == 2
    assert late.stderr.splitlines()[-1] == "error: ConfigError: streams is 9; this adapter was trained with 3"
