"""What a bench record says beyond its table: waits, drafts, costs, spread, parts of the data set, and when it pays.

Older records lack some of it; what is not there is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import Any, Final

from forestream.bench import PLAIN
from forestream.bench.tables import cell, code, table

STRONG: Final = 0.3
"""The least rank correlation that is called one."""


def details(record: dict[str, Any]) -> str:
    """Sections of Markdown, below headings of level 3."""
    return "\n".join(f"### {heading}\n\n{text}" for heading, text in sections(record).items())


def sections(record: dict[str, Any]) -> dict[str, str]:
    """Markdown by heading; what the record does not hold is left out."""
    known: dict[str, Callable[[dict[str, Any]], str | None]] = {
        "When it pays": _pays,
        "By category": _parts,
        "Drafts": _drafts,
        "Latency": _latency,
        "Spread over repeats": _spread,
        "Costs": _costs,
        "Task score": _scores,
        "Settings": _settings,
    }
    return {heading: text for heading, write in known.items() if (text := write(record))}


def _having(record: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in record["methods"].items() if row.get(key) is not None}


def _drafting(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Methods that had drafts to check."""
    return {name: row for name, row in record["methods"].items() if row["nodes_per_pass"] > 1}


def _pays(record: dict[str, Any]) -> str | None:
    """Tokens that a pass has to bring for its seconds, and those it brought."""
    plain, rows = record["methods"].get(PLAIN), []
    lines: list[str] = []
    if plain is None or not plain["seconds_per_pass"]:
        return None
    for name, row in _drafting(record).items():
        needed = row["seconds_per_pass"] / plain["seconds_per_pass"]
        brought = (row["generated_tokens"] - row["prompts"]) / max(row["passes"], 1)
        faster = row["speedup"]["of_totals"]
        rows.append((name, f"{needed:.2f}", f"{brought:.2f}", f"{faster:.2f}", "yes" if faster > 1 else "no"))
        lines += _where(record, name)
    if not rows:
        return None
    headings = ["method", "break-even, tokens per pass", "measured", "speedup of totals", "pays"]
    return "".join([table(headings, rows), *(f"\n{line}\n" for line in lines)])


def _where(record: dict[str, Any], name: str) -> Iterator[str]:
    """Parts of the data set where a method loses, and how much the entropy of the text has to do with acceptance."""
    parts = record.get("by_category", {})
    speeds = {category: part["methods"][name]["speedup"]["of_totals"] for category, part in parts.items()}
    slow = [f"{category} ({speed:.2f})" for category, speed in speeds.items() if speed <= 1]
    if slow:
        yield cell(f"{name} does not pay on {', '.join(slow)}.")
    elif speeds:
        yield cell(f"{name} pays on every category.")
    entropy = record.get("entropy", {})
    if (found := entropy.get("rank_correlation", {}).get(name)) is not None:
        yield cell(f"{name}: {reason(found, len(entropy['nats_per_token']))}")


def reason(correlation: float, prompts: int) -> str:
    """What a rank correlation of entropy and acceptance says, and no more."""
    chance = 1.96 / sqrt(max(prompts - 1, 1))
    told = (
        "so few prompts may show this by chance"
        if STRONG <= abs(correlation) < chance
        else "drafts are accepted less where the model is less certain of its own text"
        if correlation <= -STRONG
        else "drafts are accepted more where the model is less certain, so that its entropy is not the reason"
        if correlation >= STRONG
        else "how certain the model is of its text says little about acceptance here"
    )
    return (
        f"over {prompts} prompts, the entropy of the model's next token and the acceptance length have a rank "
        f"correlation of {correlation:+.2f}: {told}."
    )


def _parts(record: dict[str, Any]) -> str | None:
    rows = []
    for category, part in record.get("by_category", {}).items():
        for name, row in part["methods"].items():
            if name == PLAIN and len(part["methods"]) > 1:
                continue
            nats = part.get("nats_per_token")
            rows.append(
                (
                    category,
                    name,
                    str(row["prompts"]),
                    "-" if nats is None else f"{nats:.2f}",
                    f"{row['call_reduction']:.2f}",
                    f"{row['mean_acceptance_length']:.2f}",
                    f"{row['speedup']['of_totals']:.2f}",
                    f"{row['equal_outputs']} of {row['prompts']}",
                )
            )
    headings = ["category", "method", "prompts", "entropy, nats", "tokens per pass", "mean acceptance length"]
    return table([*headings, "speedup of totals", "equal texts"], rows) if rows else None


