"""An adapter folder: the LoRA as PEFT writes it, the streams and scorer beside it, and what they were made for.

adapter_model.safetensors, adapter_config.json   the LoRA; a joint one also loads in PEFT alone
streams.safetensors                              P_j; start map, exit scorer, draft vocabulary and path sampler, if any
forestream.json                                  format, StreamConfig, base model and its fingerprint
provenance.json                                  command, commit, versions, machine
README.md                                        the model card, written from the provenance
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forestream import card
from forestream.bases import fingerprint, load_base
from forestream.config import Quantise
from forestream.data import template_print
from forestream.errors import CheckpointError, ConfigError, PrecisionWarning
from forestream.manifest import MANIFEST, BaseModel, Manifest
from forestream.model import StreamingLM
from forestream.processes import is_first, whole
from forestream.quantised import quantise as quantise_model
from forestream.streams import StreamStart
from forestream.vocabulary import DraftVocabulary

VOCABULARY = "vocabulary.ids"
"""A tensor of `STREAMS` that may be missing: without it, streams draft any token."""
SAMPLER = ("sampler.state", "sampler.token", "sampler.up")
"""Tensors of `STREAMS` that may be missing together: without them, streams draft by themselves."""
LORA, STREAMS, PROVENANCE = "adapter_model.safetensors", "streams.safetensors", "provenance.json"
FILES = (LORA, "adapter_config.json", STREAMS, MANIFEST, PROVENANCE, card.FILE)
"""The adapter's own files: what is copied and sent to a hub."""


def own_tensors(model: StreamingLM) -> dict[str, Tensor]:
    """Everything of an adapter beside its LoRA, by name: start.*, scorer.* and sampler.*, and the draft vocabulary."""
    parts = {"start": model.start, "scorer": model.scorer, "sampler": model.sampler}
    trained = {
        f"{name}.{key}": tensor.detach()
        for name, part in parts.items()
        if part is not None
        for key, tensor in part.state_dict().items()
    }
    return trained | ({} if model.vocabulary is None else {VOCABULARY: model.vocabulary.ids.int()})


def lora_tensors(host: PeftModel) -> dict[str, Tensor]:
    """The LoRA's tensors under PEFT's names; embeddings are never trained, and PEFT would ask a hub about them."""
    tensors: dict[str, Tensor] = get_peft_model_state_dict(host, save_embedding_layers=False)
    return tensors


