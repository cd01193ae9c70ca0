"""How much memory a run took above the loaded models: of the process, or of its GPU.

All methods of a run share a process, which keeps what it was once given: this is one figure for all of them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, Any]]:
    """Fill what is yielded once the block is done: `of`, and bytes `loaded` before it, at its `peak`, and between.

    It stays empty where nobody counts: the peak of a process can be set back on Linux only.
    """
    found: dict[str, Any] = {}
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
        loaded: int | None = torch.cuda.memory_allocated(device)
    else:
        loaded = _status("VmRSS") if _set_back() else None
    try:
        yield found
    finally:
        peak = torch.cuda.max_memory_allocated(device) if gpu else _status("VmHWM")
        if loaded is not None and peak is not None:
            peak = max(peak, loaded)  # the system counts pages in lots, and the peak may lag by one
            of = "gpu" if gpu else "process"
            found |= {"of": of, "loaded": loaded, "peak": peak, "above_loaded": max(peak - loaded, 0)}


def _set_back() -> bool:
    """Have the system forget the process's peak so far; whether it did."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    """Bytes of an entry of the process's status."""
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
