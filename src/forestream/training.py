"""A training run: its settings, its examples in order, and the run itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from transformers import TrainingArguments, set_seed

from forestream import processes, runs
from forestream.bases import usual_dtype
from forestream.config import JsonConfig, StreamConfig, in_range, one_of, whole
from forestream.data import TARGETS, Collator, Targets, TokenDataset, Tokens, grouped_order, nothing, restrict_drafts
from forestream.errors import ConfigError, DataError
from forestream.model import StreamingLM
from forestream.objective import LossConfig
from forestream.recomputed import RecomputedLayers
from forestream.runs import LogFile
from forestream.trainer import Objective, StreamTrainer


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
        dtype: "bfloat16" computes in bf16 with float32 adapter weights, "float32" throughout in float32; "auto" is the
            first where the device multiplies bfloat16 itself, else the second.
        max_length: longer examples are left out, and counted in the report.
        save_every: updates between checkpoints that a run can be resumed from.
        log_every: updates between lines of the log.
        checkpointing: keep a layer's input only and compute the layer again for its gradients: less memory, a third
            more time. The gradients are the same.
        draft_vocabulary: tokens that streams learn to draft: so many of the most frequent ones in the completions of
            the examples that are used, and the end of text; 0 leaves all the base's tokens. The streams' share of the
            head's work shrinks accordingly, in training and in decoding. The text may hold any token all the same.
        sampler_width: of a path sampler that is trained with the streams, so that drafts fit together; 0 trains none,
            which leaves it to be trained afterwards.
        layout: of the weights where several processes train: "copies" in all of them, or "shards", a part in each.
    """

    epochs: int = 1
    batch_size: int = 12
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: int = 20
    share: float = 1.0
    dtype: str = "auto"
    max_length: int = 1024
    seed: int = 0
    save_every: int = 100
    log_every: int = 10
    schedule: Literal["linear", "cosine"] = "linear"
    stream_rate: float = 1.0
    weight_decay: float = 0.0
    targets: Targets = "completion"
    checkpointing: bool = False
    layout: str = "copies"
    draft_vocabulary: int = 0
    sampler_width: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "max_length", "save_every", "log_every"):
            whole(name, getattr(self, name), 1)
        in_range("learning_rate", self.learning_rate, 0.0, 1.0)
        one_of("schedule", self.schedule, ("linear", "cosine"))
        in_range("stream_rate", self.stream_rate, 0.0, 1e4)
        in_range("weight_decay", self.weight_decay, 0.0, 1.0)
        one_of("targets", self.targets, TARGETS)
        whole("warmup", self.warmup, 0)
        whole("draft_vocabulary", self.draft_vocabulary, 0)
        whole("sampler_width", self.sampler_width, 0)
        whole("seed", self.seed, 0)
        if not isinstance(self.checkpointing, bool):
            raise ConfigError(f"checkpointing is {self.checkpointing!r}; expected true or false")
        in_range("share", self.share, 0.0, 1.0)
        one_of("dtype", self.dtype, ("auto", "bfloat16", "float32"))
        one_of("layout", self.layout, ("copies", "shards"))

    def on(self, device: str) -> TrainConfig:
        """The same with the dtype that "auto" is on `device`."""
        if self.dtype != "auto":
            return self
        return replace(self, dtype="bfloat16" if usual_dtype(device) == torch.bfloat16 else "float32")


def training_model(base: Any, config: StreamConfig) -> StreamingLM:
    """A base model with a fresh adapter whose trained weights are float32 whatever the base's dtype."""
    model = StreamingLM(base, config)
    model.add_lora()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # Autocast picks the compute dtype; without this PEFT would lift every activation to float32.
            module.cast_input_dtype_enabled = False
    return model


def usable(examples: Sequence[Tokens], config: TrainConfig) -> list[Tokens]:
    """The examples that are short enough.

    Raises:
        DataError: there is none.
    """
    short = [e for e in examples if len(e) <= config.max_length]
    if not short:
        raise DataError(f"none of {len(examples)} examples has at most {config.max_length} tokens")
    return short


