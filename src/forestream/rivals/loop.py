"""Decoding with drafts from a source other than streams: the passes, the cache, the choice of token are the same.

Methods differ in where drafts come from. The text is that of plain decoding, whatever a source offers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.decode import Checked, commit
from forestream.drafting import DraftTree
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.prefill import begin
from forestream.requests import Request
from forestream.rows import Row
from forestream.steps import Step, TokenScore
from forestream.topology import Topology


@dataclass(frozen=True)
class Beside:
    """Nodes that go through a pass beside the tree that is checked; they are never accepted.

    Attributes:
        parents: of each, by number in the whole pass, where the tree's nodes come first; parents precede children.
        tokens: of each.
        asked: numbers, counted from the first node beside the tree, of those whose logits are wanted.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    asked: tuple[int, ...]


NOTHING = Beside((), (), ())


@dataclass(frozen=True)
class Offer:
    """What a source has for one text's next pass.

    Attributes:
        tree: the drafts, behind the text's last token; no deeper than what may still be written, less one.
        calls: forward passes of a draft model that took part in it.
        beside: what else the pass is to go through.
    """

    tree: DraftTree
    calls: int = 0
    beside: Beside = NOTHING


class Drafts(Protocol):
    """A source at work on texts under way."""

    def offer(self, rows: Sequence[Row]) -> list[Offer]:
        """Drafts for every text."""
        ...

    def learn(self, logits: Sequence[Float[Tensor, "asked V"]]) -> None:
        """Take the logits that were asked for beside the trees, per text; the texts have grown since the offer."""
        ...

    def keep(self, places: Sequence[int]) -> None:
        """Let go of all texts but those at `places`, which are then numbered in this order."""
        ...


class Source(Protocol):
    """Where drafts come from."""

    @property
    def passes(self) -> set[int]:
        """Numbers of slots that the model's passes usually have; none ever has more than the largest."""
        ...

    def begin(self, model: StreamingLM, rows: Sequence[Row], chunk: int) -> Drafts:
        """Set to work on texts whose first tokens are written.

        Args:
            model: what the drafts are for.
            chunk: most tokens of a prompt that a draft model reads in one pass.
        """
        ...


def drafted(
    model: StreamingLM,
    prompt: Sequence[int] | Request,
    settings: DecodeSettings,
    source: Source,
    eos: Sequence[int] = (),
) -> Iterator[Step]:
    """Write after `prompt` with the drafts of `source`; in float32 the tokens are those of plain decoding.

    Args:
        prompt: token ids, at least one, to go on from greedily; or a request that says more.
        settings: `max_new_tokens` and `prompt_chunk` count, the rest is about streams.

    Raises:
        PromptError: the prompt is empty or leaves no room before the context limit.
    """
    for steps in drafted_batch(model, [Request.of(prompt, eos)], settings, source):
        yield steps[0][1]


def drafted_batch(
    model: StreamingLM, requests: Sequence[Request], settings: DecodeSettings, source: Source
) -> Iterator[list[tuple[int, Step]]]:
    """Write several texts together. Arguments and errors as in `drafted`, yields as in `decode_batch`.

    What a source does before the first drafts, such as reading the prompts, counts to the prompt pass.
    """
    model.layers.fix(source.passes)
    begun = begin(model, requests, settings, 0, max(source.passes))
    if begun is None:
        return
    rows, numbers, steps, cache = begun.rows, begun.numbers, begun.steps, begun.cache
    began = perf_counter()
    if going := _going(rows):
        drafts = source.begin(model, rows, settings.prompt_chunk)
        share = (perf_counter() - began) / len(rows)
        steps = [replace(step, seconds=step.seconds + share, draft_seconds=share) for step in steps]
    yield list(zip(numbers, steps, strict=True))
    while going:
        if len(going) < len(rows):
            cache.keep(going)
            model.layers.admit(cache)
            drafts.keep(going)
            rows, numbers = [rows[i] for i in going], [numbers[i] for i in going]
        began = perf_counter()
        offers = drafts.offer(rows)
        drafting = perf_counter() - began
        checked, beside = check(model, offers, cache)
        with torch.inference_mode():
            read = [row.read(*one) for row, *one in zip(rows, checked.trees, checked.logits, strict=True)]
        commit(model, checked, [verdict for verdict, _ in read], cache)
        drafts.learn(beside)
        spent, share = (perf_counter() - began) / len(rows), drafting / len(rows)
        yield [
            (number, _step(offer, row, verdict.path, verdict.next_token, scores, spent, share))
            for number, offer, row, (verdict, scores) in zip(numbers, offers, rows, read, strict=True)
        ]
        going = _going(rows)


@torch.inference_mode()
def check(
    model: StreamingLM, offers: Sequence[Offer], cache: StreamCache
) -> tuple[Checked, list[Float[Tensor, "asked V"]]]:
    """One pass over a tree per row and what is beside it; nothing is committed yet.

    Returns:
        The trees after their pass, and per row the logits that were asked for beside the tree.
    """
    trees = tuple(offer.tree for offer in offers)
    whole = [Topology((*offer.tree.topology.parents, *offer.beside.parents)) for offer in offers]
    size = max(map(len, whole))
    ids = [[*offer.tree.tokens, *offer.beside.tokens] for offer in offers]
    ids = [[*own, *[0] * (size - len(own))] for own in ids]
    output = model(torch.tensor(ids, device=model.device), Pack.forest(whole, [()] * len(whole)), cache)
    # The head is dear: it reads no node that nobody asks about.
    wanted = [
        [*range(len(tree.tokens)), *(len(tree.tokens) + node for node in offer.beside.asked)]
        for tree, offer in zip(trees, offers, strict=True)
    ]
    logits = model.logits(_at(output.main, wanted))
    kept = tuple(tuple(range(len(tree.tokens))) for tree in trees)
    beside = [own[len(tree.tokens) : len(nodes)] for own, tree, nodes in zip(logits, trees, wanted, strict=True)]
    return Checked(trees, kept, logits, output.trunk, output.main, ((),) * len(kept), output.streams), beside


def _at(states: Float[Tensor, "B N D"], wanted: Sequence[Sequence[int]]) -> Float[Tensor, "B n D"]:
    """The states of these nodes; shorter rows are filled up with their root's."""
    most = max(map(len, wanted))
    if all(own[-1] == len(own) - 1 for own in wanted):  # increasing, so these are the first ones
        return states[:, :most]
    index = torch.tensor([[*own, *[0] * (most - len(own))] for own in wanted], device=states.device)
    return states.gather(1, index[:, :, None].expand(-1, -1, states.shape[2]))


def _going(rows: Sequence[Row]) -> list[int]:
    """Places of the texts that go on."""
    return [place for place, row in enumerate(rows) if row.finish is None]


def _step(
    offer: Offer,
    row: Row,
    path: tuple[int, ...],
    next_token: int | None,
    scores: tuple[TokenScore, ...],
    seconds: float,
    draft_seconds: float,
) -> Step:
    tree = offer.tree
    tokens = tuple(tree.tokens[node] for node in path[1:])
    if next_token is not None:
        tokens = (*tokens, next_token)
    return Step(
        tokens,
        len(path) - 1,
        seconds,
        tree,
        tuple(range(len(tree.tokens))),
        path,
        row.finish,
        scores,
        offer.calls,
        draft_seconds,
    )
