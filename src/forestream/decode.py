"""The decoding loop: draft, check, commit, and draft again from the accepted node. One text, or several together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.drafting import Drafter, DraftTree, drafter_for, largest_tree
from forestream.errors import ConfigError
from forestream.lookup import with_copies
from forestream.memory import Memory
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.paths import Paths
from forestream.prefill import Heads, begin
from forestream.pruning import Keep, edge_scores, keep_rule
from forestream.requests import Request
from forestream.rows import Row
from forestream.schedule import Schedule
from forestream.steps import Step, TokenScore
from forestream.topology import renumbered
from forestream.verify import Verdict

LARGEST_TREE = 4096
"""Nodes of the largest tree that is decoded."""


def decode(
    model: StreamingLM,
    prompt: Sequence[int] | Request,
    settings: DecodeSettings | Schedule,
    eos: Sequence[int] = (),
    drafter: Drafter | None = None,
    memory: Memory | None = None,
    heads: Heads | None = None,
) -> Iterator[Step]:
    """Write after `prompt`, several tokens a pass; in float32 the tokens are those of plain decoding.

    The first step is the prompt pass. Closing the iterator early leaves nothing behind.

    Args:
        prompt: token ids, at least one, to go on from greedily; or a request that says more.
        settings: shape of the draft trees, and the cap on tokens.
        eos: ids that end the text; they are yielded.
        drafter: replaces the one that `settings` name; its trees must not be larger than theirs. It is handed logits
            of all V tokens, minus infinity at those that the draft vocabulary leaves out.
        memory: what is known from earlier texts, and will be of this one.
        heads: foretell in place of the model's streams, of which no pass then carries any.

    Raises:
        PromptError: the prompt is empty or leaves no room before the context limit.
        ConfigError: more streams than were trained, too large a tree, or pruning without a scorer.
    """
    for steps in decode_batch(model, [Request.of(prompt, eos)], settings, drafter, memory, heads):
        yield steps[0][1]


def decode_batch(
    model: StreamingLM,
    requests: Sequence[Request],
    settings: DecodeSettings | Schedule,
    drafter: Drafter | None = None,
    memory: Memory | None = None,
    heads: Heads | None = None,
) -> Iterator[list[tuple[int, Step]]]:
    """Write several texts together: each has its own tree, verdict and end, and is what it would be alone.

    Yields, pass by pass, pairs (number of the request, its step). Texts that have ended leave the work. Arguments and
    errors as in `decode`; a schedule gives the settings by the number of texts under way.
    """
    schedule = Schedule.of(settings)
    plans = {least: Plan.of(model, one, drafter, heads) for least, one in schedule.steps}
    for plan in plans.values():
        model.layers.fix(usual_passes(plan.settings, plan.streams))
    first = plans[schedule.steps[0][0]].settings
    most = max(plan.streams for plan in plans.values())
    slots = max(plan.slots for plan in plans.values())
    begun = begin(model, requests, first, most, slots, memory, heads)
    if begun is None:
        return
    rows, numbers, cache, drafts = begun.rows, begun.numbers, begun.cache, begun.streams
    yield list(zip(numbers, begun.steps, strict=True))
    if going := _going(model, rows, cache):
        rows, numbers = [rows[i] for i in going], [numbers[i] for i in going]
        drafts = [drafts[i] for i in going]
    while going:
        began = perf_counter()
        if memory is not None:
            memory.check(rows[0].text)
        plan = plans[schedule.least(len(rows))]
        offered = [_draft(plan, row, ahead) for row, ahead in zip(rows, drafts, strict=True)]
        streams = plan.streams if any(row.left > 1 for row in rows) else 0
        checked = check(model, offered, cache, streams, plan.settings, plan.keep)
        with torch.inference_mode():
            read = [row.read(*one) for row, *one in zip(rows, checked.trees, checked.logits, strict=True)]
        verdicts = [verdict for verdict, _ in read]
        commit(model, checked, verdicts, cache)
        going = _going(model, rows, cache)
        if any(rows[i].left > 1 for i in going):
            wanted = plans[schedule.least(len(going))].streams
            places = [(i, verdicts[i].path[-1]) for i in going]
            drafts = list(look_ahead(model, checked, places, wanted, cache, heads))
        else:
            drafts = [ahead[:0] for ahead in drafts[: len(going)]]
        seconds = (perf_counter() - began) / len(rows)
        yield [
            (number, _step(tree, kept, verdict, seconds, row, scores))
            for number, tree, kept, row, (verdict, scores) in zip(
                numbers, offered, checked.kept, rows, read, strict=True
            )
        ]
        rows, numbers = [rows[i] for i in going], [numbers[i] for i in going]


@dataclass(frozen=True)
class Plan:
    """Settings with what follows from them for a model: G, pruning rule, drafter, and slots of a pass at most."""

    settings: DecodeSettings
    streams: int
    keep: Keep | None
    draft: Callable[[Row, Tensor], DraftTree]
    slots: int

    @staticmethod
    def of(
        model: StreamingLM, settings: DecodeSettings, drafter: Drafter | None = None, heads: Heads | None = None
    ) -> Plan:
        """The plan of `settings`.

        Raises:
            ConfigError: more streams than were trained, too large a tree, or pruning without a scorer.
        """
        if heads is not None:
            settings = replace(settings, carriers="deferred")  # heads ride on no pass
        streams, keep = streams_in_use(model, settings, heads), keep_rule(settings)
        if keep is not None and streams and model.scorer is None:
            raise ConfigError("pruning needs the exit scorer; this adapter has none (scorer_rank 0)")
        slots = fused_slots(settings, tree_limit(settings, streams), streams)
        return Plan(settings, streams, keep, _drafter(model, settings, drafter, heads), max(slots, streams + 1))


def _drafter(
    model: StreamingLM, settings: DecodeSettings, given: Drafter | None, heads: Heads | None = None
) -> Callable[[Row, Float[Tensor, "G X"]], DraftTree]:
    """What makes a text's tree out of what `StreamingLM.ahead` made of its streams, or out of the logits of `heads`."""
    own = drafter_for(settings)
    # A draft vocabulary and a path sampler are the streams' own.
    vocabulary, sampler = (model.vocabulary, model.sampler) if heads is None else (None, None)

    def draft(row: Row, ahead: Float[Tensor, "G X"]) -> DraftTree:
        law = partial(row.mirrored, vocabulary=vocabulary)
        if sampler is not None and given is None:
            return own.follow(row.text[-1], Paths(model, ahead, own.width, law if row.mirrors else None))
        logits = law(ahead if sampler is None else model.draft_logits(ahead))
        if vocabulary is None:
            return (given or own)(row.text, logits)
        if given is None:
            return own(row.text, logits, vocabulary.ids)
        # Whoever wrote it counts on columns being tokens.
        return given(row.text, vocabulary.spread(logits))

    return draft