def write_weights(model: StreamingLM, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write LoRA, streams and scorer into an existing folder, in `dtype` or as they are.

    Where several processes train, all have to call this, since weights may be sharded; the first one writes.
    """
    if not isinstance(model.host, PeftModel):
        raise CheckpointError("this model's adapter was merged; only an unmerged one can be saved")

    def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        as_is = {name: whole(t.detach()).cpu() for name, t in tensors.items()}
        return {n: (t.to(dtype or t.dtype) if t.is_floating_point() else t).contiguous() for n, t in as_is.items()}

    lora, own = stored(lora_tensors(model.host)), stored(own_tensors(model))
    if is_first():
        save_file(lora, folder / LORA, {"format": "pt"})
        save_file(own, folder / STREAMS, {"format": "pt"})


def read_weights(model: StreamingLM, folder: Path, alone: bool = False, top: bool = False) -> None:
    """Read into a model that has its LoRA in place what `write_weights` wrote.

    Args:
        alone: read the LoRA only, for a model without streams; what the folder holds beside it is let be.
        top: the folder may hold a LoRA of more layers than the model has one on; that of the others is let be.

    Raises:
        CheckpointError: a file is missing or corrupt, or its tensors are not exactly the expected ones.
    """
    if not isinstance(model.host, PeftModel):
        raise CheckpointError("this model's adapter was merged; load into a fresh base instead")
    lora = _tensors(folder / LORA, lora_tensors(model.host), surplus=top)
    own = {} if alone else _tensors(folder / STREAMS, own_tensors(model), (VOCABULARY, *SAMPLER))
    if not alone:
        _restrict(model, folder / STREAMS, own.get(VOCABULARY))
        _sample(model, folder / STREAMS, {name: own[name] for name in SAMPLER if name in own})
    set_peft_model_state_dict(model.host, lora)
    for name, part in {"start": model.start, "scorer": model.scorer, "sampler": model.sampler}.items():
        if part is not None:
            prefix = f"{name}."
            part.load_state_dict({k.removeprefix(prefix): t for k, t in own.items() if k.startswith(prefix)})


def _restrict(model: StreamingLM, path: Path, ids: Tensor | None) -> None:
    """Give `model` the draft vocabulary that `path` holds, or none."""
    try:
        model.restrict(None if ids is None else DraftVocabulary(ids, model.port.head_size))
    except ConfigError as error:
        raise CheckpointError(f"{path} holds no draft vocabulary for this base: {error}") from error


def _sample(model: StreamingLM, path: Path, found: dict[str, Tensor]) -> None:
    """Give `model` a path sampler of the size that `path` holds, or none."""
    if not found:
        model.sampler = None
        return
    width = found[SAMPLER[-1]].shape[0] if SAMPLER[-1] in found else 0
    if model.sampler is None or model.sampler.width != width:  # one that is under training stays the optimizer's
        model.add_sampler(width)
    expected = {name: tensor for name, tensor in own_tensors(model).items() if name in SAMPLER}
    if any(name not in found or found[name].shape != tensor.shape for name, tensor in expected.items()):
        raise CheckpointError(f"{path} holds a path sampler that does not fit this base, or a part of one")


def begin_from(model: StreamingLM, folder: Path, base: str, sampler_width: int = 0) -> str:
    """Give a fresh model, its LoRA in place, the weights of an adapter that was trained with settings that fit.

    There may be more or fewer streams: those that the adapter lacks begin as its last one. With value rotation, whose
    angle depends on their number, there have to be as many. A joint LoRA is of use whatever layers carry streams, and
    without any: `stream_layers` may differ, a model of 0 streams takes the LoRA alone, and a lossless one that of its
    stream layers. The model keeps its own draft vocabulary.

    Args:
        base: fingerprint of the model's base, taken before the LoRA was put in.
        sampler_width: of the path sampler that will be trained; the adapter's own is taken if it is as wide.

    Returns:
        A print of the weights read, 64 hexadecimal digits.

    Raises:
        CheckpointError: the folder is incomplete or corrupt, or the adapter has another base or another StreamConfig.
    """
    manifest = Manifest.read(folder)
    if manifest.base.fingerprint != base:
        raise CheckpointError(
            f"{folder} was trained on {manifest.base.name} with fingerprint {manifest.base.fingerprint[:12]}, but this "
            f"base has {base[:12]}; start from an adapter of the same base"
        )
    earlier, wanted = asdict(manifest.config), asdict(model.stream_config)
    free = {"stream_layers", "mode"} if earlier["mode"] == "joint" else set()
    if earlier["streams"] and wanted["streams"] and not wanted["value_rotation"]:
        free.add("streams")
    if wanted["mode"] == "joint" and not wanted["streams"]:
        free |= set(wanted) - {"mode", "lora_rank", "lora_alpha"}
    if differing := [
        f"{name} {earlier[name]!r}, not {wanted[name]!r}"
        for name in wanted
        if earlier[name] != wanted[name] and name not in free
    ]:
        raise CheckpointError(
            f"{folder} cannot be started from: it was trained with {'; '.join(differing)}; train with its settings, or "
            "start from fresh weights"
        )
    vocabulary, start = model.vocabulary, model.start
    if start is not None:
        model.start = StreamStart(manifest.config, model.port.hidden_size)
    try:
        read_weights(model, folder, alone=start is None, top=wanted["mode"] != earlier["mode"])
        if start is not None and model.start is not None:
            start.begin_as(model.start)
    finally:
        model.start = start
    model.restrict(vocabulary)
    if model.sampler is not None and model.sampler.width != sampler_width:
        model.sampler = None
    digest = hashlib.sha256()
    for name in (LORA, STREAMS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _tensors(
    path: Path, expected: dict[str, Tensor], free: Sequence[str] = (), surplus: bool = False
) -> dict[str, Tensor]:
    """What `path` holds, which has to be what is expected; tensors in `free` may be there or not, in any shape.

    Args:
        surplus: whether there may be others, which are left out.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the adapter folder is incomplete")
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is corrupt or no safetensors file: {error}") from error
    if surplus:
        found = {name: tensor for name, tensor in found.items() if name in expected}
    wrong = sorted(
        name
        for name in (set(found) | set(expected)) - set(free)
        if name not in found or name not in expected or found[name].shape != expected[name].shape
    )
    if wrong:
        raise CheckpointError(
            f"{path} does not fit its configuration: {len(wrong)} tensors are missing, unknown or of another shape, "
            f"first {wrong[0]!r}"
        )
    return found


def save(
    model: StreamingLM,
    folder: Path,
    base: BaseModel,
    provenance: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a whole adapter folder, or nothing: it is put together aside and moved into place.

    Where several processes train, all have to call this, as with `write_weights`; the first one writes.

    Raises:
        CheckpointError: the adapter was merged already, or `folder` exists and is no adapter folder.
    """
    if not isinstance(model.host, PeftModel):
        raise CheckpointError("this model's adapter was merged; only an unmerged one can be saved")
    if not is_first():
        write_weights(model, folder)  # a sharded weight is gathered with every process's help
        return
    with written(folder) as aside:
        write_weights(model, aside, dtype)
        lora = copy.deepcopy(model.host.peft_config["default"])
        lora.base_model_name_or_path, lora.inference_mode = base.name, True
        lora.target_modules = sorted(lora.target_modules)
        lora.save_pretrained(str(aside))
        manifest = Manifest(model.stream_config, base)
        (aside / MANIFEST).write_text(manifest.to_json())
        write_provenance(aside, folder.name, manifest, provenance)


def write_provenance(folder: Path, name: str, manifest: Manifest, provenance: dict[str, Any]) -> None:
    """Write where an adapter comes from into its folder, and the card of the adapter `name` that says so to people."""
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
    text = card.render(name, manifest.config, manifest.base.name, provenance)
    (folder / card.FILE).write_text(text, encoding="utf-8")


def copy_adapter(adapter: Path, folder: Path) -> None:
    """Write the adapter's own files, and nothing else of its folder, to `folder`: whole, or not at all.

    Raises:
        CheckpointError: `adapter` is incomplete, or `folder` exists and is no adapter folder.
    """
    Manifest.read(adapter)
    with written(folder) as aside:
        for name in FILES:
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, aside / name)
            elif name in (LORA, "adapter_config.json", STREAMS):
                raise CheckpointError(f"{adapter / name} is missing; the adapter folder is incomplete")


@contextmanager
def written(folder: Path, manifest: str = MANIFEST) -> Iterator[Path]:
    """A folder to fill, which is moved to `folder` once the block has ended without an error.

    Arguments and errors as in `check_output`.
    """
    check_output(folder, manifest)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        aside.chmod(0o755)
        _put(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_output(folder: Path, manifest: str = MANIFEST) -> None:
    """See to it that an adapter may be written to `folder`, before hours are spent on making one.

    Args:
        manifest: the file by which a folder of this kind is known.

    Raises:
        CheckpointError: `folder` exists and is no adapter folder, or none of the kind.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / manifest).is_file()):
        kind = "is no adapter folder" if manifest == MANIFEST else f"holds no {manifest}"
        raise CheckpointError(f"{folder} exists and {kind}; choose another output folder")


