"""The streams' loss over a draft vocabulary, against a reference that takes one place at a time out of whole logits."""

from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from forestream.data import Collator, Tokens, restrict_drafts
from forestream.model import StreamingLM
from forestream.objective import IGNORED, JointLoss, LossConfig, TargetBatch, count_targets, joint_loss
from forestream.packing import Pack
from forestream.vocabulary import DraftVocabulary
from wrapped import prompt, shake, trainable

G = 3
CONFIG = LossConfig(main=0.7, stream=0.3, scorer=0.2, chunk=5)
TEXTS = [Tokens(prompt(n, seed=n), prompt(m, seed=50 + m)) for n, m in ((4, 6), (2, 3), (5, 1), (1, 9))]
TARGETS = [
    CONFIG,
    replace(CONFIG, target="soft"),
    replace(CONFIG, target="both", soft_share=0.3),
    replace(CONFIG, decay=0.5, scorer=0.0),
]
"""What is learned: hard targets, soft ones, both, and hard ones without a scorer."""


def model_with(ids: list[int] | None, host: str = "llama") -> StreamingLM:
    made = trainable(host, streams=G)
    shake(made, seed=2)
    made.restrict(None if ids is None else DraftVocabulary(ids, made.port.head_size))
    return made


def some() -> list[int]:
    """Every other token that streams are asked for, and some that they are not."""
    asked = sorted({token for text in TEXTS for token in text.completion})
    return sorted({*asked[::2], 71, 80})


def batch_of(texts: list[Tokens] = TEXTS) -> TargetBatch:
    return Collator(G, pad=0).batch(texts)


def loss_of(model: StreamingLM, batch: TargetBatch, config: LossConfig, totals: Tensor | None = None) -> JointLoss:
    output = model(batch.ids, Pack.text(batch.ids.shape[1], batch.carriers, G))
    return joint_loss(model, output, batch, config, totals)


@dataclass
class Slow:
    """Every term's losses, one by one, and what is counted of them."""

    losses: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    hits: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    outside: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def total(self, config: LossConfig) -> Tensor:
        weights = config.weights(G, True)
        return torch.stack([weights[name] * torch.stack(own).mean() for name, own in self.losses.items()]).sum()


def slow(model: StreamingLM, config: LossConfig, ids: list[int]) -> Slow:
    """Every text in a pass of its own; laws over the vocabulary are cut out of whole ones and renormalised."""
    found = Slow()
    for text in TEXTS:
        tokens = [*text.prompt, *text.completion]
        first, length = len(text.prompt) - 1, len(tokens)
        places = list(range(first, length - 2))
        pack = Pack.text(length - 1, torch.tensor([places], dtype=torch.long), G if places else 0)
        output = model(torch.tensor([tokens[:-1]]), pack)
        laws = model.logits(output.main)[0].softmax(-1)
        for t in range(first, length - 1):
            found.losses["main"].append(-laws[t, tokens[t + 1]].log())
            if config.scorer:
                assert model.scorer is not None
                scored = model.logits(model.scorer(output.trunk[0, t].detach())).log_softmax(-1)
                found.losses["scorer"].append(-scored[tokens[t + 1]])
        for c, t in enumerate(places):
            for j in range(1, G + 1):
                if t + 1 + j >= length:
                    continue
                name, target = f"stream_{j}", tokens[t + 1 + j]
                if target not in ids:
                    found.outside[name] += 1
                    continue
                kept = model.logits(output.streams[0, j - 1, c]).softmax(-1)[ids]
                own = kept / kept.sum()
                law = laws[t + j].detach()[ids]
                law = law / law.sum()
                hard, kl = -own[ids.index(target)].log(), (law * (law.log() - own.log())).sum()
                found.losses[name].append(config.softness * kl + (1 - config.softness) * hard)
                found.hits[name] += ids[int(own.argmax())] == target
    return found


