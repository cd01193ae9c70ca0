"""Recorded runs as Markdown: tables in the documents are generated from JSON, never typed.

A document holds a pair of markers, `<!-- results: NAME -->` and `<!-- end -->`; between them stands the table of
the record NAME.json. `<!-- results: NAME, By category -->` asks for that section of its details instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forestream.bench.details import sections
from forestream.bench.tables import cell, code
from forestream.bench.tables import table as _table
from forestream.errors import DataError

_BLOCK = re.compile(r"(<!-- results: (?P<name>[\w./-]+)(, (?P<part>[\w ]+))? -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def refresh(text: str, records: Path) -> str:
    """`text` with every block between markers replaced by the table of its record in the folder `records`.

    Raises:
        DataError: a marker names a record that is not there, or a section that it lacks.
    """

    def block(match: re.Match[str]) -> str:
        path = records / f"{match['name']}.json"
        if not path.is_file():
            raise DataError(f"the document asks for the record {path}, which does not exist; run it or mend the marker")
        record = json.loads(path.read_text())
        if match["part"] is None:
            return f"{match[1]}{markdown(record)}{match['end']}"
        parts = sections(record) if kind_of(record) == "methods" else {}
        if match["part"] not in parts:
            known = ", ".join(parts) or "none"
            raise DataError(f"the document asks for {match['part']!r} of {path}; expected one of its sections: {known}")
        return f"{match[1]}{parts[match['part']]}{match['end']}"

    return _BLOCK.sub(block, text)


def markdown(record: dict[str, Any]) -> str:
    """The table of a record, whichever of the kinds below it is, with a line that says how it came about."""
    body = _TABLES[kind_of(record)](record)
    made, settings = record["provenance"], record["settings"]
    machine = made["machine"]
    what = f"{settings['task']} {settings['split']} split, " if "task" in settings else ""
    made_how = (
        f"{what}{settings['dtype']}, "
        f"{machine['processor']}, {settings.get('threads', machine['threads'])} threads, "
        f"{made['date'][:10]}, commit {made['commit']}"
    )
    return f"{body}\n{cell(made_how)}: {code(made['command'])}\n"


def kind_of(record: dict[str, Any]) -> str:
    """The key that tells what a record is of.

    Raises:
        DataError: it is of no known kind.
    """
    kind = next((key for key in _TABLES if key in record), None)
    if kind is None:
        raise DataError(f"found the keys {', '.join(map(str, record)) or 'none'}; expected one of {', '.join(_TABLES)}")
    return kind


def _bench(record: dict[str, Any]) -> str:
    rows = [
        (
            name,
            f"{row['call_reduction']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['nodes_per_pass']:.1f}",
            f"{1000 * row['seconds_per_pass']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            spread(row["speedup"]),
            f"{row['equal_outputs']} of {row['prompts']}",
        )
        for name, row in record["methods"].items()
    ]
    headings = ["method", "tokens per pass", "mean acceptance length", "nodes per pass", "ms per pass", "tokens/s"]
    return _table([*headings, "speedup, median (min to max)", "equal texts"], rows)


def spread(speedup: dict[str, Any]) -> str:
    """Median and range of a method's speedup."""
    if speedup["median"] is None:
        return "nothing was decoded"
    return f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})"


def _scores(record: dict[str, Any]) -> str:
    scores, settings = record["scores"], record["settings"]
    cells = [settings["adapter"], str(settings["inputs"]), *(f"{score:.2f}" for score in scores.values())]
    return _table(["adapter", "inputs", *scores], [cells])


def _guard(record: dict[str, Any]) -> str:
    """An adapter's scores against its twin's, with intervals of 95 %."""
    rows = [
        (
            name,
            f"{row['joint']:.2f}",
            f"{row['twin']:.2f} ({row['twin_interval']['low']:.2f} to {row['twin_interval']['high']:.2f})",
            f"{row['difference']:+.2f} ({row['interval']['low']:+.2f} to {row['interval']['high']:+.2f})",
            f"{row['place']} the twin's interval",
            f"{'holds' if row['held'] else 'does not hold'} ({100 * row['bound']:g} points)",
        )
        for name, row in record["guard"].items()
    ]
    own, twin = record["settings"]["adapter"], record["against"]["settings"]["adapter"]
    body = _table(["score", own, f"twin, {twin}", "difference", "adapter is", "guard"], rows)
    return f"{body}\n{record['settings']['inputs']} inputs; intervals of 95 %.\n"


def _rules(record: dict[str, Any]) -> str:
    """Lossy rules of acceptance."""
    known = ("accept", "threshold", "temperature", "call_reduction", "seconds_per_token", "nats_per_token")
    scores = [name for name in record["rules"][0] if name not in known]
    rows = [
        (
            row["accept"] if row["threshold"] is None else f"{row['accept']} {row['threshold']:g}",
            f"{row['temperature']:g}",
            f"{row['call_reduction']:.2f}",
            f"{1000 * row['seconds_per_token']:.1f}",
            f"{row['nats_per_token']:.3f}",
            *(f"{row[name]:.2f}" for name in scores),
        )
        for row in record["rules"]
    ]
    headings = ["rule", "temperature", "tokens per pass", "ms per token", "divergence, nats per token"]
    return _table([*headings, *scores], rows)


def calibration_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """What a pruning rule keeps and loses, cell by cell."""
    return (
        row["rule"],
        f"{row['nodes_per_pass']:.1f} of {row['offered_per_pass']:.1f}",
        f"{row['lost']} of {row['good']} ({100 * row['share_lost']:.1f} %)",
        f"{row['call_reduction']:.2f}",
        f"{row['share_of_call_reduction']:.3f}",
    )