@dataclass(frozen=True)
class Checked:
    """Trees after their pass.

    Attributes:
        trees: what survived pruning, per row.
        kept: numbers of these nodes in the tree that was offered, per row.
        logits: the main stream's at every node; rows of smaller trees are filled up with what nobody needs.
        trunk: states at the entry of the stream layers.
        main: final states of the nodes, before the norm.
        carriers: numbers of the nodes that carried streams, in the trees that survived, per row.
        streams: final states of their streams, or none where streams are deferred.
    """

    trees: tuple[DraftTree, ...]
    kept: tuple[tuple[int, ...], ...]
    logits: Float[Tensor, "B N V"]
    trunk: Float[Tensor, "B N D"]
    main: Float[Tensor, "B N D"]
    carriers: tuple[tuple[int, ...], ...]
    streams: Float[Tensor, "B G C D"]


@torch.inference_mode()
def check(
    model: StreamingLM,
    trees: Sequence[DraftTree],
    cache: StreamCache,
    streams: int,
    settings: DecodeSettings,
    keep: Keep | None,
) -> Checked:
    """One pass over a draft tree per row; nothing is committed yet."""
    topologies = [tree.topology for tree in trees]
    carriers = [carrying(tree, settings) if streams else () for tree in trees]
    size = max(map(len, topologies))
    pack = Pack.forest(topologies, carriers, streams)
    ids = torch.tensor([[*tree.tokens, *[0] * (size - len(tree.tokens))] for tree in trees], device=model.device)

    def survivors(trunk: Float[Tensor, "B N D"]) -> tuple[tuple[int, ...], ...]:
        assert keep is not None
        scores = model.exit_logits(trunk)
        return tuple(
            keep(tree.topology, edge_scores(tree.topology, tree.tokens, own))
            for tree, own in zip(trees, scores, strict=True)
        )

    output = model(ids, pack, cache, survivors if keep is not None and size > 1 else None, topologies)
    left = tuple(tree.subset(kept) for tree, kept in zip(trees, output.kept, strict=True))
    found = tuple(renumbered(*pair) for pair in zip(carriers, output.kept, strict=True))
    return Checked(left, output.kept, model.logits(output.main), output.trunk, output.main, found, output.streams)


@torch.inference_mode()
def commit(model: StreamingLM, checked: Checked, verdicts: Sequence[Verdict], cache: StreamCache) -> None:
    """Keep the verified paths in the cache: all of a text but its last token."""
    for row, (kept, verdict) in enumerate(zip(checked.kept, verdicts, strict=True)):
        path = verdict.path if verdict.next_token is not None else verdict.path[:-1]
        cache.commit(model.trunk_layers, [kept[node] for node in path], row)
        cache.commit(model.stream_layers, path, row)
        cache.advance(len(path), row)


