"""Profiles, predictions, the choice of settings, and the file they are kept in."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import tiny
from forestream.acceptance import Trace, simulate
from forestream.baseline import plain
from forestream.bench.methods import method
from forestream.bench.stock import stock
from forestream.cli import app, options
from forestream.config import DecodeSettings
from forestream.cost import Curve, Profile, pass_seconds, plain_seconds
from forestream.decode import decode
from forestream.drafting import BudgetTree, drafter_for
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.profiling import profile
from forestream.steps import tokens_of
from forestream.tuning import (
    FILE,
    PLAIN,
    Prediction,
    Setup,
    Tuned,
    choose,
    grid,
    measure,
    name_of,
    predict,
    predict_all,
    record_traces,
    share_of_best,
    shortlist,
    this_setup,
)
from forestream.vocabulary import DraftVocabulary
from wrapped import prompt, wrapped

SETUP = Setup("a processor", 2, "cpu", "bfloat16", "layer")
COSTS = Profile(
    "a model",
    "bfloat16",
    "cpu",
    "a processor",
    2,
    "off",
    4,
    2,
    Curve(((1, 1.0), (9, 2.0))),
    Curve(((1, 3.0),)),
    0.5,
    0.25,
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_adapter(tmp_path_factory.mktemp("tuning") / "tiny")


@pytest.fixture(scope="module")
def generator(adapter: Path) -> Generator:
    return Generator.from_pretrained(adapter, dtype=torch.float32, settings=DecodeSettings(max_new_tokens=20))


def traced(tokens: int = 12, streams: int = 2) -> Trace:
    """Token t is t; stream j of row t has the truth at rank (t + j) % 3."""
    ids = torch.full((tokens, streams, 8), 99)
    for t in range(tokens):
        for j in range(streams):
            ids[t, j] = torch.arange(100, 108)
            ids[t, j, (t + j) % 3] = t + 1 + j
    log_probs = torch.linspace(-0.1, -4.0, 8).expand(tokens, streams, 8).contiguous()
    return Trace(tuple(range(tokens)), ids, log_probs, 200, tokens + 5)


# --- the settings file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [DecodeSettings(nodes=5), DecodeSettings(tree="static", shape=((0, 0), (0, 1), (1, 0)), streams=2)]
)
def test_a_settings_file_survives_the_round_trip(settings: DecodeSettings, tmp_path: Path) -> None:
    tuned = Tuned(SETUP, settings)
    (tmp_path / FILE).write_text(tuned.to_json())
    assert Tuned.read(tmp_path / FILE) == tuned


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "'setup' and 'decode'"),
        ("[]", "expected an object"),
        ('{"setup": {}, "decode": {}}', "malformed"),
        ('{"setup": 3, "decode": {}}', "malformed"),
        ('{"setup": {"cpu": 1}, "decode": {}}', "unknown keys in Setup: cpu"),
        ("{", "not valid JSON"),
    ],
)
def test_a_broken_settings_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=said):
        Tuned.read(tmp_path / FILE)


def test_a_missing_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="forestream tune"):
        Tuned.read(tmp_path / FILE)


def chosen(folder: Path, settings: Path | None = None) -> DecodeSettings | None:
    return options.tuned(settings, folder, options.DType.float32, "cpu", options.CompileForm.off)


def test_the_adapters_own_file_counts_on_the_machine_it_was_made_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(tmp_path) is None
    here, settings = this_setup("float32", "cpu", "off"), DecodeSettings(nodes=3)
    (tmp_path / FILE).write_text(Tuned(here, settings).to_json())
    assert chosen(tmp_path) == settings
    assert capsys.readouterr().err == ""
    (tmp_path / FILE).write_text(Tuned(replace(here, threads=99, dtype="bfloat16"), settings).to_json())
    assert chosen(tmp_path) is None
    assert "another threads, dtype; not used" in " ".join(capsys.readouterr().err.split())
    assert chosen(tmp_path, tmp_path / FILE) == settings  # asked for by name
    assert "used all the same" in " ".join(capsys.readouterr().err.split())


def test_settings_for_plain_weights_are_not_used_with_quantised_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = this_setup("float32", "cpu", "off")
    (tmp_path / FILE).write_text(Tuned(here, DecodeSettings(nodes=3)).to_json())
    arguments = (None, tmp_path, options.DType.float32, "cpu", options.CompileForm.off)
    assert options.tuned(*arguments, options.QuantiseForm.int8) is None
    assert "another dtype; not used" in " ".join(capsys.readouterr().err.split())
    setup = replace(here, dtype=options.precision(options.DType.float32, options.QuantiseForm.int8))
    (tmp_path / FILE).write_text(Tuned(setup, DecodeSettings(nodes=4)).to_json())
    assert options.tuned(*arguments, options.QuantiseForm.int8) == DecodeSettings(nodes=4)
    assert chosen(tmp_path) is None


def test_options_go_before_a_settings_file() -> None:
    shaped = DecodeSettings(tree="static", shape=((0, 0),), streams=2, carriers="deferred")
    assert options.settings_from(shaped) == shaped
    assert options.settings_from(shaped, streams=1, nodes=None).shape == ((0, 0),)
    budget = options.settings_from(shaped, nodes=7)
    assert (budget.tree, budget.nodes, budget.shape, budget.carriers) == ("budget", 7, None, "deferred")
    full = options.settings_from(shaped, tree=options.TreeForm.full, k=3)
    assert (full.tree, full.k, full.shape) == ("full", 3, None)
    assert options.settings_from() == DecodeSettings()


# --- prediction ---------------------------------------------------------------------------------------------------


def test_the_grid_has_every_form_once() -> None:
    settings = grid([traced()], 2, DecodeSettings(prune_below=0.5, max_new_tokens=17))
    names = [name_of(one) for one in settings]
    assert len(set(names)) == len(names)
    assert {"budget-8+G2", "budget-8+G1+fused", "full-2+G2", "static-6+G2+fused"} <= set(names)
    assert {"budget-8+G2+fused-1", "budget-8+G1+fused-3+lookup-3-4"} <= set(names)
    assert "budget-3+G2+fused-3" not in names, "all of three nodes carry streams as it is"
    assert {"budget-8+G2+lookup-3-0", "budget-8+G1+fused+lookup-3-4"} <= set(names)
    assert all(one.max_new_tokens == 17 and one.prune_below == 0 for one in settings)
    shape = next(one.shape for one in settings if name_of(one) == "static-4+G2")
    assert shape is not None
    assert len(shape) == 3


@pytest.mark.parametrize("carriers", ["deferred", "fused"])
def test_a_prediction_is_simulated_passes_times_profiled_seconds(carriers: Any) -> None:
    traces = [traced(), traced(9)]
    settings = DecodeSettings(nodes=4, streams=2, carriers=carriers)
    found = predict(COSTS, traces, settings)
    runs = [simulate(trace, BudgetTree(4), 2) for trace in traces]
    sizes = [nodes for run in runs for nodes in run.nodes]
    seconds = sum(pass_seconds(COSTS, nodes, 2, carriers) for nodes in sizes)
    assert found.tokens_per_pass == pytest.approx(21 / len(sizes))
    assert found.pass_seconds == pytest.approx(seconds / len(sizes))
    assert found.tokens_per_second == pytest.approx(19 / seconds)
    assert found.speedup == pytest.approx(19 / seconds * plain_seconds(COSTS))


def test_passes_that_end_without_streams_cost_a_second_one() -> None:
    traces = [traced(), traced(12)]
    runs = [simulate(trace, BudgetTree(4), 2) for trace in traces]
    missed = [sum(end >= few for run in runs for end in run.ends) for few in (1, 2, 3)]
    assert missed[0] > missed[2] > 0
    for few in (1, 2, 3):
        pairs = [pair for run in runs for pair in zip(run.nodes, run.ends, strict=True)]
        seconds = sum(pass_seconds(COSTS, nodes, 2, "fused", carried=few, missed=end >= few) for nodes, end in pairs)
        settings = DecodeSettings(streams=2, nodes=4, carriers="fused", carried=few)
        assert predict(COSTS, traces, settings).pass_seconds == pytest.approx(seconds / len(pairs))


def test_predictions_together_are_those_alone() -> None:
    traces = [traced(), traced(9)]
    offered = [one for one in grid(traces, 2, DecodeSettings()) if drafter_for(one).width <= 8]
    assert {"deferred", "fused"} == {one.carriers for one in offered}
    rounds: list[None] = []
    found = predict_all(COSTS, traces, offered, lambda: rounds.append(None))
    assert found == [predict(COSTS, traces, one) for one in offered]
    assert len(rounds) == len(offered)


def test_texts_of_one_token_predict_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing to speed up"):
        predict(COSTS, [traced(1)], DecodeSettings(streams=2))


def prediction(name: str, speed: float) -> Prediction:
    return Prediction(name, DecodeSettings(nodes=int(speed)), 2.0, 1.0, speed, 1.0)


def test_the_fastest_as_measured_is_chosen_not_as_predicted() -> None:
    best = shortlist([prediction("a", 3), prediction("b", 5), prediction("c", 4)], 2)
    assert [one.name for one in best] == ["b", "c"]
    speeds = {PLAIN: 1.0, "b": 1.2, "c": 1.3}
    results = {name: {"speedup": {"of_totals": speed}} for name, speed in speeds.items()}
    assert choose(best, results) == ("c", best[1].settings)


def test_where_nothing_is_faster_than_plain_decoding_nothing_is_drafted() -> None:
    best = [prediction("b", 5)]
    name, settings = choose(best, {PLAIN: {"speedup": {"of_totals": 1.0}}, "b": {"speedup": {"of_totals": 0.9}}})
    assert name == PLAIN
    assert (settings.tree, settings.nodes) == ("budget", 1)


def test_how_far_a_choice_is_from_the_best() -> None:
    results = {name: {"speedup": {"of_totals": speed}} for name, speed in {PLAIN: 1.0, "b": 1.2, "c": 1.5}.items()}
    assert share_of_best("b", results) == pytest.approx(0.8)
    assert share_of_best("c", results) == 1.0


def test_traces_of_a_generator_foretell_its_passes(generator: Generator) -> None:
    prompts = [tuple(range(2, 12)), tuple(range(5, 30))]
    traces = record_traces(generator, prompts)
    settings = [
        replace(generator.settings, streams=2, nodes=6),
        replace(generator.settings, streams=3, tree="full", k=1),
        replace(generator.settings, streams=3, nodes=4, lookup_beside=3, lookup_behind=4),
        replace(generator.settings, streams=3, nodes=5, carriers="fused", carried=2),
    ]
    predictions = [predict(COSTS, traces, one) for one in settings]
    results = measure(generator, predictions, prompts)
    for one in predictions:
        assert results[one.name]["call_reduction"] == pytest.approx(one.tokens_per_pass, abs=1e-3)
        assert results[one.name]["equal_outputs"] == 2


def test_passes_that_end_at_a_carrier_need_no_second_one(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, model = [tuple(range(2, 12)), tuple(range(5, 30))], generator.model
    settings = replace(generator.settings, streams=2, nodes=6, carriers="fused", carried=1)
    calls: list[int] = []
    right = StreamingLM.streams_behind
    monkeypatch.setattr(StreamingLM, "streams_behind", lambda *given: calls.append(given[2]) or right(*given))
    for one, trace in zip(prompts, record_traces(generator, prompts), strict=True):
        calls.clear()
        run = simulate(trace, BudgetTree(6), 2, settings)
        assert len(list(decode(model, one, settings, generator.eos))) == run.passes + 1
        # Where the next tree is a root alone, nothing was drafted.
        drafted = [nodes > 1 for nodes in run.nodes[1:]]
        assert len(calls) == sum(end >= 1 and more for end, more in zip(run.ends, drafted, strict=False))
        assert 0 < len(calls) < run.passes - 1


# --- measurement --------------------------------------------------------------------------------------------------


def test_a_profile_has_every_size() -> None:
    model = wrapped("llama")
    model.prepare()
    rounds: list[None] = []
    costs = profile(model, "tiny", SETUP, rows=(1, 4, 16), context=20, advance=lambda: rounds.append(None))
    assert [rows for rows, _ in costs.layer.points] == [rows for rows, _ in costs.head.points] == [1, 4, 16]
    assert (costs.layers, costs.stream_layers) == (model.port.num_layers, len(model.stream_layers))
    assert costs.overhead >= 0
    assert costs.draft_overhead >= 0
    assert plain_seconds(costs) > 0
    assert len(rounds) == 3 + 9
    assert costs.draft_head is None
    assert Profile.from_json(costs.to_json()) == costs


def test_the_head_of_a_draft_vocabulary_is_measured_apart() -> None:
    model = wrapped("llama")
    model.restrict(DraftVocabulary([1, 3, 5], 89))
    model.prepare()
    costs = profile(model, "tiny", SETUP, rows=(1, 4), context=20)
    assert costs.draft_head is not None
    assert [rows for rows, _ in costs.draft_head.points] == [1, 4]
    assert costs.draft_head != costs.head
    assert Profile.from_json(costs.to_json()) == costs


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_the_host_librarys_generate_writes_the_text_of_plain_decoding(mode: str) -> None:
    model = wrapped("llama", mode)
    given, settings = prompt(9), DecodeSettings(max_new_tokens=12)
    own = list(plain(model, given, settings, eos=(5,)))
    (theirs,) = stock(model, [given], settings, eos=(5,))
    assert tokens_of(theirs) == tokens_of(own)
    assert [step.finish for step in theirs] == [step.finish for step in own]
    assert [step.tree is None for step in theirs] == [step.tree is None for step in own]
    assert all(step.seconds > 0 for step in theirs)
    (ended,) = stock(model, [given], settings, eos=(tokens_of(own)[3],))
    assert ended[-1].finish == "stop"


def test_who_carries_streams_is_asked_anew_with_the_option() -> None:
    tuned = DecodeSettings(carriers="fused", carried=2)
    assert options.settings_from(tuned, nodes=5).carried == 2
    assert options.settings_from(tuned, carriers=options.CarrierForm.fused).carried is None
    assert options.settings_from(tuned, carriers=options.CarrierForm.fused, carried=3).carried == 3


def test_named_trees_replace_a_static_one(adapter: Path) -> None:
    settings = DecodeSettings(tree="static", shape=((0, 0), (0, 1)), max_new_tokens=9)
    generator = Generator.from_pretrained(adapter, settings=settings)
    for name, form in (("budget-5", ("budget", 5)), ("full-2+fused", ("full", 8)), ("budget-4+fused-2", ("budget", 4))):
        found = method(name, generator).settings
        assert isinstance(found, DecodeSettings)
        assert (found.carriers, found.carried) == (
            "fused" if "fused" in name else "deferred",
            2 if "-2" in name[8:] else None,
        )
        assert (found.tree, found.nodes, found.shape, found.max_new_tokens) == (*form, None, 9)
    assert method("forestream", generator).settings == settings


def test_the_host_librarys_generate_needs_a_model_of_its_own(generator: Generator) -> None:
    with pytest.raises(ConfigError, match="model of its own"):
        method("transformers", generator)


def test_plain_decoding_in_another_dtype_is_a_method(generator: Generator, adapter: Path) -> None:
    asked: list[str] = []

    def load(dtype: str) -> Generator:
        asked.append(dtype)
        return Generator.from_pretrained(adapter, dtype=getattr(torch, dtype), settings=generator.settings)

    given = [tuple(range(2, 12))]
    (own,) = method("plain-float32", generator, load=load).run(given)
    assert asked == ["float32"]
    assert tokens_of(own) == tokens_of(method("plain", generator).run(given)[0])
    with pytest.raises(ConfigError, match="model of its own"):
        method("plain-bfloat16", generator)
    with pytest.raises(ConfigError, match="unknown method"):
        method("plain-int3", generator, load=load)


# --- the commands -------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "140", "TERM": "dumb"})


def test_what_tune_chooses_is_what_generate_uses(adapter: Path, tmp_path: Path) -> None:
    costs, record = tmp_path / "machine.json", tmp_path / "tune.json"
    profiled = run("profile", "--adapter", adapter, "--dtype", "float32", "--context", 8, "--output", costs)
    assert profiled.exit_code == 0, profiled.output
    arguments = ("--adapter", adapter, "--task", "synthetic", "--limit", 2, "--candidates", 2, "--dtype", "float32")
    tuned = run("tune", *arguments, "--confirm", "test", "--profile", costs, "--json", record)
    assert tuned.exit_code == 0, tuned.output
    assert "predicted" in tuned.output
    found = json.loads(record.read_text())
    kept = Tuned.read(adapter / FILE)
    assert kept.decode == DecodeSettings.from_dict(found["chosen"]["settings"])
    assert len(found["methods"]) == 3
    assert found["confirmed"]["split"] == "test"
    assert set(found["confirmed"]["methods"]) == set(found["methods"])
    assert f"{found['chosen']['name']} reaches" in tuned.output
    assert set(found["prediction_errors"]) == set(found["methods"]) - {"plain"}
    written = tmp_path / "generate.json"
    made = run("generate", "--adapter", adapter, "abc", "--dtype", "float32", "--json", written, "--max-new-tokens", 9)
    assert made.exit_code == 0, made.output
    assert json.loads(written.read_text())["settings"] == {
        **json.loads(json.dumps(vars(replace(kept.decode, max_new_tokens=9))))
    }