def _calibration(record: dict[str, Any]) -> str:
    headings = ["rule", "nodes kept", "good edges lost", "tokens per pass", "of the unpruned"]
    return _table(headings, map(calibration_cells, record["calibration"]))


def _timeline(record: dict[str, Any]) -> str:
    """Parts of a pass, and its distance from reading the weights once."""
    roof, parts = record["roofline"], record["milliseconds"]
    names = list(next(iter(parts.values())))
    rows = [
        (method, *(f"{own[name]:.2f}" for name in names), f"{roof['share_of_bandwidth'][method]:.2f}")
        for method, own in parts.items()
    ]
    floor = (
        f"\n{roof['weight_bytes'] / 1e6:.0f} MB of weights at {roof['bytes_per_second'] / 1e9:.1f} GB/s take "
        f"{roof['floor_milliseconds']:.1f} ms.\n"
    )
    return _table(["ms per pass", *names, "share of bandwidth"], rows) + floor


def _hosts(record: dict[str, Any]) -> str:
    """What passes cost on several hosts, in plain passes."""
    hosts = record["hosts"]
    settings = list(next(iter(hosts.values())))
    rows = [
        (host, f"{own['plain']['milliseconds']:.0f}", *(f"{own[name]['plain_passes']:.2f}" for name in settings[1:]))
        for host, own in hosts.items()
    ]
    return _table(["host", "plain, ms", *settings[1:]], rows)


def _ablations(record: dict[str, Any]) -> str:
    """One setting of a training changed at a time, each against the first; other seeds tell what is chance."""
    first, *others = record["ablations"]
    seeds = [row["call_reduction"] - first["call_reduction"] for row in others if "seed" in row["variant"]]
    chance = max(map(abs, seeds), default=0.0)
    rows = []
    for row in (first, *others):
        more = row["call_reduction"] - first["call_reduction"]
        told = " (no more than a seed)" if abs(more) <= chance else ""
        rows.append(
            (
                row["variant"],
                f"{row['main_loss']:.2f}",
                ", ".join(f"{loss:.2f}" for loss in row["stream_losses"]),
                f"{row['call_reduction']:.2f}",
                "" if row is first else f"{more:+.2f}{told}",
                f"{row['speedup']:.2f}",
                f"{row['training_seconds'] / 60:.1f}",
            )
        )
    settings = record["settings"]
    headings = ["variant", "main loss", "loss of streams 1, 2, ...", "tokens per pass", "against the first", "speedup"]
    body = _table([*headings, "minutes of training"], rows)
    base = ", ".join(map(code, settings["base"]))
    method, prompts = settings["method"], settings["prompts"]
    return f"{body}\n{settings['examples']} examples each, with {base}; {method} on {prompts} prompts.\n"


def _training_step(record: dict[str, Any]) -> str:
    """A joint step against its twin's."""
    step = record["training_step"]
    rows = [(kind, f"{s:.2f}", f"{step['peak_bytes'][kind] / 1e9:.2f}") for kind, s in step["seconds"].items()]
    low, middle, high = (step["ratio"][name] for name in ("min", "median", "max"))
    body = _table(["step", "seconds, median", "peak memory, GB"], rows)
    return (
        f"{body}\nA joint step takes {middle:.2f} times its twin's ({low:.2f} to {high:.2f}, batch by batch), and "
        f"{step['peak_ratio']:.2f} times its memory.\n"
    )


def _draft_vocabulary(record: dict[str, Any]) -> str:
    """Draft vocabularies by size: what they hold of the texts, and the tokens per pass of budget trees."""
    found = record["draft_vocabulary"]
    rows = [
        (
            f"{one['size']:,}",
            f"{one['covers_train']:.2%}",
            f"{one['covers_texts']:.2%}",
            *(f"{tokens:.2f}" for tokens in one["tokens_per_pass"].values()),
        )
        for one in found
    ]
    trees = [f"tokens per pass, {nodes} nodes" for nodes in found[0]["tokens_per_pass"]]
    return _table(["tokens drafted from", "inside, training texts", "inside, texts written", *trees], rows)


def _served(record: dict[str, Any]) -> str:
    """An engine that serves several clients, with drafts and without."""
    rows = []
    for clients, engines in record["served"].items():
        for name, row in engines.items():
            speeds, ratios, waits = row["tokens_per_second"], row["over_plain"], row["seconds_a_text"]
            shares = [f"{count / row['steps']:.2f}" for count in row["accepted_by_place"] if count]
            rows.append(
                (
                    clients,
                    name,
                    f"{speeds['median']:.1f}",
                    spread(ratios),
                    f"{waits['p50']:.2f}, {waits['p95']:.2f}",
                    f"{row['mean_acceptance_length']:.2f}",
                    ", ".join(shares),
                    f"{row['equal_texts']} of {record['settings']['prompts']}",
                )
            )
    headings = ["clients", "engine", "tokens/s", "over plain, median (min to max)", "s a text, p50, p95"]
    more = ["mean acceptance length", "accepted at place 1, 2, ...", "equal texts"]
    return _table([*headings, *more], rows)


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "methods": _bench,
    "rules": _rules,
    "milliseconds": _timeline,
    "hosts": _hosts,
    "guard": _guard,
    "calibration": _calibration,
    "ablations": _ablations,
    "training_step": _training_step,
    "draft_vocabulary": _draft_vocabulary,
    "served": _served,
    "scores": _scores,
}
"""By the key that tells the kind of a record."""
