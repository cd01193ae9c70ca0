"""Eq. 5: the joint n-gram loss, with a head that never holds the logits of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from forestream.config import JsonConfig, in_range, one_of, whole
from forestream.model import PassOutput, StreamingLM
from forestream.packing import Pack
from forestream.vocabulary import OUTSIDE, DraftVocabulary

IGNORED = -100


@dataclass(frozen=True)
class LossConfig(JsonConfig):
    """Weights of the terms of eq. 5.

    Attributes:
        main: a_0, of the next-token term.
        stream: a_1, of the first stream's term.
        decay: a_j is `stream` * decay^(j - 1): below 1, streams that look further ahead weigh less.
        scorer: of the exit scorer's own next-token term. Its input is detached: it trains the scorer alone.
        chunk: rows whose logits are held at a time.
        target: what streams are trained towards. "hard": the token of the example. "soft": the law of the main stream
            of the same pass for that token, by KL(main || stream), with no gradient to the main stream; in lossless
            mode this is the base's own law. "both": the weighted mean of the two.
        soft_share: weight of the soft target in "both", from 0 to 1; the hard one has the rest.
    """

    main: float = 1.0
    stream: float = 0.1
    scorer: float = 0.1
    chunk: int = 128
    decay: float = 1.0
    target: Literal["hard", "soft", "both"] = "hard"
    soft_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("main", "stream", "scorer", "decay"):
            in_range(name, getattr(self, name), 0.0)
        whole("chunk", self.chunk, 1)
        one_of("target", self.target, ("hard", "soft", "both"))
        in_range("soft_share", self.soft_share, 0.0, 1.0)

    @property
    def softness(self) -> float:
        """Share of the streams' loss that is taken against the main stream's law."""
        return {"hard": 0.0, "soft": 1.0, "both": self.soft_share}[self.target]

    def weights(self, streams: int, scored: bool) -> dict[str, float]:
        """The weight of every term of a model with `streams` streams, by name: "main", "stream_1".., "scorer"."""
        weights = {"main": self.main}
        weights |= {f"stream_{j}": self.stream * self.decay ** (j - 1) for j in range(1, streams + 1)}
        return weights | ({"scorer": self.scorer} if scored and self.scorer > 0 else {})


@dataclass(frozen=True)
class TargetBatch:
    """What a batch of B padded examples asks of the model; IGNORED marks places without a target.

    Attributes:
        ids: input tokens.
        rows: positions whose next token belongs to a completion.
        targets: that next token.
        carriers: positions that carry streams.
        stream_targets: token j places after the carrier's next one, for stream j.
    """

    ids: Int[Tensor, "B T"]
    rows: Int[Tensor, "B R"]
    targets: Int[Tensor, "B R"]
    carriers: Int[Tensor, "B C"]
    stream_targets: Int[Tensor, "B G C"]


@dataclass(frozen=True)
class Term:
    """One term of the loss over a batch, summed over its targets; hits and cross-entropy are of the hard ones.

    Attributes:
        loss: cross-entropy in nats, also where it is not what is trained on.
        hits: targets that the argmax met.
        count: targets that have a loss.
        soft: KL of the stream's law from the main stream's, in nats; None where it was not asked for.
        outside: further targets, which no draft can meet: the draft vocabulary lacks them, so they have no loss.
    """

    loss: float
    hits: int
    count: int
    soft: float | None = None
    outside: int = 0

    @property
    def asked(self) -> int:
        """Targets in all: what an accuracy is a share of."""
        return self.count + self.outside


@dataclass(frozen=True)
class JointLoss:
    """The weighted sum to minimise, and each term by name: "main", "stream_1".., "scorer"."""

    total: Float[Tensor, ""]
    terms: dict[str, Term]


class _ChunkedLoss(torch.autograd.Function):
    """Weighted sum of the rows' losses, whose gradient is taken chunk by chunk, in the forward pass.

    The head is frozen and teachers are not to learn, so only the gradient with respect to the rows' own states is
    needed; logits live for one chunk. Returned beside the sum: each row's cross-entropy, KL (0 without a teacher),
    and whether its argmax is the hard target.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "R D"],
        rows: _Rows,
        main: Float[Tensor, "M D"],
        head: Callable[[Tensor], Tensor],
        config: LossConfig,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(states)
        losses = torch.empty(len(states), dtype=torch.float32, device=states.device)
        hard, soft = torch.empty_like(losses), torch.zeros_like(losses)
        hits = torch.empty(len(states), dtype=torch.bool, device=states.device)
        for start in range(0, len(states), config.chunk):
            part = slice(start, start + config.chunk)
            targets, teachers = rows.targets[part], rows.teachers[part]
            taught = teachers >= 0
            with torch.set_grad_enabled(ctx.needs_input_grad[0]):
                piece = states[part].detach().requires_grad_(ctx.needs_input_grad[0])
                logits = head(piece).float()
                entropy = functional.cross_entropy(logits, targets, reduction="none")
                divergence = torch.zeros_like(entropy)
                if bool(taught.any()):
                    own, law = logits[taught].log_softmax(-1), _law(main[teachers[taught]], head)
                    kl = functional.kl_div(own, law, reduction="none", log_target=True).sum(-1)
                    divergence = divergence.masked_scatter(taught, kl)
                loss = torch.where(taught, torch.lerp(entropy, divergence, config.softness), entropy)
                if ctx.needs_input_grad[0]:
                    (gradient[part],) = torch.autograd.grad((loss * rows.scales[part]).sum(), piece)
            losses[part], hard[part], soft[part] = loss.detach(), entropy.detach(), divergence.detach()
            hits[part] = logits.detach().argmax(-1) == targets
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hard, soft, hits)
        return (losses * rows.scales).sum(), hard, soft, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None


