"""What an exported folder says of its streams: read from its config.json, by vLLM's processes and by the commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forestream.config import StreamConfig
from forestream.errors import CheckpointError, ConfigError

FORMAT: Final = 1
KEY: Final = "forestream"
"""Of the entry in config.json: format, base and config, a whole `StreamConfig`."""

STREAMS: Final = "streams.safetensors"
"""Beside model.safetensors, and read by vLLM's loader as well: the tensors of `StreamStart`, under `START`, those of a
path sampler and the ids of a draft vocabulary, where the adapter has them, and of a lossless adapter the stream layers
with the LoRA merged, under `COPIES`."""

START: Final = "start."
SAMPLER: Final = "sampler."
"""Before the names of a `PathSampler`'s tensors, whose shapes say its size."""
VOCABULARY: Final = "vocabulary.ids"

COPIES: Final = "copies."
"""Before the number of a stream layer, counted from the lowest one, and the tensor's own name in that layer."""

FAMILIES: Final = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "opt": "OPT",
}
"""`config.model_type` of the bases that can be exported, and what vLLM, which has a class for each, calls them."""

ARCHITECTURES: Final = {family: f"Forestream{family}ForCausalLM" for family in FAMILIES.values()}
"""What stands under `architectures` in config.json, by vLLM's name of the family."""


def stream_config(entry: object, where: str) -> StreamConfig:
    """The streams' configuration out of an exported model's entry `KEY`.

    Args:
        entry: what config.json holds there; None if nothing.
        where: what to call the folder in messages.

    Raises:
        CheckpointError: the entry is missing, malformed or of another format.
    """
    if not isinstance(entry, Mapping):
        raise CheckpointError(
            f"config.json of {where} holds no entry {KEY!r}; expected a folder that `forestream export vllm` wrote"
        )
    if (found := entry.get("format")) != FORMAT:
        raise CheckpointError(f"{where} was exported in format {found}; this version reads format {FORMAT}")
    try:
        return StreamConfig.from_dict(dict(entry["config"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the entry {KEY!r} in config.json of {where} is malformed: {error}") from error


def read(folder: Path) -> tuple[StreamConfig, dict[str, Any]]:
    """The streams' configuration of an exported folder, and all of its config.json.

    Raises:
        CheckpointError: the folder is missing, incomplete, or was not exported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no config.json; give a folder that `forestream export vllm` wrote")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is malformed: {error}") from error
    config = stream_config(values.get(KEY) if isinstance(values, dict) else None, str(folder))
    for name in ("model.safetensors", STREAMS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; export the adapter again")
    return config, values


def check_drafts(config: StreamConfig, drafts: int) -> None:
    """See to it that so many tokens can be drafted at a time.

    Raises:
        ConfigError: more than there are streams, or none.
    """
    if not 1 <= drafts <= config.streams:
        raise ConfigError(
            f"{drafts} drafts at a time (num_speculative_tokens) were asked for; expected 1 to {config.streams}: the "
            f"adapter was trained with {config.streams} streams"
        )
