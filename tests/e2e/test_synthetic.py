"""From a random base to an adapter that drafts: the commands, on a task that a tiny model learns in 200 updates."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from forestream import checkpoint
from forestream.bases import fingerprint, load_base
from forestream.calibration import replay, score_text
from forestream.checkpoint import PROVENANCE
from forestream.cli import app
from forestream.config import DecodeSettings, StreamConfig
from forestream.data import prompt_ids
from forestream.evaluation import outputs
from forestream.generation import Generation, Generator
from forestream.manifest import BaseModel
from forestream.packing import Pack
from forestream.pruning import keep_rule
from forestream.steps import Counters
from forestream.tasks import get_task
from forestream.training import training_model
from tiny import tiny_base

TASK = get_task("synthetic")
TOKENS = 40  # a walk has 32 characters
FLOAT32 = ("--dtype", "float32")

pytestmark = pytest.mark.slow


def forestream(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


@dataclass(frozen=True)
class Adapters:
    """Folders: the base, an adapter as fresh as training starts from, the same one trained, and its log."""

    base: Path
    fresh: Path
    joint: Path
    log: list[dict[str, float]]


def fresh_adapter(base: Path, folder: Path, **changes: Any) -> Path:
    host, _ = load_base(str(base))
    origin = BaseModel(str(base), host.config.model_type, fingerprint(host))
    torch.manual_seed(0)
    model = training_model(host, StreamConfig(stream_layers=2, **changes))
    checkpoint.save(model, folder, origin, {}, torch.float32)
    return folder


def train(base: Path, output: Path, *changes: object) -> None:
    settings = ("--stream-layers", 2, "--batch-size", 10, "--learning-rate", 5e-3, *changes)
    forestream("train", "--task", "synthetic", "--base", base, "--output", output, *settings, *FLOAT32)


def read_log(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "stream_1_loss" in line]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("synthetic")
    base = tiny_base(folder / "base", hidden_size=96, intermediate_size=192, initializer_range=0.2)
    fresh = fresh_adapter(base, folder / "fresh")
    train(base, folder / "joint", "--stream-weight", 0.3)
    return Adapters(base, fresh, folder / "joint", read_log(folder / "joint.run"))


def prompts(split: str, count: int) -> list[str]:
    return [example.prompt for example in TASK.grouped(split)[:count]]


def generator(adapter: Path, **settings: Any) -> Generator:
    return Generator.from_pretrained(
        adapter, dtype=torch.float32, settings=DecodeSettings(**{"nodes": 8, "max_new_tokens": TOKENS, **settings})
    )


def run_all(written: Generator, texts: Sequence[str], **changes: Any) -> tuple[list[Generation], Counters]:
    total, found = Counters(), []
    for text in texts:
        found.append(written.generate(text, **changes))
        total.merge(found[-1].counters)
    return found, total


# --- training -------------------------------------------------------------------------------------------------


def test_every_loss_falls_and_every_accuracy_rises(adapters: Adapters) -> None:
    first, last = adapters.log[0], adapters.log[-1]
    assert last["step"] >= 200
    for term in ("main", "stream_1", "stream_2", "stream_3", "stream_4", "scorer"):
        assert last[f"{term}_loss"] < 0.5 * first[f"{term}_loss"], term
        assert last[f"{term}_accuracy"] > first[f"{term}_accuracy"] + 0.2, term
    assert all(last[f"stream_{j}_accuracy"] > 0.8 for j in range(1, 5))


def test_the_adapter_says_where_it_comes_from(adapters: Adapters) -> None:
    record = json.loads((adapters.joint / PROVENANCE).read_text())
    assert record["task"] == "synthetic"
    assert record["updates"] == 205
    assert record["examples"] == 2048
    assert record["stream"]["stream_layers"] == 2
    assert record["loss"]["stream"] == 0.3
    assert record["training"]["learning_rate"] == 5e-3


# --- decoding -------------------------------------------------------------------------------------------------


def test_acceptance_rises(adapters: Adapters) -> None:
    texts = prompts("train", 12)
    _, before = run_all(generator(adapters.fresh), texts)
    _, after = run_all(generator(adapters.joint), texts)
    assert after.mean_acceptance_length > 1.5
    assert after.mean_acceptance_length > before.mean_acceptance_length + 1.0
    assert after.call_reduction > 1.5
    assert after.acceptance_by_position[0] > 0.7


@pytest.mark.parametrize("kind", ["fresh", "joint"])
def test_text_is_that_of_plain_decoding(adapters: Adapters, kind: str) -> None:
    """Before training and after, on prompts seen in training and new ones, whatever the settings."""
    written = generator(getattr(adapters, kind))
    for text in (*prompts("train", 4), *prompts("test", 4)):
        wanted = written.collect(written.plain_steps(text))
        for changes in (
            {},
            {"carriers": "fused"},
            {"tree": "full", "k": 2, "prune_below": 0.05},
            {"nodes": 32, "prune_to": 8, "carriers": "fused"},
            {"streams": 2},
        ):
            found = written.generate(text, **changes)
            assert found.tokens == wanted.tokens
            assert found.text == wanted.text
            assert found.steps[-1].finish == wanted.steps[-1].finish


def test_a_trained_scorer_prunes_what_would_not_be_accepted(adapters: Adapters) -> None:
    texts = prompts("train", 8)
    written = generator(adapters.joint, tree="full", k=2)
    _, whole = run_all(written, texts)
    _, pruned = run_all(written, texts, prune_below=0.02)
    assert pruned.nodes_per_pass < 0.6 * whole.nodes_per_pass
    assert pruned.mean_acceptance_length > 0.7 * whole.mean_acceptance_length


def test_calibration_counts_what_runs_under_each_rule_count(adapters: Adapters) -> None:
    written = generator(adapters.joint, tree="full", k=2)
    lost = 0
    for text in prompts("train", 3):
        places = score_text(written.model, prompt_ids(written.tokenizer, text), written.settings, written.eos)
        for changes in ({}, {"prune_below": 0.02}, {"prune_below": 0.3}, {"prune_to": 6}):
            found = replay(places, keep_rule(DecodeSettings(**changes)))
            counters = written.generate(text, **changes).counters
            assert (found.tokens, found.passes, found.kept) == (counters.generated, counters.passes, counters.nodes)
            assert found.good - found.lost == counters.accepted
            lost += found.lost
    assert lost > 0


@torch.no_grad()
def test_what_is_accepted_is_what_was_foretold(adapters: Adapters) -> None:
    """Chains, pass by pass: one packed pass over the finished text says which drafts will have been right."""
    written = generator(adapters.joint, tree="full", k=1)
    model = written.model
    for text in (*prompts("train", 3), *prompts("test", 3)):
        start = list(written.tokenizer(text)["input_ids"])
        found = written.generate(start)
        whole = [*start, *found.tokens]
        output = model(torch.tensor([whole]), Pack.text(len(whole), torch.arange(len(whole))[None], 4))
        foreseen = model.logits(output.streams[0]).argmax(-1)  # [G, place]: stream j at t guesses t + 1 + j
        place = len(start)  # of the root: the last token known
        for step in found.steps[1:]:
            # the pass before ended with the root; its streams sit on the token in front of it
            room = len(whole) - place - 2
            right = 0
            while right < min(4, room) and int(foreseen[right, place - 1]) == whole[place + 1 + right]:
                right += 1
            if step.finish is None:
                assert step.accepted == right
            place += len(step.tokens)
        assert place == len(whole) - 1


# --- evaluation -------------------------------------------------------------------------------------------------


def test_the_score_rises_and_is_the_same_in_every_way(adapters: Adapters, tmp_path: Path) -> None:
    def score(adapter: Path, way: str) -> tuple[float, list[str]]:
        file = tmp_path / f"{adapter.name}-{way}.json"
        common = ("evaluate", "--adapter", adapter, "--task", "synthetic", "--split", "train", "--limit", 12)
        forestream(*common, *FLOAT32, "--way", way, "--max-new-tokens", TOKENS, "--json", file)
        record = json.loads(file.read_text())
        return record["scores"]["exact_match"], record["outputs"]

    assert score(adapters.fresh, "batched")[0] == 0.0
    best, texts = score(adapters.joint, "forestream")
    assert best > 30.0
    assert score(adapters.joint, "plain") == (best, texts)
    assert score(adapters.joint, "batched") == (best, texts)


def test_an_adapter_that_is_not_merged_writes_the_same(adapters: Adapters) -> None:
    model, tokenizer = checkpoint.load(adapters.joint, merge=False)
    unmerged = Generator(model, tokenizer, DecodeSettings(max_new_tokens=TOKENS))
    examples = TASK.grouped("train")[:4]
    wanted = outputs(generator(adapters.joint), examples, "plain")
    for way in ("plain", "forestream", "batched"):
        assert outputs(unmerged, examples, way) == wanted


# --- lossless -----------------------------------------------------------------------------------------------------


def test_lossless_streams_learn_to_draft_for_a_base_that_stays_as_it_is(adapters: Adapters, tmp_path: Path) -> None:
    """The base is a model fine-tuned without streams: what it writes stays, what changes is acceptance."""
    train(adapters.base, tmp_path / "twin", "--streams", 0, "--examples", 1400)
    twin, tokenizer = checkpoint.load(tmp_path / "twin")
    base = tmp_path / "tuned"
    twin.port.model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    fresh = generator(fresh_adapter(base, tmp_path / "fresh", mode="lossless"))
    train(base, tmp_path / "own", "--mode", "lossless", "--examples", 1000, "--stream-weight", 1.0)
    trained = generator(tmp_path / "own")
    texts = prompts("train", 8)
    before, slow = run_all(fresh, texts)
    after, fast = run_all(trained, texts)
    wanted = generator(tmp_path / "twin")
    for one, other, text in zip(before, after, texts, strict=True):
        assert one.tokens == other.tokens == wanted.collect(wanted.plain_steps(text)).tokens
    assert outputs(trained, TASK.grouped("train")[:8], "batched") == [generation.text for generation in after]
    assert fast.mean_acceptance_length > 1.5
    assert fast.mean_acceptance_length > slow.mean_acceptance_length + 0.5
