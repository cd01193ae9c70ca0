"""Speculative Streaming: a language model that drafts its own next tokens in the pass that checks the last ones.

    from forestream import Generator

    generator = Generator.from_pretrained("adapters/smollm2-135m-e2e")
    print(generator.generate("name[Blue Spice], eatType[coffee shop] ->").text)

Names are loaded on first use, so that importing the package stays instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forestream.config import DecodeSettings, SamplingSettings, StreamConfig
    from forestream.errors import ForestreamError
    from forestream.generation import Generation, Generator
    from forestream.grammar import Grammar
    from forestream.memory import Memory
    from forestream.requests import Request
    from forestream.schedule import Schedule
    from forestream.steps import Counters, Step

_HOMES = {
    "Counters": "forestream.steps",
    "DecodeSettings": "forestream.config",
    "ForestreamError": "forestream.errors",
    "Generation": "forestream.generation",
    "Generator": "forestream.generation",
    "Grammar": "forestream.grammar",
    "Memory": "forestream.memory",
    "Request": "forestream.requests",
    "SamplingSettings": "forestream.config",
    "Schedule": "forestream.schedule",
    "Step": "forestream.steps",
    "StreamConfig": "forestream.config",
}

__all__ = [
    "Counters",
    "DecodeSettings",
    "ForestreamError",
    "Generation",
    "Generator",
    "Grammar",
    "Memory",
    "Request",
    "SamplingSettings",
    "Schedule",
    "Step",
    "StreamConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forestream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
