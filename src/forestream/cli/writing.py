"""A run as commands show it: text whose tokens tell where they came from, figures, and the head of a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from forestream.config import DecodeSettings
from forestream.writing import Piece

if TYPE_CHECKING:
    from forestream.generation import Generator
    from forestream.steps import Counters

ACCEPTED: Final = "green"
OWN: Final = "yellow"
PRUNED: Final = "dim strike"


def coloured(pieces: Sequence[Piece]) -> Text:
    """Drafted tokens in one colour, the main stream's own in another."""
    return Text.assemble(*((piece.text, ACCEPTED if piece.drafted else OWN) for piece in pieces))


def speed_line(counters: Counters) -> str:
    """One line of statistics."""
    return (
        f"{counters.generated} tokens in {counters.passes} passes after the prompt pass: "
        f"{counters.call_reduction:.2f} a pass, {counters.tokens_per_second:.1f} tokens/s"
    )


def figures(counters: Counters) -> dict[str, Any]:
    """Counters as a record, under the names that bench files use."""
    return {
        "generated_tokens": counters.generated,
        "passes": counters.passes,
        "call_reduction": round(counters.call_reduction, 4),
        "mean_acceptance_length": round(counters.mean_acceptance_length, 4),
        "acceptance_by_position": [round(share, 4) for share in counters.acceptance_by_position],
        "acceptance_given_previous": [round(share, 4) for share in counters.acceptance_given_previous],
        "nodes_per_pass": round(counters.nodes_per_pass, 3),
        "prompt_seconds": round(counters.prompt_seconds, 5),
        "decode_seconds": round(counters.decode_seconds, 5),
        "tokens_per_second": round(counters.tokens_per_second, 3),
    }


def tree_form(settings: DecodeSettings) -> str:
    """The draft trees of these settings in words."""
    looked_up = settings.lookup_beside + settings.lookup_behind
    beside = f" and up to {looked_up} that are looked up" if looked_up else ""
    if settings.tree == "full":
        return f"full draft trees, {settings.k} candidate{'s' if settings.k > 1 else ''} per stream{beside}"
    if settings.tree == "static":
        return f"draft trees of one shape of {len(settings.shape or ()) + 1} nodes{beside}"
    if settings.nodes > 1 or looked_up:
        return f"draft trees of {settings.nodes} node{'s' if settings.nodes > 1 else ''}{beside}"
    return "no drafts: plain decoding is faster"


def heading(adapter: Path, generator: Generator) -> dict[str, Any]:
    """What every record begins with: adapter, base, dtype, settings and provenance."""
    from forestream import provenance
    from forestream.manifest import Manifest

    base = Manifest.read(adapter).base
    dtype = next(generator.model.host.parameters()).dtype
    return {
        "adapter": adapter.resolve().name,
        "base": vars(base),
        "dtype": str(dtype).removeprefix("torch."),
        "quantise": generator.model.quantised,
        "settings": vars(generator.settings),
        "provenance": provenance.collect(),
    }
