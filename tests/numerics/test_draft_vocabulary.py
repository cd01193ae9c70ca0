"""Streams restricted to a draft vocabulary, in every family: their logits are the head's own, and no text changes."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from batch import together
from forestream import checkpoint
from forestream.acceptance import record, simulate
from forestream.config import Compile, DecodeSettings, SamplingSettings
from forestream.decode import decode
from forestream.drafting import BudgetTree, DraftTree, drafter_for
from forestream.errors import CheckpointError, ConfigError, UnsupportedModel
from forestream.manifest import Manifest
from forestream.model import StreamingLM
from forestream.ports import port_for
from forestream.requests import Request
from forestream.steps import Step, tokens_of
from forestream.vocabulary import DraftVocabulary
from subject import lively, model_of
from tiny import tiny_adapter
from wrapped import prompt, wrapped

SETTINGS = {
    "budget": DecodeSettings(nodes=8, max_new_tokens=20),
    "fused": DecodeSettings(nodes=8, carriers="fused", max_new_tokens=20),
    "full": DecodeSettings(tree="full", k=2, max_new_tokens=20),
    "static": DecodeSettings(tree="static", shape=((0, 0), (0, 1), (1, 0), (3, 2)), max_new_tokens=20),
    "pruned": DecodeSettings(nodes=12, prune_to=5, max_new_tokens=20),
}


def halved(model: StreamingLM, seed: int = 0, size: int | None = None) -> DraftVocabulary:
    """A vocabulary of about half of the model's tokens, at random."""
    V = model.port.head_size
    picked = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[: size or V // 2]
    return DraftVocabulary(picked.sort().values, V)


def drafted(steps: list[Step]) -> set[int]:
    return {token for step in steps if step.tree is not None for token in step.tree.tokens[1:]}


# --- logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [None, "off"], ids=["plain", "packed"])
@pytest.mark.parametrize("host", zoo.HOSTS)
def test_draft_logits_are_the_heads_at_the_vocabularys_tokens(host: str, compile: Compile | None) -> None:
    model = wrapped(host)
    vocabulary = halved(model)
    states = torch.randn(2, 3, model.port.hidden_size, generator=torch.Generator().manual_seed(3))
    assert torch.equal(model.draft_logits(states), model.logits(states))
    model.restrict(vocabulary)
    if compile is not None:
        model.prepare(compile)
    with torch.no_grad():
        found, wanted = model.draft_logits(states), model.logits(states)[..., vocabulary.ids]
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-5)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_a_head_with_a_bias_and_one_that_squashes_are_among_them() -> None:
    phi, gemma = wrapped("phi"), wrapped("gemma2")
    phi.restrict(halved(phi))
    gemma.restrict(halved(gemma))
    assert isinstance(phi.draft_head, torch.nn.Linear)
    assert phi.draft_head.bias is not None
    states = 1e3 * torch.ones(1, gemma.port.hidden_size)
    assert float(gemma.draft_logits(states).abs().max()) <= gemma.port.config.final_logit_softcapping


def test_the_rows_are_copies_and_frozen_and_follow_the_model_to_another_dtype() -> None:
    model = wrapped("llama-tied")
    model.restrict(halved(model))
    assert model.draft_head is not None
    weight = next(model.draft_head.parameters())
    assert not weight.requires_grad
    assert weight.data_ptr() != model.port.output.weight.data_ptr()
    model.double()
    states = torch.randn(2, model.port.hidden_size, dtype=torch.double)
    assert model.vocabulary is not None
    assert model.vocabulary.ids.dtype == torch.long
    torch.testing.assert_close(model.draft_logits(states), model.logits(states)[:, model.vocabulary.ids])


def test_what_cannot_be_restricted() -> None:
    model = wrapped("llama")
    with pytest.raises(ConfigError, match="one of 7 tokens; the model's head has 89"):
        model.restrict(DraftVocabulary([1, 2], 7))
    model.restrict(halved(model))
    model.prepare("off")
    model.restrict(halved(model))  # the one it has
    with pytest.raises(ConfigError, match="the model is prepared"):
        model.restrict(None)
    with pytest.raises(ConfigError, match="the model is prepared"):
        model.restrict(halved(model, seed=1))


