"""transformers' Trainer with the joint loss: one loss per update, however it is spread over passes and processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from forestream import checkpoint, processes, runs
from forestream.model import StreamingLM
from forestream.objective import JointLoss, LossConfig, TargetBatch, batch_pass, count_targets, joint_loss


class Objective(nn.Module):
    """A model and its loss as one module: what ties processes together wraps it, and has to see all that is trained."""

    def __init__(self, model: StreamingLM, config: LossConfig) -> None:
        super().__init__()
        self.model = model
        self.loss_config = config

    @property
    def streams(self) -> int:
        """G, streams, or what stands in their place, that batches have targets for."""
        return self.model.stream_config.streams

    def count(self, batch: TargetBatch) -> Tensor:
        """Targets of every term."""
        return count_targets(batch, self.model.vocabulary)

    def settings(self) -> dict[str, Any]:
        """What must not change when a run is resumed."""
        return {"loss": asdict(self.loss_config), "streams": asdict(self.model.stream_config)}

    def forward(self, inputs: dict[str, Tensor], totals: Tensor | None) -> JointLoss:
        batch = TargetBatch(**inputs)
        return joint_loss(self.model, batch_pass(self.model, batch), batch, self.loss_config, totals)

    def write(self, folder: Path) -> None:
        """Write all that is trained into an existing folder; every process calls it."""
        checkpoint.write_weights(self.model, folder)

    def read(self, folder: Path) -> None:
        """Read what `write` wrote."""
        checkpoint.read_weights(self.model, folder)


class StreamTrainer(runs.WholeCheckpoints, Trainer):
    """Trainer whose loss is the joint n-gram loss and whose checkpoints are adapter weights only.

    The loss of an update is the same however its examples are spread over processes and accumulated passes: means are
    taken over the targets of the whole update. `stream_rate` is the learning rate of the streams' start in multiples of
    the rest's; `sharded` lays a part of the weights in each process.
    """

    def __init__(
        self, *args: Any, objective: Objective, stream_rate: float = 1.0, sharded: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, model=objective, **kwargs)
        self.trained = objective
        self.streaming = objective.model
        self.loss_config = objective.loss_config
        self.stream_rate = stream_rate
        self.sharded = sharded
        # The loss comes scaled for accumulation: nothing is left for the Trainer to average.
        self.model_accepts_loss_kwargs = True
        if self.sharded:
            # The Trainer's word for a model that needs no wrapping to add up gradients.
            self.is_distributed_loading_by_transformers = True
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)

    # --- the loss of an update -----------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """The parts of one update that fall to this process, and all processes' targets in it, by term."""
        parts, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        own = torch.stack([self.trained.count(TargetBatch(**part)) for part in parts]).sum(0)
        return parts, self.accelerator.reduce(own.to(device), "sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        loss: JointLoss = model(inputs, num_items_in_batch)
        self._count(loss)
        # Gradients are averaged over the processes, whose shares have to be added up.
        total = loss.total * self.accelerator.num_processes
        return (total, loss) if return_outputs else total

    def _count(self, loss: JointLoss) -> None:
        for name, term in loss.terms.items():
            sums = self._sums[name]
            sums[0], sums[1], sums[2] = sums[0] + term.loss, sums[1] + term.hits, sums[2] + term.count
            sums[3], sums[4] = sums[3] + (term.soft or 0.0), sums[4] + term.asked

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds mean loss and accuracy of every term since the last line, over all processes; soft losses, too."""
        if self._sums:
            sums = self._over_processes(list(self._sums.values()), "sum")
            for name, (loss, hits, count, soft, asked) in zip(self._sums, sums.tolist(), strict=True):
                if asked:
                    logs[f"{name}_accuracy"] = round(hits / asked, 4)
                if count:
                    logs[f"{name}_loss"] = round(loss / count, 4)
                    if self.loss_config.softness and name.startswith("stream_"):
                        logs[f"{name}_soft_loss"] = round(soft / count, 4)
        self._sums.clear()
        if "train_loss" in logs:  # what the last lines left over is this process's own
            logs["train_loss"] = float(self._over_processes(logs["train_loss"], "mean"))
        super().log(logs, start_time)

    def _over_processes(self, values: Any, how: str) -> Tensor:
        reduced: Tensor = self.accelerator.reduce(torch.tensor(values, device=self.args.device), how)
        return reduced

    # --- the optimizer, and weights in shards ----------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own, with the streams' start in a group with a rate of its own and without weight decay."""
        if (made := self.optimizer) is not None:
            return made
        if self.sharded:
            processes.shard(self.model, self.streaming.port.layers)
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        start = list(self.streaming.start.parameters()) if self.streaming.start is not None else []
        if start:
            apart = {id(parameter) for parameter in start}
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in apart]
            rate = self.stream_rate * self.args.learning_rate
            optimizer.add_param_group({"params": start, "lr": rate, "weight_decay": 0.0})
        if self.sharded:
            processes.keep_whole(optimizer)
        return optimizer

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        return processes.deferred(self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharded and not self.args.should_save:
            self.optimizer.state_dict()  # gathering it takes every process
        super()._save_optimizer_and_scheduler(output_dir)

    # --- checkpoints -----------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        self.trained.write(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.trained.read(Path(resume_from_checkpoint))
