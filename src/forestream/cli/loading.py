"""Models loaded for a command: behind a spinner, with what the libraries warn of kept from the reader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from forestream.cli.options import CompileForm, DType, QuantiseForm, compile_how, torch_device, torch_dtype
from forestream.config import DecodeSettings, Quantise
from forestream.errors import PrecisionWarning

if TYPE_CHECKING:
    from forestream.generation import Generator
    from forestream.model import StreamingLM


def load_generator(
    adapter: Path,
    base: str | None = None,
    dtype: DType = DType.float32,
    settings: DecodeSettings | None = None,
    device: str = "cpu",
    form: CompileForm = CompileForm.off,
    quantise: QuantiseForm = QuantiseForm.off,
) -> Generator:
    """The adapter and its base, ready to write, behind a spinner on stderr.

    Raises:
        CheckpointError: the adapter folder is missing, incomplete or corrupt, or the base is another one.
        ConfigError: the base or the device cannot be had, or the base cannot be quantised here.
    """
    console = Console(stderr=True)
    with console.status("loading the libraries"):
        from transformers.utils import logging

        from forestream.generation import Generator
        from forestream.manifest import Manifest
    manifest = Manifest.read(adapter)  # before anything that takes long
    logging.disable_progress_bar()
    name = base or manifest.base.name
    spinner = console.status(f"loading {name} (a first use prepares the base model, once: about half a minute)")
    with spinner, _known_warnings():
        return Generator.from_pretrained(
            adapter, base, torch_dtype(dtype), settings, torch_device(device), compile_how(form), _how(quantise)
        )


def _how(form: QuantiseForm) -> Quantise:
    return "int8" if form == QuantiseForm.int8 else "int4" if form == QuantiseForm.int4 else "off"


def load_base_generator(name: str, dtype: DType, device: str, form: CompileForm) -> tuple[Generator, str]:
    """A base without an adapter, ready to write plainly, behind a spinner on stderr; and its fingerprint.

    Raises:
        CheckpointError, ConfigError, UnsupportedModel: the base or the device cannot be had or used.
    """
    with Console(stderr=True).status(f"loading {name} (a first use prepares the base model, once: half a minute)"):
        from transformers.utils import logging

        from forestream.distillation import base_generator

        logging.disable_progress_bar()
        return base_generator(name, torch_dtype(dtype), torch_device(device), compile_how(form))


def load_host(
    adapter: Path, base: str | None, dtype: DType, device: str, quantise: QuantiseForm = QuantiseForm.off
) -> StreamingLM:
    """The model with its adapter merged, as the host library made it: nothing packed, nothing compiled."""
    from forestream import checkpoint

    spinner = Console(stderr=True).status("loading the base once more, for the host library's own generate")
    with spinner, _known_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # said when the adapter was loaded first
        how = _how(quantise)
        return checkpoint.load(adapter, base, torch_dtype(dtype), quantise=how, device=torch_device(device))[0]


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Our own warnings as a line on stderr; some of the libraries' not at all."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, PrecisionWarning):
                Console(stderr=True).print(f"{message}", style="yellow", highlight=False, markup=False)
            else:
                usual(message, category, *place, **more)

        warnings.showwarning = cast("Any", show)
        # peft asks transformers for an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        yield
