"""A finished adapter with a part beside its LoRA trained, replaced or added: every other byte of its weights stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forestream import checkpoint
from forestream.checkpoint import FILES, PROVENANCE, STREAMS
from forestream.data import Tokens
from forestream.manifest import Manifest
from forestream.model import StreamingLM
from forestream.objective import LossConfig
from forestream.training import TrainConfig, fit


def fit_part(
    part: nn.Module,
    model: StreamingLM,
    examples: Sequence[Tokens],
    pad: int,
    folder: Path,
    config: TrainConfig,
    loss_config: LossConfig,
    resume: bool = False,
) -> dict[str, Any]:
    """Train `part` of `model` in place, from where it is; everything else is frozen.

    Args:
        model: with its LoRA unmerged, as `checkpoint.load(..., merge=False)` gives it.
        pad, folder, config, loss_config, resume: as for `training.fit`, whose report is returned.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # Small updates would vanish in half precision.
    part.float().requires_grad_(True)
    report = fit(model, examples, pad, folder, config, loss_config, resume)
    model.eval()
    return report


def revise(adapter: Path, folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write `adapter` to `folder`, which may be the same, with `tensors` among its own and its card written anew.

    Args:
        tensors: by their names in the adapter's own file; one that is there keeps its dtype.
        record: added to the provenance.

    Raises:
        CheckpointError: `adapter` has no manifest, or `folder` exists and is no adapter folder.
    """
    manifest = Manifest.read(adapter)
    stored = load_file(adapter / STREAMS)
    for name, tensor in tensors.items():
        dtype = stored[name].dtype if name in stored else tensor.dtype
        stored[name] = tensor.detach().to("cpu", dtype).contiguous()
    found = adapter / PROVENANCE
    provenance = {**(json.loads(found.read_text()) if found.is_file() else {}), **record}
    with checkpoint.written(folder) as aside:
        for name in FILES:
            if (adapter / name).is_file():
                (aside / name).write_bytes((adapter / name).read_bytes())
        save_file(stored, aside / STREAMS, {"format": "pt"})
        checkpoint.write_provenance(aside, folder.name, manifest, provenance)
