"""What an adapter folder holds, with every parameter accounted for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from forestream.model import StreamingLM


@dataclass(frozen=True)
class Part:
    """Parameters trained beside the LoRA: a name, the formula of their number, and that number."""

    name: str
    formula: str
    number: int


def extra_parts(model: StreamingLM) -> list[Part]:
    """Everything trained beside the LoRA, counted on the tensors themselves."""
    parts = []
    if model.start is not None and (embedding := model.start.embedding) is not None:
        G, D = embedding.shape
        parts.append(Part("P_j", f"G*D = {G}*{D}", embedding.numel()))
    low_rank = {"start map": model.start.map if model.start is not None else None, "exit scorer": model.scorer}
    for name, part in low_rank.items():
        if part is not None:
            D, rank = part.down.shape
            number = part.down.numel() + part.up.numel()
            parts.append(Part(name, f"2*rank*D = {2 * rank}*D = {2 * rank}*{D}", number))
    if (sampler := model.sampler) is not None:
        D, E = sampler.state.shape[0], sampler.token.shape[0]
        number = sum(weight.numel() for weight in sampler.parameters())
        parts.append(Part("path sampler", f"width*(2*D+E) = {sampler.width}*{2 * D + E}", number))
    return parts


def lora_parameters(folder: Path) -> int:
    """Number of LoRA parameters in a folder that was loaded before, read off the file's header."""
    from safetensors import safe_open

    from forestream.checkpoint import LORA

    with safe_open(folder / LORA, "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def summary(folder: Path, model: StreamingLM) -> dict[str, Any]:
    """The adapter as a record."""
    from forestream.manifest import Manifest

    manifest = Manifest.read(folder)
    parts = extra_parts(model)
    trained = provenance_of(folder)
    return {
        "adapter": folder.resolve().name,
        "base": manifest.base.name,
        "family": manifest.base.family,
        "fingerprint": manifest.base.fingerprint,
        "config": vars(manifest.config),
        "layers": model.port.num_layers,
        "hidden_size": model.port.hidden_size,
        "draft_vocabulary": None if model.vocabulary is None else len(model.vocabulary),
        "lora_parameters": lora_parameters(folder),
        "extra_parameters": {part.name: part.number for part in parts},
        "extra_parameters_total": sum(part.number for part in parts),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "trained": {key: trained.get(key) for key in ("date", "commit", "task", "examples", "command")},
    }


def summary_table(record: dict[str, Any], model: StreamingLM) -> Table:
    """The record for people to read."""
    config = record["config"]
    title = Text(f"adapter {record['adapter']}")
    table = Table(title=title, title_style="bold", title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = {
        "base": f"{record['base']} (family {record['family']}), fingerprint {record['fingerprint'][:16]}…",
        "mode": f"{config['mode']}: {_MODES[config['mode']]}",
        "streams": f"G = {config['streams']}, stream j drafts the token j places after the next one",
        "draft vocabulary": _drafted(model),
        "stream layers": f"{config['stream_layers']} of {record['layers']}, the top ones",
        "LoRA": f"{record['lora_parameters']:,} parameters (rank {config['lora_rank']}, alpha {config['lora_alpha']})",
        "beside it": _accounts(model),
        "files": "\n".join(f"{name}  {decimal(size)}" for name, size in record["files"].items()),
        "trained": _origin(record["trained"]),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


_MODES = {
    "joint": "LoRA and streams learned the task together; the text is the fine-tuned model's",
    "lossless": "the LoRA acts on streams only; the text is the base model's",
}


def _drafted(model: StreamingLM) -> str:
    V = model.port.head_size
    return f"all {V:,} tokens" if model.vocabulary is None else f"{len(model.vocabulary):,} of {V:,} tokens"


def _accounts(model: StreamingLM) -> str:
    parts, D = extra_parts(model), model.port.hidden_size
    lines = [f"{part.name}: {part.formula} = {part.number:,}" for part in parts]
    total = sum(part.number for part in parts)
    return "\n".join([*lines, f"together: {total // D}*D = {total // D}*{D} = {total:,} parameters"])


def _origin(trained: dict[str, Any]) -> str:
    if not any(trained.values()):
        return "not recorded"
    examples = trained["examples"]
    facts = [
        trained["date"] or "date not recorded",
        f"commit {trained['commit'] or 'not recorded'}",
        f"{examples:,} examples" if isinstance(examples, int) else "examples not recorded",
    ]
    return "\n".join([", ".join(map(str, facts)), *([str(trained["command"])] if trained["command"] else [])])


def provenance_of(folder: Path) -> dict[str, Any]:
    """What the folder says about its making; nothing that decoding needs, so its absence is no error."""
    from forestream.checkpoint import PROVENANCE

    try:
        record = json.loads((folder / PROVENANCE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
