"""An adapter and its base as one model folder: the merged model for any engine, and for vLLM with its streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forestream.bases import load_base
from forestream.checkpoint import load, own_tensors, written
from forestream.errors import CheckpointError, UnsupportedModel
from forestream.manifest import Manifest
from forestream.vllm.exported import ARCHITECTURES, COPIES, FAMILIES, FORMAT, KEY, SAMPLER, START, STREAMS, VOCABULARY

# These choose their frequencies by the longest text of a pass, which other engines do in ways of their own.
_ROPES_REFUSED = ("dynamic", "longrope")


def export_hf(adapter: Path, output: Path, base: str | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the adapter merged into its base, with the tokenizer, as an ordinary model folder, whole or not at all.

    Any engine serves it, without drafting.

    Args:
        adapter: an adapter folder.
        output: the folder to write; it must be absent or empty.
        base: where to find the base model; by default the name in the manifest.
        dtype: of the weights; they are merged in it, as `checkpoint.load` does.

    Raises:
        CheckpointError: the adapter is incomplete or lossless, or `output` is not empty.
    """
    if Manifest.read(adapter).config.mode == "lossless":
        raise CheckpointError(
            f"{adapter} is a lossless adapter: without drafting its model is the base itself, so there is nothing to "
            "merge; serve the base, or export the adapter for vLLM"
        )
    _check_absent(output)
    model, tokenizer = load(adapter, base, dtype)
    with written(output) as folder:
        _save(model.port.model, tokenizer, folder)


def export_vllm(adapter: Path, output: Path, base: str | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write what `export_hf` writes, and what vLLM needs to draft with it.

    That is `architectures` and the entry `forestream` in config.json, and the streams, with path sampler and draft
    vocabulary if the adapter has them, in a file of their own, which other engines overlook: they serve the folder as
    the merged model. Of a lossless adapter, which acts on streams alone, the model is the base, and its stream layers
    are there a second time, merged.

    Arguments as of `export_hf`.

    Raises:
        CheckpointError: the adapter is incomplete or has no streams, or `output` is not empty.
        UnsupportedModel: the family, or what its layers do with positions, cannot be driven in vLLM.
    """
    manifest = Manifest.read(adapter)
    _servable(adapter, manifest)
    _check_absent(output)
    model, tokenizer = load(adapter, base, dtype)
    config: Any = model.port.config
    _plain_positions(config)
    drafting = (START, SAMPLER, VOCABULARY)  # an exit scorer would have nothing to prune
    streams = {name: t for name, t in own_tensors(model).items() if name.startswith(drafting)}
    host = model.port.model
    if isinstance(model.host, PeftModel):
        model.host.merge_and_unload()
        streams |= _copies(model.port.layers, model.stream_layers)
        host, _ = load_base(base or manifest.base.name, dtype)  # taking a LoRA out again would leave rounding behind
    with written(output) as folder:
        _save(host, tokenizer, folder)
        save_file({name: t.contiguous() for name, t in streams.items()}, folder / STREAMS, {"format": "pt"})
        path = folder / "config.json"
        values: dict[str, Any] = json.loads(path.read_text())
        values["architectures"] = [ARCHITECTURES[FAMILIES[config.model_type]]]
        values[KEY] = {"format": FORMAT, "config": asdict(manifest.config), "base": asdict(manifest.base)}
        path.write_text(json.dumps(values, indent=2) + "\n")


def _check_absent(output: Path) -> None:
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not empty; choose another output folder")


def _save(host: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    # One file: beside an index, engines would read only the files that it names.
    host.save_pretrained(folder, max_shard_size="1TB")
    tokenizer.save_pretrained(folder)


def _copies(layers: Sequence[nn.Module], which: range) -> dict[str, Tensor]:
    """The tensors of the layers `which`, under `COPIES`."""
    return {
        f"{COPIES}{number}.{name}": tensor.detach()
        for number, i in enumerate(which)
        for name, tensor in layers[i].state_dict().items()
    }


def _servable(adapter: Path, manifest: Manifest) -> None:
    """Refuse, before the base is loaded, what vLLM's layers could not do."""
    if (family := manifest.base.family) not in FAMILIES:
        raise UnsupportedModel(
            f"the base of {adapter} is a {family}; streams run on vLLM's layers of {', '.join(FAMILIES)}: export it "
            "with `forestream export hf`, to serve the merged model without drafts"
        )
    if not manifest.config.streams:
        raise CheckpointError(f"{adapter} was trained without streams; export it with `forestream export hf`")
    if manifest.config.value_rotation:
        raise UnsupportedModel(
            f"{adapter} rotates the values of its streams, inside the layers, which vLLM's do not; export it with "
            "`forestream export hf`, or train with learned stream vectors"
        )


def _plain_positions(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in _ROPES_REFUSED:
        raise UnsupportedModel(f"the base has rotary positions of type {kind!r}; expected ones that every text shares")
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in kinds or (config.model_type == "mistral" and config.sliding_window is not None):
        raise UnsupportedModel("the base has sliding windows; streams in vLLM need layers that see the whole text")
