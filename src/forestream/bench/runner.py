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
from forestream.steps import Counters, tokens_of


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
            "nodes_per_pass": round(once.nodes_per_pass, 3),
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
) -> dict[str, dict[str, Any]]:
    """Run every method on every prompt, interleaved, and sum up.

    Within a prompt and repeat the methods take turns, and who begins changes, so that a drift of the machine hits all
    of them alike. The first prompt is run once by each beforehand and not counted. Prompts on which nothing is decoded
    after the prompt pass count for equality, not for speed.

    Args:
        methods: "plain" must be among them.
        advance: called after each prompt, for a progress bar.

    Raises:
        ConfigError: plain is missing, a method is named twice, or there is no prompt.
        ForestreamError: a method wrote two different texts after one prompt.
    """
    records = _records(methods, prompts)
    for method in methods:
        tokens_of(list(method.run(prompts[0])))
    for number, prompt in enumerate(prompts):
        runs: dict[str, list[Counters]] = {name: [] for name in records}
        texts: dict[str, tuple[int, ...]] = {}
        for repeat in range(repeats):
            for place in range(len(methods)):
                method = methods[(place + number + repeat) % len(methods)]
                steps = list(method.run(prompt))
                counters = Counters()
                counters.extend(steps)
                runs[method.name].append(counters)
                text = tokens_of(steps)
                if texts.setdefault(method.name, text) != text:
                    raise ForestreamError(f"{method.name} wrote another text when it was run again on prompt {number}")
        for name, record in records.items():
            record.runs.append(Run(texts[name], tuple(runs[name])))
            if texts[name] == texts[PLAIN]:
                record.equal += 1
            else:
                record.margins.append(first_difference_margin(model, prompt, texts[PLAIN], texts[name]))
        advance()
    return {name: record.summary(records[PLAIN]) for name, record in records.items()}


def _records(methods: Sequence[Method], prompts: Sequence[Sequence[int]]) -> dict[str, Record]:
    records = {method.name: Record(method) for method in methods}
    if len(records) < len(methods):
        raise ConfigError(f"methods are {', '.join(m.name for m in methods)}; name each of them once")
    if PLAIN not in records:
        raise ConfigError(f"methods are {', '.join(records)}; plain must be among them, as the baseline")
    if not prompts:
        raise ConfigError("there is no prompt to run")
    return records
