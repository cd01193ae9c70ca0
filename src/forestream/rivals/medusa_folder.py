"""A folder of Medusa heads: the heads, and the model that they were trained on.

medusa.safetensors   blocks.J and, of heads with projections of their own, projections.J
medusa.json          format, MedusaConfig, the base and the adapter that was merged into it, each with a print
acceptance.json      how often each candidate of each head was right: what static trees are chosen by
provenance.json      command, commit, versions, machine, the training
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from forestream import checkpoint
from forestream.acceptance import Trace, rates
from forestream.checkpoint import LORA, PROVENANCE
from forestream.config import Shape
from forestream.cost import best_static_tree
from forestream.errors import CheckpointError, ConfigError
from forestream.manifest import BaseModel, Manifest, values_of
from forestream.model import StreamingLM
from forestream.rivals.medusa import MedusaConfig, MedusaHeads

FORMAT: Final = 1
HEADS: Final = "medusa.safetensors"
MANIFEST: Final = "medusa.json"
ACCEPTANCE: Final = "acceptance.json"


@dataclass(frozen=True)
class HeadsManifest:
    """What `medusa.json` holds.

    Attributes:
        base: the base model of the adapter.
        adapter: name of the adapter folder.
        adapter_print: what tells the adapter's LoRA from others, 64 hexadecimal digits.
    """

    config: MedusaConfig
    base: BaseModel
    adapter: str
    adapter_print: str

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def of(config: MedusaConfig, adapter: Path) -> HeadsManifest:
        """That of heads on the model that `adapter` makes of its base.

        Raises:
            CheckpointError: the adapter folder is incomplete, or lossless: its model is the base, not a merged one.
        """
        manifest = Manifest.read(adapter)
        if manifest.config.mode == "lossless":
            raise CheckpointError(
                f"{adapter} is a lossless adapter, which is never merged into its base; heads are trained on the model "
                "of a joint adapter, or of a twin (`forestream train --streams 0`)"
            )
        return HeadsManifest(config, manifest.base, adapter.name, adapter_print(adapter, manifest))

    @staticmethod
    def read(folder: Path) -> HeadsManifest:
        """Raises:
        CheckpointError: the folder or its manifest is missing, malformed or of another format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise CheckpointError(f"{folder} holds no {MANIFEST}; give a folder that `forestream train-medusa` wrote")
        with values_of(path, FORMAT) as values:
            config, base = MedusaConfig.from_dict(values.pop("config")), BaseModel.from_dict(values.pop("base"))
            return HeadsManifest(config, base, **values)


def adapter_print(adapter: Path, manifest: Manifest) -> str:
    """64 hexadecimal digits that tell what an adapter makes of its base, whatever streams and scorer it has.

    Raises:
        CheckpointError: the LoRA is missing.
    """
    path = adapter / LORA
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the adapter folder is incomplete")
    scale = f"{manifest.config.lora_rank} {manifest.config.lora_alpha}"
    return hashlib.sha256(scale.encode() + path.read_bytes()).hexdigest()


def save_heads(
    heads: MedusaHeads,
    folder: Path,
    adapter: Path,
    provenance: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a whole folder of heads that were trained on the model of `adapter`, or nothing.

    Raises:
        CheckpointError: `folder` exists and is no folder of heads, or the adapter is incomplete or lossless.
    """
    manifest = HeadsManifest.of(heads.config, adapter)
    tensors = {name: part.detach().to("cpu", dtype).contiguous() for name, part in heads.state_dict().items()}
    with checkpoint.written(folder, MANIFEST) as aside:
        save_file(tensors, aside / HEADS, {"format": "pt"})
        (aside / MANIFEST).write_text(manifest.to_json())
        (aside / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")


def load_heads(folder: Path, adapter: Path, model: StreamingLM) -> MedusaHeads:
    """The heads of `folder` on `model`, which was loaded from `adapter`: in its dtype, and laid out as its weights are.

    Raises:
        CheckpointError: the folder is incomplete or corrupt, or the heads were trained on another base or adapter.
    """
    manifest = HeadsManifest.read(folder)
    here = HeadsManifest.of(manifest.config, adapter)
    if here.base.fingerprint != manifest.base.fingerprint:
        raise CheckpointError(
            f"the heads in {folder} were trained on the base {manifest.base.name} with fingerprint "
            f"{manifest.base.fingerprint[:12]}, but {adapter} has {here.base.name} with {here.base.fingerprint[:12]}; "
            "give the adapter that they were trained on"
        )
    if here.adapter_print != manifest.adapter_print:
        raise CheckpointError(
            f"the heads in {folder} were trained on the adapter {manifest.adapter} with print "
            f"{manifest.adapter_print[:12]}, but {adapter} has {here.adapter_print[:12]}; give that adapter, or train "
            "heads for this one"
        )
    path = folder / HEADS
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing, corrupt or no safetensors file: {error}") from error
    heads = MedusaHeads(manifest.config, model.port, tensors).to(model.device, model.dtype).eval()
    if model.prepared is not None:
        heads.prepare()
    return heads


# --- what static trees are chosen by ------------------------------------------------------------------------------


def save_acceptance(folder: Path, traces: Sequence[Trace], made: dict[str, Any]) -> None:
    """Write the heads' rates on `traces` into their folder; `made` says what texts these are of.

    Raises:
        ConfigError: there are no traces.
    """
    found = rates(traces, traces[0].streams if traces else 0)
    (folder / ACCEPTANCE).write_text(json.dumps({**made, "texts": len(traces), "rates": found}) + "\n")


def best_shape(folder: Path, nodes: int) -> Shape:
    """The static tree of `nodes` nodes that measured acceptance makes the best one: `DecodeSettings.shape`.

    Raises:
        CheckpointError: acceptance was not measured, or the file is malformed.
        ConfigError: `nodes` is below 1.
    """
    path = folder / ACCEPTANCE
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {ACCEPTANCE}; `forestream train-medusa` measures it (--measure)")
    try:
        table = json.loads(path.read_text())["rates"]
        parents, ranks = best_static_tree(table, nodes)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is malformed: {error}") from error
    return tuple(zip(parents[1:], ranks[1:], strict=True))