@torch.no_grad()
def _law(states: Float[Tensor, "R D"], head: Callable[[Tensor], Tensor]) -> Float[Tensor, "R V"]:
    """Log-probabilities by which main states foretell their next tokens."""
    return head(states.detach()).float().log_softmax(-1)


def gather_rows(states: Float[Tensor, "B N D"], rows: Int[Tensor, "B R"]) -> Float[Tensor, "B R D"]:
    """The states at `rows` of each batch row."""
    return torch.gather(states, 1, rows[:, :, None].expand(-1, -1, states.shape[2]))


@dataclass(frozen=True)
class _Rows:
    """R rows of one term, or of all terms one after the other.

    Attributes:
        states: what the head is applied to.
        targets: hard targets, as columns of the logits; IGNORED marks rows that have none, hard or soft.
        teachers: number of the main state that a row learns from, among all texts' one after the other; -1 of none.
        scales: weight of each row's loss in the total.
    """

    states: Float[Tensor, "R D"]
    targets: Int[Tensor, " R"]
    teachers: Int[Tensor, " R"]
    scales: Float[Tensor, " R"]

    @staticmethod
    def of(weight: float, states: Tensor, targets: Tensor, teachers: Tensor | None = None) -> _Rows:
        """The rows of a term that have a target, each of which counts with `weight` in the total."""
        targets = targets.flatten()
        valid = targets != IGNORED
        teachers = torch.full_like(targets, -1) if teachers is None else teachers.flatten()
        scales = torch.full((int(valid.sum()),), weight, device=states.device)
        return _Rows(states.flatten(0, 1)[valid], targets[valid], teachers[valid], scales)


def batch_pass(model: StreamingLM, batch: TargetBatch) -> PassOutput:
    """The pass that a batch asks for: its texts as chains, with streams at its carriers."""
    output: PassOutput = model(
        batch.ids, Pack.text(batch.ids.shape[1], batch.carriers.cpu(), model.stream_config.streams)
    )
    return output


def draft_targets(batch: TargetBatch, vocabulary: DraftVocabulary | None) -> Int[Tensor, "B G C"]:
    """The streams' targets as columns of their logits; IGNORED where there is none, or `vocabulary` lacks it."""
    if vocabulary is None:
        return batch.stream_targets
    columns = vocabulary.columns(batch.stream_targets)
    return columns.masked_fill(columns == OUTSIDE, IGNORED)


def tokens_before(batch: TargetBatch, stream: int) -> Int[Tensor, "B C"]:
    """The token before the one that `stream` foretells from each carrier; any where there is no target."""
    if stream > 1:
        return batch.stream_targets[:, stream - 2].clamp(min=0)
    ends = batch.ids.shape[1] - 1
    return batch.ids.gather(1, (batch.carriers + 1).clamp(max=ends))


