"""Runs methods prompt by prompt, in turn, and adds up what each of them did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from forestream.agreement import first_difference_margin
from forestream.bench import PLAIN
from forestream.bench.log import log_of
from forestream.bench.measures import Latency, drafts_of, over_repeats
from forestream.bench.methods import Method
from forestream.errors import ConfigError, ForestreamError
from forestream.model import StreamingLM
from forestream.steps import Counters, Step, tokens_of

WORK: Final = ("extra_parameters", "extra_bytes", "operations_per_pass", "extra_operations_per_pass")
"""Entries that say what a method adds; null of methods that nobody counts them for."""


@dataclass(frozen=True)
class Run:
    """One method on one prompt of so many tokens: what it wrote, its steps and the counters of every repeat."""

    prompt: int
    tokens: tuple[int, ...]
    steps: tuple[Sequence[Step], ...]
    repeats: tuple[Counters, ...]

    @staticmethod
    def of(prompt: int, tokens: tuple[int, ...], again: Sequence[Sequence[Step]]) -> Run:
        return Run(prompt, tokens, tuple(again), tuple(map(Counters.of, again)))

    @property
    def pace(self) -> float:
        """Seconds per token after the first, the median over repeats."""
        return median(c.decode_seconds / max(c.decoded, 1) for c in self.repeats)


@dataclass
class Record:
    """What one method did on all prompts so far."""

    method: Method
    runs: list[Run] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    latency: Latency = field(default_factory=Latency)
    equal: list[bool] = field(default_factory=list)

    def summary(self, baseline: Record) -> dict[str, Any]:
        """The method's entry of the bench file; speedups are against `baseline`, prompt by prompt and in total.

        Counts are of one repeat (they do not vary); times are of the repeats put together.
        """
        once, every = self._once(), Counters()
        for run in self.runs:
            for counters in run.repeats:
                every.merge(counters)
        repeats = max(len(self.runs[0].repeats), 1)
        return {
            "settings": vars(self.method.settings) if self.method.settings else None,
            "prompts": len(self.runs),
            "generated_tokens": once.generated,
            "passes": once.passes,
            "call_reduction": round(once.call_reduction, 4),
            "mean_acceptance_length": round(once.mean_acceptance_length, 4),
            "acceptance_by_position": [round(share, 4) for share in once.acceptance_by_position],
            "acceptance_given_previous": [round(share, 4) for share in once.acceptance_given_previous],
            "accepted_histogram": list(once.histogram),
            "nodes_per_pass": round(once.nodes_per_pass, 3),
            "drafted_per_pass": round(max(once.nodes_per_pass - 1, 0), 3),
            "accepted_per_pass": round(once.mean_acceptance_length - 1, 4),
            **drafts_of([run.steps[0] for run in self.runs], self.method.settings),
            "draft_calls": once.draft_calls,
            "draft_seconds": round(every.draft_seconds / repeats, 4),
            "decode_seconds": round(every.decode_seconds / repeats, 4),
            "tokens_per_second": round(every.tokens_per_second, 3),
            "seconds_per_pass": round(every.decode_seconds / max(every.passes, 1), 6),
            "time_to_first_token": round(every.prompt_seconds / (len(self.runs) * repeats), 5),
            "latency": self.latency.record(),
            "over_repeats": over_repeats([self._once(repeat) for repeat in range(repeats)]),
            **self._work(),
            "equal_outputs": sum(self.equal),
            "first_difference_margins": [round(margin, 5) for margin in self.margins],
            "speedup": speedup_of(self.runs, baseline.runs),
            "per_prompt": {
                "tokens": [len(run.tokens) for run in self.runs],
                "passes": [run.repeats[0].passes for run in self.runs],
                "accepted": [run.repeats[0].accepted for run in self.runs],
                "decode_seconds": [[round(c.decode_seconds, 5) for c in run.repeats] for run in self.runs],
            },
        }

    def part(self, places: Sequence[int], baseline: Record) -> dict[str, Any]:
        """What `summary` says first, of the prompts at `places` alone."""
        runs = [self.runs[place] for place in places]
        once = self._once(places=places)
        return {
            "prompts": len(runs),
            "generated_tokens": once.generated,
            "passes": once.passes,
            "call_reduction": round(once.call_reduction, 4),
            "mean_acceptance_length": round(once.mean_acceptance_length, 4),
            "equal_outputs": sum(self.equal[place] for place in places),
            "speedup": speedup_of(runs, [baseline.runs[place] for place in places]),
        }

    @property
    def acceptance(self) -> list[float]:
        """Mean acceptance length, prompt by prompt."""
        return [run.repeats[0].mean_acceptance_length for run in self.runs]

    def log(self) -> list[list[str]]:
        """Every pass of every repeat, prompt by prompt."""
        return [[log_of(steps) for steps in run.steps] for run in self.runs]

    def _once(self, repeat: int = 0, places: Sequence[int] | None = None) -> Counters:
        """One repeat of all prompts, or of some, put together."""
        counters = Counters()
        for place in range(len(self.runs)) if places is None else places:
            counters.merge(self.runs[place].repeats[repeat])
        return counters

    def _work(self) -> dict[str, Any]:
        work = self.method.work
        if work is None:
            return dict.fromkeys(WORK)
        return work.record([(run.prompt, run.steps[0]) for run in self.runs])


def speedup_of(own: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    """Seconds per token of `baseline` over those of the same prompts' `own` runs, one by one and in total."""
    ratios = [theirs.pace / mine.pace for mine, theirs in zip(own, baseline, strict=True) if mine.pace]
    theirs, mine = (sum(run.pace * (len(run.tokens) - 1) for run in runs) for runs in (baseline, own))
    return {
        "median": round(median(ratios), 4) if ratios else None,
        "min": round(min(ratios), 4) if ratios else None,
        "max": round(max(ratios), 4) if ratios else None,
        "of_totals": round(theirs / max(mine, 1e-12), 4),
    }


