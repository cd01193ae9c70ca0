"""The path sampler: what it is told, what it learns, and that no text changes with it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import tiny
import zoo
from batch import together
from forestream import checkpoint, objective, paths
from forestream.acceptance import record, simulate
from forestream.calibration import replay, score_text
from forestream.checkpoint import LORA, PROVENANCE, SAMPLER, STREAMS
from forestream.cli import app
from forestream.config import DecodeSettings, SamplingSettings
from forestream.data import Collator, Tokens
from forestream.decode import decode
from forestream.drafting import BudgetTree, DraftTree, drafter_for
from forestream.errors import CheckpointError, ConfigError
from forestream.generation import Generator
from forestream.manifest import MANIFEST, Manifest
from forestream.model import StreamingLM
from forestream.objective import LossConfig, batch_pass, joint_loss, tokens_before
from forestream.packing import Pack
from forestream.paths import told
from forestream.ranking import best_ids
from forestream.requests import Request
from forestream.sampler import fit_sampler, save_sampler
from forestream.steps import Step, tokens_of
from forestream.streams import PathSampler
from forestream.tasks import get_task
from forestream.training import TrainConfig
from forestream.vocabulary import DraftVocabulary
from subject import lively, model_of
from wrapped import prompt, shake, trainable, wrapped

STATIC = ((0, 0), (0, 1), (1, 0), (3, 2), (2, 0))
SETTINGS = {
    "budget": DecodeSettings(nodes=8, max_new_tokens=20),
    "fused": DecodeSettings(nodes=8, carriers="fused", max_new_tokens=20),
    "full": DecodeSettings(tree="full", k=2, max_new_tokens=20),
    "static": DecodeSettings(tree="static", shape=STATIC, max_new_tokens=20),
    "pruned": DecodeSettings(nodes=12, prune_to=5, max_new_tokens=20),
    "plain": DecodeSettings(nodes=1, max_new_tokens=20),
}
TEXTS = [Tokens(prompt(n, seed=n), prompt(m, seed=50 + m)) for n, m in ((4, 6), (2, 3), (5, 1), (1, 9))]


@torch.no_grad()
def equipped(model: StreamingLM, seed: int = 3, size: float = 0.3) -> StreamingLM:
    """`model` with a random sampler that changes most of what streams say."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_sampler(8)
        assert model.sampler is not None
        model.sampler.up.normal_(0.0, size)
        model.sampler.to(model.dtype).eval()
    return model


def trees(steps: list[Step]) -> list[DraftTree | None]:
    return [step.tree for step in steps]


# --- the module -----------------------------------------------------------------------------------------------


def test_a_fresh_one_changes_nothing_and_sizes_do_not_matter() -> None:
    torch.manual_seed(0)
    states, embedded = torch.randn(2, 3, 16), torch.randn(2, 3, 6)
    sampler = PathSampler(16, 6, 4)
    assert torch.equal(sampler(states, embedded), states)
    with torch.no_grad():
        sampler.up.normal_()
        told = sampler(states, embedded)
        assert not torch.allclose(told, states, atol=0.1)
        torch.testing.assert_close(sampler(100 * states, 0.01 * embedded), 100 * told, rtol=1e-4, atol=1e-3)
        assert not torch.allclose(sampler(states, embedded.flip(-1)), told, atol=0.1)
        assert torch.isfinite(sampler(torch.zeros(1, 16), torch.zeros(1, 6))).all()


@pytest.mark.parametrize("host", zoo.HOSTS)
def test_every_family_has_embeddings_to_read(host: str) -> None:
    model = equipped(wrapped(host))
    states = torch.randn(3, model.port.hidden_size)
    told = [model.behind(states, torch.full((3,), token)) for token in (4, 5)]
    assert told[0].shape == states.shape
    assert not torch.allclose(told[0], told[1], atol=1e-3)


# --- decoding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("host", "mode"), [("llama", "joint"), ("gpt2", "lossless"), ("gemma2", "joint")])
def test_no_text_changes_and_drafts_do(host: str, mode: str, settings: DecodeSettings) -> None:
    subject, model = lively(model_of(host, mode), 20), equipped(wrapped(host, mode))
    steps, without = (list(decode(one, subject.start, settings)) for one in (model, subject.model))
    assert tokens_of(steps) == tokens_of(without) == subject.text
    assert (trees(steps) != trees(without)) == (settings.nodes > 1)