def count_targets(batch: TargetBatch, vocabulary: DraftVocabulary | None = None) -> Int[Tensor, " terms"]:
    """How many targets with a loss the main stream has, then each of the streams 1..G.

    Args:
        vocabulary: the draft vocabulary of the model that is trained.
    """
    streams = (draft_targets(batch, vocabulary) != IGNORED).sum((0, 2))
    return torch.cat([(batch.targets != IGNORED).sum()[None], streams])


def joint_loss(
    model: StreamingLM,
    output: PassOutput,
    batch: TargetBatch,
    config: LossConfig,
    totals: Int[Tensor, " terms"] | None = None,
) -> JointLoss:
    """Eq. 5 over one pass: each term is the mean over its own targets, then weighted.

    A term without any target counts as zero. Soft targets stand where hard ones do. Streams of a model with a draft
    vocabulary learn among its tokens alone: a target outside has no loss, and the main stream's law is that of these
    tokens, renormalised.

    Args:
        totals: where the pass is a part of an update, the targets of the whole update, as `count_targets` counts them.
            Every term is then the part's share of the update's mean; the parts add up to the loss of one large pass.
    """
    vocabulary = model.vocabulary
    counted = (count_targets(batch, vocabulary) if totals is None else totals).clamp(min=1).tolist()
    weights = config.weights(output.streams.shape[1], model.scorer is not None)
    main = {"main": _Rows.of(weights["main"] / counted[0], gather_rows(output.main, batch.rows), batch.targets)}
    targets, ahead = draft_targets(batch, vocabulary), {}
    for j in range(output.streams.shape[1]):
        teachers = _teachers(batch, output.main.shape[1], j + 1) if config.softness else None
        name, states = f"stream_{j + 1}", model.behind(output.streams[:, j], tokens_before(batch, j + 1))
        ahead[name] = _Rows.of(weights[name] / counted[j + 1], states, targets[:, j], teachers)
    last = {}
    if model.scorer is not None and "scorer" in weights:
        scored = model.scorer(gather_rows(output.trunk, batch.rows).detach())
        last["scorer"] = _Rows.of(weights["scorer"] / counted[0], scored, batch.targets)
    # Rows of one head go through it together.
    groups = [(main | ahead | last, model.logits)]
    if vocabulary is not None:
        groups = [(main | last, model.logits), (ahead, model.draft_logits)]
    losses = [_head_loss(parts, head, output.main, config) for parts, head in groups if parts]
    found = {name: term for _, terms in losses for name, term in terms.items()}
    lost = ((batch.stream_targets != IGNORED) & (targets == IGNORED)).sum((0, 2)).tolist()
    for name, outside in zip(ahead, lost, strict=True):
        found[name] = replace(found[name], outside=outside)
    return JointLoss(torch.stack([total for total, _ in losses]).sum(), {n: found[n] for n in main | ahead | last})


def _head_loss(
    parts: dict[str, _Rows], head: Callable[[Tensor], Tensor], main: Float[Tensor, "B N D"], config: LossConfig
) -> tuple[Float[Tensor, ""], dict[str, Term]]:
    """The weighted loss of terms whose rows go through one head, and each of them."""
    states = torch.cat([part.states.to(main.dtype) for part in parts.values()])
    targets, teachers, scales = (
        torch.cat([getattr(part, name) for part in parts.values()]) for name in ("targets", "teachers", "scales")
    )
    rows = _Rows(states, targets, teachers, scales)
    total, *found = _ChunkedLoss.apply(states, rows, main.detach().flatten(0, 1), head, config)
    counts = [len(part.targets) for part in parts.values()]
    terms = {
        name: Term(
            float(hard.sum()),
            int(hits.sum()),
            len(hard),
            float(soft.sum()) if config.softness and name.startswith("stream_") else None,
        )
        for name, hard, soft, hits in zip(parts, *(one.split(counts) for one in found), strict=True)
    }
    return total, terms


def _teachers(batch: TargetBatch, nodes: int, stream: int) -> Int[Tensor, "B C"]:
    """The main state that foretells what `stream` is to foretell from each carrier, numbered text after text.

    Stream j at t foretells the token at t + 1 + j, as the main stream does at t + j. Where that is behind the text's
    end there is no target either, and whatever is named here is left out with it.
    """
    texts = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
    return texts * nodes + (batch.carriers + stream).clamp(max=nodes - 1)
