"""Records on disk: complete or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record` beside `path` and move it into place, so that an interrupted run leaves no half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent, text=True)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    finally:
        Path(aside).unlink(missing_ok=True)