def test_a_head_that_is_no_plain_linear_layer_is_refused() -> None:
    host: Any = zoo.HOSTS["llama"]()
    port = port_for(host)
    host.lm_head = torch.nn.Sequential(host.lm_head)
    with pytest.raises(UnsupportedModel, match="the head of this llama is a Sequential"):
        port.head_of(torch.tensor([1, 2]))


# --- decoding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("host", "mode"), [("llama", "joint"), ("gpt2", "lossless"), ("gemma2", "joint")])
def test_no_text_changes_and_only_the_vocabulary_is_drafted(host: str, mode: str, settings: DecodeSettings) -> None:
    subject = lively(model_of(host, mode), 20)
    model = wrapped(host, mode)
    model.restrict(halved(model))
    assert model.vocabulary is not None
    steps = list(decode(model, subject.start, settings))
    assert tokens_of(steps) == subject.text
    assert drafted(steps) <= set(model.vocabulary.ids.tolist())
    assert len(drafted(steps)) > 5
    free = list(decode(subject.model, subject.start, settings))
    assert not drafted(free) <= set(model.vocabulary.ids.tolist())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_vocabulary_of_all_tokens_changes_no_draft(settings: DecodeSettings) -> None:
    subject, model = lively(model_of("llama", "joint"), 20), wrapped("llama")
    model.restrict(DraftVocabulary(range(89), 89))
    ours, theirs = (list(decode(one, subject.start, settings)) for one in (model, subject.model))
    assert [(step.tokens, step.tree) for step in ours] == [(step.tokens, step.tree) for step in theirs]


def test_a_vocabulary_of_the_text_accepts_what_the_whole_does() -> None:
    """Streams that are told the truth: what they draft is in the vocabulary, so nothing is lost."""
    subject, model = lively(model_of("llama", "joint"), 20), wrapped("llama")
    model.restrict(DraftVocabulary(sorted(set(subject.text)), 89))
    subject.check(20, rate=1.0, nodes=8)
    accepted = subject.counters.accepted
    restricted = type(subject)(model, subject.start, subject.text)
    restricted.check(20, rate=1.0, nodes=8)
    assert restricted.counters.accepted == accepted > 10


def test_a_drafter_of_ones_own_sees_all_tokens() -> None:
    subject, model = lively(model_of("llama", "joint"), 20), wrapped("llama")
    model.restrict(halved(model))
    assert model.vocabulary is not None
    seen: list[torch.Tensor] = []

    def watching(text: Any, logits: torch.Tensor) -> DraftTree:
        seen.append(logits)
        return BudgetTree(8)(text, logits)

    ours = list(decode(model, subject.start, DecodeSettings(max_new_tokens=20), drafter=watching))
    assert {logits.shape[1] for logits in seen} == {89}
    shut = torch.isinf(seen[0][0]).nonzero().flatten().tolist()
    assert sorted([*shut, *model.vocabulary.ids.tolist()]) == list(range(89))
    own = list(decode(model, subject.start, DecodeSettings(max_new_tokens=20)))
    assert [step.tree for step in ours] == [step.tree for step in own]


@pytest.mark.parametrize("law", [{"temperature": 1.5}, {"repetition_penalty": 1.4, "presence_penalty": 0.7}])
@pytest.mark.parametrize("mirror", [False, True])
def test_sampled_and_penalised_texts_stay_too(law: dict[str, float], mirror: bool) -> None:
    whole, model = model_of("llama", "joint"), wrapped("llama")
    model.restrict(halved(model))
    asked = [
        Request(prompt(3 + row, seed=row), sampling=SamplingSettings(**law, mirror=mirror), max_new_tokens=16, row=row)
        for row in range(4)
    ]
    settings = DecodeSettings(nodes=8)
    ours, theirs = together(model, asked, settings), together(whole, asked, settings)
    assert [tokens_of(steps) for steps in ours] == [tokens_of(steps) for steps in theirs]


def test_mirrored_penalties_act_on_the_right_tokens() -> None:
    """All tokens but six are bad words; of those in the vocabulary, only these are drafted."""
    model = wrapped("llama")
    left = (5, 8, 13, 21, 34, 55)
    model.restrict(DraftVocabulary(range(89), 89).__class__(sorted({*left[:4], *range(60, 89)}), 89))
    words = tuple((token,) for token in range(89) if token not in left)
    sampling = SamplingSettings(bad_words=words, mirror=True)
    steps = together(model, [Request(prompt(4), sampling=sampling, max_new_tokens=16)], DecodeSettings(nodes=4))[0]
    assert drafted(steps)
    assert drafted(steps) <= set(left[:4])