def test_a_fresh_sampler_changes_no_draft() -> None:
    subject, model = lively(model_of("llama", "joint"), 20), equipped(wrapped("llama"), size=0.0)
    for settings in SETTINGS.values():
        ours, theirs = (list(decode(one, subject.start, settings)) for one in (model, subject.model))
        assert trees(ours) == trees(theirs)


def test_the_root_and_every_draft_before_are_what_streams_are_told() -> None:
    subject, model = lively(model_of("llama", "joint"), 20), equipped(wrapped("llama"))
    steps = list(decode(model, subject.start, SETTINGS["static"]))
    text = list(subject.start)
    for step in steps:
        if step.tree is not None and len(step.tree.tokens) == 1 + len(STATIC):
            states = streams_of(model, text)
            for node, (parent, rank) in enumerate(STATIC, 1):
                before = torch.tensor(step.tree.tokens[parent])
                level = step.tree.topology.depths[node] - 1
                logits = model.draft_logits(model.behind(states[level], before))
                assert int(logits.argsort(descending=True, stable=True)[rank]) == step.tree.tokens[node]
        text += step.tokens
    assert sum(step.tree is not None for step in steps) > 5


@torch.no_grad()
def streams_of(model: StreamingLM, text: list[int]) -> torch.Tensor:
    """Streams of the token before the last one, the root, by a pass over the whole text."""
    ids = torch.tensor([text[:-1]])
    return model(ids, Pack.text(len(text) - 1, torch.tensor([[len(text) - 2]]), 4)).streams[0, :, 0]


def test_fused_and_deferred_streams_draft_the_same() -> None:
    model, subject = equipped(wrapped("llama")), lively(model_of("llama", "joint"), 20)
    deferred, fused = (list(decode(model, subject.start, SETTINGS[name])) for name in ("budget", "fused"))
    assert trees(deferred) == trees(fused)


@pytest.mark.parametrize("compile", ["off", "layer"])
def test_a_prepared_model_drafts_the_same(compile: Any) -> None:
    model, packed = equipped(wrapped("llama")), equipped(wrapped("llama"))
    packed.prepare(compile)
    for name in ("budget", "static"):
        ours, theirs = (list(decode(one, prompt(6), SETTINGS[name])) for one in (packed, model))
        assert trees(ours) == trees(theirs)


@pytest.mark.parametrize("law", [{}, {"temperature": 1.5}, {"repetition_penalty": 1.4, "presence_penalty": 0.7}])
@pytest.mark.parametrize("mirror", [False, True])
def test_a_batch_of_any_law_is_each_text_alone(law: dict[str, float], mirror: bool) -> None:
    plain, model = model_of("llama", "joint"), equipped(wrapped("llama"))
    asked = [
        Request(prompt(3 + row, seed=row), sampling=SamplingSettings(**law, mirror=mirror), max_new_tokens=16, row=row)
        for row in range(4)
    ]
    settings = DecodeSettings(nodes=8)
    ours, theirs = together(model, asked, settings), together(plain, asked, settings)
    assert [tokens_of(steps) for steps in ours] == [tokens_of(steps) for steps in theirs]
    assert [trees(steps) for steps in ours] == [trees(together(model, [one], settings)[0]) for one in asked]


def test_penalties_and_the_vocabulary_hold_along_paths() -> None:
    model, left = wrapped("llama"), (5, 8, 13, 21, 34, 55)
    model.restrict(DraftVocabulary(sorted({*left[:4], *range(60, 89)}), 89))
    equipped(model)
    words = tuple((token,) for token in range(89) if token not in left)
    sampling = SamplingSettings(bad_words=words, mirror=True)
    steps = together(model, [Request(prompt(4), sampling=sampling, max_new_tokens=16)], DecodeSettings(nodes=4))[0]
    drafts = {token for tree in trees(steps) if tree is not None for token in tree.tokens[1:]}
    assert drafts
    assert drafts <= set(left[:4])