def _put(aside: Path, folder: Path) -> None:
    """Move `aside` to `folder`; what stood there goes only once that has worked."""
    if not folder.exists():
        aside.replace(folder)
        return
    earlier = folder.rename(aside.with_name(f"{aside.name}-earlier"))
    try:
        aside.replace(folder)
    except BaseException:
        earlier.rename(folder)
        raise
    shutil.rmtree(earlier)


def load(
    folder: Path,
    base: str | None = None,
    dtype: torch.dtype = torch.float32,
    merge: bool = True,
    quantise: Quantise = "off",
    device: str = "cpu",
) -> tuple[StreamingLM, PreTrainedTokenizerBase]:
    """A model ready to decode, from an adapter folder; joint adapters are merged into the base unless told not to.

    Args:
        folder: what `save` wrote.
        base: where to find the base model; by default the name in the manifest.
        dtype: of weights and activations.
        quantise: what the base's linear layers are held in, once the base was recognised and the adapter merged.
        device: where the model goes; quantised weights are laid out for it and stay there.

    Raises:
        CheckpointError: the folder is incomplete or corrupt, the base is not the one it was trained on, or renders
            chats by another template.
        ConfigError: the base cannot be quantised so, or a joint adapter is to stay unmerged beside quantised weights.

    Warns:
        PrecisionWarning: the adapter was trained on the base in another precision.
    """
    manifest = Manifest.read(folder)
    # float16 cannot hold every bfloat16 number: the fingerprint is taken before values are lost.
    host, tokenizer = load_base(base or manifest.base.name, torch.float32 if dtype == torch.float16 else dtype)
    if (found := fingerprint(host)) != manifest.base.fingerprint:
        raise CheckpointError(
            f"{folder} was trained on {manifest.base.name} with fingerprint {manifest.base.fingerprint[:12]}, but the "
            f"base given has {found[:12]}; load the base it was trained on"
        )
    _compare_templates(folder, manifest.base.chat_template, template_print(tokenizer))
    model = StreamingLM(host, manifest.config)
    model.add_lora()
    read_weights(model, folder)
    for parameter in model.parameters():
        # Parameters only: rotary frequencies are buffers, which stay in float32 whatever the dtype.
        parameter.data = parameter.data.to(dtype)
    if merge and manifest.config.mode == "joint":
        model.merge()
    model.to(device)
    quantise_model(model, quantise)
    _compare_precisions(folder, manifest.base.precision, quantise if quantise != "off" else _name(dtype))
    return model.eval(), tokenizer


def _compare_templates(folder: Path, trained: str | None, here: str | None) -> None:
    if trained is not None and trained != here:
        raise CheckpointError(
            f"{folder} was trained on chats in the template {trained[:12]}, and the base given has "
            f"{here[:12] if here else 'none'}: it would see other prompts than those it has learned from; give the "
            "base with the tokenizer it was trained with, or train anew"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare_precisions(folder: Path, trained: str | None, here: str) -> None:
    """Warn if one is quantised and the other is not, or not so; floating-point dtypes are close enough."""
    integers = ("int8", "int4")
    if (trained if trained in integers else None) == (here if here in integers else None):
        return
    warnings.warn(
        f"the adapter {folder.name} was trained on its base in {trained or 'floating point'} and runs on it in {here}: "
        "drafts may be accepted less often; `forestream verify` and `forestream bench` tell how often",
        PrecisionWarning,
        stacklevel=3,
    )
