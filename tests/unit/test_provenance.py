"""What stands beside every artefact: complete, JSON-ready, and without paths of this machine."""

import json
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from forestream import provenance
from forestream.provenance import collect


def test_the_record_is_json_and_says_what_ran_where() -> None:
    record = json.loads(json.dumps(collect(["train", "e2e"])))
    assert record["command"] == "forestream train e2e"
    assert datetime.fromisoformat(record["date"]).tzinfo is not None
    assert record["packages"]["torch"] == torch.__version__
    assert set(record["packages"]) <= set(provenance.PACKAGES)
    assert record["python"] == sys.version.split()[0]
    assert set(record["machine"]) == {"system", "processor", "cores", "threads", "instructions", "gpu"}
    assert record["machine"]["threads"] == torch.get_num_threads()


def test_arguments_default_to_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/forestream", "demo", "--nodes", "8"])
    assert collect()["command"] == "forestream demo --nodes 8"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/home/someone/data", "data"),
        ("../../elsewhere/data", "data"),
        ("runs/../../data", "data"),
        ("runs/e2e", "runs/e2e"),
        ("./runs", "./runs"),
        ("e2e", "e2e"),
        ("--nodes=8", "--nodes=8"),
        ("0.1", "0.1"),
        ("owner/model", "owner/model"),
    ],
)
def test_paths_outside_the_working_folder_keep_their_last_part_only(given: str, kept: str) -> None:
    assert collect(["train", "--out", given])["command"] == f"forestream train --out {kept}"


@pytest.mark.parametrize("given", ["--out=/home/someone/data", "--out=../elsewhere/data"])
def test_paths_glued_to_an_option_are_shortened_too(given: str) -> None:
    assert collect(["train", given])["command"] == "forestream train --out=data"


def test_no_path_of_this_machine_is_left_in_a_record(tmp_path: Path) -> None:
    text = json.dumps(collect(["train", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]))
    assert str(tmp_path) not in text


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert collect([])["commit"] is None


def test_packages_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGES", ("torch", "no-such-package-at-all"))
    assert list(collect([])["packages"]) == ["torch"]
