"""Eq. 5: the joint n-gram loss, with a head that never holds the logits of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from forestream.config import JsonConfig, in_range, whole
from forestream.model import PassOutput, StreamingLM

IGNORED = -100


@dataclass(frozen=True)
class LossConfig(JsonConfig):
    """Weights of the terms of eq. 5.

    Attributes:
        main: a_0, of the next-token term.
        stream: a_j, of every stream's term.
        scorer: of the exit scorer's own next-token term. Its input is detached: it trains the scorer alone.
        chunk: rows whose logits are held at a time.
    """

    main: float = 1.0
    stream: float = 0.1
    scorer: float = 0.1
    chunk: int = 128

    def __post_init__(self) -> None:
        for name in ("main", "stream", "scorer"):
            in_range(name, getattr(self, name), 0.0)
        whole("chunk", self.chunk, 1)


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
    """One term of the loss over a batch: summed cross-entropy, hits of the argmax, and targets counted."""

    loss: float
    hits: int
    count: int


@dataclass(frozen=True)
class JointLoss:
    """The weighted sum to minimise, and each term by name: "main", "stream_1".., "scorer"."""

    total: Float[Tensor, ""]
    terms: dict[str, Term]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted sum of cross-entropies whose gradient is taken chunk by chunk, in the forward pass.

    The head is frozen, so only the gradient with respect to its input is needed; logits live for one chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "R D"],
        targets: Int[Tensor, " R"],
        weights: Float[Tensor, " R"],
        head: Callable[[Tensor], Tensor],
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(states)
        losses = torch.empty(len(targets), dtype=torch.float32, device=states.device)
        hits = torch.empty(len(targets), dtype=torch.bool, device=states.device)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad():
                piece = states[part].detach().requires_grad_()
                logits = head(piece).float()
                loss = functional.cross_entropy(logits, targets[part], reduction="none")
                (gradient[part],) = torch.autograd.grad((loss * weights[part]).sum(), piece)
            losses[part] = loss.detach()
            hits[part] = logits.detach().argmax(-1) == targets[part]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * weights).sum(), losses, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None


def gather_rows(states: Float[Tensor, "B N D"], rows: Int[Tensor, "B R"]) -> Float[Tensor, "B R D"]:
    """The states at `rows` of each batch row."""
    return torch.gather(states, 1, rows[:, :, None].expand(-1, -1, states.shape[2]))


def count_targets(batch: TargetBatch) -> Int[Tensor, " terms"]:
    """How many targets the main stream has, then each of the streams 1..G."""
    streams = (batch.stream_targets != IGNORED).sum((0, 2))
    return torch.cat([(batch.targets != IGNORED).sum()[None], streams])


def joint_loss(
    model: StreamingLM,
    output: PassOutput,
    batch: TargetBatch,
    config: LossConfig,
    totals: Int[Tensor, " terms"] | None = None,
) -> JointLoss:
    """Eq. 5 over one pass: each term is the mean over its own targets, then weighted.

    A term without any target counts as zero.

    Args:
        totals: where the pass is a part of an update, the targets of the whole update, as `count_targets` counts them.
            Every term is then the part's share of the update's mean; the parts add up to the loss of one large pass.
    """
    counted = (count_targets(batch) if totals is None else totals).clamp(min=1).tolist()
    states = [gather_rows(output.main, batch.rows).flatten(0, 1)]
    targets = [batch.targets.flatten()]
    names, weights = ["main"], [config.main / counted[0]]
    for j in range(output.streams.shape[1]):
        states.append(output.streams[:, j].flatten(0, 1))
        targets.append(batch.stream_targets[:, j].flatten())
        names.append(f"stream_{j + 1}")
        weights.append(config.stream / counted[j + 1])
    if model.scorer is not None and config.scorer > 0:
        states.append(model.scorer(gather_rows(output.trunk, batch.rows).detach()).flatten(0, 1))
        targets.append(targets[0])
        names.append("scorer")
        weights.append(config.scorer / counted[0])
    return _weighted(model, states, targets, names, weights, config.chunk)


def _weighted(
    model: StreamingLM,
    states: list[Tensor],
    targets: list[Tensor],
    names: list[str],
    weights: list[float],
    chunk: int,
) -> JointLoss:
    valid: list[Bool[Tensor, " R"]] = [target != IGNORED for target in targets]
    counts = [int(mask.sum()) for mask in valid]
    rows = torch.cat([s[mask].to(states[0].dtype) for s, mask in zip(states, valid, strict=True)])
    wanted = torch.cat([t[mask] for t, mask in zip(targets, valid, strict=True)])
    scales = torch.cat(
        [torch.full((count,), weight, device=rows.device) for weight, count in zip(weights, counts, strict=True)]
    )
    total, losses, hits = _ChunkedCrossEntropy.apply(rows, wanted, scales, model.logits, chunk)
    terms = {
        name: Term(float(loss.sum()), int(hit.sum()), len(loss))
        for name, loss, hit in zip(names, losses.split(counts), hits.split(counts), strict=True)
    }
    return JointLoss(total, terms)
