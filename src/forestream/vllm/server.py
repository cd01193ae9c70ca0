"""How vLLM is started on an exported folder: checked beforehand, with the settings that matter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote
from typing import Any, Final

from forestream.errors import ConfigError
from forestream.vllm import PROPOSER, check_version
from forestream.vllm.exported import check_drafts, read

_MODULE: Final = "vllm.entrypoints.openai.api_server"  # the command `vllm` does not run in the CPU build

# On few cores: by default the worker is bound to one core, and threads that wait keep the others busy.
_CPU: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "KMP_BLOCKTIME": "1"}

# Intel's OpenMP comes with the CPU build, which says itself that speculation is slow without; the allocator is the
# system's, if it is there.
_PRELOADED: Final = (
    Path(sys.prefix, "lib", "libiomp5.so"),
    Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
)


@dataclass(frozen=True)
class Launch:
    """A server to start.

    Attributes:
        command: with its arguments.
        environment: what is set for it beside what is set already.
        address: where it will answer.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    address: str

    @property
    def health(self) -> str:
        """Answers 200 as soon as, and as long as, texts can be asked for."""
        return f"{self.address}/health"

    def shell(self) -> str:
        """The same as a line for a shell."""
        settings = [f"{name}={quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, *map(quote, self.command)])


def by_load(drafts: int, rows: int) -> list[tuple[int, int, int]]:
    """Fewer drafts where more requests run, so that a step verifies at most `rows` tokens: vLLM's schedule of drafts.

    Returns:
        First and last number of requests, and the drafts of each; the last entry holds for more requests as well.

    Raises:
        ConfigError: `rows` is below 2, which leaves no room for a draft.
    """
    if rows < 2:
        raise ConfigError(f"rows is {rows}; expected at least 2: the last token of a request, and one draft")
    schedule: list[tuple[int, int, int]] = []
    for requests in range(1, rows + 1):
        count = max(0, min(drafts, rows // requests - 1))
        first = schedule.pop()[0] if schedule and schedule[-1][2] == count else requests
        schedule.append((first, requests, count))
    return schedule


def options(folder: Path, drafts: int | None = None, eager: bool = False, rows: int | None = None) -> dict[str, Any]:
    """What vLLM has to be told to draft with an exported folder: arguments of `vllm.LLM` and of its engines.

    Args:
        folder: what `export_vllm` wrote.
        drafts: tokens drafted at a time; None: one for each stream, 0: none, for comparison.
        eager: run layers as they are; otherwise vLLM compiles them first, for some minutes on a small machine.
        rows: most tokens that a step verifies, prompts apart: the more requests run, the fewer each drafts.
            None: `drafts` for any number of requests.

    Raises:
        CheckpointError: the folder is missing, incomplete, or was not exported.
        ConfigError: more drafts than streams, too few rows, or vLLM is not installed or not the version that is
            tested with.
    """
    config, values = read(folder)
    if drafts is None:
        drafts = config.streams
    if drafts:
        check_drafts(config, drafts)
    check_version()
    # Of its own accord vLLM would run float32 weights in bfloat16.
    told: dict[str, Any] = {"model": str(folder), "dtype": values["dtype"]}
    if drafts:
        told["speculative_config"] = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": drafts}
        if rows is not None:
            told["speculative_config"]["num_speculative_tokens_per_batch_size"] = by_load(drafts, rows)
    if eager or (drafts and values.get("model_type") == "opt"):
        told["enforce_eager"] = True
    return told


def launch(
    folder: Path,
    drafts: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    eager: bool = False,
    rows: int | None = None,
    further: Sequence[str] = (),
) -> Launch:
    """What starts vLLM's server on a folder that `export_vllm` wrote; starts nothing.

    Args:
        further: options of vLLM's own, which go before these.

    Other arguments and errors as of `options`.
    """
    told = options(folder, drafts, eager, rows)
    told |= {"served_model_name": folder.resolve().name, "host": host, "port": port}
    command = [sys.executable, "-m", _MODULE]
    for name, value in told.items():
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return Launch((*command, *further), cpu_settings(), f"http://{host}:{port}")


def cpu_settings() -> dict[str, str]:
    """Settings for vLLM's CPU build, where the user has made none."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return {}
    settings = {name: value for name, value in _CPU.items() if name not in os.environ}
    if "LD_PRELOAD" not in os.environ and (found := [str(path) for path in _PRELOADED if path.is_file()]):
        settings["LD_PRELOAD"] = ":".join(found)
    return settings
