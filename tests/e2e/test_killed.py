"""Runs that are killed while they write, and go on: their weights are those of a run that nothing happened to."""

import multiprocessing
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forestream.checkpoint import LORA, STREAMS
from scaled import killed, killed_in_a_file, lines

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def context() -> Any:
    """Starts processes out of one that has the libraries loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=":")
        patch.setenv("OMP_NUM_THREADS", "1")
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["scaled"])
        yield forks


def start(context: Any, target: Callable[..., None], *arguments: object) -> int:
    """Run `target` in a process of its own; how many changes to files it made, 0 if it was killed."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender))
    process.start()
    sender.close()
    process.join(600)
    if process.exitcode == -signal.SIGKILL:
        return 0
    assert process.exitcode == 0
    changes: int = receiver.recv()
    return changes


def left(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (LORA, STREAMS)}


@pytest.fixture(scope="module")
def whole(context: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], int]:
    """What an uninterrupted run leaves, and how many changes to files it made."""
    folder = tmp_path_factory.mktemp("whole")
    changes = start(context, killed, folder, 0)
    assert changes > 30
    return left(folder), changes


def assert_goes_on(context: Any, folder: Path, whole: dict[str, bytes]) -> None:
    assert start(context, killed, folder, 0) > 0
    assert left(folder) == whole
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def test_killed_before_any_change_to_its_files(
    context: Any, whole: tuple[dict[str, bytes], int], tmp_path: Path
) -> None:
    moments = random.Random(1).sample(range(1, whole[1]), 6)
    for moment in moments:
        folder = tmp_path / str(moment)
        assert start(context, killed, folder, moment) == 0
        assert_goes_on(context, folder, whole[0])


def test_killed_again_and_again(context: Any, whole: tuple[dict[str, bytes], int], tmp_path: Path) -> None:
    for moment in random.Random(2).sample(range(5, 20), 5):
        start(context, killed, tmp_path, moment)
    assert_goes_on(context, tmp_path, whole[0])


def test_killed_in_the_middle_of_a_file(context: Any, whole: tuple[dict[str, bytes], int], tmp_path: Path) -> None:
    assert start(context, killed_in_a_file, tmp_path) == 0
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert (tmp_path / "unfinished" / "checkpoint-4" / "trainer_state.json").is_file()
    assert_goes_on(context, tmp_path, whole[0])
