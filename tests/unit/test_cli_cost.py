"""`forestream cost`: its tables against hand arithmetic, its files, and how it fails."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from forestream.cli import app
from forestream.cost import Curve, Profile, pass_seconds

# A plain pass takes 1000 + 5 * 11 + 101 = 1156 s.
PROFILE = Profile(
    model="tiny",
    dtype="float32",
    device="cpu",
    processor="an abacus",
    threads=2,
    compile="none",
    layers=5,
    stream_layers=2,
    layer=Curve(((1, 11.0), (100, 110.0))),
    head=Curve(((1, 101.0), (100, 200.0))),
    overhead=1000.0,
    draft_overhead=5000.0,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cost", *map(str, arguments)], env={"COLUMNS": "100", "TERM": "dumb"})


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def cells(output: str, first: int) -> list[str]:
    """The cells of the table row that begins with `first`."""
    (row,) = [line.split() for line in output.splitlines() if line.split()[:1] == [str(first)]]
    return row


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text(PROFILE.to_json())
    return file


def test_cost_shows_the_map() -> None:
    output = done("--gamma", 2, "--pass-cost", 1.5, "--alpha", 1.0)
    assert "gamma 2, pass cost 1.5" in output
    # (1 + 2/4) / 1.5 = 1 at equal lengths, where both bring 3 tokens.
    assert cells(output, 4) == ["4", "0.50", "0.75", "1.00", "1.25", "1.50", "1.00", "3.00"]
    assert cells(output, 2) == ["2", "0.67", "1.00", "1.33", "1.67", "2.00", "0.75", "2.25"]
    assert "plain pass" not in output


def test_cost_predicts_a_measured_machine(profile: Path) -> None:
    output = done("--profile", profile, "--streams", 4)
    assert f"{1000 * 1156:.2f} ms" in output
    assert cells(output.split("a plain pass takes")[1], 8) == [
        "8",
        f"{1000 * 6366:.2f}",
        f"{6366 / 1156:.2f}",
        f"{1000 * 6330:.2f}",
        f"{6330 / 1156:.2f}",
    ]


def test_cost_writes_everything_down(profile: Path, tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "cost.json"
    done("--profile", profile, "--streams", 3, "--gamma", 5, "--alpha", 0.5, "--json", file)
    record = json.loads(file.read_text())
    assert set(record) == {"provenance", "settings", "map", "profile"}
    assert record["settings"] == {"pass_cost": 1.25, "gamma": 5, "alpha": 0.5, "streams": 3}
    predictions = record["profile"].pop("predictions")
    assert Profile.from_dict(record["profile"]) == PROFILE
    assert [row["nodes"] for row in predictions] == [4, 8, 16, 32]
    for row in predictions:
        for carriers in ("fused", "deferred"):
            seconds = pass_seconds(PROFILE, row["nodes"], 3, carriers)
            assert row[carriers]["milliseconds_per_pass"] == pytest.approx(1000 * seconds)
            assert row[carriers]["break_even_call_reduction"] == pytest.approx(seconds / 1156)
    for row in record["map"]:
        assert row["speedup"]["0.5"] == pytest.approx((1 + 5 / row["cost_ratio"]) / 1.25 * 0.5)
        assert row["equal_at"] * row["speedup"]["1.0"] == pytest.approx(1.0)
        assert row["equal_tokens"] == pytest.approx(row["equal_at"] * 1.96875)


def test_without_a_profile_none_is_recorded(tmp_path: Path) -> None:
    done("--json", tmp_path / "cost.json")
    assert set(json.loads((tmp_path / "cost.json").read_text())) == {"provenance", "settings", "map"}


@pytest.mark.parametrize(("name", "start"), [("map.png", b"\x89PNG\r\n"), ("deep/map.SVG", b"<?xml")])
def test_cost_draws_the_map(tmp_path: Path, name: str, start: bytes) -> None:
    done("--plot", tmp_path / name)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(start)
    done("--plot", tmp_path / name)
    assert (tmp_path / name).read_bytes() == drawn


@pytest.mark.parametrize(("pass_cost", "crosses"), [(1.25, True), (50, False), (0.01, False)])
def test_the_break_even_line_is_drawn_where_there_is_one(tmp_path: Path, pass_cost: float, crosses: bool) -> None:
    file = tmp_path / "map.svg"
    done("--plot", file, "--pass-cost", pass_cost, "--gamma", 6)
    text = file.read_text()
    assert ">equal<" in text if crosses else ">equal<" not in text
    assert f"gamma 6, pass cost {pass_cost:g}" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--plot", "map.pdf"), "--plot is 'map.pdf'; expected a name that ends in .png or .svg"),
        (("--pass-cost", 0), "pass_cost is 0.0; expected a finite number above 0"),
    ],
)
def test_impossible_options_are_refused(
    arguments: tuple[object, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, "--json", "out.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.strip() == f"error: ConfigError: {told}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "Profile is not valid JSON"),
        (b"[]", "Profile is a JSON list; expected an object"),
        (b"caf\xe9", "is no UTF-8 text (unexpected end of data at byte 3); expected JSON"),
        (b'{"model": "x"}', "Profile lacks compile, device"),
    ],
)
def test_a_torn_profile_is_named(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "torn.json"
    file.write_bytes(content)
    result = run("--profile", file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ConfigError: ")
    assert told in result.stderr