def ordered(examples: Sequence[Tokens], config: TrainConfig, pad: int, world: int = 1) -> TokenDataset:
    """Examples in the order in which training meets them, all epochs included.

    The order depends on how large an update is, not on its spread over accumulated passes and `world` processes, all of
    which get as many: what fills up the last passes asks for nothing.
    """
    update = config.batch_size * config.accumulate * world
    order = grouped_order([len(e) for e in examples], update, config.epochs, config.seed)
    if world > 1:
        order += [len(examples)] * (-len(order) % (config.batch_size * world))
    return TokenDataset([*examples, nothing(pad)], order)


def collator(streams: int, pad: int, config: TrainConfig) -> Collator:
    """What makes batches of them."""
    return Collator(streams, pad, config.share, config.seed, config.targets)


def equip(model: StreamingLM, examples: Sequence[Tokens], end: int, config: TrainConfig) -> None:
    """Give streams the draft vocabulary of `examples` and the path sampler that `config` asks for.

    A path sampler that is there stays; a model without streams stays as it is.
    """
    restrict_drafts(model, examples, end, config.draft_vocabulary)
    if config.sampler_width and model.stream_config.streams and model.sampler is None:
        model.add_sampler(config.sampler_width)


def fit(
    model: StreamingLM,
    examples: Sequence[Tokens],
    pad: int,
    folder: Path,
    config: TrainConfig,
    loss_config: LossConfig,
    resume: bool = False,
    started_from: str | None = None,
    objective: Objective | None = None,
) -> dict[str, Any]:
    """Train `model` in place; checkpoints and log go to `folder`.

    `objective` replaces the joint loss, and says what else is trained.
    `started_from` names the weights that the run begins with, None fresh ones: a run goes on with its own only.
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
    config = config.on(model.device.type)
    set_seed(config.seed)
    if config.checkpointing:
        model.layers = RecomputedLayers(model.port)
    if model.gate is not None:
        model.gate.open(0, 1, model.device)  # decoding may have left it shut, and PEFT freezes what is shut
    objective = objective or Objective(model, loss_config)
    # The scorer is all that may be unused.
    given = arguments(folder, config, model.device.type == "cpu", ddp_find_unused_parameters=loss_config.scorer == 0)
    world = given.world_size
    processes.check_number(world)
    log = LogFile(folder / runs.LOG)
    used = usable(examples, config)
    equip(model, used, pad, config)
    trainer = StreamTrainer(
        objective=objective,
        args=given,
        train_dataset=ordered(used, config, pad, world),
        data_collator=collator(objective.streams, pad, config),
        stream_rate=config.stream_rate,
        sharded=config.layout == "shards",
        callbacks=[log],
    )
    identity = _identity(objective, used, config, world, started_from)
    last = runs.begin(folder, identity, resume, trainer.accelerator.wait_for_everyone, given.should_save)
    trainer.train(resume_from_checkpoint=last)
    terms = [line for line in trainer.state.log_history if "main_loss" in line]
    sampler = model.sampler if config.sampler_width else None  # one that was there before was trained elsewhere
    return {
        "training": asdict(config),
        "loss": asdict(loss_config),
        "processes": world,
        "examples": len(used),
        "left_out_as_too_long": len(examples) - len(used),
        **({} if (own := model.vocabulary) is None else {"vocabulary": {"size": len(own), "of": own.among}}),
        **({} if sampler is None else {"sampler": {"width": sampler.width, "examples": len(used)}}),
        "updates": trainer.state.global_step,
        "seconds": log.seconds(),
        "last_log": terms[-1] if terms else {},
    }


def _identity(
    objective: Objective, examples: Sequence[Tokens], config: TrainConfig, world: int, started_from: str | None
) -> dict[str, Any]:
    """What must not change when a run is resumed."""
    digest = sha256(json.dumps([(e.prompt, e.completion) for e in examples]).encode()).hexdigest()
    training = {key: value for key, value in asdict(config).items() if key not in ("save_every", "log_every")}
    return {
        "training": training,
        **objective.settings(),
        "processes": world,
        "examples": digest,
        "started_from": started_from,
    }


def arguments(folder: Path, config: TrainConfig, cpu: bool, **more: Any) -> TrainingArguments:
    """What the host library's Trainer is told; `more` is in its own terms."""
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
        save_strategy="steps",
        remove_unused_columns=False,
        seed=config.seed,
        report_to=[],
        dataloader_pin_memory=not cpu and torch.cuda.is_available(),
        **more,
    )
