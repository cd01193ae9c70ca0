"""A joint adapter merged into its base: a model folder that other engines load, for vLLM with its streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forestream.checkpoint import Manifest, load, own_tensors, written
from forestream.errors import CheckpointError, UnsupportedModel
from forestream.model import StreamingLM
from forestream.vllm.exported import ARCHITECTURES, FAMILIES, FORMAT, KEY, STREAMS

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
        CheckpointError: the adapter is incomplete or gated to stream slots (lossless), or `output` is not empty.
    """
    _merged_only(adapter, Manifest.read(adapter))
    with _exported(adapter, output, base, dtype):
        pass


def export_vllm(adapter: Path, output: Path, base: str | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write what `export_hf` writes, and what vLLM needs to draft with it.

    That is `architectures` and the entry `forestream` in config.json, and the streams' start in a file of its own,
    which other engines overlook: they serve the folder as the merged model.

    Args and errors as of `export_hf`, and

    Raises:
        UnsupportedModel: the family, or what its layers do with positions, cannot be driven in vLLM.
    """
    manifest = Manifest.read(adapter)
    _merged_only(adapter, manifest)
    _servable(adapter, manifest)
    with _exported(adapter, output, base, dtype) as (model, folder):
        config: Any = model.port.config
        _plain_positions(config)
        start = {name: t.contiguous() for name, t in own_tensors(model).items() if name.startswith("start.")}
        save_file(start, folder / STREAMS, {"format": "pt"})
        path = folder / "config.json"
        values: dict[str, Any] = json.loads(path.read_text())
        values["architectures"] = [ARCHITECTURES[FAMILIES[config.model_type]]]
        values[KEY] = {"format": FORMAT, "config": asdict(manifest.config), "base": asdict(manifest.base)}
        path.write_text(json.dumps(values, indent=2) + "\n")


@contextmanager
def _exported(adapter: Path, output: Path, base: str | None, dtype: torch.dtype) -> Iterator[tuple[StreamingLM, Path]]:
    """The merged model, and the folder that it was written to, which becomes `output` when the block has ended."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not empty; choose another output folder")
    model, tokenizer = load(adapter, base, dtype)
    with written(output) as folder:
        # One file: with an index, engines would read only the files that it names.
        model.port.model.save_pretrained(folder, max_shard_size="1TB")
        tokenizer.save_pretrained(folder)
        yield model, folder


def _merged_only(adapter: Path, manifest: Manifest) -> None:
    if manifest.config.mode == "lossless":
        raise CheckpointError(
            f"{adapter} is a lossless adapter: it acts on stream slots only and cannot be merged into its base; export "
            "a joint adapter, or serve this one with forestream itself"
        )


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
