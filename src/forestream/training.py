"""Training on transformers' Trainer: the same pass as decoding, on a chain, with the joint loss."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from forestream import checkpoint, processes
from forestream.config import JsonConfig, StreamConfig, in_range, one_of, whole
from forestream.data import Collator, TokenDataset, Tokens, grouped_order, nothing
from forestream.errors import CheckpointError, DataError
from forestream.model import StreamingLM
from forestream.objective import JointLoss, LossConfig, TargetBatch, count_targets, joint_loss
from forestream.packing import Pack

UNFINISHED = "unfinished"
"""Where checkpoints are put together, inside the folder of a run."""
KEPT = 2
"""How many checkpoints stay."""


@dataclass(frozen=True)
class TrainConfig(JsonConfig):
    """How a model is trained; schedules count optimizer updates.

    Attributes:
        epochs: passes over the examples.
        batch_size: examples per forward pass of one process.
        accumulate: forward passes per optimizer update.
        learning_rate: peak; it rises over `warmup` updates and falls linearly to zero.
        share: share of the completion positions that carry streams.
        dtype: "bfloat16" computes in bf16 with float32 adapter weights, "float32" throughout in float32.
        max_length: longer examples are left out, and counted in the report.
        save_every: updates between checkpoints that a run can be resumed from.
        log_every: updates between lines of the log.
        layout: of the weights where several processes train: "copies" in all of them, or "shards", a part in each.
    """

    epochs: int = 1
    batch_size: int = 12
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: int = 20
    share: float = 1.0
    dtype: str = "bfloat16"
    max_length: int = 1024
    seed: int = 0
    save_every: int = 100
    log_every: int = 10
    layout: str = "copies"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "max_length", "save_every", "log_every"):
            whole(name, getattr(self, name), 1)
        in_range("learning_rate", self.learning_rate, 0.0, 1.0)
        whole("warmup", self.warmup, 0)
        in_range("share", self.share, 0.0, 1.0)
        one_of("dtype", self.dtype, ("bfloat16", "float32"))
        one_of("layout", self.layout, ("copies", "shards"))


def training_model(base: Any, config: StreamConfig) -> StreamingLM:
    """A base model with a fresh adapter whose trained weights are float32 whatever the base's dtype."""
    model = StreamingLM(base, config)
    model.add_lora()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # Autocast picks the compute dtype; without this PEFT would lift every activation to float32.
            module.cast_input_dtype_enabled = False
    return model


class Objective(nn.Module):
    """A model and its loss as one module: what ties processes together wraps it, and has to see all that is trained."""

    def __init__(self, model: StreamingLM, config: LossConfig) -> None:
        super().__init__()
        self.model = model
        self.loss_config = config

    def forward(self, inputs: dict[str, Tensor], totals: Tensor | None) -> JointLoss:
        batch = TargetBatch(**inputs)
        pack = Pack.text(batch.ids.shape[1], batch.carriers.cpu(), self.model.stream_config.streams)
        return joint_loss(self.model, self.model(batch.ids, pack), batch, self.loss_config, totals)


