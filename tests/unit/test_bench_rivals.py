"""Rivals as methods of `forestream bench`, ours and the host library's: equal texts, one counter (J01, J02, J13)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from forestream.baseline import plain
from forestream.bench.assisted import AssistedSettings, StockLookupSettings, assisted, looked_up
from forestream.bench.methods import method
from forestream.bench.stock import stock
from forestream.cli import app
from forestream.config import DecodeSettings, SamplingSettings
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.rivals.loop import drafted
from forestream.rivals.two_model import TwoModel, TwoModelSettings
from forestream.steps import Counters, Step, tokens_of
from rival import draft_model
from subject import model_of
from tiny import tiny_adapter, tiny_base
from wrapped import prompt
from writers import writer

OURS = ("lookup", "lookup-3", "lookup-3-2", "draft-model", "draft-model-2")
THEIRS = ("transformers", "transformers+lookup-3", "transformers+draft-model-3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter, and a draft model with the tokenizer of its base."""
    folder = tmp_path_factory.mktemp("rivals")
    return tiny_adapter(folder / "adapter"), tiny_base(folder / "draft", num_hidden_layers=2)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "140", "TERM": "dumb"})


def bench(folders: tuple[Path, Path], *arguments: object) -> Result:
    common = ("--dtype", "float32", "--task", "synthetic", "--limit", 3, "--max-new-tokens", 12)
    return run("bench", "--adapter", folders[0], *common, "--draft-model", folders[1], *arguments)


