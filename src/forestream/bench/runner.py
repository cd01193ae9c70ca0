"""Runs methods prompt by prompt, in turn, and adds up what each of them did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from forestream.agreement import first_difference_margin
from forestream.bench.methods import PLAIN, Method
from forestream.errors import ConfigError, ForestreamError
from forestream.model import StreamingLM
from forestream.steps import Counters, Step, tokens_of


@dataclass(frozen=True)
class Run:
    """One method on one prompt: its tokens, and the counters of every repeat."""

    tokens: tuple[int, ...]
    repeats: tuple[Counters, ...]

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
    equal: int = 0

    def summary(self, baseline: Record) -> dict[str, Any]:
        """The method's entry of the bench file; speedups are against `baseline`, prompt by prompt and in total.

        Counts are of one repeat (they do not vary); times are of the repeats put together.
        """
        once, every = Counters(), Counters()
        for run in self.runs:
            once.merge(run.repeats[0])
            for counters in run.repeats:
                every.merge(counters)
        ratios = [theirs.pace / own.pace for own, theirs in zip(self.runs, baseline.runs, strict=True) if own.pace]
        in_total = sum(run.pace * (len(run.tokens) - 1) for run in baseline.runs) / max(
            sum(run.pace * (len(run.tokens) - 1) for run in self.runs), 1e-12
        )
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
            "nodes_per_pass": round(once.nodes_per_pass, 3),
            "draft_calls": once.draft_calls,
            "draft_seconds": round(every.draft_seconds / repeats, 4),
            "decode_seconds": round(every.decode_seconds / repeats, 4),
            "tokens_per_second": round(every.tokens_per_second, 3),
            "seconds_per_pass": round(every.decode_seconds / max(every.passes, 1), 6),
            "time_to_first_token": round(every.prompt_seconds / (len(self.runs) * repeats), 5),
            "equal_outputs": self.equal,
            "first_difference_margins": [round(margin, 5) for margin in self.margins],
            "speedup": {
                "median": round(median(ratios), 4) if ratios else None,
                "min": round(min(ratios), 4) if ratios else None,
                "max": round(max(ratios), 4) if ratios else None,
                "of_totals": round(in_total, 4),
            },
            "per_prompt": {
                "tokens": [len(run.tokens) for run in self.runs],
                "passes": [run.repeats[0].passes for run in self.runs],
                "decode_seconds": [[round(c.decode_seconds, 5) for c in run.repeats] for run in self.runs],
            },
        }


def compare(
    model: StreamingLM,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    repeats: int = 1,
    advance: Callable[[], None] = lambda: None,
    batch: int = 1,
) -> dict[str, dict[str, Any]]:
    """Run every method on every prompt, interleaved, and sum up.

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
            for place, again in enumerate(texts):
                own, wanted = _text(name, first + place, again), tokens_of(runs[PLAIN][place][0])
                records[name].runs.append(Run(own, tuple(map(Counters.of, again))))
                if own == wanted:
                    records[name].equal += 1
                else:
                    records[name].margins.append(first_difference_margin(model, group[place], wanted, own))
        for _ in group:
            advance()
    return {name: record.summary(records[PLAIN]) for name, record in records.items()}


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
