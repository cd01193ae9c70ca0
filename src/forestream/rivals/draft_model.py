"""The small model of two-model decoding: a Llama with the base's tokenizer, trained from nothing on the same task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase, Trainer, set_seed

from forestream import checkpoint, processes, runs
from forestream.config import JsonConfig, whole
from forestream.data import Targets, Tokens
from forestream.errors import CheckpointError, ConfigError
from forestream.objective import IGNORED
from forestream.runs import LogFile
from forestream.training import TrainConfig, arguments, ordered, usable

HEAD: Final = 32
"""Width of an attention head."""

_OF_STREAMS: Final = ("share", "stream_rate", "checkpointing", "layout")
"""Settings of training that mean nothing here."""


@dataclass(frozen=True)
class DraftModelConfig(JsonConfig):
    """The size of a draft model. Most of its weights are its embedding, which its head shares.

    Attributes:
        width: of the hidden states, a multiple of 32; attention heads are 32 wide, the MLP four times the width.
        layers: decoder layers.
    """

    width: int = 160
    layers: int = 4

    def __post_init__(self) -> None:
        whole("width", self.width, HEAD, 4096)
        whole("layers", self.layers, 1, 64)
        if self.width % HEAD:
            raise ConfigError(f"width is {self.width}; expected a multiple of {HEAD}, the width of a head")


def fresh_model(base: PreTrainedConfig, config: DraftModelConfig, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama with the vocabulary, the ends of text and the context of `base`."""
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=base.vocab_size,
            hidden_size=config.width,
            intermediate_size=4 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.width // HEAD,
            max_position_embeddings=base.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=base.bos_token_id,
            eos_token_id=base.eos_token_id,
            pad_token_id=base.pad_token_id,
        )
    )


def labelled(examples: Sequence[Tokens], pad: int, targets: Targets) -> dict[str, Tensor]:
    """A batch as the host library's own loss takes it, padded at the right end, where causal rows never look."""
    texts = [[*one.prompt, *one.completion] for one in examples]
    longest = max(map(len, texts))
    labels = [
        [IGNORED] * len(one.prompt) + list(one.completion) if targets == "completion" else text
        for one, text in zip(examples, texts, strict=True)
    ]
    return {
        "input_ids": torch.tensor([text + [pad] * (longest - len(text)) for text in texts]),
        "labels": torch.tensor([own + [IGNORED] * (longest - len(own)) for own in labels]),
    }


class _Trainer(runs.WholeCheckpoints, Trainer):
    """The host library's Trainer, whose checkpoints a kill leaves whole."""


def fit_draft_model(
    model: LlamaForCausalLM,
    examples: Sequence[Tokens],
    pad: int,
    folder: Path,
    config: TrainConfig,
    resume: bool = False,
) -> dict[str, Any]:
    """Train every weight of `model` in place, in one process; checkpoints and log go to `folder`.

    Args:
        examples, pad, folder, config, resume: as of `training.fit`; what `config` says of streams and adapters does
            not apply.

    Returns:
        A JSON-ready report: settings, examples used, updates, seconds of all starts, the last log line.

    Raises:
        DataError: no example is short enough.
        CheckpointError: `folder` holds an earlier run and `resume` is False, or a run with other settings.
        ConfigError: a launcher announced other processes.
    """
    processes.check_number(1)
    set_seed(config.seed)
    own, log = usable(examples, config), LogFile(folder / runs.LOG)
    trainer = _Trainer(
        model=model,
        args=arguments(folder, config, model.device.type == "cpu"),
        train_dataset=ordered(own, config, pad),
        data_collator=partial(labelled, pad=pad, targets=config.targets),
        callbacks=[log],
    )
    digest = sha256(json.dumps([(one.prompt, one.completion) for one in own]).encode()).hexdigest()
    training = {key: value for key, value in asdict(config).items() if key not in _OF_STREAMS}
    kept = {key: value for key, value in training.items() if key not in ("save_every", "log_every")}
    size = {key: getattr(model.config, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    identity = {"training": kept, "draft_model": size, "examples": digest}
    trainer.train(resume_from_checkpoint=runs.begin(folder, identity, resume, lambda: None, True))
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "training": training,
        "examples": len(own),
        "left_out_as_too_long": len(examples) - len(own),
        "updates": trainer.state.global_step,
        "seconds": log.seconds(),
        "last_log": lines[-1] if lines else {},
    }


def check_output(folder: Path) -> None:
    """See to it that a draft model may be written to `folder`, before it is trained.

    Raises:
        CheckpointError: there is something already.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists; remove it or choose another output folder")


def save_draft_model(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, record: dict[str, Any]
) -> None:
    """Write an ordinary model folder, as the host library loads it, with its provenance: whole, or not at all.

    Raises:
        CheckpointError: there is something already.
    """
    check_output(folder)
    with checkpoint.written(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        (aside / checkpoint.PROVENANCE).write_text(json.dumps(record, indent=2) + "\n")
        for path in aside.iterdir():  # some are made private, and a model folder may be read by several users
            path.chmod(0o644)