def gradients(model: StreamingLM, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float = 3e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        scale = float(wanted[name].abs().max())
        assert float((gradient - wanted[name]).abs().max()) <= share * scale, name


@pytest.mark.parametrize("config", TARGETS)
@pytest.mark.parametrize("host", ["llama", "gemma2"])
def test_value_and_gradients_are_those_of_the_slow_reference(host: str, config: LossConfig) -> None:
    ids = some()
    model = model_with(ids, host)
    loss = loss_of(model, batch_of(), config)
    wanted = slow(model, config, ids)
    assert float(loss.total.detach()) == pytest.approx(float(wanted.total(config).detach()), rel=1e-5)
    for name, term in loss.terms.items():
        assert term.count == len(wanted.losses[name]), name
        assert term.outside == wanted.outside[name], name
        if name.startswith("stream"):
            assert term.hits == wanted.hits[name]
            assert term.count > 2
            assert term.outside > 2
            assert term.asked == term.count + term.outside
    assert_same_gradients(gradients(model, loss.total), gradients(model, slow(model, config, ids).total(config)))


@pytest.mark.parametrize("config", TARGETS)
def test_a_vocabulary_of_all_tokens_changes_nothing(config: LossConfig) -> None:
    whole, same = model_with(None), model_with(list(range(89)))
    ours, theirs = loss_of(same, batch_of(), config), loss_of(whole, batch_of(), config)
    torch.testing.assert_close(ours.total, theirs.total, rtol=1e-6, atol=0.0)
    assert ours.terms.keys() == theirs.terms.keys()
    for name, term in ours.terms.items():
        other = theirs.terms[name]
        assert (term.hits, term.count, term.outside) == (other.hits, other.count, 0)
        assert term.loss == pytest.approx(other.loss, rel=1e-6)
        assert term.soft == (None if other.soft is None else pytest.approx(other.soft, rel=1e-5))
    assert_same_gradients(gradients(same, ours.total), gradients(whole, theirs.total), 1e-5)


def test_terms_come_in_their_usual_order() -> None:
    terms = loss_of(model_with(some()), batch_of(), CONFIG).terms
    assert list(terms) == ["main", "stream_1", "stream_2", "stream_3", "scorer"]


@pytest.mark.parametrize("config", TARGETS)
def test_the_parts_of_an_update_add_up(config: LossConfig) -> None:
    """Where the targets of each part with a loss are counted beforehand, outside ones left out."""
    model = model_with(some())
    whole = loss_of(model, batch_of(), config)
    parts = [batch_of(TEXTS[:1]), batch_of(TEXTS[1:3]), batch_of(TEXTS[3:])]
    totals = torch.stack([count_targets(part, model.vocabulary) for part in parts]).sum(0)
    assert totals.tolist() == [term.count for name, term in whole.terms.items() if name != "scorer"]
    added = sum(float(loss_of(model, part, config, totals).total.detach()) for part in parts)
    assert added == pytest.approx(float(whole.total.detach()), rel=1e-5)


def test_streams_without_any_target_inside_learn_nothing() -> None:
    """71 and 80 are no token of the texts."""
    model = model_with([71, 80])
    loss = loss_of(model, batch_of(), CONFIG)
    assert [loss.terms[f"stream_{j}"].count for j in (1, 2, 3)] == [0, 0, 0]
    assert [loss.terms[f"stream_{j}"].outside for j in (1, 2, 3)] == [15, 12, 9]
    found = gradients(model, loss.total)
    assert float(found["start.embedding"].abs().max()) == 0.0
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 0.0


def test_targets_that_there_are_not_stay_so() -> None:
    vocabulary = DraftVocabulary([5], 89)
    batch = batch_of()
    assert int(count_targets(batch, vocabulary)[1:].sum()) == int((batch.stream_targets == 5).sum())
    assert bool((batch.stream_targets == IGNORED).any())


def test_the_vocabulary_of_a_training_is_that_of_its_completions() -> None:
    model = model_with(None)
    restrict_drafts(model, TEXTS, 1, 0)
    assert model.vocabulary is None
    restrict_drafts(model, TEXTS, 1, 1000)
    assert model.vocabulary is not None
    assert set(model.vocabulary.ids.tolist()) == {1, *(token for text in TEXTS for token in text.completion)}
    restrict_drafts(model, TEXTS, 1, 3)
    assert len(model.vocabulary) == 3
    twin = trainable("llama", streams=0)
    restrict_drafts(twin, TEXTS, 1, 3)
    assert twin.vocabulary is None
