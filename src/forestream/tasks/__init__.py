"""Tasks: where examples come from and how outputs are scored."""

from __future__ import annotations

from typing import Final

from forestream.errors import ConfigError
from forestream.tasks.base import Example, Message, Source, Task
from forestream.tasks.chat import Chat
from forestream.tasks.dialogsum import DialogSum
from forestream.tasks.e2e import E2E
from forestream.tasks.gsm8k import GSM8K
from forestream.tasks.humaneval import HumanEval
from forestream.tasks.spec_bench import SpecBench
from forestream.tasks.sql import SQL
from forestream.tasks.synthetic import Synthetic

TASKS: Final[tuple[Task, ...]] = (
    E2E(),
    SQL(),
    DialogSum(),
    Chat(),
    SpecBench(),
    GSM8K(),
    HumanEval(),
    Synthetic(),
)
"""Every task, the most useful first."""


def get_task(name: str) -> Task:
    """Return the task of this name.

    Raises:
        ConfigError: there is none.
    """
    for task in TASKS:
        if task.name == name:
            return task
    raise ConfigError(f"found task {name!r}; expected one of {', '.join(task.name for task in TASKS)}")


__all__ = [
    "TASKS",
    "Chat",
    "DialogSum",
    "E2E",
    "Example",
    "GSM8K",
    "HumanEval",
    "Message",
    "SQL",
    "Source",
    "SpecBench",
    "Synthetic",
    "Task",
    "get_task",
]