@torch.inference_mode()
def look_ahead(
    model: StreamingLM,
    checked: Checked,
    places: Sequence[tuple[int, int]],
    streams: int,
    cache: StreamCache,
    heads: Heads | None = None,
) -> Float[Tensor, "B G X"]:
    """What `StreamingLM.ahead` makes of the accepted nodes' streams: out of the pass (fused) or behind it (deferred).

    Args:
        places: row of the pass and node of its surviving tree, for every row of `cache`.
        heads: foretell in place of the streams.
    """
    if not streams:
        return checked.logits[: len(places), :0]
    rows, nodes = map(list, zip(*places, strict=True))
    if heads is not None:
        return heads(checked.main[rows, nodes], streams)
    if checked.streams.shape[1] >= streams and all(node in checked.carriers[row] for row, node in places):
        found = [checked.carriers[row].index(node) for row, node in places]
        return model.ahead(checked.streams[rows, :, found][:, :streams])
    return model.ahead(model.streams_behind(checked.trunk[rows, nodes][:, None], streams, cache))


@torch.inference_mode()
def _draft(plan: Plan, row: Row, ahead: Float[Tensor, "G X"]) -> DraftTree:
    # A pass yields one token more than it accepts, so deeper drafts than this could never be used.
    depth = row.left - 1
    tree = plan.draft(row, ahead[: min(plan.streams, depth)])
    return row.legal(with_copies(tree, row.text, row.ngrams, plan.settings, depth))


def _going(model: StreamingLM, rows: Sequence[Row], cache: StreamCache) -> list[int]:
    """Places of the rows that go on; the cache lets go of the others."""
    going = [place for place, row in enumerate(rows) if row.finish is None]
    if 0 < len(going) < len(rows):
        cache.keep(going)
        model.layers.admit(cache)
    return going


def _step(
    tree: DraftTree, kept: tuple[int, ...], verdict: Verdict, seconds: float, row: Row, scores: tuple[TokenScore, ...]
) -> Step:
    path = tuple(kept[node] for node in verdict.path)
    tokens = tuple(tree.tokens[node] for node in path[1:])
    if verdict.next_token is not None:
        tokens = (*tokens, verdict.next_token)
    return Step(tokens, len(path) - 1, seconds, tree, kept, path, row.finish, scores)


def streams_in_use(model: StreamingLM, settings: DecodeSettings, heads: Heads | None = None) -> int:
    """G for this run, of streams or of heads that stand in their place.

    Raises:
        ConfigError: more than were trained.
    """
    trained = model.stream_config.streams if heads is None else heads.count
    if largest_tree(settings, trained) == 1:
        return 0  # a root alone drafts nothing
    if settings.streams is not None and settings.streams > trained:
        what = "this adapter was" if heads is None else "these heads were"
        raise ConfigError(f"streams is {settings.streams}; {what} trained with {trained}")
    return trained if settings.streams is None else settings.streams


def tree_limit(settings: DecodeSettings, streams: int) -> int:
    """Most nodes that a tree can have in this run, with those that are looked up.

    Raises:
        ConfigError: more than a pass can sensibly hold.
    """
    nodes = largest_tree(settings, streams)
    if nodes > LARGEST_TREE:
        raise ConfigError(
            f"a full tree with k = {settings.k} and {streams} streams has {nodes} nodes; at most {LARGEST_TREE} are "
            "taken: lower k or streams, or use a budget tree"
        )
    return nodes + settings.lookup_beside + settings.lookup_behind


def carrying(tree: DraftTree, settings: DecodeSettings) -> tuple[int, ...]:
    """The nodes of a tree that carry streams in its pass."""
    if settings.carriers == "deferred":
        return ()
    if settings.carried is None:
        return tuple(range(len(tree.tokens)))
    return tuple(sorted(tree.ends[: settings.carried]))


def fused_slots(settings: DecodeSettings, nodes: int, streams: int) -> int:
    """Slots of a pass over `nodes` nodes with the streams that they carry."""
    if settings.carriers == "deferred":
        return nodes
    return nodes + streams * (nodes if settings.carried is None else min(settings.carried, nodes))


def usual_passes(settings: DecodeSettings, streams: int) -> set[int]:
    """Numbers of slots that the layers meet in pass after pass; the last passes of a text may have fewer."""
    found = set[int]()
    for looked_up in product({0, settings.lookup_beside}, {0, settings.lookup_behind}):
        nodes = largest_tree(settings, streams) + sum(looked_up)
        kept = nodes if settings.prune_to is None else min(nodes, settings.prune_to)
        found |= {nodes, fused_slots(settings, kept, streams)}
        if settings.carriers == "deferred" or settings.carried is not None:
            found.add(streams)
    return found - {0}
