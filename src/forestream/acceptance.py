"""What the streams would have drafted at every place of a text, recorded once: any tree can be judged by it.

The streams of a node depend on the text up to that node alone, not on the trees that led there. So one pass over a
finished text, with streams at every token, holds all that decoding it could ever draft from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.config import DecodeSettings
from forestream.drafting import RankDrafter
from forestream.errors import ConfigError, PromptError
from forestream.lookup import NGrams, with_copies
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.paths import told
from forestream.ranking import best_tokens
from forestream.verify import verify

ROWS = 128
"""Logits held at a time while recording."""

NO_TOKEN = -1
"""What follows a text: no draft is equal to it."""


@dataclass(frozen=True)
class Trace:
    """The K best candidates of G streams for each of the T tokens of a text as root.

    Row t is what decoding has when token t is the last verified one: the streams of the node before it (of the
    prompt's last token, for t = 0). Its stream j, counted from 1, drafts token t + j; where there is a path sampler, as
    behind the text's own token t + j - 1.

    Attributes:
        tokens: the text behind the prompt, its first token included.
        ids: candidates, best first, exact ties to the lowest id.
        log_probs: their log-probabilities, normalised over all that the streams chose from.
        vocabulary: tokens that the streams chose from: V, or those of the draft vocabulary.
        limit: the cap under which the text was written; larger than T if the text ended by itself.
        prompt: what the text was written after.

    Raises:
        ConfigError: the text is empty, a tensor has no row for each token, or the limit is below the text's length.
    """

    tokens: tuple[int, ...]
    ids: Int[Tensor, "T G K"]
    log_probs: Float[Tensor, "T G K"]
    vocabulary: int
    limit: int
    prompt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("a trace of no tokens; record at least the first token behind the prompt")
        if self.ids.shape != self.log_probs.shape or len(self.ids) != len(self.tokens):
            shapes = f"{tuple(self.ids.shape)} and {tuple(self.log_probs.shape)}"
            raise ConfigError(f"ids and log_probs are {shapes}; expected [{len(self.tokens)}, G, K] for both")
        if self.limit < len(self.tokens):
            raise ConfigError(f"limit is {self.limit}; expected at least {len(self.tokens)}, the length of the text")

    @property
    def streams(self) -> int:
        """G, streams recorded."""
        return self.ids.shape[1]

    @property
    def candidates(self) -> int:
        """K, candidates recorded per stream."""
        return self.ids.shape[2]

    @cached_property
    def hits(self) -> Int[Tensor, "T G"]:
        """Rank of the true token among the candidates; -1 if it is none of them, or the text has ended."""
        rest = torch.tensor([*self.tokens[1:], *[NO_TOKEN] * self.streams])
        right = self.ids == rest.unfold(0, self.streams, 1)[..., None]
        return torch.where(right.any(dim=2), right.int().argmax(dim=2), -1)


@dataclass(frozen=True)
class Simulated:
    """A run of decoding, counted. Passes are verify passes: the prompt pass, which yields one token, is left out.

    Attributes:
        tokens: written in all.
        nodes: size of each pass's tree, root included.
        accepted: drafts that each pass accepted.
        ends: place of the node where each pass ended among the `DraftTree.ends` of its tree.
    """

    tokens: int
    nodes: tuple[int, ...]
    accepted: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def passes(self) -> int:
        return len(self.nodes)


@torch.inference_mode()
def record(
    model: StreamingLM,
    prompt: Sequence[int],
    tokens: Sequence[int],
    candidates: int = 32,
    limit: int | None = None,
) -> Trace:
    """One pass over `prompt` and `tokens` with streams at every place from which decoding would draft.

    Args:
        prompt: token ids, at least one.
        tokens: what the model writes greedily after it; of any other text, how well the streams foresee that one.
        candidates: K, kept per stream; the vocabulary bounds it.
        limit: cap on tokens under which the text was written. None: the text's own length, as if the cap had ended it.

    Raises:
        PromptError: the prompt is empty.
        ConfigError: the model has no streams, there are no tokens or no candidates, or the limit is below the text's
            length.
    """
    streams = model.stream_config.streams
    if not prompt:
        raise PromptError("the prompt is empty; give the one that the text was written after")
    if not streams:
        raise ConfigError("the adapter has 0 streams; a trace can be recorded of one that was trained with streams")
    if not tokens or candidates < 1:
        raise ConfigError(f"{len(tokens)} tokens and {candidates} candidates; expected at least one of both")
    states = stream_states(model, prompt, tokens).flatten(0, 1)  # streams of token 0, then of token 1, ...
    ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    # What a stream foretells behind the text's own tokens: no other path is followed.
    before = torch.tensor([*tokens, *[0] * streams], device=model.device).unfold(0, streams, 1)[: len(tokens)].flatten()
    for rows, own in zip(states.split(ROWS), before.split(ROWS), strict=True):
        logits = told(model, rows, own, candidates)
        best, scores = best_tokens(logits, candidates, model.draft_ids)
        ids += best
        log_probs += scores
    return Trace(
        tuple(tokens),
        torch.tensor(ids).unflatten(0, (-1, streams)),
        torch.tensor(log_probs).unflatten(0, (-1, streams)),
        logits.shape[1],
        len(tokens) if limit is None else limit,
        tuple(prompt),
    )


@torch.inference_mode()
def stream_states(model: StreamingLM, prompt: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "T G D"]:
    """Final states of the streams that are there when each of `tokens` is the last verified one, by one pass."""
    text = [*prompt, *tokens[:-1]]
    carriers = torch.arange(len(prompt) - 1, len(text))[None]
    pack = Pack.text(len(text), carriers, model.stream_config.streams)
    output = model(torch.tensor([text], device=model.device), pack)
    states: Tensor = output.streams[0].transpose(0, 1)
    return states


def simulate(trace: Trace, drafter: RankDrafter, streams: int, lookup: DecodeSettings | None = None) -> Simulated:
    """Decode the text of `trace` with the trees of `drafter`, without the model and without pruning.

    Trees, passes and accepted drafts are those of `decode` with as many streams, in float32 and with the limit of the
    trace, except where rounding decides between two trees that are equally good. With a path sampler a trace knows what
    is foretold behind the text alone: full and static trees do as said, budget trees about so.

    Args:
        lookup: settings that say how many nodes are looked up; none by default.

    Raises:
        ConfigError: the trace has fewer streams, or fewer candidates than the drafter may look at.
    """
    _has_streams(trace, streams)
    if drafter.width > trace.candidates < trace.vocabulary:
        raise ConfigError(
            f"the trace has {trace.candidates} candidates per stream and {drafter} takes up to {drafter.width}; record "
            "more of them, or draft smaller trees"
        )
    length = len(trace.tokens)
    lookup = lookup or DecodeSettings()
    most = streams + lookup.lookup_beside + lookup.lookup_behind
    text, behind, ngrams = (*trace.tokens, *[NO_TOKEN] * most), list(trace.prompt), NGrams()
    nodes, accepted, ends = [], [], []
    written = 1
    while written < length:
        # As in `decode`: a pass yields one token more than it accepts.
        useful = trace.limit - written - 1
        depth = min(streams, useful)
        root = written - 1
        ids, log_probs = trace.ids[root, :depth, : drafter.width], trace.log_probs[root, :depth, : drafter.width]
        tree = drafter.grow(trace.tokens[root], ids.tolist(), log_probs.tolist())
        behind += trace.tokens[len(behind) - len(trace.prompt) : written]
        tree = with_copies(tree, behind, ngrams, lookup, useful)
        # What the main stream says is known on the path of the text, and no other path is followed.
        path = verify(tree, [text[written + steps] for steps in tree.topology.depths].__getitem__).path
        nodes.append(len(tree.tokens))
        accepted.append(len(path) - 1)
        ends.append(tree.ends.index(path[-1]))
        written = min(written + len(path), length)
    return Simulated(length, tuple(nodes), tuple(accepted), tuple(ends))


def rates(traces: Sequence[Trace], streams: int) -> list[list[float]]:
    """How often the streams' candidates are right, by depth and rank: what the shape of a static tree is chosen by.

    Entry [d - 1][r] estimates the probability that the candidate of rank r of stream d is the true token, given that
    the true tokens of all depths before d were among their streams' candidates. It is a ratio of counts over all places
    of all texts, each place as a root: in how many the true tokens of depths 1 to d - 1 were candidates, of any rank,
    and in how many of these candidate r of stream d was right. Places less than d tokens before the end of their text
    do not count. Pooling the ranks before d makes it a product form: a path is accepted with the product of its nodes'
    rates. Decoding does not start at every place alike, so `simulate` has the last word.

    Returns:
        A row per stream with an entry per recorded candidate; 0 where nothing was counted.

    Raises:
        ConfigError: there are no traces, or one has fewer streams.
    """
    if not traces:
        raise ConfigError("0 traces; expected at least one to count in")
    widest = max(trace.candidates for trace in traces)
    right = torch.zeros(streams, widest, dtype=torch.float64)
    cases = torch.zeros(streams, 1, dtype=torch.float64)
    for trace in traces:
        _has_streams(trace, streams)
        for row in range(streams):
            hits = trace.hits[: max(len(trace.tokens) - 1 - row, 0)]
            ranks = hits[(hits[:, :row] >= 0).all(dim=1), row]
            cases[row] += len(ranks)
            right[row] += ranks[ranks >= 0].bincount(minlength=widest)
    found: list[list[float]] = (right / cases.clamp(min=1)).tolist()
    return found


def _has_streams(trace: Trace, streams: int) -> None:
    if not 0 <= streams <= trace.streams:
        raise ConfigError(f"streams is {streams}; the trace has {trace.streams}, expected 0 to so many")
