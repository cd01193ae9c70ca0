"""What says, in a folder of trained weights, which model they were made for and how they are shaped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from forestream.config import JsonConfig, StreamConfig
from forestream.errors import CheckpointError

FORMAT: Final = 1
MANIFEST: Final = "forestream.json"


@contextmanager
def values_of(path: Path, format: int) -> Iterator[dict[str, Any]]:
    """The values of a manifest of this format, to be made sense of inside.

    Raises:
        CheckpointError: the file is of another format or no JSON object, or what is done inside fails on its values.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        if (found := values.pop("format", None)) != format:
            raise CheckpointError(f"{path} has format {found}; this version reads format {format}")
        yield values
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is malformed: {error}") from error


@dataclass(frozen=True)
class BaseModel(JsonConfig):
    """The base that an adapter belongs to: its name, its family and a print of its weights.

    Attributes:
        precision: of its weights while the adapter was trained: a dtype's name, int8 or int4; None if not recorded.
        chat_template: print of the chat template that training prompts were rendered with; None if they were plain
            texts, or if it was not recorded.
    """

    name: str
    family: str
    fingerprint: str
    precision: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What `forestream.json` holds."""

    config: StreamConfig
    base: BaseModel

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises:
        CheckpointError: the folder or its manifest is missing, malformed or of another format.
        """
        if not folder.is_dir():
            raise CheckpointError(f"no adapter folder at {folder}; give one that `forestream train` wrote")
        path = folder / MANIFEST
        if not path.is_file():
            raise CheckpointError(f"{folder} holds no {MANIFEST}; is it a folder that `forestream train` wrote?")
        with values_of(path, FORMAT) as values:
            if set(values) != {"config", "base"}:
                raise CheckpointError(f"{path} holds {sorted(values)}; expected 'base' and 'config'")
            if missing := sorted({field.name for field in fields(StreamConfig)} - set(values["config"])):
                raise CheckpointError(f"{path} lacks the settings {', '.join(missing)}; the adapter cannot be rebuilt")
            return Manifest(StreamConfig.from_dict(values["config"]), BaseModel.from_dict(values["base"]))
