"""The methods that can be compared, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from forestream.baseline import plain_batch
from forestream.bench import PLAIN
from forestream.bench.assisted import AssistedSettings, StockLookupSettings, assisted, looked_up
from forestream.bench.stock import stock
from forestream.bench.work import Work
from forestream.config import DecodeSettings, JsonConfig
from forestream.decode import decode_batch
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.rivals.lookahead import Lookahead, LookaheadSettings
from forestream.rivals.lookup import Lookup, LookupSettings
from forestream.rivals.loop import Source, drafted_batch
from forestream.rivals.medusa import MedusaHeads
from forestream.rivals.medusa_folder import best_shape, load_heads
from forestream.rivals.two_model import TwoModel, TwoModelSettings, check_same_tokens
from forestream.schedule import Schedule
from forestream.steps import Step, by_text

# From prompts that are decoded together to the steps of each text.
Run = Callable[[Sequence[Sequence[int]]], list[list[Step]]]
Load = TypeVar("Load", bound=Callable[..., Any])
Settings = TypeVar("Settings", bound=JsonConfig)
STOCK = "transformers"
MEDUSA = "medusa"
KNOWN: Final = (
    "plain, plain-DTYPE, forestream, budget-M and full-K (these two also with +prune, +GN, +fused[-N] and +lookup-B-A, "
    "in this order), "
    "lookup[-GAMMA[-N]], lookahead[-W-N-G], draft-model[-GAMMA], medusa, medusa-static-M, medusa-budget-M, "
    "medusa-full-K, transformers, transformers+lookup[-GAMMA], transformers+draft-model[-GAMMA]"
)
_PLAIN_IN = re.compile(r"plain-(?P<dtype>float32|bfloat16|float16)")
_TREE = re.compile(
    r"(?P<tree>full|budget)-(?P<size>\d+)(?P<pruned>\+prune)?(\+G(?P<streams>\d+))?(?P<fused>\+fused(-(?P<carried>\d+))?)?"
    r"(\+lookup-(?P<beside>\d+)-(?P<behind>\d+))?"
)
_MEDUSA = re.compile(rf"{MEDUSA}(-(?P<tree>full|budget|static)-(?P<size>\d+))?")
_LOOKUP = re.compile(r"lookup(-(?P<gamma>\d+)(-(?P<max_ngram>\d+))?)?")
_LOOKAHEAD = re.compile(r"lookahead(-(?P<window>\d+)-(?P<ngram>\d+)-(?P<guesses>\d+))?")
_DRAFT_MODEL = re.compile(r"draft-model(-(?P<gamma>\d+))?")
_STOCK_LOOKUP = re.compile(r"transformers\+lookup(-(?P<gamma>\d+))?")
_STOCK_ASSISTED = re.compile(r"transformers\+draft-model(-(?P<gamma>\d+))?")


@dataclass(frozen=True)
class Method:
    """A named way to decode.

    Attributes:
        settings: of its draft trees; None for plain decoding.
        work: what it adds to the model; None where nobody counts it.
    """

    name: str
    settings: JsonConfig | None
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
    draft: Callable[[], Generator] | None = None,
    assistant: Callable[[], Generator] | None = None,
    medusa: Medusa | None = None,
) -> Method:
    """The method of this name, on this generator.

    plain                           one token a pass
    plain-DTYPE                     the same, on the model that `load` loads in float32, bfloat16 or float16
    forestream                      the generator's own settings
    budget-M, full-K                a tree of M nodes, or of the K best tokens of each stream
    ...+prune                       the same, edges below `prune_below` pruned
    ...+GN                          the same, drafted by the first N streams
    ...+fused                       the same, every surviving node carrying streams
    ...+fused-N                     the same, the N nodes of a budget tree where the pass most likely ends carrying them
    ...+lookup-B-A                  the same, B nodes looked up beside the tree and A behind its first choices
    lookup-GAMMA-N                  prompt lookup: GAMMA tokens behind a match of N tokens at most
    lookahead-W-N-G                 lookahead decoding: W columns of guesses, n-grams of N tokens, G of them checked
    draft-model-GAMMA               two-model decoding: the model that `draft` loads writes GAMMA tokens ahead
    medusa                          heads in place of streams, with the generator's own tree
    medusa-static-M                 the same, with the tree of M nodes that their measured acceptance makes the best
    medusa-budget-M, -full-K        the same, with a tree of M nodes, or of the K best tokens of each head
    transformers                    the host library's own generate, on the model that `host` loads, as it made it
    transformers+lookup-GAMMA       the same with the library's prompt lookup
    transformers+draft-model-GAMMA  the same, assisted by the model that `assistant` loads, as the library made it

    Numbers may be left out.

    Raises:
        ConfigError: the name is none of these, a number is out of range, a draft model has another vocabulary, or
            nothing loads the model that a method needs.
    """
    if name == PLAIN:
        return _plain(name, generator)
    if (match := _PLAIN_IN.fullmatch(name)) is not None:
        return _plain(name, _needed(name, load)(match["dtype"]))
    if name == "forestream":
        return drafting(name, generator, generator.settings, generator.schedule)
    if (match := _MEDUSA.fullmatch(name)) is not None:
        return _medusa(name, generator, medusa, match["tree"], int(match["size"] or 0))
    if (match := _TREE.fullmatch(name)) is not None:
        return drafting(name, generator, _tree(match, generator.settings, prune_below))
    if name.startswith(("lookup", "lookahead", "draft-model")):
        return _of_rival(name, generator, draft)
    if name.partition("+")[0] == STOCK:
        return _of_stock(name, generator, host, assistant)
    raise _unknown(name)


def _of_rival(name: str, generator: Generator, draft: Callable[[], Generator] | None) -> Method:
    """A method whose drafts come from the text, or from a small model."""
    if (match := _LOOKUP.fullmatch(name)) is not None:
        own = _numbered(LookupSettings, match)
        return _rival(name, generator, own, Lookup(own))
    if (match := _LOOKAHEAD.fullmatch(name)) is not None:
        size = _numbered(LookaheadSettings, match)
        return _rival(name, generator, size, Lookahead(size))
    if (match := _DRAFT_MODEL.fullmatch(name)) is not None:
        small = _needed(name, draft)()
        check_same_tokens(generator, small)
        gamma = _numbered(TwoModelSettings, match)
        return _rival(name, generator, gamma, TwoModel(small.model, gamma))
    raise _unknown(name)


def _of_stock(
    name: str,
    generator: Generator,
    host: Callable[[], StreamingLM] | None,
    assistant: Callable[[], Generator] | None,
) -> Method:
    """A method of the host library's."""
    looks, asks = _STOCK_LOOKUP.fullmatch(name), _STOCK_ASSISTED.fullmatch(name)
    if not (name == STOCK or looks or asks):
        raise _unknown(name)
    if host is None:
        raise _unloaded(name)
    if not generator.sampling.greedy:
        raise ConfigError(f"{name} draws with randomness of its own, so texts cannot be compared; leave it out")
    cap, eos = generator.settings, generator.eos
    if looks:
        ahead = _numbered(StockLookupSettings, looks)
        bare = host()
        return Method(name, ahead, lambda prompts: looked_up(bare, prompts, cap, ahead, eos))
    if asks:
        small, gamma = _needed(name, assistant)(), _numbered(AssistedSettings, asks)
        check_same_tokens(generator, small)
        bare = host()
        return Method(name, gamma, lambda prompts: assisted(bare, small.host, prompts, cap, gamma, eos))
    bare = host()
    return Method(name, None, lambda prompts: stock(bare, prompts, cap, eos), Work.of(generator.model))


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"unknown method {name!r}; known are {KNOWN}")


