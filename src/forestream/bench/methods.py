"""The methods that can be compared, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from forestream.baseline import plain
from forestream.bench.stock import stock
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.steps import Step

Run = Callable[[Sequence[int]], Iterator[Step]]
PLAIN = "plain"
STOCK = "transformers"
_TREE = re.compile(r"(?P<tree>full|budget)-(?P<size>\d+)(?P<pruned>\+prune)?(?P<fused>\+fused)?")


@dataclass(frozen=True)
class Method:
    """A named way to decode; `settings` is None for plain decoding."""

    name: str
    settings: DecodeSettings | None
    run: Run


def method(
    name: str, generator: Generator, prune_below: float = 0.05, host: Callable[[], StreamingLM] | None = None
) -> Method:
    """The method of this name, on this generator.

    plain                    one token a pass
    transformers             the host library's own generate, on the model that `host` loads, as the library made it
    forestream               the generator's own settings
    budget-M, full-K         a tree of M nodes, or of the K best tokens of each stream
    ...+prune                the same, edges below `prune_below` pruned
    ...+fused                the same, every surviving node carrying streams

    Raises:
        ConfigError: the name is none of these.
    """
    model, eos, settings = generator.model, generator.eos, generator.settings
    if name == PLAIN:
        return Method(name, None, partial(plain, model, settings=settings, eos=eos))
    if name == STOCK:
        if host is None:
            raise ConfigError(f"{STOCK} needs a model of its own, which nobody said how to load")
        return Method(name, None, partial(stock, host(), settings=settings, eos=eos))
    if name != "forestream":
        match = _TREE.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"unknown method {name!r}; known are plain, transformers, forestream, budget-M and full-K, the last "
                "two also with +prune, +fused or +prune+fused"
            )
        settings = replace(
            settings,
            **_size(match["tree"], int(match["size"])),
            shape=None,
            prune_below=prune_below if match["pruned"] else 0.0,
            prune_to=None,
            carriers="fused" if match["fused"] else "deferred",
        )
    return Method(name, settings, partial(decode, model, settings=settings, eos=eos))


def _size(tree: str, size: int) -> dict[str, Any]:
    return {"tree": "full", "k": size} if tree == "full" else {"tree": "budget", "nodes": size}
