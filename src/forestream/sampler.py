"""The path sampler of a finished adapter, trained on its own: nothing else of the adapter changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from forestream.checkpoint import own_tensors
from forestream.data import Tokens
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.objective import LossConfig
from forestream.revision import fit_part, revise
from forestream.training import TrainConfig

ALONE: Final = LossConfig(main=0.0, stream=1.0, scorer=0.0)
"""The streams' terms, which reach the sampler alone; the main one is still reported."""


def fit_sampler(
    model: StreamingLM,
    examples: Sequence[Tokens],
    pad: int,
    folder: Path,
    config: TrainConfig,
    width: int = 64,
    resume: bool = False,
) -> dict[str, Any]:
    """Train the path sampler of `model` in place, from where it is or from a fresh one; everything else is frozen.

    Args:
        model: with its LoRA unmerged, as `checkpoint.load(..., merge=False)` gives it.
        pad, folder, config, resume: as for `training.fit`.
        width: of a fresh sampler's inner layer; one that is there keeps its own.

    Returns:
        The report of `training.fit`.

    Raises:
        ConfigError: the adapter has no streams.
    """
    if not model.stream_config.streams:
        raise ConfigError("this adapter has 0 streams and drafts nothing; give one that was trained with streams")
    if model.sampler is None:
        torch.manual_seed(config.seed)
        model.add_sampler(width)
    assert model.sampler is not None
    return fit_part(model.sampler, model, examples, pad, folder, config, ALONE, resume)


def save_sampler(model: StreamingLM, adapter: Path, folder: Path, record: dict[str, Any]) -> None:
    """Write `adapter` with the sampler of `model` to `folder`; every other tensor keeps its bytes.

    Args:
        adapter: the folder that `model` was loaded from.
        record: where the sampler comes from; it goes into the provenance, under "sampler".

    Raises:
        CheckpointError: `folder` exists and is no adapter folder.
        ConfigError: `model` has no path sampler.
    """
    if model.sampler is None:
        raise ConfigError("this model has no path sampler to save")
    own = {name: tensor.bfloat16() for name, tensor in own_tensors(model).items() if name.startswith("sampler.")}
    revise(adapter, folder, own, {"sampler": record})