class StreamTrainer(Trainer):
    """Trainer whose loss is the joint n-gram loss and whose checkpoints are adapter weights only.

    The loss of an update is the same however its examples are spread over processes and accumulated passes: means are
    taken over the targets of the whole update.
    """

    def __init__(self, *args: Any, model: StreamingLM, loss_config: LossConfig, layout: str, **kwargs: Any) -> None:
        super().__init__(*args, model=Objective(model, loss_config), **kwargs)
        self.streaming = model
        self.sharded = layout == "shards"
        # The loss comes scaled for accumulation: nothing is left for the Trainer to average.
        self.model_accepts_loss_kwargs = True
        if self.sharded:
            # The Trainer's word for a model that needs no wrapping to add up gradients.
            self.is_distributed_loading_by_transformers = True
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    # --- the loss of an update -----------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """The parts of one update that fall to this process, and all processes' targets in it, by term."""
        parts, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        own = torch.stack([count_targets(TargetBatch(**part)) for part in parts]).sum(0)
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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds mean loss and accuracy of every term since the last line, over all processes."""
        if self._sums:
            sums = self._over_processes(list(self._sums.values()), "sum")
            for name, (loss, hits, count) in zip(self._sums, sums.tolist(), strict=True):
                if count:
                    logs[f"{name}_loss"] = round(loss / count, 4)
                    logs[f"{name}_accuracy"] = round(hits / count, 4)
        self._sums.clear()
        if "train_loss" in logs:  # what the last lines left over is this process's own
            logs["train_loss"] = float(self._over_processes(logs["train_loss"], "mean"))
        super().log(logs, start_time)

    def _over_processes(self, values: Any, how: str) -> Tensor:
        reduced: Tensor = self.accelerator.reduce(torch.tensor(values, device=self.args.device), how)
        return reduced

    # --- weights in shards -----------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if not self.sharded or self.optimizer is not None:
            return super().create_optimizer(model)
        processes.shard(self.model, self.streaming.port.layers)
        optimizer = super().create_optimizer(model)
        processes.keep_whole(optimizer)
        return optimizer

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        return processes.deferred(self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharded and not self.args.should_save:
            self.optimizer.state_dict()  # gathering it takes every process
        super()._save_optimizer_and_scheduler(output_dir)

    # --- checkpoints -----------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Where the Trainer puts checkpoints together."""
        return str(Path(self.args.output_dir) / UNFINISHED)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Put together aside and moved into place: a run may be killed at any moment."""
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # each process writes its random state
        if self.args.should_save:
            folder = Path(self.args.output_dir)
            name = f"checkpoint-{self.state.global_step}"
            (folder / UNFINISHED / name).replace(folder / name)
            _tidy(folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write_weights(self.streaming, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint.read_weights(self.streaming, Path(resume_from_checkpoint))


class _LogFile(TrainerCallback):
    """Appends every log line to a JSON Lines file, with the seconds that training took, earlier starts included."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.monotonic()

    def seconds(self) -> float:
        return round(time.monotonic() - self.start, 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lines = self.path.read_text().splitlines()
        before = json.loads(lines[-1]).get("seconds", 0.0) if lines else 0.0
        self.start = time.monotonic() - before

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            line = {"step": state.global_step, "seconds": self.seconds(), **(logs or {})}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def fit(
    model: StreamingLM,
    examples: Sequence[Tokens],
    pad: int,
    folder: Path,
    config: TrainConfig,
    loss_config: LossConfig,
    resume: bool = False,
) -> dict[str, Any]:
    """Train `model` in place; checkpoints and log go to `folder`.

    With `resume`, the last checkpoint in `folder` is continued, as if it had never been interrupted. Processes that a
    launcher started together all call this, with equal arguments and a `folder` that all of them see; an update then
    has `batch_size` times `accumulate` examples of every process.

    Returns:
        A JSON-ready report: settings, processes, examples used, updates, seconds of all starts, and the last log line.

    Raises:
        DataError: no example is short enough.
        CheckpointError: `folder` holds an earlier run and `resume` is False, or a run with other settings.
        ConfigError: a launcher announced other processes than there are, or weights are to be sharded in a single one.
    """
    usable = [e for e in examples if len(e) <= config.max_length]
    if not usable:
        raise DataError(f"none of {len(examples)} examples has at most {config.max_length} tokens")
    set_seed(config.seed)
    arguments = _arguments(folder, config, loss_config, model.device.type == "cpu")
    processes.check_number(arguments.world_size)
    log = _LogFile(folder / "log.jsonl")
    trainer = StreamTrainer(
        model=model,
        args=arguments,
        train_dataset=_dataset(usable, pad, config, arguments.world_size),
        data_collator=Collator(model.stream_config.streams, pad, config.share, config.seed),
        loss_config=loss_config,
        layout=config.layout,
        callbacks=[log],
    )
    last = _begin(folder, _identity(model, usable, config, loss_config, arguments.world_size), resume, trainer)
    trainer.train(resume_from_checkpoint=last)
    terms = [line for line in trainer.state.log_history if "main_loss" in line]
    return {
        "training": asdict(config),
        "loss": asdict(loss_config),
        "processes": arguments.world_size,
        "examples": len(usable),
        "left_out_as_too_long": len(examples) - len(usable),
        "updates": trainer.state.global_step,
        "seconds": log.seconds(),
        "last_log": terms[-1] if terms else {},
    }


def _dataset(examples: Sequence[Tokens], pad: int, config: TrainConfig, world: int) -> TokenDataset:
    """Examples in an order that depends on how large an update is, not on its spread; all processes get as many."""
    order = grouped_order(
        [len(e) for e in examples], config.batch_size * config.accumulate * world, config.epochs, config.seed
    )
    if world > 1:
        order += [len(examples)] * (-len(order) % (config.batch_size * world))
    return TokenDataset([*examples, nothing(pad)], order)


def _identity(
    model: StreamingLM, examples: Sequence[Tokens], config: TrainConfig, loss_config: LossConfig, world: int
) -> dict[str, Any]:
    """What must not change when a run is resumed."""
    digest = sha256(json.dumps([(e.prompt, e.completion) for e in examples]).encode()).hexdigest()
    training = {key: value for key, value in asdict(config).items() if key not in ("save_every", "log_every")}
    return {
        "training": training,
        "loss": asdict(loss_config),
        "streams": asdict(model.stream_config),
        "processes": world,
        "examples": digest,
    }


def _begin(folder: Path, identity: dict[str, Any], resume: bool, trainer: StreamTrainer) -> str | None:
    """Note what the run is; return the last checkpoint, which is the one to go on from."""
    note, log = folder / "run.json", folder / "log.jsonl"
    complete = _checkpoints(folder)
    if complete and not resume:
        raise CheckpointError(f"{folder} holds an earlier run; continue it (--resume) or remove the folder")
    if complete and note.is_file() and (earlier := json.loads(note.read_text())) != identity:
        changed = sorted(key for key in identity if earlier.get(key) != identity[key])
        raise CheckpointError(
            f"the run in {folder} was started with another setting of {', '.join(changed)}; resume it with the same "
            "ones, or train into another folder"
        )
    step = max(complete, default=0)
    trainer.accelerator.wait_for_everyone()  # everybody has read what is changed now
    if trainer.args.should_save:
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        _tidy(folder)
        _write(note, json.dumps(identity, indent=1) + "\n")
        # The log's lines behind the checkpoint are about to be written again.
        lines = log.read_text().splitlines() if log.is_file() else []
        _write(log, "".join(f"{x}\n" for x in lines if x.endswith("}") and json.loads(x)["step"] <= step))
    trainer.accelerator.wait_for_everyone()
    return str(complete[step]) if step else None


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints by the updates that were made before them."""
    return {
        int(path.name.rsplit("-", 1)[1]): path
        for path in folder.glob("checkpoint-*")
        if (path / "trainer_state.json").is_file()
    }


def _tidy(folder: Path) -> None:
    """Remove all but the last checkpoints, and what is left of those that a killed run was removing."""
    kept = [path for _, path in sorted(_checkpoints(folder).items())[-KEPT:]]
    for path in folder.glob("checkpoint-*"):
        if path not in kept:
            shutil.rmtree(path)


def _write(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it finds the earlier text or this one."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)


def _arguments(folder: Path, config: TrainConfig, loss_config: LossConfig, cpu: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # every epoch is in the dataset's order already
        train_sampling_strategy="sequential",
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=config.warmup,
        weight_decay=0.0,
        bf16=config.dtype == "bfloat16",
        use_cpu=cpu,
        logging_steps=config.log_every,
        save_steps=config.save_every,
        save_strategy="steps",
        remove_unused_columns=False,
        seed=config.seed,
        report_to=[],
        ddp_find_unused_parameters=loss_config.scorer == 0,  # the scorer is all that may be unused
        dataloader_pin_memory=not cpu and torch.cuda.is_available(),
    )
