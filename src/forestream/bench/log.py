"""Every pass of a run, written down compactly, and the published counters worked out from it a second time.

The second count shares nothing with the first: it reads this log alone, and goes by the definitions of the bench file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from forestream.errors import DataError

if TYPE_CHECKING:
    from forestream.steps import Step

EXACT: Final = (
    "generated_tokens",
    "passes",
    "call_reduction",
    "mean_acceptance_length",
    "acceptance_by_position",
    "acceptance_given_previous",
    "accepted_histogram",
    "nodes_per_pass",
)
TIMES: Final = ("decode_seconds", "tokens_per_second", "seconds_per_pass", "time_to_first_token")


@dataclass(frozen=True)
class Pass:
    """One pass of one text.

    Attributes:
        tokens: how many it delivered.
        accepted: how many of them were drafts.
        nodes: of its tree that were checked, root included; 0 of the prompt's pass.
        depth: of the deepest of them.
        microseconds: the text's share of it.
    """

    tokens: int
    accepted: int
    nodes: int
    depth: int
    microseconds: int


def log_of(steps: Sequence[Step]) -> str:
    """One run over one prompt: five whole numbers per pass, in the order of `Pass`; passes are parted by `;`."""
    found = [
        (len(step.tokens), step.accepted, len(step.kept), step.offered_depth, round(1e6 * step.seconds))
        for step in steps
    ]
    return ";".join(" ".join(map(str, one)) for one in found)


def passes_of(line: str) -> list[Pass]:
    """A line of the log.

    Raises:
        DataError: it is none.
    """
    try:
        return [Pass(*map(int, one.split(" "))) for one in line.split(";")] if line else []
    except (TypeError, ValueError, AttributeError):
        raise DataError(
            f"{str(line)[:40]!r} is no log of passes; expected five whole numbers each, parted by semicolons"
        ) from None


def recount(log: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The counters of a bench file from its log.

    Args:
        log: lines of every repeat, for every prompt.
    """
    texts = [[passes_of(line) for line in repeats] for repeats in log]
    once = [one for repeats in texts for one in repeats[0]]
    checked = [one for one in once if one.nodes]
    every = [one for repeats in texts for line in repeats for one in line]
    later = [one for one in every if one.nodes]
    first = [one for one in every if not one.nodes]
    seconds, count = sum(one.microseconds for one in later) / 1e6, max(len(checked), 1)
    deepest = max((one.depth for one in checked), default=0)
    return {
        "generated_tokens": sum(one.tokens for one in once),
        "passes": len(checked),
        "call_reduction": sum(one.tokens for one in once) / count,
        "mean_acceptance_length": 1 + sum(one.accepted for one in checked) / count,
        "acceptance_by_position": [_share(checked, j, 0) for j in range(1, deepest + 1)],
        "acceptance_given_previous": [_share(checked, j, j - 1) for j in range(1, deepest + 1)],
        "accepted_histogram": [
            sum(one.accepted == number for one in checked)
            for number in range(max((one.accepted for one in checked), default=-1) + 1)
        ],
        "nodes_per_pass": sum(one.nodes for one in checked) / count,
        "decode_seconds": seconds / max(len(texts[0]), 1),
        "tokens_per_second": sum(one.tokens for one in later) / seconds if seconds else 0.0,
        "seconds_per_pass": seconds / max(len(later), 1),
        "time_to_first_token": sum(one.microseconds for one in first) / 1e6 / max(len(first), 1),
    }


def _share(passes: Sequence[Pass], depth: int, least: int) -> float:
    """Of the passes with a draft of this depth that accepted `least` drafts: the share that accepted one there."""
    came = [one for one in passes if one.depth >= depth and one.accepted >= least]
    return sum(one.accepted >= depth for one in came) / max(len(came), 1)


def differences(record: dict[str, Any]) -> list[str]:
    """Where the counters of a bench record are not those of its log; empty if all agree.

    Counts must be the same to the last digit written, seconds to a thousandth: the log has whole microseconds.

    Raises:
        DataError: the record holds no log, or a broken one.
    """
    logged = {name: entry["steps"] for name, entry in record.get("methods", {}).items() if "steps" in entry}
    if not logged:
        raise DataError("found no log of passes; run `forestream bench --steps --json FILE` to have one written")
    found = []
    for name, log in logged.items():
        entry, again = record["methods"][name], _recounted(name, log)
        for key in (*EXACT, *TIMES):
            allowed = 1e-3 * abs(again[key]) + 1e-5 if key in TIMES else 1e-3 if key == "nodes_per_pass" else 1e-4
            if not _near(entry.get(key), again[key], allowed):
                found.append(f"{name}: {key} is {entry.get(key)} in the record and {again[key]} by its log")
    return found


def _recounted(name: str, log: Any) -> dict[str, Any]:
    try:
        return recount(log)
    except (IndexError, KeyError, TypeError) as error:
        raise DataError(f"the log of {name} is broken ({type(error).__name__}: {error}); run bench anew") from error


def _near(written: Any, counted: Any, allowed: float) -> bool:
    if isinstance(counted, list):
        return (
            isinstance(written, list)
            and len(written) == len(counted)
            and all(_near(*pair, allowed) for pair in zip(written, counted, strict=True))
        )
    return isinstance(written, int | float) and abs(written - counted) <= allowed
