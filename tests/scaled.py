"""Runs of one small training, in one process or several: what tests of scale start under torchrun, or fork and kill.

As a script, in every process: python scaled.py FOLDER PART
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerState

from forestream import checkpoint, processes
from forestream.data import Tokens
from forestream.errors import CheckpointError
from forestream.model import StreamingLM
from forestream.objective import IGNORED, LossConfig, TargetBatch, count_targets
from forestream.trainer import StreamTrainer
from forestream.training import TrainConfig, fit
from wrapped import prompt, shake, trainable

LOSS = LossConfig(main=1.0, stream=0.3, scorer=0.2, chunk=16)
UPDATE = 6
"""Examples of one update, however they are spread."""
COUNT = 26
"""Examples in all: the last update has two, fewer than the slots of one of two processes."""


def ragged(count: int = COUNT) -> list[Tokens]:
    """Completions of 1 to 24 tokens: parts of an update differ much in their targets."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 25, (count,), generator=generator).tolist()
    return [
        Tokens(prompt(1 + i % 4, seed=i), prompt(1 if i % 5 == 4 else n, seed=99 + i)) for i, n in enumerate(lengths)
    ]


def subject(**changes: Any) -> StreamingLM:
    """A model whose every trained weight has a gradient from the first update on."""
    model = trainable("llama", **changes)
    shake(model, seed=4, scale=0.03)
    return model


def settings(**changes: Any) -> TrainConfig:
    common = {"warmup": 0, "dtype": "float32", "log_every": 1, "save_every": 2, "batch_size": UPDATE}
    return TrainConfig(**{**common, **changes})


def run(folder: Path, model: StreamingLM, config: TrainConfig, resume: bool = False) -> dict[str, Any]:
    """Train in `folder`, and leave the weights there as an adapter folder has them."""
    report = fit(model, ragged(), 0, folder, config, LOSS, resume)
    checkpoint.write_weights(model, folder)
    return report


def lines(folder: Path) -> list[dict[str, float]]:
    """The log's lines of updates."""
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if "grad_norm" in line]


Computed = Callable[[dict[str, Tensor]], None]


@contextmanager
def watching(seen: Computed) -> Iterator[None]:
    """Show every pass's batch to `seen`."""
    compute = StreamTrainer.compute_loss

    def watched(self: StreamTrainer, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        seen(inputs)
        return compute(self, model, inputs, *args, **kwargs)

    StreamTrainer.compute_loss = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        StreamTrainer.compute_loss = compute  # type: ignore[method-assign]


@contextmanager
def means_of_passes() -> Iterator[None]:
    """The naive way: every pass takes means over its own targets, and updates average passes."""
    right = StreamTrainer.get_batch_samples

    def naive(self: StreamTrainer, *args: Any) -> Any:
        parts, _ = Trainer.get_batch_samples(self, *args)
        own = torch.stack([count_targets(TargetBatch(**part)) for part in parts]).sum(0)
        return parts, own * self.accelerator.num_processes  # a mean over each process, then over processes

    StreamTrainer.get_batch_samples = naive  # type: ignore[method-assign]
    try:
        yield
    finally:
        StreamTrainer.get_batch_samples = right  # type: ignore[method-assign]


def asked_for(inputs: dict[str, Tensor]) -> list[list[int]]:
    """The completions of a batch, without what fills it up."""
    rows = [[token for token in row if token != IGNORED] for row in inputs["targets"].tolist()]
    return [row for row in rows if row]


# --- in several processes -----------------------------------------------------------------------------------------


class Interrupted(Exception):
    """The power cut."""


def interrupted(folder: Path, config: TrainConfig, passes: int) -> None:
    """A run that ends in its pass number `passes`, in all processes, and is resumed with other fresh weights."""
    met: list[None] = []

    def cut(_: dict[str, Tensor]) -> None:
        met.append(None)
        if len(met) == passes:
            raise Interrupted

    try:
        with watching(cut):
            run(folder, subject(), config)
    except Interrupted:
        run(folder, trainable("llama", seed=99), config, resume=True)


def spread(folder: Path) -> None:
    """The same training, spread in all ways over the processes that run this."""
    met: list[list[list[int]]] = []
    with watching(lambda inputs: met.append(asked_for(inputs))):
        report = run(folder / "copies", subject(), settings(batch_size=UPDATE // 2))
    index = int(os.environ["RANK"])
    (folder / f"met-{index}.json").write_text(json.dumps(met))
    (folder / f"report-{index}.json").write_text(json.dumps(report))
    run(folder / "accumulated", subject(), settings(batch_size=1, accumulate=UPDATE // 2))
    run(folder / "shards", subject(), settings(batch_size=UPDATE // 2, layout="shards"))
    run(folder / "vocabulary", subject(), settings(batch_size=UPDATE // 2, layout="shards", draft_vocabulary=20))
    lossless = subject(mode="lossless")
    run(folder / "lossless", lossless, settings(batch_size=1, accumulate=UPDATE // 2, layout="shards"))
    frozen = sum(p.to_local().numel() for p in lossless.parameters() if not p.requires_grad)  # type: ignore[attr-defined]
    (folder / f"frozen-{index}.json").write_text(json.dumps(frozen))
    with means_of_passes():
        run(folder / "naive", subject(), settings(batch_size=UPDATE // 2))
    for layout in ("copies", "shards"):
        interrupted(folder / f"interrupted-{layout}", settings(batch_size=UPDATE // 2, layout=layout), passes=4)
    try:
        run(folder / "copies", subject(), settings(batch_size=UPDATE // 2))
    except CheckpointError as error:
        (folder / f"refused-{index}.txt").write_text(str(error))


def broken(folder: Path) -> None:
    """The last process fails in its third pass."""
    met: list[None] = []

    def fail(_: dict[str, Tensor]) -> None:
        met.append(None)
        if len(met) == 3 and not processes.is_first():
            raise RuntimeError("this process has failed")

    with watching(fail):
        run(folder / "broken", subject(), settings(batch_size=UPDATE // 2))


# --- killed ----------------------------------------------------------------------------------------------------------

CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def killed(folder: Path, moment: int, counted: Any) -> None:
    """Train, and be killed just before the change number `moment` to the files in `folder`; 0 is never.

    At the end, how many changes there were is sent to `counted`.
    """
    changes = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal changes
        if event not in CHANGES or not _concerns(folder, event, args):
            return
        changes += 1
        if changes == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    run(folder, subject(), settings(), resume=True)
    counted.send(changes)


def killed_in_a_file(folder: Path, counted: Any) -> None:
    """Train, and be killed when half of the second checkpoint's last file is written."""

    def half(self: TrainerState, path: str) -> None:
        whole(self, path)
        if self.global_step == 4:
            os.truncate(path, Path(path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    whole = TrainerState.save_to_json
    TrainerState.save_to_json = half
    run(folder, subject(), settings(), resume=True)
    counted.send(0)


def _concerns(folder: Path, event: str, args: tuple[Any, ...]) -> bool:
    if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
        return False
    if event in ("os.remove", "os.rmdir") and args[1] != -1:
        return True  # inside a folder that is being removed
    return str(args[0]).startswith(str(folder))


if __name__ == "__main__":
    {"spread": spread, "broken": broken}[sys.argv[2]](Path(sys.argv[1]))
    processes.leave()