@pytest.mark.parametrize("name", ["budget", "full", "static", "pruned"])
@pytest.mark.parametrize(("host", "restricted"), [("llama", True), ("llama-tied", False)])
@pytest.mark.parametrize("compile", [None, "off"])
def test_drafts_are_chosen_among_the_likeliest_whatever_stands_before(
    name: str, host: str, restricted: bool, compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's rows are taken once for all of them, and those of few candidates once a level; packed or not."""
    model = wrapped(host)
    if restricted:
        model.restrict(DraftVocabulary(range(3, 80), 89))
    equipped(model)
    if compile is not None:
        model.prepare(compile)
    assert model.draft_rows is not None
    whole = list(decode(model, prompt(6), SETTINGS[name]))
    monkeypatch.setattr(paths, "NEAR", 89)
    assert trees(list(decode(model, prompt(6), SETTINGS[name]))) == trees(whole)
    monkeypatch.setattr(paths, "NEAR", 9)
    steps = list(decode(model, prompt(6), SETTINGS[name]))
    assert tokens_of(steps) == tokens_of(whole)
    assert trees(steps) != trees(whole), "a sampler as rough as this one chooses others too"
    text, most = list(prompt(6)), max(9, drafter_for(SETTINGS[name]).width)
    for step in steps:
        if step.tree is not None:
            states = streams_of(model, text)
            depths, tokens = step.tree.topology.depths, step.tree.tokens
            for depth, parent, token in zip(depths[1:], step.tree.topology.parents[1:], tokens[1:], strict=True):
                state = states[depth - 1][None]
                assert token in best_ids(model.draft_logits(state), most, model.draft_ids)[0]
                logits = told(model, state, torch.tensor([tokens[parent]]), most)
                assert token in best_ids(logits, drafter_for(SETTINGS[name]).width, model.draft_ids)[0]
        text += step.tokens


def test_a_packed_head_without_plain_rows_is_read_once_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "NEAR", 9)
    plain, packed = equipped(wrapped("phi")), equipped(wrapped("phi"))
    packed.prepare("off")
    assert plain.draft_rows is not None
    assert packed.draft_rows is None
    texts = [tokens_of(list(decode(model, prompt(6), SETTINGS["budget"]))) for model in (plain, packed)]
    assert texts[0] == texts[1]


def test_a_drafter_of_ones_own_sees_the_streams_own_logits() -> None:
    seen: list[torch.Tensor] = []

    def watching(text: Any, logits: torch.Tensor) -> DraftTree:
        seen.append(logits)
        return BudgetTree(8)(text, logits)

    settings = DecodeSettings(max_new_tokens=20)
    ours = list(decode(equipped(wrapped("llama")), prompt(6), settings, drafter=watching))
    theirs = list(decode(model_of("llama", "joint"), prompt(6), settings, drafter=BudgetTree(8)))
    assert trees(ours) == trees(theirs)
    assert {logits.shape[1] for logits in seen} == {89}


