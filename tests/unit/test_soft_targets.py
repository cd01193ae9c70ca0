"""Soft targets against a slow reference that takes one text, one stream and one place at a time, with all logits."""

from collections import defaultdict
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from forestream.data import Collator, Tokens
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.objective import IGNORED, JointLoss, LossConfig, TargetBatch, joint_loss
from forestream.packing import Pack
from wrapped import prompt, shake, trainable

Target = Literal["hard", "soft", "both"]

CONFIG = LossConfig(main=0.7, stream=0.3, scorer=0.2, chunk=5, target="soft")
TEXTS = [Tokens(prompt(n, seed=n), prompt(m, seed=50 + m)) for n, m in ((4, 6), (2, 3), (5, 1), (1, 9))]
G = 3
TERMS = ["main", "stream_1", "stream_2", "stream_3", "scorer"]


@pytest.fixture(params=["joint", "lossless"])
def model(request: pytest.FixtureRequest) -> StreamingLM:
    made = trainable("llama", streams=G, mode=request.param)
    shake(made, seed=2)
    return made


def batch_of(texts: list[Tokens] = TEXTS, share: float = 1.0) -> TargetBatch:
    return Collator(G, pad=0, share=share).batch(texts)


def loss_of(model: StreamingLM, batch: TargetBatch, config: LossConfig = CONFIG) -> JointLoss:
    return joint_loss(model, model(batch.ids, Pack.text(batch.ids.shape[1], batch.carriers, G)), batch, config)


def slow(model: StreamingLM, config: LossConfig, texts: list[Tokens] = TEXTS) -> tuple[Tensor, dict[str, float]]:
    """The loss with every text in a pass of its own, nothing padded, and the summed KL of each stream."""
    losses: dict[str, list[Tensor]] = defaultdict(list)
    divergences: dict[str, float] = defaultdict(float)
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.completion]])
        first, length = len(text.prompt) - 1, ids.shape[1]
        carriers = torch.arange(first, length - 2)[None]
        output = model(ids[:, :-1], Pack.text(length - 1, carriers, G if carriers.numel() else 0))
        laws = model.logits(output.main)[0].float().softmax(-1)
        for t in range(first, length - 1):
            losses["main"].append(-laws[t, ids[0, t + 1]].log())
            assert model.scorer is not None
            scored = model.logits(model.scorer(output.trunk[0, t].detach())).float().log_softmax(-1)
            losses["scorer"].append(-scored[ids[0, t + 1]])
        for c, t in enumerate(carriers[0].tolist()):
            for j in range(1, G + 1):
                if t + 1 + j < length:  # else the token is behind the end of the text
                    own = model.logits(output.streams[0, j - 1, c]).float().softmax(-1)
                    law = laws[t + j].detach()
                    kl = (law * (law.log() - own.log())).sum()
                    hard = -own[ids[0, t + 1 + j]].log()
                    share = {"hard": 0.0, "soft": 1.0, "both": config.soft_share}[config.target]
                    losses[f"stream_{j}"].append(share * kl + (1 - share) * hard)
                    divergences[f"stream_{j}"] += float(kl.detach())
    weights = {"main": config.main, "scorer": config.scorer}
    means = [weights.get(name, config.stream) * torch.stack(own).mean() for name, own in losses.items()]
    return torch.stack(means).sum(), divergences


