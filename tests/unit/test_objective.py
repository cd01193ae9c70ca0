"""Eq. 5 against a slow reference that holds all logits: value, gradients, chunks, and terms without targets."""

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from forestream.data import Collator, Tokens, nothing
from forestream.model import PassOutput, StreamingLM
from forestream.objective import (
    IGNORED,
    JointLoss,
    LossConfig,
    TargetBatch,
    Term,
    count_targets,
    gather_rows,
    joint_loss,
)
from forestream.packing import Pack
from wrapped import prompt, shake, trainable

CONFIG = LossConfig(main=0.7, stream=0.3, scorer=0.2, chunk=5)
TEXTS = [Tokens(prompt(n, seed=n), prompt(m, seed=50 + m)) for n, m in ((4, 6), (2, 3), (5, 1), (1, 9))]


@pytest.fixture
def model() -> StreamingLM:
    made = trainable("llama", streams=3)
    shake(made, seed=2)
    return made


def batch_of(model: StreamingLM, texts: list[Tokens] | None = None) -> TargetBatch:
    return Collator(model.stream_config.streams, pad=0).batch(TEXTS if texts is None else texts)


def forward(model: StreamingLM, batch: TargetBatch, streams: int | None = None) -> PassOutput:
    pack = Pack.text(batch.ids.shape[1], batch.carriers, model.stream_config.streams if streams is None else streams)
    output = model(batch.ids, pack)
    assert isinstance(output, PassOutput)
    return output


def asked(model: StreamingLM, output: PassOutput, batch: TargetBatch) -> Iterator[tuple[str, Tensor, int]]:
    """Every term's name, state and target, one at a time."""
    for b, text in enumerate(batch.rows.tolist()):
        for place, target in zip(text, batch.targets[b].tolist(), strict=True):
            yield "main", output.main[b, place], target
            if model.scorer is not None:
                yield "scorer", model.scorer(output.trunk[b, place].detach()), target
    rows, streams, places = batch.stream_targets.shape
    for b, j, c in product(range(rows), range(streams), range(places)):
        yield f"stream_{j + 1}", output.streams[b, j, c], int(batch.stream_targets[b, j, c])


def slow(
    model: StreamingLM, output: PassOutput, batch: TargetBatch, config: LossConfig
) -> tuple[Tensor, dict[str, Term]]:
    """Every term as the mean of the losses of its targets, taken one after another."""
    weights = {"main": config.main, "scorer": config.scorer}
    losses: dict[str, list[Tensor]] = defaultdict(list)
    hits: dict[str, int] = defaultdict(int)
    for name, state, target in asked(model, output, batch):
        if target != IGNORED:
            logits = model.port.head(model.port.finish(state[None, None]))[0, 0].float()
            losses[name].append(torch.logsumexp(logits, 0) - logits[target])
            hits[name] += int(logits.argmax()) == target
    means = [weights.get(name, config.stream) * torch.stack(own).mean() for name, own in losses.items()]
    terms = {n: Term(float(torch.stack(own).sum().detach()), hits[n], len(own)) for n, own in losses.items()}
    return torch.stack(means).sum() if means else torch.zeros(()), terms


def gradients(model: StreamingLM, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], share: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        scale = float(wanted[name].abs().max())
        assert float((gradient - wanted[name]).abs().max()) <= share * scale, name


