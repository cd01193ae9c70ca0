"""The processes of a run: how many a launcher announced, and one process alone."""

import pytest
import torch
from torch import nn

from forestream import processes
from forestream.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def test_as_many_processes_as_announced_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    processes.check_number(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    processes.check_number(2)


def test_another_number_than_announced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"announced 2 processes, but 1 would train; start several with torchrun"):
        processes.check_number(1)


def test_a_launcher_that_was_asked_for_several_and_starts_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate launch --cpu --num_processes 2 leaves these in the environment, and no WORLD_SIZE."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    processes.check_number(1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="announced several processes, but 1 would train"):
        processes.check_number(1)


def test_one_process_is_the_first_and_shards_nothing() -> None:
    assert processes.is_first()
    model = nn.Linear(2, 2)
    assert processes.whole(model.weight) is model.weight
    with pytest.raises(ConfigError, match="among several processes only; start the run with torchrun"):
        processes.shard(model, [])
    processes.leave()
    assert not torch.distributed.is_initialized()