def gradients(model: StreamingLM, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float = 2e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        scale = float(wanted[name].abs().max())
        assert float((gradient - wanted[name]).abs().max()) <= share * scale, name


# --- value and gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "share"), [("soft", 0.5), ("both", 0.5), ("both", 0.2), ("hard", 0.5)])
def test_value_and_gradients_are_those_of_the_slow_reference(model: StreamingLM, target: Target, share: float) -> None:
    """Ragged texts in one padded batch: no target crosses the end of its text, soft or hard."""
    config = replace(CONFIG, target=target, soft_share=share)
    loss = loss_of(model, batch_of(), config)
    total, divergences = slow(model, config)
    assert float(loss.total.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    assert list(loss.terms) == TERMS
    for name, term in loss.terms.items():
        if target == "hard" or not name.startswith("stream"):
            assert term.soft is None
        else:
            assert term.soft == pytest.approx(divergences[name], rel=1e-4)
    assert_same_gradients(gradients(model, loss.total), gradients(model, total))


def test_cross_entropy_and_hits_are_told_whatever_is_trained_on(model: StreamingLM) -> None:
    hard, soft, both = (loss_of(model, batch_of(), replace(CONFIG, target=t)) for t in ("hard", "soft", "both"))
    for name, term in hard.terms.items():
        for other in (soft.terms[name], both.terms[name]):
            assert (other.loss, other.hits, other.count) == (term.loss, term.hits, term.count)
    means = [float(loss.total.detach()) for loss in (hard, soft, both)]
    assert means[2] == pytest.approx((means[0] + means[1]) / 2, rel=1e-5)
    assert means[0] != pytest.approx(means[1], rel=1e-3)


def test_the_gradient_is_the_difference_of_the_laws(model: StreamingLM) -> None:
    """At the logits: the stream's law minus the main stream's, a closed form that autograd has no part in."""
    text = [Tokens((1, 2), (3, 4))]
    batch = batch_of(text)
    output = model(batch.ids, Pack.text(3, batch.carriers, G))
    states = output.streams.detach().requires_grad_()
    config = replace(CONFIG, main=0.0, stream=1.0, scorer=0.0)
    joint_loss(model, replace(output, streams=states), batch, config).total.backward()
    logits = model.logits(leaf := states.detach()[0, 0].requires_grad_())
    teacher = model.logits(output.main[0, 2].detach()).softmax(-1)
    wanted = torch.autograd.grad(logits, leaf, logits.detach().softmax(-1) - teacher)[0]
    assert states.grad is not None
    torch.testing.assert_close(states.grad[0, 0], wanted, rtol=1e-4, atol=1e-6)
    assert not states.grad[0, 1:].any()  # streams 2 and 3 have nothing left to foretell


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_the_size_of_chunks_does_not_matter(model: StreamingLM, chunk: int) -> None:
    outcomes = [loss_of(model, batch_of(), replace(CONFIG, target="both", chunk=size)) for size in (chunk, 7)]
    found, wanted = (gradients(model, loss.total) for loss in outcomes)
    assert float(outcomes[0].total.detach()) == pytest.approx(float(outcomes[1].total.detach()), rel=1e-6)
    assert_same_gradients(found, wanted)


def test_the_main_stream_learns_nothing_from_its_pupils() -> None:
    """Its states get no gradient from soft targets, also where LoRA would let it move towards its streams."""
    model = trainable("llama", streams=G)
    shake(model, seed=2)
    batch = batch_of()
    output = model(batch.ids, Pack.text(batch.ids.shape[1], batch.carriers, G))
    main = output.main.detach().requires_grad_()
    config = LossConfig(main=0.0, stream=1.0, scorer=0.0, target="soft")
    joint_loss(model, replace(output, main=main), batch, config).total.backward()
    assert main.grad is None or not main.grad.any()


# --- borders and padding -----------------------------------------------------------------------------------------


def test_logits_are_never_held_for_more_rows_than_a_chunk(model: StreamingLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    right = StreamingLM.logits

    def counted(self: StreamingLM, states: Tensor) -> Any:
        rows.append(len(states))
        return right(self, states)

    monkeypatch.setattr(StreamingLM, "logits", counted)
    loss = loss_of(model, batch_of(), replace(CONFIG, chunk=4))
    assert max(rows) <= 4
    streams = sum(term.count for name, term in loss.terms.items() if name.startswith("stream"))
    assert sum(rows) == streams + sum(term.count for term in loss.terms.values())  # a teacher for each stream's row


def test_other_texts_and_padding_change_no_soft_target(model: StreamingLM) -> None:
    """What stands beside a text, and behind its end, may be anything."""
    alone = loss_of(model, batch_of(TEXTS[:1]))
    wide = batch_of(TEXTS[:1])
    extra = torch.full((1, 3), 8)
    padded = TargetBatch(
        torch.cat([wide.ids, extra], 1),
        wide.rows,
        wide.targets,
        torch.cat([wide.carriers, extra], 1),
        torch.cat([wide.stream_targets, torch.full((1, G, 3), IGNORED)], 2),
    )
    found = loss_of(model, padded)
    for name, term in alone.terms.items():
        assert found.terms[name].soft == (None if term.soft is None else pytest.approx(term.soft, rel=1e-5))
        assert found.terms[name].count == term.count
    mates = batch_of([TEXTS[0], TEXTS[3]])
    together = loss_of(model, mates)
    apart = [alone, loss_of(model, batch_of(TEXTS[3:]))]
    for j in range(1, G + 1):
        sums = [loss.terms[f"stream_{j}"].soft or 0.0 for loss in apart]
        assert together.terms[f"stream_{j}"].soft == pytest.approx(sum(sums), rel=1e-5)


def test_thinned_carriers_have_the_teachers_of_their_own_places(model: StreamingLM) -> None:
    """With a share of the carriers every stream's row has the KL that it has among all carriers."""
    every, some = batch_of(TEXTS[3:]), batch_of(TEXTS[3:], share=0.5)
    kept = some.carriers[0].tolist()
    assert 0 < len(kept) < every.carriers.shape[1]
    found = loss_of(model, some)
    for j in range(1, G + 1):
        single = 0.0
        for place in kept:
            at = every.carriers[0].tolist().index(place)
            one = TargetBatch(
                every.ids, every.rows, every.targets, every.carriers[:, [at]], every.stream_targets[:, :, [at]]
            )
            single += loss_of(model, one).terms[f"stream_{j}"].soft or 0.0
        assert found.terms[f"stream_{j}"].soft == pytest.approx(single, rel=1e-4)


def test_texts_too_short_for_streams_are_finite(model: StreamingLM) -> None:
    loss = loss_of(model, batch_of([Tokens((1, 2), (3,)), Tokens((4,), (5,))]))
    assert (loss.terms["stream_1"].soft, loss.terms["stream_1"].count) == (0.0, 0)
    assert all(bool(g.isfinite().all()) for g in gradients(model, loss.total).values())


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"target": "softer"}, "target is 'softer'"),
        ({"soft_share": 1.5}, "soft_share is 1.5; expected a number from 0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LossConfig(**changes)


def test_softness_is_what_the_target_says() -> None:
    assert [LossConfig(target=t, soft_share=0.3).softness for t in ("hard", "soft", "both")] == [0.0, 1.0, 0.3]
    assert LossConfig().target == "hard"
    assert LossConfig.from_json(LossConfig(target="both").to_json()) == LossConfig(target="both")
