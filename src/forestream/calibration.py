"""What a pruning rule keeps and what it loses, for any rule, from passes that are run once.

Where a pass begins depends on what the passes before accepted, so a rule changes the roots of all later trees. But
the tree at a place of a text, and the scores of its edges, depend on the text up to there alone. So the tree of *every*
place is scored once; a run under any rule only picks its way through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forestream.acceptance import NO_TOKEN, record, stream_states
from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.decode import check, commit, streams_in_use, tree_limit
from forestream.drafting import DraftTree, RankDrafter, drafter_for
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.paths import Paths
from forestream.prefill import prompt_pass, token_limit
from forestream.pruning import Keep
from forestream.steps import tokens_of
from forestream.topology import Topology
from forestream.verify import Verdict, verify


@dataclass(frozen=True)
class Scored:
    """The tree that decoding would draft at one place of a text.

    Attributes:
        topology: its shape.
        edges: what the exit scorer gives each node behind its parent; 1 for the root.
        path: nodes of the longest path that the text follows, from the root.
    """

    topology: Topology
    edges: tuple[float, ...]
    path: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """A run under a rule, counted; passes are verify passes.

    Attributes:
        tokens: written, the one of the prompt pass included.
        offered, kept: nodes of all trees, roots included, before and after pruning.
        good: edges of the trees met that the text follows: drafts that would be accepted if nothing were pruned.
        lost: how many of them were pruned.
    """

    tokens: int
    passes: int
    offered: int
    kept: int
    good: int
    lost: int

    def __add__(self, other: Kept) -> Kept:
        return Kept(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def call_reduction(self) -> float:
        """Generated tokens per pass after the prompt pass."""
        return self.tokens / max(self.passes, 1)

    @property
    def nodes_per_pass(self) -> float:
        return self.kept / max(self.passes, 1)

    @property
    def offered_per_pass(self) -> float:
        return self.offered / max(self.passes, 1)

    @property
    def share_lost(self) -> float:
        """Lost over good edges; 0 where there were none."""
        return self.lost / max(self.good, 1)


@dataclass
class _Noted:
    """A rule that keeps every node and notes the scores of the edges."""

    edges: tuple[float, ...] = (1.0,)

    def __call__(self, topology: Topology, edges: Sequence[float]) -> tuple[int, ...]:
        self.edges = tuple(edges)
        return tuple(range(len(topology)))


def score_text(
    model: StreamingLM, prompt: Sequence[int], settings: DecodeSettings, eos: Sequence[int] = ()
) -> tuple[Scored, ...]:
    """Write greedily after `prompt`, and score the tree of every place of the text: one pass for each token.

    Args:
        settings: shape of the streams' trees and cap on tokens. Its pruning rule is not looked at, and no drafts are
            looked up.

    Returns:
        A tree for each token but the last as the root; none if the text has one token.

    Raises:
        ConfigError: the adapter has no exit scorer or no streams, or the settings ask for more than was trained.
        PromptError: the prompt is empty or leaves no room before the context limit.
    """
    streams = streams_in_use(model, settings)
    if model.scorer is None or not streams:
        raise ConfigError("pruning needs drafts and an exit scorer; this adapter has none, or trees are roots")
    text = tokens_of(list(plain(model, prompt, settings, eos)))
    if len(text) < 2:
        return ()
    limit = token_limit(model, prompt, settings.max_new_tokens)
    # A pass yields one token more than it accepts.
    depths = [min(streams, limit - root - 2) for root in range(len(text) - 1)]
    cache = model.new_cache(len(prompt) + len(text) + tree_limit(settings, streams))
    prompt_pass(model, prompt, 0, cache, settings.prompt_chunk)
    places = []
    rest = (*text, *[NO_TOKEN] * streams)
    for root, tree in enumerate(_drafted(model, prompt, text, drafter_for(settings), depths)):
        noted = _Noted()
        checked = check(model, [tree], cache, 0, settings, noted)
        places.append(Scored(tree.topology, noted.edges, _followed(tree, rest[root + 1 :])))
        commit(model, checked, [Verdict((0,), text[root + 1])], cache)
    return tuple(places)


def _drafted(
    model: StreamingLM, prompt: Sequence[int], text: Sequence[int], drafter: RankDrafter, depths: Sequence[int]
) -> list[DraftTree]:
    """The trees of the first places of `text`, each by so many streams as `depths` says."""
    if model.sampler is not None:
        states = stream_states(model, prompt, text)
        places = zip(text, states, depths, strict=False)
        return [drafter.follow(root, Paths(model, own[:depth], drafter.width)) for root, own, depth in places]
    trace = record(model, prompt, text, max(drafter.width, 1))
    rows = zip(text, trace.ids.tolist(), trace.log_probs.tolist(), depths, strict=False)
    return [drafter.grow(root, ids[:depth], log_probs[:depth]) for root, ids, log_probs, depth in rows]


def _followed(tree: DraftTree, rest: Sequence[int]) -> tuple[int, ...]:
    """Nodes of the longest path that spells the beginning of `rest`."""
    return verify(tree, [rest[depth] for depth in tree.topology.depths].__getitem__).path


def replay(places: Sequence[Scored], rule: Keep | None) -> Kept:
    """The run that decoding would make of the text under `rule`; None keeps everything.

    In float32 passes, nodes and accepted drafts are those of `decode` with that rule.
    """
    passes = offered = held = good = lost = 0
    root = 0
    while root < len(places):
        here = places[root]
        size = len(here.topology)
        kept = rule(here.topology, here.edges) if rule is not None and size > 1 else tuple(range(size))
        path = here.path[: next((i for i, node in enumerate(here.path) if node not in kept), len(here.path))]
        passes, offered, held = passes + 1, offered + size, held + len(kept)
        good, lost = good + len(here.path) - 1, lost + len(here.path) - len(path)
        root += len(path)
    return Kept(len(places) + 1, passes, offered, held, good, lost)