def test_every_rival_and_the_baseline_in_one_run(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """J13: both run. J01, J02: the same counter, ids that were never made anew from text."""
    names = ("plain", "forestream", *OURS, *THEIRS)
    result = bench(folders, "--methods", ",".join(names), "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["settings"]["draft_model"] == "draft"
    assert tuple(record["methods"]) == names
    wanted = record["methods"]["plain"]
    for name, row in record["methods"].items():
        assert row["equal_outputs"] == row["prompts"] == 3, name
        assert row["generated_tokens"] == wanted["generated_tokens"]
        assert row["per_prompt"]["tokens"] == wanted["per_prompt"]["tokens"]
        assert row["generated_tokens"] == sum(row["per_prompt"]["tokens"])
        assert (row["draft_calls"] > 0) == ("draft-model" in name), name
        assert row["passes"] <= wanted["passes"]
        assert row["draft_seconds"] <= row["decode_seconds"]
    assert record["methods"]["lookup-3-2"]["settings"] == {"gamma": 3, "max_ngram": 2, "min_ngram": 1}
    assert record["methods"]["draft-model"]["settings"] == {"gamma": 4}
    assert record["methods"]["transformers+lookup-3"]["settings"] == {"gamma": 3, "max_ngram": 2}
    assert record["methods"]["transformers+draft-model-3"]["settings"] == {"gamma": 3, "confidence": 0.4}


def test_rivals_take_batches_and_draws(folders: tuple[Path, Path], tmp_path: Path) -> None:
    law = ("--temperature", 0.8, "--seed", 3, "--batch-size", 2)
    result = bench(folders, "--methods", "plain,lookup-3,draft-model-3", *law, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    for row in json.loads((tmp_path / "out.json").read_text())["methods"].values():
        assert row["equal_outputs"] == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--methods", "plain,medley"), "unknown method 'medley'; known are plain, plain-DTYPE, forestream"),
        (("--methods", "plain,transformers+medley"), "transformers+draft-model[-GAMMA]"),
        (("--methods", "plain,lookup-0"), "gamma is 0"),
        (("--methods", "plain,lookup-two"), "lookup[-GAMMA[-N]]"),
        (("--methods", "plain,transformers+lookup-3", "--batch-size", 2), "the host library takes one"),
        (("--methods", "plain,transformers+lookup-3", "--temperature", 1), "randomness of its own"),
    ],
)
def test_what_cannot_be_run_is_told(folders: tuple[Path, Path], arguments: tuple[Any, ...], told: str) -> None:
    result = bench(folders, *arguments)
    assert result.exit_code == 1
    assert told in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", ["draft-model-2", "transformers+draft-model-2"])
def test_a_draft_model_has_to_be_given(folders: tuple[Path, Path], name: str) -> None:
    result = run("bench", "--adapter", folders[0], "--task", "synthetic", "--methods", f"plain,{name}", "--limit", 1)
    assert result.exit_code == 1
    assert "give --draft-model FOLDER" in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", ["draft-model-2", "transformers+draft-model-2"])
def test_a_draft_model_of_another_vocabulary_is_refused(folders: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    other = tiny_base(tmp_path / "other", vocab_size=120)
    result = bench((folders[0], other), "--methods", f"plain,{name}")
    assert result.exit_code == 1
    assert "the draft model knows 120 ids" in " ".join(result.stderr.split())


def test_help_teaches_the_names() -> None:
    text = " ".join(run("bench", "--help").output.replace("│", " ").split())
    for name in ("lookup-GAMMA", "draft-model-GAMMA", "transformers+lookup-GAMMA", "--draft-model"):
        assert name in text


# --- the host library's own -----------------------------------------------------------------------------------


def hosts_draft(host: str, noise: float, mode: str = "joint") -> PreTrainedModel:
    return draft_model(host, noise, mode).port.model


@pytest.mark.parametrize(
    ("host", "mode"), [("llama", "joint"), ("llama", "lossless"), ("gpt2", "joint"), ("mistral-window", "joint")]
)
def test_the_librarys_passes_are_counted_as_they_are(host: str, mode: str) -> None:
    """Its text is plain decoding's, and no pass of either model is missing."""
    model, small = model_of(host, mode), hosts_draft(host, 0.08, mode)
    settings, start = DecodeSettings(max_new_tokens=24), prompt(9)
    calls = {"model": 0, "assistant": 0}

    def counted(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    hooks = [
        model.port.model.register_forward_hook(counted("model")),
        small.register_forward_hook(counted("assistant")),
    ]
    try:
        ahead = AssistedSettings(4, confidence=0.0)
        (steps,) = assisted(model, small, [start], settings, ahead)
    finally:
        for hook in hooks:
            hook.remove()
    wanted = tokens_of(list(plain(model, start, settings)))
    assert tokens_of(steps) == wanted
    counters = Counters.of(steps)
    assert counters.prompts + counters.passes == calls["model"]
    assert sum(step.draft_calls for step in steps) == calls["assistant"]
    assert counters.draft_calls == calls["assistant"] - steps[0].draft_calls
    assert counters.prompted == len(steps[0].tokens)
    assert counters.decoded == 24 - counters.prompted
    assert counters.generated == counters.prompted + counters.passes + counters.accepted == 24
    assert 0 < counters.accepted < counters.nodes - counters.passes
    assert all(step.seconds > step.draft_seconds > 0 for step in steps)
    (none,) = looked_up(model, [start], settings, StockLookupSettings(3))
    assert tokens_of(none) == wanted
    assert Counters.of(none).draft_calls == 0


def test_the_library_and_we_accept_alike() -> None:
    """The same draft model, as many tokens ahead: from its second pass on the same drafts fare the same."""
    host = "llama"
    model, small = model_of(host, "joint"), draft_model(host, 0.08)
    settings, start = DecodeSettings(max_new_tokens=24), prompt(9)
    ours = list(drafted(model, start, settings, TwoModel(small, TwoModelSettings(4))))
    (theirs,) = assisted(model, small.port.model, [start], settings, AssistedSettings(4, confidence=0.0))
    # the library drafts before it has read the prompt, so its borders lie elsewhere until both meet
    borders = [{sum(len(s.tokens) for s in steps[: i + 1]) for i in range(len(steps))} for steps in (ours, theirs)]
    common = sorted(borders[0] & borders[1])[:-2]
    assert common

    def behind(steps: list[Step], place: int) -> Step:
        written = 0
        for step in steps:
            if written == place:
                return step
            written += len(step.tokens)
        raise AssertionError

    for place in common:
        own, other = behind(ours, place), behind(theirs, place)
        assert own.tree == other.tree
        assert own.accepted == other.accepted


def test_the_library_ends_where_the_text_does() -> None:
    """Inside of what its assistant drafted, too; and at caps of one and two tokens."""
    model, small, start = model_of("llama", "joint"), hosts_draft("llama", 0.0), prompt(6)
    text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=20))))
    inside = 0
    for end in dict.fromkeys(text[:12]):
        (steps,) = assisted(model, small, [start], DecodeSettings(max_new_tokens=20), AssistedSettings(5), (end,))
        assert tokens_of(steps) == text[: text.index(end) + 1]
        assert [step.finish for step in steps] == [*[None] * (len(steps) - 1), "stop"]
        inside += steps[-1].accepted == len(steps[-1].tokens)
    assert inside
    for cap in (1, 2, 3):
        (steps,) = assisted(model, small, [start], DecodeSettings(max_new_tokens=cap), AssistedSettings(5))
        assert tokens_of(steps) == text[:cap]
        assert steps[-1].finish == "length"


def test_the_library_without_drafts_is_one_token_a_pass() -> None:
    """Whatever text there is to look things up in, `transformers` alone has none."""
    model, start = model_of("llama", "joint"), prompt(6)
    (steps,) = stock(model, [start], DecodeSettings(max_new_tokens=5))
    assert [len(step.tokens) for step in steps] == [1] * 5


def test_methods_without_loaders_say_what_they_need() -> None:
    generator = writer()
    for name in ("draft-model", "transformers+draft-model", "transformers+lookup", "transformers"):
        with pytest.raises(ConfigError, match="needs a model of its own"):
            method(name, generator)
    warm = Generator(generator.model, generator.tokenizer, generator.settings, SamplingSettings(temperature=1.0))
    with pytest.raises(ConfigError, match="randomness of its own"):
        method("transformers+lookup", warm, host=lambda: generator.model)
