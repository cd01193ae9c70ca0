"""Training of Medusa heads: on a frozen model, or, for comparison with streams, together with its LoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from forestream.data import Tokens
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.objective import (
    IGNORED,
    JointLoss,
    LossConfig,
    TargetBatch,
    Term,
    count_targets,
    gather_rows,
)
from forestream.packing import Pack
from forestream.processes import is_first
from forestream.rivals.medusa import MedusaHeads
from forestream.rivals.medusa_folder import HEADS
from forestream.trainer import Objective
from forestream.training import TrainConfig, fit

PUBLISHED: Final = LossConfig(main=0.0, stream=0.8, decay=0.8, scorer=0.0)
"""Of Medusa-1: the model is frozen, and head j weighs 0.8 to the power of j. The main term is still reported."""


class _ChunkedHead(torch.autograd.Function):
    """Sum of the rows' cross-entropies times `scale`, whose gradients are taken chunk by chunk, in the forward pass.

    Logits live for one chunk. Returned beside the sum: the sum without the scale, and how often the argmax is right.
    `weights` are those of `project` that are trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "R E"],
        targets: Int[Tensor, " R"],
        scale: float,
        chunk: int,
        project: Callable[[Tensor], Tensor],
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        learns = ctx.needs_input_grad[0]
        gradient, gradients = torch.zeros_like(states), [torch.zeros_like(weight) for weight in weights]
        loss = torch.zeros((), dtype=torch.float32, device=states.device)
        hits = torch.zeros((), dtype=torch.long, device=states.device)
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(learns):
                piece = states[part].detach().requires_grad_(learns)
                logits = project(piece).float()
                entropy = functional.cross_entropy(logits, targets[part], reduction="sum")
                if learns:
                    found = torch.autograd.grad(scale * entropy, [piece, *weights])
                    gradient[part] = found[0]
                    for whole, own in zip(gradients, found[1:], strict=True):
                        whole += own
            loss += entropy.detach()
            hits += (logits.detach().argmax(-1) == targets[part]).sum()
        ctx.save_for_backward(gradient, *gradients)
        ctx.mark_non_differentiable(loss, hits)
        return scale * loss, loss, hits

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *gradients = (tensor * given[0].to(tensor.dtype) for tensor in ctx.saved_tensors)
        return gradient, None, None, None, None, *gradients


class HeadsObjective(Objective):
    """The loss of plain heads: term j is what stream j is trained by, from a head on the final state instead.

    The model is trained with them as far as its weights want gradients; where none does, it runs without any, and as
    in evaluation.

    Raises:
        ConfigError: soft targets are asked for, which heads are not trained towards.
    """

    def __init__(self, model: StreamingLM, heads: MedusaHeads, config: LossConfig) -> None:
        if config.softness:
            raise ConfigError(f"target is {config.target!r}; heads are trained towards hard targets")
        super().__init__(model, config)
        self.heads = heads
        self.frozen = not any(parameter.requires_grad for parameter in model.parameters())

    @property
    def streams(self) -> int:
        return self.heads.count

    def count(self, batch: TargetBatch) -> Tensor:
        return count_targets(batch)  # whatever vocabulary the adapter's streams draft from

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "heads": asdict(self.heads.config), "frozen": self.frozen}

    def train(self, mode: bool = True) -> HeadsObjective:
        super().train(mode)
        if self.frozen:
            self.model.eval()  # heads have to learn from the states that they will see
        return self

    def forward(self, inputs: dict[str, Tensor], totals: Tensor | None) -> JointLoss:
        batch = TargetBatch(**inputs)
        counted = (count_targets(batch) if totals is None else totals).clamp(min=1).tolist()
        weights = self.loss_config.weights(self.heads.count, scored=False)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            output = self.model(batch.ids, Pack.text(batch.ids.shape[1], batch.carriers[:, :0].cpu(), 0))
            finished = self.heads.port.finish(output.main)
        terms: dict[str, Term] = {}
        total = torch.zeros((), dtype=torch.float32, device=finished.device)

        def add(name: str, states: Tensor, targets: Tensor, project: Callable[[Tensor], Tensor], *own: Tensor) -> None:
            nonlocal total
            valid = targets != IGNORED
            scale = weights[name] / counted[len(terms)]
            share, loss, hits = _ChunkedHead.apply(
                states[valid], targets[valid], scale, self.loss_config.chunk, project, *own
            )
            total = total + share
            terms[name] = Term(float(loss), int(hits), int(valid.sum()))

        add("main", gather_rows(finished, batch.rows), batch.targets, self.heads.port.head)
        carried = gather_rows(finished, batch.carriers)
        for head in range(self.heads.count):
            own = self.heads.projections[head].parameters() if self.heads.projections else ()
            states, targets = self.heads.block(head, carried), batch.stream_targets[:, head]
            add(f"stream_{head + 1}", states, targets, partial(self.heads.project, head), *own)
        return JointLoss(total, terms)

    def write(self, folder: Path) -> None:
        if not self.frozen:
            super().write(folder)
        if is_first():
            save_file({name: part.detach().cpu() for name, part in self.heads.state_dict().items()}, folder / HEADS)

    def read(self, folder: Path) -> None:
        if not self.frozen:
            super().read(folder)
        self.heads.load_state_dict(load_file(folder / HEADS))


def fit_heads(
    model: StreamingLM,
    heads: MedusaHeads,
    examples: Sequence[Tokens],
    pad: int,
    folder: Path,
    config: TrainConfig,
    loss_config: LossConfig = PUBLISHED,
    resume: bool = False,
    started_from: str | None = None,
) -> dict[str, Any]:
    """Train `heads` in place on the final states of `model`, which is frozen. Logs name head j "stream_j".

    Examples, their order, and the tokens that head j learns from are those that stream j of an adapter would be
    trained with under the same `config`.

    Args:
        model: with its adapter merged, and not prepared.
        pad, folder, config, resume, started_from: as for `training.fit`.

    Returns:
        The report of `training.fit`.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    objective = HeadsObjective(model, heads, loss_config)
    return fit(model, examples, pad, folder, config, loss_config, resume, started_from, objective)
