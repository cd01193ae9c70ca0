"""Training on transformers' Trainer: the same pass as decoding, on a chain, with the joint loss."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from forestream import checkpoint
from forestream.cache import PassCache, StreamCache
from forestream.compiled import EagerLayers
from forestream.config import JsonConfig, StreamConfig, in_range, one_of, whole
from forestream.data import TARGETS, Collator, Targets, TokenDataset, Tokens, grouped_order
from forestream.errors import CheckpointError, ConfigError, DataError
from forestream.model import StreamingLM
from forestream.objective import JointLoss, LossConfig, TargetBatch, joint_loss
from forestream.packing import Pack
from forestream.ports import LayerInputs


@dataclass(frozen=True)
class TrainConfig(JsonConfig):
    """How a model is trained; schedules count optimizer updates.

    Attributes:
        epochs: passes over the examples.
        batch_size: examples per forward pass of one process.
        accumulate: forward passes per optimizer update.
        learning_rate: peak; it rises over `warmup` updates and falls to zero as `schedule` says.
        schedule: "linear" or "cosine".
        stream_rate: learning rate of the streams' start (P_j and the optional map), in multiples of `learning_rate`.
            Hidden states where streams begin are many times as large as P_j at its start, so more than 1 may pay.
        weight_decay: of AdamW, on the LoRA and the scorer; never on the streams' start.
        targets: "completion" has a loss on completion tokens only, "all" on prompt tokens too.
        share: share of the positions with a target that carry streams.
        dtype: "bfloat16" computes in bf16 with float32 adapter weights, "float32" throughout in float32.
        max_length: longer examples are left out, and counted in the report.
        save_every: updates between checkpoints that a run can be resumed from.
        log_every: updates between lines of the log.
        checkpointing: keep a layer's input only and compute the layer again for its gradients: less memory, a third
            more time. The gradients are the same.
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
    schedule: Literal["linear", "cosine"] = "linear"
    stream_rate: float = 1.0
    weight_decay: float = 0.0
    targets: Targets = "completion"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "max_length", "save_every", "log_every"):
            whole(name, getattr(self, name), 1)
        in_range("learning_rate", self.learning_rate, 0.0, 1.0)
        one_of("schedule", self.schedule, ("linear", "cosine"))
        in_range("stream_rate", self.stream_rate, 0.0, 1e4)
        in_range("weight_decay", self.weight_decay, 0.0, 1.0)
        one_of("targets", self.targets, TARGETS)
        whole("warmup", self.warmup, 0)
        whole("seed", self.seed, 0)
        if not isinstance(self.checkpointing, bool):
            raise ConfigError(f"checkpointing is {self.checkpointing!r}; expected true or false")
        in_range("share", self.share, 0.0, 1.0)
        one_of("dtype", self.dtype, ("bfloat16", "float32"))


def training_model(base: Any, config: StreamConfig) -> StreamingLM:
    """A base model with a fresh adapter whose trained weights are float32 whatever the base's dtype."""
    model = StreamingLM(base, config)
    model.add_lora()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # Autocast picks the compute dtype; without this PEFT would lift every activation to float32.
            module.cast_input_dtype_enabled = False
    return model


class RecomputedLayers(EagerLayers):
    """Layers whose activations are not kept: each runs again when its gradients are wanted."""

    def __call__(
        self,
        layers: range,
        states: Float[Tensor, "B Q D"],
        inputs: Mapping[int, LayerInputs],
        cache: StreamCache | PassCache | None,
    ) -> Float[Tensor, "B Q D"]:
        """As they are where no gradients are taken."""
        if not torch.is_grad_enabled():
            return super().__call__(layers, states, inputs, cache)
        for i in layers:
            # Not the host's own switch: it drops the cache, which maps values where they are rotated.
            states = recomputed(self.port.run, i, states, inputs[i], cache, use_reentrant=False)
        return states