def _drafts(record: dict[str, Any]) -> str | None:
    rows = []
    for name, row in _drafting(record).items():
        without = row.get("passes_without")
        reasons = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in (without or {}).items())
        rows.append(
            (
                name,
                f"{row['nodes_per_pass'] - 1:.2f}",
                f"{row['mean_acceptance_length'] - 1:.2f}",
                _shares(row["acceptance_by_position"]),
                _shares(row.get("acceptance_given_previous")),
                "-" if without is None else f"{row['passes_with_drafts']} of {row['passes']}",
                "-" if without is None else reasons or "none",
            )
        )
    headings = ["method", "drafted per pass", "accepted per pass", "accepted by position", "given the previous"]
    return table([*headings, "passes with drafts", "passes without, and why"], rows) if rows else None


def _shares(shares: Sequence[float] | None) -> str:
    return ", ".join(f"{100 * share:.0f} %" for share in shares) if shares else "-"


def _latency(record: dict[str, Any]) -> str | None:
    rows = []
    for name, row in _having(record, "latency").items():
        waits = [row["latency"].get(kind) or {} for kind in ("first_token", "between_passes", "between_tokens")]
        asked = [("p50", "p95"), ("p50", "p95", "p99"), ("p50", "p95", "p99")]
        rows.append((name, *(_milliseconds(wait, names) for wait, names in zip(waits, asked, strict=True))))
    headings = ["method, ms", "first token, p50, p95", "between passes, p50, p95, p99"]
    return table([*headings, "between tokens, p50, p95, p99"], rows) if rows else None


def _milliseconds(wait: dict[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{1000 * wait[name]:.1f}" for name in names) if wait else "-"


def _spread(record: dict[str, Any]) -> str | None:
    rows = []
    for name, row in _having(record, "over_repeats").items():
        own = row["over_repeats"]
        cells = [f"{own[key]['median']:.1f} ({own[key]['min']:.1f} to {own[key]['max']:.1f})" for key in _SPREAD]
        rows.append((name, str(own["repeats"]), *cells))
    return table(["method", "repeats", *_SPREAD.values()], rows) if rows else None


_SPREAD: Final = {
    "tokens_per_second": "tokens/s, median (min to max)",
    "decode_seconds": "seconds, median (min to max)",
}


def _costs(record: dict[str, Any]) -> str | None:
    rows = [
        (
            name,
            f"{row['extra_parameters']:,}",
            f"{row['extra_bytes'] / 1e6:.2f}",
            f"{row['operations_per_pass'] / 1e9:.4g}",
            f"{row['extra_operations_per_pass'] / 1e9:+.4g}",
        )
        for name, row in _having(record, "extra_parameters").items()
    ]
    lines = []
    if memory := record.get("memory"):
        lines.append(
            f"All methods together took {memory['above_loaded'] / 1e6:.0f} MB above the {memory['loaded'] / 1e6:.0f} "
            f"MB of the {memory['of']} with its models loaded."
        )
    training = record.get("training") or {}
    if training.get("seconds") is not None:
        lines.append(f"Training took {training['seconds']:.0f} s, {training.get('examples')} examples.")
    if not rows and not lines:
        return None
    headings = ["method", "extra parameters", "extra MB", "GFLOP per pass", "above plain"]
    return "".join([table(headings, rows) if rows else "", *(f"\n{line}\n" for line in lines)])


def _scores(record: dict[str, Any]) -> str | None:
    scored = _having(record, "scores")
    if not scored:
        return None
    names = list(next(iter(scored.values()))["scores"])
    rows = [(method, *(f"{row['scores'][name]:.2f}" for name in names)) for method, row in scored.items()]
    return table(["method", *names], rows)


def _settings(record: dict[str, Any]) -> str:
    """Everything that a figure depends on, the temperature among it."""
    machine = record["provenance"]["machine"]
    packages = record["provenance"].get("packages", {})
    flat = {**_flat(record["settings"]), **_flat(machine, "machine"), **_flat(packages, "version of")}
    return table(["setting", "value"], [(name, code(str(value))) for name, value in flat.items()])


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        own = f"{above} {name}".strip()
        found |= _flat(value, own) if isinstance(value, dict) else {own: value}
    return found
