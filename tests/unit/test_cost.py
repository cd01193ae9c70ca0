"""The cost model against hand arithmetic: curves, profiles, passes and the two-model rival."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestream.cost import (
    Curve,
    Profile,
    break_even_acceptance,
    break_even_tokens,
    pass_seconds,
    plain_seconds,
    speedup,
    streaming_over_two_model,
    tokens_per_second,
    two_model_seconds,
    two_model_tokens,
)
from forestream.errors import ConfigError

Carriers = Literal["fused", "deferred"]

# Layers cost 10 + rows, heads 100 + rows, so that every term of a sum can be told from the others.
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


def test_the_module_needs_no_torch() -> None:
    script = "import sys, forestream.cost; print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_streams_head_may_be_a_smaller_one() -> None:
    small = replace(PROFILE, draft_head=Curve(((1, 2.0), (3, 4.0))))
    assert plain_seconds(small) == plain_seconds(PROFILE)
    for carriers in ("deferred", "fused"):
        fewer = pass_seconds(PROFILE, 8, 3, carriers) - pass_seconds(small, 8, 3, carriers)
        assert fewer == pytest.approx(PROFILE.head(3) - 4.0)
        assert pass_seconds(small, 8, 0, carriers) == pass_seconds(PROFILE, 8, 0, carriers)


def test_profiles_of_all_kinds_are_read() -> None:
    """Those that were written before there were draft vocabularies, and those without one."""
    small = replace(PROFILE, draft_head=Curve(((1, 2.0),)))
    for profile in (PROFILE, small):
        assert Profile.from_json(json.dumps(asdict(profile))) == profile
    older = asdict(PROFILE)
    del older["draft_head"]
    assert Profile.from_dict(older) == PROFILE
    with pytest.raises(ConfigError, match="draft_head is 3; expected a curve"):
        Profile.from_dict({**older, "draft_head": 3})


# --- curves ---------------------------------------------------------------------------------------------------

CURVE = Curve(((2, 1.0), (4, 2.0), (8, 3.0), (16, 7.0)))


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        (1, 1.0),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
        (5, 2.25),
        (6, 2.5),
        (8, 3.0),
        (12, 5.0),
        (16, 7.0),
        (18, 8.0),
        (32, 15.0),
    ],
)
def test_a_curve_is_linear_between_points_and_beyond_the_last(rows: int, seconds: float) -> None:
    assert CURVE(rows) == seconds


def test_one_point_is_a_constant_and_a_falling_end_stays_level() -> None:
    assert [Curve(((4, 2.0),))(rows) for rows in (1, 4, 9)] == [2.0] * 3
    assert [Curve(((1, 3.0), (2, 1.0)))(rows) for rows in (1, 2, 3, 100)] == [3.0, 1.0, 1.0, 1.0]


@given(
    st.dictionaries(st.integers(1, 200), st.floats(1e-6, 10.0), min_size=1, max_size=6), st.data(), st.integers(1, 300)
)
def test_a_curve_meets_its_points_and_stays_between_neighbours(
    measured: dict[int, float], data: st.DataObject, rows: int
) -> None:
    curve = Curve(tuple(sorted(measured.items())))
    known = data.draw(st.sampled_from(sorted(measured)))
    assert curve(known) == measured[known]
    assert curve(rows) > 0
    below = [measured[row] for row in sorted(measured) if row <= rows]
    above = [measured[row] for row in sorted(measured) if row >= rows]
    if below and above:
        ends = sorted((below[-1], above[0]))
        assert ends[0] - 1e-12 <= curve(rows) <= ends[1] + 1e-12


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ((), "expected one or more pairs"),
        (None, "expected one or more pairs"),
        ((3,), "a point is 3; expected a pair"),
        (((1, 1.0, 1.0),), "expected a pair"),
        (((0, 1.0),), "rows of a point is 0; expected a number from 1"),
        (((1.5, 1.0),), "rows of a point is 1.5; expected a whole number"),
        (((1, 0.0),), "seconds of a point is 0.0; expected a finite number above 0"),
        (((1, -1.0),), "expected a finite number above 0"),
        (((1, float("nan")),), "expected a finite number above 0"),
        (((1, float("inf")),), "expected a finite number above 0"),
        (((1, "1"),), "expected a finite number above 0"),
        (((2, 1.0), (1, 2.0)), "at 1 rows follows one at 2; sort points"),
        (((2, 1.0), (2, 2.0)), "at 2 rows follows one at 2"),
    ],
)
def test_impossible_points_are_refused(points: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Curve(points)


@pytest.mark.parametrize("rows", [0, -1, 2.5])
def test_a_curve_takes_whole_numbers_of_rows(rows: Any) -> None:
    with pytest.raises(ConfigError, match="rows is"):
        CURVE(rows)


# --- profiles -------------------------------------------------------------------------------------------------


def test_profiles_and_curves_survive_json() -> None:
    text = PROFILE.to_json()
    assert json.loads(text)["layer"] == {"points": [[1, 11.0], [100, 110.0]]}
    again = Profile.from_json(text)
    assert again == PROFILE
    assert again.layer(50) == PROFILE.layer(50) == 60.0
    assert Curve.from_json(CURVE.to_json()) == CURVE


def test_unknown_and_missing_keys_are_refused_at_both_levels() -> None:
    values = json.loads(PROFILE.to_json())
    with pytest.raises(ConfigError, match="unknown keys in Profile: gpu; known are"):
        Profile.from_dict({**values, "gpu": "none"})
    with pytest.raises(ConfigError, match="unknown keys in Curve: unit; known are points"):
        Profile.from_dict({**values, "head": {**values["head"], "unit": "ms"}})
    with pytest.raises(ConfigError, match="Curve lacks points"):
        Profile.from_dict({**values, "layer": {}})
    with pytest.raises(ConfigError, match="Profile lacks head, threads"):
        Profile.from_dict({name: value for name, value in values.items() if name not in ("threads", "head")})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 7),
        ("compile", None),
        ("threads", 0),
        ("layers", 0),
        ("stream_layers", 0),
        ("stream_layers", 6),
        ("layer", 0.5),
        ("head", [[1, 0.5]]),
        ("overhead", -1.0),
        ("overhead", float("inf")),
        ("draft_overhead", float("nan")),
    ],
)
def test_profile_ranges(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; expected"):
        Profile.from_dict({**json.loads(PROFILE.to_json()), name: value})


def test_a_plain_pass_by_hand() -> None:
    assert plain_seconds(PROFILE) == 1000 + 5 * 11 + 101


@pytest.mark.parametrize(
    ("nodes", "streams", "carriers", "kept", "seconds"),
    [
        # overhead, 3 trunk layers at M, 2 stream layers, head at M, head at G
        (8, 4, "fused", None, 6000 + 3 * 18 + 2 * (10 + 8 * 5) + 108 + 104),
        (8, 4, "deferred", None, 6000 + 3 * 18 + 2 * 18 + 108 + 104 + 2 * 14),
        # stream layers and head at the survivors, the exit scorer's head at M
        (8, 4, "fused", 3, 6000 + 3 * 18 + 2 * (10 + 3 * 5) + 103 + 104 + 108),
        (8, 4, "deferred", 3, 6000 + 3 * 18 + 2 * 13 + 103 + 104 + 2 * 14 + 108),
        (8, 4, "deferred", 8, 6000 + 3 * 18 + 2 * 18 + 108 + 104 + 2 * 14 + 108),
        # no streams: nothing rides along, nothing follows
        (1, 0, "fused", None, 6000 + 3 * 11 + 2 * 11 + 101),
        (1, 0, "deferred", None, 6000 + 3 * 11 + 2 * 11 + 101),
    ],
)
def test_a_pass_by_hand(nodes: int, streams: int, carriers: Carriers, kept: int | None, seconds: float) -> None:
    assert pass_seconds(PROFILE, nodes, streams, carriers, kept) == seconds


@pytest.mark.parametrize(
    ("carried", "missed", "rows", "second"),
    [(1, False, 8 + 4, 0), (2, False, 8 + 8, 0), (2, True, 8 + 8, 2 * 14), (9, False, 8 + 32, 0)],
)
def test_a_pass_in_which_few_nodes_carry_streams_by_hand(carried: int, missed: bool, rows: int, second: int) -> None:
    wanted = 6000 + 3 * 18 + 2 * (10 + rows) + 108 + 104 + second
    assert pass_seconds(PROFILE, 8, 4, "fused", carried=carried, missed=missed) == wanted


def test_speeds_by_hand_and_their_break_even() -> None:
    seconds = pass_seconds(PROFILE, 8, 4, "fused")
    assert tokens_per_second(3.0, 0.5) == 6.0
    assert speedup(PROFILE, 3.0, 578.0) == pytest.approx(3 * 1156 / 578)
    needed = break_even_tokens(PROFILE, seconds)
    assert needed == pytest.approx(6366 / 1156)
    assert speedup(PROFILE, needed, seconds) == pytest.approx(1.0)
    assert speedup(PROFILE, 1.0, plain_seconds(PROFILE)) == pytest.approx(1.0)


def test_a_faster_machine_part_makes_a_faster_pass() -> None:
    for change in (
        {"overhead": 0.0},
        {"draft_overhead": 0.0},
        {"layer": Curve(((1, 1.0),))},
        {"head": Curve(((1, 1.0),))},
    ):
        faster = replace(PROFILE, **change)
        assert asdict(faster) != asdict(PROFILE)
        assert pass_seconds(faster, 8, 4, "fused", 4) < pass_seconds(PROFILE, 8, 4, "fused", 4)


@pytest.mark.parametrize(
    "arguments",
    [
        *((0, 4, "fused"), (8, -1, "fused"), (8, 4, "both"), (8.0, 4, "fused")),
        *((8, 4, "fused", 0), (8, 4, "fused", 9), (8, 4, "fused", 8, 0)),
    ],
)
def test_impossible_passes_are_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="; expected"):
        pass_seconds(PROFILE, *arguments)


def test_impossible_speeds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"seconds is 0\.0; expected"):
        tokens_per_second(1.0, 0.0)
    with pytest.raises(ConfigError, match=r"tokens_per_pass is -1\.0; expected"):
        tokens_per_second(-1.0, 1.0)
    with pytest.raises(ConfigError, match=r"seconds is 0\.0; expected"):
        break_even_tokens(PROFILE, 0.0)


# --- against two models ---------------------------------------------------------------------------------------


@given(st.integers(0, 8), st.floats(0.0, 0.99))
def test_two_model_tokens_are_the_closed_form(gamma: int, alpha: float) -> None:
    assert two_model_tokens(gamma, alpha) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


@pytest.mark.parametrize(("gamma", "alpha", "tokens"), [(4, 1.0, 5.0), (4, 0.0, 1.0), (0, 0.7, 1.0), (2, 0.5, 1.75)])
def test_two_model_tokens_at_the_ends(gamma: int, alpha: float, tokens: float) -> None:
    assert two_model_tokens(gamma, alpha) == tokens


def test_two_models_take_turns() -> None:
    assert two_model_seconds(4, 0.25, 2.0) == 3.0
    assert two_model_seconds(0, 0.25, 2.0) == 2.0


def test_the_ratio_by_hand() -> None:
    # Two models: 4 drafts at 1/8 and a target pass make 1.5 for 4 tokens; streaming: 1.25 for 3 tokens.
    ours = streaming_over_two_model(cost_ratio=8, acceptance_ratio=3 / 4, gamma=4, pass_cost=1.25)
    assert ours == pytest.approx((1.5 / 4) / (1.25 / 3))
    assert streaming_over_two_model(cost_ratio=4, acceptance_ratio=1.0, gamma=0) == 1.0


@given(st.floats(0.5, 100), st.floats(0.5, 6), st.integers(0, 8), st.floats(0.5, 3))
def test_at_the_break_even_acceptance_both_are_as_fast(
    cost_ratio: float, theirs: float, gamma: int, pass_cost: float
) -> None:
    ours = break_even_acceptance(cost_ratio=cost_ratio, theirs=theirs, gamma=gamma, pass_cost=pass_cost)
    assert ours == pytest.approx(theirs * pass_cost / (1 + gamma / cost_ratio))

    def ratio(tokens: float) -> float:
        return streaming_over_two_model(
            cost_ratio=cost_ratio, acceptance_ratio=tokens / theirs, gamma=gamma, pass_cost=pass_cost
        )

    assert ratio(ours) == pytest.approx(1.0)
    assert ratio(1.01 * ours) > 1.0 > ratio(0.99 * ours)
    # The same from the seconds per token of both, in another unit.
    target = 0.02
    theirs_each = two_model_seconds(gamma, target / cost_ratio, target) / theirs
    assert pass_cost * target / ours == pytest.approx(theirs_each)


@pytest.mark.parametrize(
    ("name", "value"), [("cost_ratio", 0.0), ("acceptance_ratio", -0.1), ("gamma", -1), ("pass_cost", 0.0)]
)
def test_impossible_rivals_are_refused(name: str, value: float) -> None:
    good: dict[str, Any] = {"cost_ratio": 8.0, "acceptance_ratio": 1.0}
    with pytest.raises(ConfigError, match=f"{name} is {value}; expected"):
        streaming_over_two_model(**{**good, name: value})


@pytest.mark.parametrize(("gamma", "alpha"), [(-1, 0.5), (4, -0.1), (4, 1.1)])
def test_impossible_acceptance_is_refused(gamma: int, alpha: float) -> None:
    with pytest.raises(ConfigError, match="; expected"):
        two_model_tokens(gamma, alpha)
