"""The folder of a training run: what the run is, its log, and checkpoints that a kill at any moment leaves whole."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from transformers import TrainerCallback

from forestream.errors import CheckpointError

NOTE: Final = "run.json"
LOG: Final = "log.jsonl"
UNFINISHED: Final = "unfinished"
"""Where checkpoints are put together, inside the folder of a run."""
KEPT: Final = 2
"""How many checkpoints stay."""


class LogFile(TrainerCallback):
    """Appends every log line to a JSON Lines file, with the seconds that training took, earlier starts included."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.monotonic()

    def seconds(self) -> float:
        return round(time.monotonic() - self.start, 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lines = self.path.read_text().splitlines()
        before = json.loads(lines[-1]).get("seconds", 0.0) if lines else 0.0
        self.start = time.monotonic() - before

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            line = {"step": state.global_step, "seconds": self.seconds(), **(logs or {})}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


class WholeCheckpoints:
    """For a Trainer: checkpoints are put together aside and moved into place, since a run may be killed any moment."""

    args: Any
    accelerator: Any
    state: Any

    def _get_output_dir(self, trial: Any) -> str:
        """Where the Trainer puts checkpoints together."""
        return str(Path(self.args.output_dir) / UNFINISHED)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]  # the Trainer's
        self.accelerator.wait_for_everyone()  # each process writes its random state
        if self.args.should_save:
            finish(Path(self.args.output_dir), self.state.global_step)


def begin(
    folder: Path, identity: dict[str, Any], resume: bool, together: Callable[[], None], first: bool
) -> str | None:
    """Note what the run is; return the last checkpoint, which is the one to go on from, if there is one.

    Args:
        identity: what must not change when a run is resumed.
        together: waits for all processes of the run.
        first: whether this process writes files.

    Raises:
        CheckpointError: `folder` holds an earlier run and `resume` is False, or a run with other settings.
    """
    note, log = folder / NOTE, folder / LOG
    complete = _checkpoints(folder)
    if complete and not resume:
        raise CheckpointError(f"{folder} holds an earlier run; continue it (--resume) or remove the folder")
    if complete and note.is_file() and (earlier := json.loads(note.read_text())) != identity:
        changed = sorted(key for key in identity if earlier.get(key) != identity[key])
        raise CheckpointError(
            f"the run in {folder} was started with another setting of {', '.join(changed)}; resume it with the same "
            "ones, or train into another folder"
        )
    step = max(complete, default=0)
    together()  # everybody has read what is changed now
    if first:
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        _tidy(folder)
        _write(note, json.dumps(identity, indent=1) + "\n")
        # The log's lines behind the checkpoint are about to be written again.
        lines = log.read_text().splitlines() if log.is_file() else []
        _write(log, "".join(f"{x}\n" for x in lines if x.endswith("}") and json.loads(x)["step"] <= step))
    together()
    return str(complete[step]) if step else None


def finish(folder: Path, step: int) -> None:
    """Move a checkpoint that was put together to its place, and remove the earliest."""
    name = f"checkpoint-{step}"
    (folder / UNFINISHED / name).replace(folder / name)
    _tidy(folder)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints by the updates that were made before them."""
    return {
        int(path.name.rsplit("-", 1)[1]): path
        for path in folder.glob("checkpoint-*")
        if (path / "trainer_state.json").is_file()
    }


def _tidy(folder: Path) -> None:
    """Remove all but the last checkpoints, and what is left of those that a killed run was removing."""
    kept = [path for _, path in sorted(_checkpoints(folder).items())[-KEPT:]]
    for path in folder.glob("checkpoint-*"):
        if path not in kept:
            shutil.rmtree(path)


def _write(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it finds the earlier text or this one."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)