def test_the_loss_is_that_of_the_slow_reference(model: StreamingLM) -> None:
    batch = batch_of(model)
    output = forward(model, batch)
    loss = joint_loss(model, output, batch, CONFIG)
    total, terms = slow(model, output, batch, CONFIG)
    assert float(loss.total.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    assert list(loss.terms) == ["main", "stream_1", "stream_2", "stream_3", "scorer"]
    for name, term in loss.terms.items():
        assert term.loss == pytest.approx(terms[name].loss, rel=1e-5)
        assert (term.hits, term.count) == (terms[name].hits, terms[name].count)
    assert [loss.terms[f"stream_{j}"].count for j in (1, 2, 3)] == [15, 12, 9]


def test_its_gradients_are_those_of_the_slow_reference(model: StreamingLM) -> None:
    batch = batch_of(model)
    fast = gradients(model, joint_loss(model, forward(model, batch), batch, CONFIG).total)
    wanted = gradients(model, slow(model, forward(model, batch), batch, CONFIG)[0])
    assert_same_gradients(fast, wanted)
    assert min(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-6


def test_gradients_scale_with_what_comes_after_the_loss(model: StreamingLM) -> None:
    """Accumulation divides the loss, mixed precision multiplies it."""
    batch = batch_of(model)
    once = gradients(model, joint_loss(model, forward(model, batch), batch, CONFIG).total)
    thrice = gradients(model, joint_loss(model, forward(model, batch), batch, CONFIG).total * 3.0)
    assert_same_gradients({name: g / 3 for name, g in thrice.items()}, once)


@pytest.mark.parametrize("chunk", [1, 2, 7, 36, 10_000])
def test_the_size_of_chunks_does_not_matter(model: StreamingLM, chunk: int) -> None:
    batch = batch_of(model)
    outcomes = []
    for size in (chunk, 16):
        loss = joint_loss(model, forward(model, batch), batch, LossConfig(0.7, 0.3, 0.2, chunk=size))
        outcomes.append((float(loss.total.detach()), loss.terms, gradients(model, loss.total)))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-6)
    for name, term in outcomes[0][1].items():
        assert term.loss == pytest.approx(outcomes[1][1][name].loss, rel=1e-5)
        assert (term.hits, term.count) == (outcomes[1][1][name].hits, outcomes[1][1][name].count)
    assert_same_gradients(outcomes[0][2], outcomes[1][2])


def test_ignored_targets_change_nothing(model: StreamingLM) -> None:
    """Padding to a wider batch, and what its rows and carriers point at, leaves value and gradients alone."""
    narrow = batch_of(model, TEXTS[:2])
    extra = torch.ones(2, 3, dtype=torch.long)
    wide = TargetBatch(
        ids=torch.cat([narrow.ids, extra * 8], 1),
        rows=torch.cat([narrow.rows, extra * 2], 1),
        targets=torch.cat([narrow.targets, extra * IGNORED], 1),
        carriers=torch.cat([narrow.carriers, extra], 1),
        stream_targets=torch.cat([narrow.stream_targets, (extra * IGNORED)[:, None].expand(-1, 3, -1)], 2),
    )
    losses = [joint_loss(model, forward(model, batch), batch, CONFIG) for batch in (narrow, wide)]
    found, wanted = (gradients(model, loss.total) for loss in reversed(losses))
    assert float(losses[1].total.detach()) == pytest.approx(float(losses[0].total.detach()), rel=1e-6)
    assert [t.count for t in losses[1].terms.values()] == [t.count for t in losses[0].terms.values()]
    assert_same_gradients(found, wanted)


def without(batch: TargetBatch, *parts: str) -> TargetBatch:
    blank = {name: torch.full_like(getattr(batch, name), IGNORED) for name in parts}
    return TargetBatch(**{**vars(batch), **blank})


@pytest.mark.parametrize("parts", [("targets",), ("stream_targets",), ("targets", "stream_targets")])
def test_terms_without_targets_are_zero_and_finite(model: StreamingLM, parts: tuple[str, ...]) -> None:
    batch = without(batch_of(model), *parts)
    loss = joint_loss(model, forward(model, batch), batch, CONFIG)
    empty = {"main", "scorer"} if "targets" in parts else set()
    empty |= {"stream_1", "stream_2", "stream_3"} if "stream_targets" in parts else set()
    for name, term in loss.terms.items():
        assert ((term.loss, term.hits, term.count) == (0.0, 0, 0)) == (name in empty)
    assert math.isfinite(float(loss.total.detach()))
    assert (float(loss.total.detach()) == 0.0) == (len(parts) == 2)
    found = gradients(model, loss.total)
    total, _ = slow(model, forward(model, batch), batch, CONFIG)
    wanted = gradients(model, total) if total.requires_grad else {}
    assert_same_gradients({name: found[name] for name in wanted}, wanted)
    assert all(not gradient.any() for name, gradient in found.items() if name not in wanted)


def test_a_batch_whose_completions_are_too_short_for_streams_is_finite(model: StreamingLM) -> None:
    batch = batch_of(model, [Tokens((1, 2), (3,)), Tokens((4,), (5,))])
    loss = joint_loss(model, forward(model, batch), batch, CONFIG)
    assert loss.terms["main"].count == 2
    assert loss.terms["stream_1"].count == 0
    assert all(g.isfinite().all() for g in gradients(model, loss.total).values())


def test_stream_weight_0_is_the_main_loss_alone(model: StreamingLM) -> None:
    """Value and gradients of a pass that has no streams at all; the streams' own parts get exact zeros."""
    batch = batch_of(model)
    alone = TargetBatch(batch.ids, batch.rows, batch.targets, batch.carriers[:, :0], batch.stream_targets[:, :0, :0])
    config = LossConfig(main=1.0, stream=0.0, scorer=0.0)
    muted = joint_loss(model, forward(model, batch), batch, config)
    assert muted.terms["stream_1"].count == 15
    found = gradients(model, muted.total)
    plain = joint_loss(model, forward(model, alone, streams=0), alone, config)
    wanted = gradients(model, plain.total)
    assert list(plain.terms) == ["main"]
    assert float(muted.total.detach()) == pytest.approx(float(plain.total.detach()), rel=1e-6)
    streams_own = {name for name in found if name.startswith("start.")}
    assert streams_own == set(found) - set(wanted)
    assert len(streams_own) == 1
    assert all(not found[name].any() for name in streams_own)
    assert_same_gradients({name: found[name] for name in wanted}, wanted, share=1e-5)


def test_main_weight_0_leaves_the_scorer_and_the_streams_to_learn(model: StreamingLM) -> None:
    batch = batch_of(model)
    found = gradients(model, joint_loss(model, forward(model, batch), batch, LossConfig(main=0.0)).total)
    assert all(gradient.any() for gradient in found.values())


def test_the_scorer_is_trained_alone(model: StreamingLM) -> None:
    """Its input is detached: its own loss moves nothing else."""
    batch = batch_of(model)
    config = LossConfig(main=0.0, stream=0.0, scorer=1.0)
    found = gradients(model, joint_loss(model, forward(model, batch), batch, config).total)
    moved = {name for name, gradient in found.items() if gradient.any()}
    assert moved == {"scorer.down", "scorer.up"}


@pytest.mark.parametrize("changes", [{"scorer_rank": 0}, {"streams": 0}])
def test_without_a_scorer_there_is_no_term_for_it(changes: dict[str, Any]) -> None:
    model = trainable("llama", **changes)
    batch = batch_of(model)
    terms = joint_loss(model, forward(model, batch), batch, LossConfig()).terms
    assert "scorer" not in terms
    assert len(terms) == 1 + model.stream_config.streams


def test_scorer_weight_0_leaves_its_term_out(model: StreamingLM) -> None:
    batch = batch_of(model)
    loss: JointLoss = joint_loss(model, forward(model, batch), batch, LossConfig(scorer=0.0))
    assert list(loss.terms) == ["main", "stream_1", "stream_2", "stream_3"]


def test_rows_are_gathered_from_their_own_text() -> None:
    states = torch.arange(24.0).view(2, 4, 3)
    found = gather_rows(states, torch.tensor([[3, 0], [1, 1]]))
    assert torch.equal(found, torch.stack([states[0, [3, 0]], states[1, [1, 1]]]))


# --- parts of an update ---------------------------------------------------------------------------------------------


def added_up(model: StreamingLM, parts: list[TargetBatch], totals: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    losses = [joint_loss(model, forward(model, part), part, CONFIG, totals).total for part in parts]
    loss = torch.stack(losses).sum()
    return float(loss.detach()), gradients(model, loss)


def test_parts_of_an_update_add_up_to_one_large_pass(model: StreamingLM) -> None:
    whole = batch_of(model)
    parts = [batch_of(model, texts) for texts in (TEXTS[:1], TEXTS[1:3], TEXTS[3:])]
    totals = count_targets(whole)
    assert totals.tolist() == [19, 15, 12, 9]  # completions of 6, 3, 1 and 9 tokens, less one for every stream
    assert torch.equal(totals, torch.stack([count_targets(part) for part in parts]).sum(0))
    value, wanted = added_up(model, [whole], None)
    found, own = added_up(model, parts, totals)
    assert found == pytest.approx(value, rel=1e-6)
    assert_same_gradients(own, wanted)


def test_a_mean_of_the_means_of_ragged_parts_is_something_else(model: StreamingLM) -> None:
    parts = [batch_of(model, texts) for texts in (TEXTS[:1], TEXTS[1:3], TEXTS[3:])]
    value, wanted = added_up(model, [batch_of(model)], None)
    found, own = added_up(model, parts, None)
    assert found / 3 != pytest.approx(value, rel=1e-3)
    with pytest.raises(AssertionError):
        assert_same_gradients({name: gradient / 3 for name, gradient in own.items()}, wanted, share=0.01)


def test_rows_without_any_target_are_no_nan(model: StreamingLM) -> None:
    """Alone they ask for nothing, and beside others they change nothing."""
    empty = batch_of(model, [nothing(0), nothing(0)])
    loss = joint_loss(model, forward(model, empty), empty, CONFIG)
    assert float(loss.total.detach()) == 0.0
    assert {term.count for term in loss.terms.values()} == {0}
    own = gradients(model, loss.total)
    assert (
        own.keys()
        == gradients(model, joint_loss(model, forward(model, batch_of(model)), batch_of(model), CONFIG).total).keys()
    )
    assert all(bool((gradient == 0).all()) for gradient in own.values())
    beside = batch_of(model, [*TEXTS, nothing(0)])
    value, wanted = added_up(model, [batch_of(model)], None)
    found, filled = added_up(model, [beside], None)
    assert found == pytest.approx(value, rel=1e-6)
    assert_same_gradients(filled, wanted)