# --- recording ------------------------------------------------------------------------------------------------


def test_a_trace_foretells_the_passes_of_a_restricted_model() -> None:
    subject, model = lively(model_of("llama", "joint"), 24), wrapped("llama")
    model.restrict(halved(model, size=60))
    assert model.vocabulary is not None
    trace = record(model, subject.start, subject.text, candidates=7)
    assert trace.vocabulary == 60
    assert set(trace.ids.flatten().tolist()) <= set(model.vocabulary.ids.tolist())
    for settings in (DecodeSettings(nodes=8, max_new_tokens=24), DecodeSettings(tree="full", k=3, max_new_tokens=24)):
        passes = [s for s in decode(model, subject.start, settings) if s.tree is not None]
        run = simulate(trace, drafter_for(settings), trace.streams)
        assert (run.nodes, run.accepted) == (
            tuple(len(step.kept) for step in passes),
            tuple(step.accepted for step in passes),
        )


# --- on disk --------------------------------------------------------------------------------------------------


def with_ids(folder: Any, ids: torch.Tensor) -> None:
    save_file({**load_file(folder / checkpoint.STREAMS), checkpoint.VOCABULARY: ids}, folder / checkpoint.STREAMS)


def test_an_adapter_keeps_its_vocabulary(tmp_path: Any) -> None:
    folder = tiny_adapter(tmp_path / "a")
    model, _ = checkpoint.load(folder, merge=False)
    assert model.vocabulary is None
    vocabulary = halved(model)
    model.restrict(vocabulary)
    origin = Manifest.read(folder).base
    checkpoint.save(model, tmp_path / "b", origin, {})
    stored = load_file(tmp_path / "b" / checkpoint.STREAMS)[checkpoint.VOCABULARY]
    assert stored.dtype == torch.int32
    assert stored.tolist() == vocabulary.ids.tolist()
    loaded, _ = checkpoint.load(tmp_path / "b")
    assert vocabulary.same(loaded.vocabulary)
    states = torch.randn(2, loaded.port.hidden_size)
    torch.testing.assert_close(loaded.draft_logits(states), loaded.logits(states)[:, vocabulary.ids])


def test_another_adapters_vocabulary_comes_and_goes_with_its_weights(tmp_path: Any) -> None:
    folder, plain = tiny_adapter(tmp_path / "a"), tiny_adapter(tmp_path / "b", tmp_path / "a-base")
    with_ids(folder, torch.tensor([1, 5, 9], dtype=torch.int32))
    model, _ = checkpoint.load(folder, merge=False)
    assert model.vocabulary is not None
    checkpoint.read_weights(model, plain)
    assert model.vocabulary is None
    assert model.draft_head is None
    checkpoint.read_weights(model, folder)
    assert model.vocabulary.ids.tolist() == [1, 5, 9]


def test_a_training_that_begins_from_an_adapter_keeps_its_own_vocabulary(tmp_path: Any) -> None:
    folder = tiny_adapter(tmp_path / "a")
    with_ids(folder, torch.tensor([1, 5, 9], dtype=torch.int32))
    manifest = Manifest.read(folder)
    for own in (None, DraftVocabulary([2, 3], 97)):
        host, _ = checkpoint.load_base(manifest.base.name)
        model = StreamingLM(host, manifest.config)
        model.add_lora()
        if own is not None:
            own = DraftVocabulary([2, 3], model.port.head_size)
        model.restrict(own)
        checkpoint.begin_from(model, folder, manifest.base.fingerprint)
        assert model.vocabulary is own


@pytest.mark.parametrize("ids", [[], [3, 1], [-1, 4], [3, 100_000], [[1, 2]]])
def test_a_vocabulary_that_is_none_is_refused(tmp_path: Any, ids: list[Any]) -> None:
    folder = tiny_adapter(tmp_path / "a")
    with_ids(folder, torch.tensor(ids, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="holds no draft vocabulary for this base: "):
        checkpoint.load(folder)


def test_a_vocabulary_of_fractions_is_refused(tmp_path: Any) -> None:
    folder = tiny_adapter(tmp_path / "a")
    with_ids(folder, torch.tensor([1.0, 2.0]))
    with pytest.raises(CheckpointError, match="float32"):
        checkpoint.load(folder)