def _unloaded(name: str) -> ConfigError:
    hint = "; give --draft-model FOLDER" if "draft-model" in name else ""
    return ConfigError(f"{name} needs a model of its own, which nobody said how to load{hint}")


def _needed(name: str, load: Load | None) -> Load:
    if load is None:
        raise _unloaded(name)
    return load


def _numbered(kind: type[Settings], match: re.Match[str]) -> Settings:
    """Settings whose numbers stand in a method's name; those that do not are as by default."""
    return kind(**{name: int(number) for name, number in match.groupdict().items() if number is not None})


def _tree(match: re.Match[str], settings: DecodeSettings, prune_below: float) -> DecodeSettings:
    return replace(
        settings,
        **_size(match["tree"], int(match["size"])),
        shape=None,
        prune_below=prune_below if match["pruned"] else 0.0,
        prune_to=None,
        streams=int(match["streams"]) if match["streams"] else settings.streams,
        carriers="fused" if match["fused"] else "deferred",
        carried=int(match["carried"]) if match["carried"] else None,
        lookup_beside=int(match["beside"] or 0),
        lookup_behind=int(match["behind"] or 0),
    )


def _plain(name: str, generator: Generator) -> Method:
    def run(prompts: Sequence[Sequence[int]]) -> list[list[Step]]:
        run = plain_batch(generator.model, _asked(generator, prompts), generator.settings)
        return by_text(run, len(prompts))

    return Method(name, None, run, Work.of(generator.model))


def _rival(name: str, generator: Generator, settings: JsonConfig, source: Source) -> Method:
    """Decoding with drafts of another source than streams."""

    def run(prompts: Sequence[Sequence[int]]) -> list[list[Step]]:
        run = drafted_batch(generator.model, _asked(generator, prompts), generator.settings, source)
        return by_text(run, len(prompts))

    return Method(name, settings, run)


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
    bare = replace(generator.settings, prune_below=0.0, prune_to=None, lookup_beside=0, lookup_behind=0)
    settings = replace(bare, carriers="deferred")
    if tree == "static":
        settings = replace(settings, tree="static", shape=best_shape(medusa.folder, size), streams=None)
    elif tree is not None:
        settings = replace(settings, **_size(tree, size), shape=None, streams=None)
    return drafting(name, generator, settings, heads=medusa.heads)


def _asked(generator: Generator, prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [Request(tuple(prompt), generator.eos, generator.sampling, row=row) for row, prompt in enumerate(prompts)]


def _size(tree: str, size: int) -> dict[str, Any]:
    return {"tree": "full", "k": size} if tree == "full" else {"tree": "budget", "nodes": size}
