"""The methods that can be compared, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forestream.baseline import plain_batch
from forestream.bench import PLAIN
from forestream.bench.stock import stock
from forestream.bench.work import Work
from forestream.config import DecodeSettings
from forestream.decode import decode_batch
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.rivals.medusa import MedusaHeads
from forestream.rivals.medusa_folder import best_shape, load_heads
from forestream.schedule import Schedule
from forestream.steps import Step, by_text

# From prompts that are decoded together to the steps of each text.
Run = Callable[[Sequence[Sequence[int]]], list[list[Step]]]
STOCK = "transformers"
MEDUSA = "medusa"
_PLAIN_IN = re.compile(r"plain-(?P<dtype>float32|bfloat16|float16)")
_TREE = re.compile(r"(?P<tree>full|budget)-(?P<size>\d+)(?P<pruned>\+prune)?(?P<fused>\+fused)?")
_MEDUSA = re.compile(rf"{MEDUSA}(-(?P<tree>full|budget|static)-(?P<size>\d+))?")


@dataclass(frozen=True)
class Method:
    """A named way to decode.

    Attributes:
        settings: of its draft trees; None for plain decoding.
        work: what it adds to the model; None where nobody counts it.
    """

    name: str
    settings: DecodeSettings | None
    run: Run
    work: Work | None = None


@dataclass(frozen=True)
class Medusa:
    """Medusa heads on a generator's model, and the folder that they came from."""

    heads: MedusaHeads
    folder: Path

    @staticmethod
    def load(folder: Path, generator: Generator) -> Medusa:
        """The heads of `folder`, on the model of `generator`. Errors as in `load_heads`.

        Raises:
            ConfigError: the generator was not loaded from an adapter folder.
        """
        if generator.adapter is None:
            raise ConfigError("heads belong to an adapter; load the generator from its folder (from_pretrained)")
        return Medusa(load_heads(folder, generator.adapter, generator.model), folder)


def method(
    name: str,
    generator: Generator,
    prune_below: float = 0.05,
    host: Callable[[], StreamingLM] | None = None,
    load: Callable[[str], Generator] | None = None,
    medusa: Medusa | None = None,
) -> Method:
    """The method of this name, on this generator.

    plain                    one token a pass
    plain-DTYPE              the same, on the model that `load` loads in float32, bfloat16 or float16
    transformers             the host library's own generate, on the model that `host` loads, as the library made it
    forestream               the generator's own settings
    budget-M, full-K         a tree of M nodes, or of the K best tokens of each stream
    ...+prune                the same, edges below `prune_below` pruned
    ...+fused                the same, every surviving node carrying streams
    medusa                   heads in place of streams, with the generator's own tree
    medusa-static-M          the same, with the tree of M nodes that their measured acceptance makes the best
    medusa-budget-M, -full-K the same, with a tree of M nodes, or of the K best tokens of each head

    Raises:
        ConfigError: the name is none of these.
    """
    if name == PLAIN:
        return _plain(name, generator)
    if (match := _PLAIN_IN.fullmatch(name)) is not None:
        if load is None:
            raise ConfigError(f"{name} needs a model of its own, which nobody said how to load")
        return _plain(name, load(match["dtype"]))
    if name == STOCK:
        if host is None:
            raise ConfigError(f"{STOCK} needs a model of its own, which nobody said how to load")
        if not generator.sampling.greedy:
            raise ConfigError(f"{STOCK} draws with randomness of its own, so texts cannot be compared; leave it out")
        bare = host()
        work = Work.of(generator.model)
        return Method(name, None, lambda prompts: stock(bare, prompts, generator.settings, generator.eos), work)
    if name == "forestream":
        return drafting(name, generator, generator.settings, generator.schedule)
    if (match := _MEDUSA.fullmatch(name)) is not None:
        return _medusa(name, generator, medusa, match["tree"], int(match["size"] or 0))
    match = _TREE.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"unknown method {name!r}; known are plain, plain-DTYPE, transformers, forestream, budget-M and full-K, "
            "the last two also with +prune, +fused or +prune+fused; medusa, medusa-static-M, -budget-M and -full-K"
        )
    settings = replace(
        generator.settings,
        **_size(match["tree"], int(match["size"])),
        shape=None,
        prune_below=prune_below if match["pruned"] else 0.0,
        prune_to=None,
        carriers="fused" if match["fused"] else "deferred",
    )
    return drafting(name, generator, settings)


def _plain(name: str, generator: Generator) -> Method:
    def run(prompts: Sequence[Sequence[int]]) -> list[list[Step]]:
        run = plain_batch(generator.model, _asked(generator, prompts), generator.settings)
        return by_text(run, len(prompts))

    return Method(name, None, run, Work.of(generator.model))


def drafting(
    name: str,
    generator: Generator,
    settings: DecodeSettings,
    schedule: Schedule | None = None,
    heads: MedusaHeads | None = None,
) -> Method:
    """Decoding with drafts under `settings`, or under a schedule that begins with them; of heads, or of streams."""
    model = generator.model

    def run(prompts: Sequence[Sequence[int]]) -> list[list[Step]]:
        run = decode_batch(model, _asked(generator, prompts), schedule or settings, heads=heads)
        return by_text(run, len(prompts))

    work = Work.of(model, settings) if heads is None else Work.of_heads(model, settings, heads)
    return Method(name, settings, run, work)


def _medusa(name: str, generator: Generator, medusa: Medusa | None, tree: str | None, size: int) -> Method:
    if medusa is None:
        raise ConfigError(f"{name} needs heads; give the folder that `forestream train-medusa` wrote (--medusa)")
    settings = replace(generator.settings, prune_below=0.0, prune_to=None, carriers="deferred")
    if tree == "static":
        settings = replace(settings, tree="static", shape=best_shape(medusa.folder, size), streams=None)
    elif tree is not None:
        settings = replace(settings, **_size(tree, size), shape=None, streams=None)
    return drafting(name, generator, settings, heads=medusa.heads)


def _asked(generator: Generator, prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(tuple(prompt), generator.eos, generator.sampling, row=row) for row, prompt in enumerate(prompts)]


def _size(tree: str, size: int) -> dict[str, Any]:
    return {"tree": "full", "k": size} if tree == "full" else {"tree": "budget", "nodes": size}
