"""Results by the part of its data set that a prompt is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forestream.bench import PLAIN
from forestream.bench.runner import Record

OTHER = "other"
"""What prompts of no part are counted under."""


def by_category(
    records: Mapping[str, Record], categories: Sequence[str | None], nats: Sequence[float] | None = None
) -> dict[str, Any]:
    """Of every part, in the order in which they come: its prompts, entropy if it is known, and each method's figures.

    Args:
        records: plain among them.
        nats: mean entropy of the next token, per prompt; the part's is the mean over its tokens.
    """
    found: dict[str, Any] = {}
    for category in dict.fromkeys(categories):
        places = [place for place, own in enumerate(categories) if own == category]
        lengths = [len(records[PLAIN].runs[place].tokens) for place in places]
        part: dict[str, Any] = {"prompts": len(places)}
        if nats is not None:
            total = sum(nats[place] * length for place, length in zip(places, lengths, strict=True))
            part["nats_per_token"] = round(total / max(sum(lengths), 1), 5)
        part["methods"] = {name: record.part(places, records[PLAIN]) for name, record in records.items()}
        found[category or OTHER] = part
    return found