def compare(
    model: StreamingLM,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    repeats: int = 1,
    advance: Callable[[], None] = lambda: None,
    batch: int = 1,
) -> dict[str, dict[str, Any]]:
    """Run every method on every prompt: entries of a bench file, by name. Arguments and errors as in `run`."""
    records = run(model, methods, prompts, repeats, advance, batch)
    return {name: record.summary(records[PLAIN]) for name, record in records.items()}


def run(
    model: StreamingLM,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    repeats: int = 1,
    advance: Callable[[], None] = lambda: None,
    batch: int = 1,
) -> dict[str, Record]:
    """Run every method on every prompt, interleaved.

    Prompts go in groups of `batch`, which are decoded together; a pass counts with its share for each of its texts, so
    a text's seconds are those that it kept the machine busy. Within a group and repeat the methods take turns, and who
    begins changes, so that a drift of the machine hits all of them alike. The first group is run once by each
    beforehand and not counted. Prompts on which nothing is decoded after the prompt pass count for equality, not for
    speed.

    Args:
        methods: "plain" must be among them.
        advance: called for each prompt, for a progress bar.

    Raises:
        ConfigError: plain is missing, a method is named twice, or there is no prompt.
        ForestreamError: a method wrote two different texts after one prompt.
    """
    records = _records(methods, prompts)
    for method in methods:
        method.run(prompts[:batch])
    for number, first in enumerate(range(0, len(prompts), batch)):
        group = prompts[first : first + batch]
        runs: dict[str, list[list[list[Step]]]] = {name: [[] for _ in group] for name in records}
        for repeat in range(repeats):
            for place in range(len(methods)):
                method = methods[(place + number + repeat) % len(methods)]
                for before, steps in zip(runs[method.name], method.run(group), strict=True):
                    before.append(steps)
        for name, texts in runs.items():
            _note(model, records[name], group, texts, [tokens_of(again[0]) for again in runs[PLAIN]], first)
        for _ in group:
            advance()
    return records


def _note(
    model: StreamingLM,
    record: Record,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[Sequence[Step]]],
    wanted: Sequence[tuple[int, ...]],
    first: int,
) -> None:
    """Add what a method did on a group of prompts, the first of which is number `first`, to its record.

    Args:
        texts: steps of every repeat, for every prompt.
        wanted: plain decoding's texts.
    """
    for together in zip(*texts, strict=True):
        record.latency.add(together)
    for place, (prompt, again, plain) in enumerate(zip(prompts, texts, wanted, strict=True)):
        own = _text(record.method.name, first + place, again)
        record.runs.append(Run.of(len(prompt), own, again))
        record.equal.append(own == plain)
        if own != plain:
            record.margins.append(first_difference_margin(model, prompt, plain, own))


def _text(name: str, number: int, again: Sequence[Sequence[Step]]) -> tuple[int, ...]:
    """The one text that all repeats wrote.

    Raises:
        ForestreamError: they wrote several.
    """
    texts = {tokens_of(steps) for steps in again}
    if len(texts) > 1:
        raise ForestreamError(f"{name} wrote another text when it was run again on prompt {number}")
    return texts.pop()


def _records(methods: Sequence[Method], prompts: Sequence[Sequence[int]]) -> dict[str, Record]:
    records = {method.name: Record(method) for method in methods}
    if len(records) < len(methods):
        raise ConfigError(f"methods are {', '.join(m.name for m in methods)}; name each of them once")
    if PLAIN not in records:
        raise ConfigError(f"methods are {', '.join(records)}; plain must be among them, as the baseline")
    if not prompts:
        raise ConfigError("there is no prompt to run")
    return records
