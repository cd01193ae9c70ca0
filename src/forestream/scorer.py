"""The exit scorer of a finished adapter, trained on its own: nothing else of the adapter changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from forestream.data import Tokens
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.objective import LossConfig
from forestream.revision import fit_part, revise
from forestream.training import TrainConfig

ALONE: Final = LossConfig(main=0.0, stream=0.0, scorer=1.0)
"""The scorer's own next-token term; the others are still reported."""


def fit_scorer(
    model: StreamingLM, examples: Sequence[Tokens], pad: int, folder: Path, config: TrainConfig, resume: bool = False
) -> dict[str, Any]:
    """Train the exit scorer of `model` in place, from where it is; everything else is frozen.

    Args:
        model: with its LoRA unmerged, as `checkpoint.load(..., merge=False)` gives it.
        pad, folder, config, resume: as for `training.fit`; no position carries streams, whatever `config.share` says.

    Returns:
        The report of `training.fit`.

    Raises:
        ConfigError: the adapter has no exit scorer.
    """
    if model.scorer is None:
        raise ConfigError("this adapter has no exit scorer (scorer_rank or streams 0, or no trunk); train another one")
    return fit_part(model.scorer, model, examples, pad, folder, replace(config, share=0.0), ALONE, resume)


def save_scorer(model: StreamingLM, adapter: Path, folder: Path, record: dict[str, Any]) -> None:
    """Write `adapter` with the scorer of `model` to `folder`; every other tensor keeps its bytes.

    Args:
        adapter: the folder that `model` was loaded from.
        record: where the scorer comes from; it goes into the provenance, under "scorer".

    Raises:
        CheckpointError: `folder` exists and is no adapter folder.
        ConfigError: `model` has no exit scorer.
    """
    if model.scorer is None:
        raise ConfigError("this model has no exit scorer to save")
    own = {f"scorer.{name}": tensor for name, tensor in model.scorer.state_dict().items()}
    revise(adapter, folder, own, {"scorer": record})