# --- recording ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near", [89, 40])
@pytest.mark.parametrize("restricted", [False, True])
def test_a_trace_foretells_the_passes_of_full_and_static_trees(
    restricted: bool, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, model = lively(model_of("llama", "joint"), 24), wrapped("llama")
    if restricted:
        model.restrict(DraftVocabulary(sorted({*subject.text, *range(30)}), 89))
    learn(model, subject.start + subject.text)
    monkeypatch.setattr(paths, "NEAR", near)
    trace = record(model, subject.start, subject.text, candidates=7)
    accepted = 0
    for settings in (
        DecodeSettings(tree="full", k=3, max_new_tokens=24),
        DecodeSettings(tree="static", shape=STATIC, max_new_tokens=24),
    ):
        passes = [s for s in decode(model, subject.start, settings) if s.tree is not None]
        run = simulate(trace, drafter_for(settings), trace.streams)
        assert run.nodes == tuple(len(step.kept) for step in passes)
        assert run.accepted == tuple(step.accepted for step in passes)
        accepted += sum(run.accepted)
    assert accepted > 10


def learn(model: StreamingLM, text: tuple[int, ...]) -> None:
    """Teach a sampler one text by heart, so that drafts are accepted at every depth."""
    equipped(model, size=0.0)
    assert model.sampler is not None
    model.requires_grad_(False)
    model.sampler.requires_grad_(True)
    batch = Collator(4, 0, targets="all").batch([Tokens(text[:2], text[2:])])
    optimizer = torch.optim.Adam(model.sampler.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        joint_loss(
            model, batch_pass(model, batch), batch, LossConfig(main=0.0, stream=1.0, scorer=0.0)
        ).total.backward()
        optimizer.step()
    model.sampler.requires_grad_(False)


def test_pruning_is_replayed_on_the_trees_that_decoding_drafts() -> None:
    model = equipped(wrapped("llama"))
    settings = DecodeSettings(tree="full", k=2, max_new_tokens=20)
    places = score_text(model, prompt(6), settings)
    steps = [s for s in decode(model, prompt(6), settings) if s.tree is not None]
    run = replay(places, None)
    assert (run.passes, run.offered) == (len(steps), sum(len(s.tree.tokens) for s in steps if s.tree is not None))


# --- training -------------------------------------------------------------------------------------------------


def test_the_tokens_before_are_the_texts_own() -> None:
    batch = Collator(3, pad=0).batch(TEXTS)
    for row, text in enumerate(TEXTS):
        tokens = [*text.prompt, *text.completion]
        for place, carrier in enumerate(batch.carriers[row].tolist()):
            for j in range(1, 4):
                if int(batch.stream_targets[row, j - 1, place]) != objective.IGNORED:
                    assert int(batch.stream_targets[row, j - 1, place]) == tokens[carrier + 1 + j]
                    assert int(tokens_before(batch, j)[row, place]) == tokens[carrier + j]


def test_the_loss_is_of_what_streams_say_behind_them() -> None:
    model = equipped(trainable("llama", streams=3))
    shake(model, 2)
    batch = Collator(3, pad=0).batch(TEXTS)
    output = batch_pass(model, batch)
    loss = joint_loss(model, output, batch, LossConfig())
    for j in range(1, 4):
        losses = []
        for row, text in enumerate(TEXTS):
            tokens = [*text.prompt, *text.completion]
            for place, carrier in enumerate(range(len(text.prompt) - 1, len(tokens) - 1 - j)):
                state = model.behind(output.streams[row, j - 1, place], torch.tensor(tokens[carrier + j]))
                losses.append(-model.logits(state).log_softmax(-1)[tokens[carrier + 1 + j]])
        term = loss.terms[f"stream_{j}"]
        assert term.count == len(losses)
        assert term.loss == pytest.approx(float(torch.stack(losses).sum().detach()), rel=1e-5)


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_it_learns_fast_and_nothing_else_gets_a_gradient(mode: str, tmp_path: Path) -> None:
    model = trainable("llama", mode=mode)
    shake(model, 1, 0.05)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    texts = [Tokens(prompt(3, seed=i % 4), prompt(8, seed=50 + i % 4)) for i in range(160)]
    config = TrainConfig(batch_size=4, learning_rate=0.02, warmup=2, dtype="float32", log_every=1)
    fit_sampler(model, texts, 0, tmp_path / "run", config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["stream_2_loss"] for line in lines if "stream_2_loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) <= name.startswith("sampler."), name
        if not name.startswith("sampler."):
            assert torch.equal(parameter, before[name]), name


def test_resuming_goes_on_with_the_sampler_of_the_run(tmp_path: Path) -> None:
    texts = [Tokens(prompt(3, seed=i), prompt(6, seed=50 + i)) for i in range(24)]
    config = TrainConfig(batch_size=4, learning_rate=0.02, warmup=0, dtype="float32", save_every=3)

    def fresh() -> StreamingLM:
        model = trainable("llama")
        shake(model, 1)
        return model

    whole, first, second = fresh(), fresh(), fresh()
    fit_sampler(whole, texts, 0, tmp_path / "whole", config)
    fit_sampler(first, texts, 0, tmp_path / "parts", config)
    last = max((tmp_path / "parts").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert last.name == "checkpoint-6"
    shutil.rmtree(last)
    fit_sampler(second, texts, 0, tmp_path / "parts", config, resume=True)
    for name in SAMPLER:
        own, wanted = checkpoint.own_tensors(second)[name], checkpoint.own_tensors(whole)[name]
        assert torch.equal(own, wanted), name


def test_an_adapter_without_streams_has_nothing_to_teach(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 streams and drafts nothing"):
        fit_sampler(trainable("llama", streams=0), TEXTS, 0, tmp_path, TrainConfig())
    with pytest.raises(ConfigError, match="no path sampler to save"):
        save_sampler(trainable("llama"), tmp_path, tmp_path, {})


# --- on disk --------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train-sampler", *map(str, arguments)])


def test_only_the_sampler_is_added_and_texts_stay(tmp_path: Path) -> None:
    adapter, output = tiny.tiny_adapter(tmp_path / "tiny"), tmp_path / "told"
    settings = ("--task", "synthetic", "--examples", 60, "--batch-size", 6, "--width", 5, "--dtype", "float32")
    result = run("--adapter", adapter, "--output", output, *settings)
    assert result.exit_code == 0, result.output
    for name in (LORA, MANIFEST, "adapter_config.json"):
        assert (output / name).read_bytes() == (adapter / name).read_bytes(), name
    before, after = load_file(adapter / STREAMS), load_file(output / STREAMS)
    assert set(after) - set(before) == set(SAMPLER)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["sampler.up"].shape[0] == 5
    assert after["sampler.up"].dtype == torch.bfloat16
    provenance = json.loads((output / PROVENANCE).read_text())
    assert provenance.pop("sampler")["updates"] == 10
    assert provenance == json.loads((adapter / PROVENANCE).read_text())
    assert "a path sampler" in (output / "README.md").read_text()
    texts = [
        [Generator.from_pretrained(str(folder), dtype=torch.float32).generate(one.prompt, max_new_tokens=24).text]
        for folder in (adapter, output)
        for one in get_task("synthetic").examples("test")[:1]
    ]
    assert texts[0] == texts[1]
    # Again, from where it is.
    assert run("--adapter", output, "--output", tmp_path / "more", *settings).exit_code == 0
    assert not torch.equal(load_file(tmp_path / "more" / STREAMS)["sampler.up"], after["sampler.up"])


def test_another_adapters_sampler_comes_and_goes_with_its_weights(tmp_path: Path) -> None:
    plain = tiny.tiny_adapter(tmp_path / "a")
    model, _ = checkpoint.load(plain, merge=False)
    equipped(model)
    origin = Manifest.read(plain).base
    checkpoint.save(model, tmp_path / "b", origin, {})
    loaded, _ = checkpoint.load(tmp_path / "b", merge=False)
    assert loaded.sampler is not None
    assert loaded.sampler.width == 8
    checkpoint.read_weights(loaded, plain)
    assert loaded.sampler is None
    host, _ = checkpoint.load_base(origin.name)
    fresh = StreamingLM(host, Manifest.read(plain).config)
    fresh.add_lora()
    checkpoint.begin_from(fresh, tmp_path / "b", origin.fingerprint)
    assert fresh.sampler is None
    checkpoint.begin_from(fresh, tmp_path / "b", origin.fingerprint, sampler_width=16)
    assert fresh.sampler is None
    checkpoint.begin_from(fresh, tmp_path / "b", origin.fingerprint, sampler_width=8)
    assert fresh.sampler is not None
    again, _ = checkpoint.load(tmp_path / "b", merge=False)
    assert again.sampler is not None
    assert torch.equal(fresh.sampler.up, again.sampler.up)


@pytest.mark.parametrize("change", ["part", "shape"])
def test_a_sampler_that_does_not_fit_is_refused(tmp_path: Path, change: str) -> None:
    folder = tiny.tiny_adapter(tmp_path / "a")
    model, _ = checkpoint.load(folder, merge=False)
    equipped(model)
    checkpoint.save(model, folder, Manifest.read(folder).base, {})
    tensors = load_file(folder / STREAMS)
    if change == "part":
        del tensors["sampler.state"]
    else:
        tensors["sampler.token"] = tensors["sampler.token"][1:].contiguous()
    save_file(tensors, folder / STREAMS)
    with pytest.raises(CheckpointError, match="a path sampler that does not fit this base, or a part of one"):
        checkpoint.load(folder)