class StreamTrainer(Trainer):
    """Trainer whose loss is the joint n-gram loss and whose checkpoints are adapter weights only."""

    def __init__(self, *args: Any, loss_config: LossConfig, stream_rate: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_config = loss_config
        self.stream_rate = stream_rate
        # The loss is a mean over each forward pass, so accumulated passes have to be averaged by the Trainer.
        self.model_accepts_loss_kwargs = False
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own, with the streams' start in a group with a rate of its own and without weight decay."""
        made = self.optimizer is not None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        own = self.accelerator.unwrap_model(model or self.model)
        assert isinstance(own, StreamingLM)
        start = list(own.start.parameters()) if own.start is not None else []
        if start and not made:
            apart = {id(parameter) for parameter in start}
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in apart]
            rate = self.stream_rate * self.args.learning_rate
            optimizer.add_param_group({"params": start, "lr": rate, "weight_decay": 0.0})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        own = self.accelerator.unwrap_model(model)
        assert isinstance(own, StreamingLM)
        batch = TargetBatch(**inputs)
        pack = Pack.text(batch.ids.shape[1], batch.carriers.cpu(), own.stream_config.streams)
        output = model(batch.ids, pack)
        loss = joint_loss(own, output, batch, self.loss_config)
        self._count(loss)
        return (loss.total, output) if return_outputs else loss.total

    def _count(self, loss: JointLoss) -> None:
        for name, term in loss.terms.items():
            sums = self._sums[name]
            sums[0], sums[1], sums[2] = sums[0] + term.loss, sums[1] + term.hits, sums[2] + term.count
            sums[3] += term.soft or 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds mean loss and accuracy of every term since the last line, and the streams' soft loss if there is one."""
        for name, (loss, hits, count, soft) in self._sums.items():
            if count:
                logs[f"{name}_loss"] = round(loss / count, 4)
                logs[f"{name}_accuracy"] = round(hits / count, 4)
                if self.loss_config.softness and name.startswith("stream_"):
                    logs[f"{name}_soft_loss"] = round(soft / count, 4)
        self._sums.clear()
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, StreamingLM)
        checkpoint.write_weights(model, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        own = self.accelerator.unwrap_model(model or self.model)
        assert isinstance(own, StreamingLM)
        checkpoint.read_weights(own, Path(resume_from_checkpoint))


class _LogFile(TrainerCallback):
    """Appends every log line to a JSON Lines file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


def ordered(examples: Sequence[Tokens], config: TrainConfig) -> TokenDataset:
    """The examples that are short enough, in the order in which training meets them, all epochs included.

    Raises:
        DataError: no example is short enough.
    """
    usable = [e for e in examples if len(e) <= config.max_length]
    if not usable:
        raise DataError(f"none of {len(examples)} examples has at most {config.max_length} tokens")
    order = grouped_order([len(e) for e in usable], config.batch_size, config.epochs, config.seed)
    return TokenDataset(usable, order)


def collator(streams: int, pad: int, config: TrainConfig) -> Collator:
    """What makes batches of them."""
    return Collator(streams, pad, config.share, config.seed, config.targets)


def fit(
    model: StreamingLM,
    examples: Sequence[Tokens],
    pad: int,
    folder: Path,
    config: TrainConfig,
    loss_config: LossConfig,
    resume: bool = False,
    started_from: str | None = None,
) -> dict[str, Any]:
    """Train `model` in place; checkpoints and log go to `folder`.

    `started_from` names the weights that the run begins with, None fresh ones: a run goes on with its own only.
    With `resume`, the last complete checkpoint in `folder` is continued, as if it had never been interrupted.

    Returns:
        A JSON-ready report: settings, examples used, updates, seconds since the last start, and the last log line.

    Raises:
        DataError: no example is short enough.
        CheckpointError: `folder` holds an earlier run and `resume` is False, or a run with other settings.
    """
    data = ordered(examples, config)
    usable = data.examples
    set_seed(config.seed)
    if config.checkpointing:
        model.layers = RecomputedLayers(model.port)
    if model.gate is not None:
        model.gate.open(0, 1, model.device)  # decoding may have left it shut, and PEFT freezes what is shut
    trainer = StreamTrainer(
        model=model,
        args=_arguments(folder, config, model.device.type == "cpu"),
        train_dataset=data,
        data_collator=collator(model.stream_config.streams, pad, config),
        loss_config=loss_config,
        stream_rate=config.stream_rate,
        callbacks=[_LogFile(folder / "log.jsonl")],
    )
    folder.mkdir(parents=True, exist_ok=True)
    last = _begin(folder, _identity(model, usable, config, loss_config, started_from), resume)
    outcome = trainer.train(resume_from_checkpoint=last)
    terms = [line for line in trainer.state.log_history if "main_loss" in line]
    return {
        "training": asdict(config),
        "loss": asdict(loss_config),
        "examples": len(usable),
        "left_out_as_too_long": len(examples) - len(usable),
        "updates": trainer.state.global_step,
        "seconds": round(float(outcome.metrics["train_runtime"]), 1),
        "last_log": terms[-1] if terms else {},
    }


def _identity(
    model: StreamingLM,
    examples: Sequence[Tokens],
    config: TrainConfig,
    loss_config: LossConfig,
    started_from: str | None,
) -> dict[str, Any]:
    """What must not change when a run is resumed."""
    digest = sha256(json.dumps([(e.prompt, e.completion) for e in examples]).encode()).hexdigest()
    training = {key: value for key, value in asdict(config).items() if key not in ("save_every", "log_every")}
    return {
        "training": training,
        "loss": asdict(loss_config),
        "streams": asdict(model.stream_config),
        "examples": digest,
        "started_from": started_from,
    }


def _begin(folder: Path, identity: dict[str, Any], resume: bool) -> str | None:
    """Note what the run is; return the checkpoint to go on from, the last one that was written to its end."""
    note, log = folder / "run.json", folder / "log.jsonl"
    complete = {
        int(path.name.rsplit("-", 1)[1]): path
        for path in folder.glob("checkpoint-*")
        if (path / "trainer_state.json").is_file()
    }
    if complete and not resume:
        raise CheckpointError(f"{folder} holds an earlier run; continue it (--resume) or remove the folder")
    if complete and note.is_file() and (earlier := json.loads(note.read_text())) != identity:
        changed = sorted(key for key in identity if earlier.get(key) != identity[key])
        raise CheckpointError(
            f"the run in {folder} was started with another setting of {', '.join(changed)}; resume it with the same "
            "ones, or train into another folder"
        )
    note.write_text(json.dumps(identity, indent=1) + "\n")
    step = max(complete, default=0)
    # The log's lines behind the checkpoint are about to be written again.
    lines = log.read_text().splitlines() if log.is_file() else []
    log.write_text("".join(f"{line}\n" for line in lines if line.endswith("}") and json.loads(line)["step"] <= step))
    return str(complete[step]) if step else None


def _arguments(folder: Path, config: TrainConfig, cpu: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # every epoch is in the dataset's order already
        train_sampling_strategy="sequential",
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        bf16=config.dtype == "bfloat16",
        use_cpu=cpu,
        logging_steps=config.log_every,
        save_steps=config.save_every,
        save_total_limit=2,
        save_strategy="steps",
        remove_unused_columns=False,
        seed=config.seed,
        report_to=[],
        dataloader_pin_memory=not cpu and torch.cuda.is_available(),
    )
