"""Which settings run an adapter fastest on a machine: predicted from its profile, checked by running the best few.

The choice is kept as a file beside the adapter, with the set-up that it holds for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from forestream import provenance
from forestream.acceptance import Simulated, Trace, rates, record, simulate
from forestream.baseline import plain
from forestream.bench import PLAIN
from forestream.bench.methods import drafting, method
from forestream.bench.runner import compare
from forestream.config import DecodeSettings, JsonConfig
from forestream.cost import Profile, best_static_tree, pass_seconds, plain_seconds
from forestream.drafting import RankDrafter, drafter_for
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.schedule import Schedule
from forestream.steps import tokens_of

FILE: Final = "decoding.json"
"""Name of the settings file in an adapter's folder."""


@dataclass(frozen=True)
class Setup(JsonConfig):
    """What speed depends on beside the settings.

    Attributes:
        processor, threads, device: of the machine.
        dtype, compile: how the model is run.
    """

    processor: str
    threads: int
    device: str
    dtype: str
    compile: str


@dataclass(frozen=True)
class Tuned(JsonConfig):
    """The choice that `forestream tune` made, and for which set-up.

    Attributes:
        batches: pairs (rows, settings) for that many texts together and more; `decode` is for one.
    """

    setup: Setup
    decode: DecodeSettings
    batches: tuple[tuple[int, DecodeSettings], ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        if set(values) - {"batches"} != {"setup", "decode"}:
            found = ", ".join(sorted(values))
            raise ConfigError(f"a settings file holds 'setup' and 'decode', perhaps 'batches'; found {found}")
        batches = tuple((int(rows), DecodeSettings.from_dict(one)) for rows, one in values.get("batches", ()))
        return cls(Setup.from_dict(values["setup"]), DecodeSettings.from_dict(values["decode"]), batches)

    @property
    def schedule(self) -> Schedule:
        """Settings by the number of texts under way."""
        return Schedule(((1, self.decode), *self.batches))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises:
        ConfigError: the file is missing or malformed.
        """
        if not path.is_file():
            raise ConfigError(f"there is no settings file {path}; `forestream tune` writes one")
        try:
            return cls.from_json(path.read_text())
        except (TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is malformed: {error}") from error


def this_setup(dtype: str, device: str, compile: str) -> Setup:
    """The set-up of this process."""
    machine = provenance.machine()
    return Setup(machine["processor"], machine["threads"], device, dtype, compile)


# --- prediction ---------------------------------------------------------------------------------------------------

BUDGETS: Final = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
LOOKED_UP: Final = ((0, 0), (3, 0), (0, 4), (3, 4))
"""Nodes that are looked up beside a budget tree and behind its first choices."""

CARRIED: Final = (1, 2, 3)
"""Nodes of a budget tree that carry fused streams, where not all do."""

FULL: Final = ((1, 4), (2, 2), (2, 3), (3, 2))
"""Full trees as (k, most streams): larger ones hold more nodes than any of the others."""


@dataclass(frozen=True)
class Prediction:
    """What a setting is expected to do on some texts.

    Attributes:
        name: short, unique within a grid.
        tokens_per_pass: generated tokens over passes, the prompts' passes left out.
        pass_seconds: mean over the passes.
        tokens_per_second: decoding speed after the prompt passes.
        speedup: over plain decoding, predicted in the same way.
    """

    name: str
    settings: DecodeSettings
    tokens_per_pass: float
    pass_seconds: float
    tokens_per_second: float
    speedup: float


def record_traces(
    generator: Generator, prompts: Sequence[Sequence[int]], advance: Callable[[], None] = lambda: None
) -> list[Trace]:
    """What streams would have drafted at every place of the texts that the model writes after `prompts`."""
    traces = []
    for prompt in prompts:
        tokens = tokens_of(list(plain(generator.model, prompt, generator.settings, generator.eos)))
        traces.append(record(generator.model, prompt, tokens, limit=generator.settings.max_new_tokens))
        advance()
    return traces


def grid(traces: Sequence[Trace], streams: int, base: DecodeSettings) -> list[DecodeSettings]:
    """Every setting that is considered: budget, full and static trees with 1 to G streams, fused and deferred.

    Beside budget trees drafts are looked up, too, and few of their nodes may carry the fused streams.
    """
    bare = replace(base, tree="budget", shape=None, carried=None, prune_below=0.0, prune_to=None)
    bare = replace(bare, lookup_beside=0, lookup_behind=0)
    settings = []
    for used in range(1, streams + 1):
        here = replace(bare, streams=used)
        settings += [
            replace(here, nodes=nodes, lookup_beside=beside, lookup_behind=behind)
            for nodes in BUDGETS
            for beside, behind in LOOKED_UP
        ]
        settings += [replace(here, tree="full", k=k) for k, most in FULL if used <= most]
        accept = rates(traces, used)
        for nodes in BUDGETS:
            parents, ranks = best_static_tree(accept, nodes)
            shape = tuple(zip(parents[1:], ranks[1:], strict=True))
            settings.append(replace(here, tree="static", shape=shape))
    # Where streams have few candidates, the best shapes of several sizes are one.
    return list(dict.fromkeys(how for one in settings for how in _carriers(one)))


def _carriers(settings: DecodeSettings) -> list[DecodeSettings]:
    fused = replace(settings, carriers="fused")
    few = [count for count in CARRIED if count < settings.nodes] if settings.tree == "budget" else []
    return [replace(settings, carriers="deferred"), fused, *(replace(fused, carried=count) for count in few)]


def name_of(settings: DecodeSettings) -> str:
    """A short name: form and size of the tree, streams, where they are computed, and what is looked up."""
    size = {"budget": settings.nodes, "full": settings.k, "static": len(settings.shape or ()) + 1}[settings.tree]
    few = "" if settings.carried is None else f"-{settings.carried}"
    fused = f"+fused{few}" if settings.carriers == "fused" else ""
    beside, behind = settings.lookup_beside, settings.lookup_behind
    looked_up = f"+lookup-{beside}-{behind}" if beside or behind else ""
    return f"{settings.tree}-{size}+G{settings.streams}{fused}{looked_up}"


def predict(costs: Profile, traces: Sequence[Trace], settings: DecodeSettings) -> Prediction:
    """Passes of the texts by simulation, and their seconds by the profile.

    Raises:
        ConfigError: no text goes beyond its first token.
    """
    return predict_all(costs, traces, [settings])[0]


def predict_all(
    costs: Profile,
    traces: Sequence[Trace],
    settings: Sequence[DecodeSettings],
    advance: Callable[[], None] = lambda: None,
) -> list[Prediction]:
    """`predict` of each, in their order; settings that differ in carriers alone draft alike, and are simulated once."""
    known: dict[DecodeSettings, list[Simulated]] = {}
    found = []
    for one in settings:
        drafter: RankDrafter = drafter_for(one)
        streams = one.streams if one.streams is not None else traces[0].streams
        trees = replace(one, carriers="deferred", carried=None)
        if trees not in known:
            known[trees] = [simulate(trace, drafter, streams, one) for trace in traces]
        found.append(_priced(costs, known[trees], one, streams))
        advance()
    return found


def _priced(costs: Profile, runs: Sequence[Simulated], settings: DecodeSettings, streams: int) -> Prediction:
    passes = sum(run.passes for run in runs)
    seconds = sum(_seconds(costs, run, settings, streams) for run in runs)
    decoded = sum(run.tokens - 1 for run in runs)
    if not passes:
        raise ConfigError("no text of the traces goes beyond its first token; there is nothing to speed up")
    speed = decoded / seconds
    return Prediction(
        name_of(settings),
        settings,
        sum(run.tokens for run in runs) / passes,
        seconds / passes,
        speed,
        speed * plain_seconds(costs),
    )


def _seconds(costs: Profile, run: Simulated, settings: DecodeSettings, streams: int) -> float:
    few = settings.carried if settings.carriers == "fused" else None
    missed = [few is not None and end >= few for end in run.ends]
    return sum(
        pass_seconds(costs, nodes, streams, settings.carriers, carried=few, missed=deferred)
        for nodes, deferred in zip(run.nodes, missed, strict=True)
    )


def shortlist(predictions: Sequence[Prediction], most: int) -> list[Prediction]:
    """The `most` best predictions, fastest first."""
    return sorted(predictions, key=lambda one: -one.tokens_per_second)[:most]


def measure(
    generator: Generator,
    candidates: Sequence[Prediction],
    prompts: Sequence[Sequence[int]],
    repeats: int = 1,
    advance: Callable[[], None] = lambda: None,
    batch: int = 1,
) -> dict[str, dict[str, Any]]:
    """Run plain decoding and the candidates in turns, `batch` prompts together: entries of a bench file, by name."""
    methods = [method(PLAIN, generator), *(drafting(one.name, generator, one.settings) for one in candidates)]
    return compare(generator.model, methods, prompts, repeats, advance, batch)


def choose(candidates: Sequence[Prediction], results: dict[str, dict[str, Any]]) -> tuple[str, DecodeSettings]:
    """The fastest as measured, by name; plain decoding, a tree of the root alone, if nothing is faster."""
    fastest = max(results, key=lambda name: results[name]["speedup"]["of_totals"])
    if fastest == PLAIN:
        nothing = replace(candidates[0].settings, tree="budget", shape=None, nodes=1, streams=None)
        return PLAIN, replace(nothing, lookup_beside=0, lookup_behind=0)
    return fastest, next(one.settings for one in candidates if one.name == fastest)


def share_of_best(name: str, results: dict[str, dict[str, Any]]) -> float:
    """Speed of `name` over the highest speed in `results`, in which it stands: 1 if it is the fastest."""
    speeds = {one: float(result["speedup"]["of_totals"]) for one, result in results.items()}
    return speeds[name] / max(speeds.values())
