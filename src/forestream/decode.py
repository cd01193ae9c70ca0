"""The decoding loop: draft, check, commit, and draft again from the accepted node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.drafting import Drafter, DraftTree, drafter_for, largest_tree
from forestream.errors import ConfigError, PromptError
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.pruning import Keep, edge_scores, keep_rule
from forestream.sampling import greedy
from forestream.steps import Finish, Step
from forestream.topology import Topology
from forestream.verify import Verdict, verify

ROOT_ALONE = Topology((-1,))
"""The tree of plain decoding: one node, no drafts."""

LARGEST_TREE = 4096
"""Nodes of the largest tree that is decoded."""


def decode(
    model: StreamingLM,
    prompt: Sequence[int],
    settings: DecodeSettings,
    eos: Sequence[int] = (),
    drafter: Drafter | None = None,
) -> Iterator[Step]:
    """Write greedily after `prompt`, several tokens a pass; in float32 the tokens are those of plain decoding.

    The first step is the prompt pass. Closing the iterator early leaves nothing behind.

    Args:
        prompt: token ids, at least one.
        settings: shape of the draft trees, and the cap on tokens.
        eos: ids that end the text; they are yielded.
        drafter: replaces the one that `settings` name; its trees must not be larger than theirs.

    Raises:
        PromptError: the prompt is empty or leaves no room before the context limit.
        ConfigError: more streams than were trained, too large a tree, or pruning without a scorer.
    """
    streams = streams_in_use(model, settings)
    limit = token_limit(model, prompt, settings)
    keep = keep_rule(settings)
    if keep is not None and streams and model.scorer is None:
        raise ConfigError("pruning needs the exit scorer; this adapter has none (scorer_rank 0)")
    if limit == 0:
        return
    draft = drafter or drafter_for(settings)
    slots = tree_limit(settings, streams) * (1 + (streams if settings.carriers == "fused" else 0))
    model.layers.fix(usual_passes(settings, streams))
    cache = model.new_cache(len(prompt) + limit + max(slots, streams + 1))
    text = list(prompt)
    began = perf_counter()
    token, logits = prompt_pass(model, prompt, streams, cache)
    step = Step((token,), 0, perf_counter() - began, finish=finish_reason((token,), 1, limit, eos))
    written = 1
    while True:
        yield step
        if step.finish:
            return
        text += step.tokens
        began = perf_counter()
        # A pass yields one token more than it accepts, so deeper drafts than this could never be used.
        depth = min(streams, limit - written - 1)
        tree = draft(text, logits[:depth])
        checked = check(model, tree, cache, streams if depth else 0, settings, keep)
        tokens = tuple(checked.tree.tokens[node] for node in checked.verdict.path[1:])
        tokens = until_end((*tokens, checked.verdict.next_token), eos)
        written += len(tokens)
        finish = finish_reason(tokens, written, limit, eos)
        if streams and limit - written > 1:
            logits = stream_logits(model, checked, streams, cache)
        # The end of the text may be a draft: what was verified behind it is not written.
        accepted = min(len(tokens), len(checked.verdict.path) - 1)
        path = tuple(checked.kept[node] for node in checked.verdict.path[: accepted + 1])
        step = Step(tokens, accepted, perf_counter() - began, tree, checked.kept, path, finish)


@dataclass(frozen=True)
class Checked:
    """A tree after its pass: what survived pruning, the verdict, and the states that streams start from or reached."""

    tree: DraftTree
    kept: tuple[int, ...]
    verdict: Verdict
    trunk: Float[Tensor, "1 N D"]
    streams: Float[Tensor, "1 G C D"]


@torch.inference_mode()
def prompt_pass(
    model: StreamingLM, prompt: Sequence[int], streams: int, cache: StreamCache
) -> tuple[int, Float[Tensor, "G V"]]:
    """Commit the prompt; return the first token and the logits of the streams of the prompt's last token."""
    ids = torch.tensor([list(prompt)], device=model.device)
    carriers = torch.tensor([[len(prompt) - 1]])
    output = model(ids, Pack.text(len(prompt), carriers, streams), cache)
    cache.advance(len(prompt))
    token = greedy(model.logits(output.main[:, -1]))[0]
    return token, model.logits(output.streams[0, :, 0]) if streams else output.main[0, :0]


@torch.inference_mode()
def check(
    model: StreamingLM,
    tree: DraftTree,
    cache: StreamCache,
    streams: int,
    settings: DecodeSettings,
    keep: Keep | None,
) -> Checked:
    """One pass over a draft tree; the verified path is committed."""
    size = len(tree.topology)
    carriers = range(size) if settings.carriers == "fused" and streams else ()
    prune = partial(_survivors, model, tree, keep) if keep is not None and size > 1 else None
    ids = torch.tensor([tree.tokens], device=model.device)
    output = model(ids, Pack.tree(tree.topology, carriers, streams), cache, prune, tree.topology)
    pruned = tree.subset(output.kept)
    verdict = verify(pruned, greedy(model.logits(output.main[0])))
    cache.commit(model.trunk_layers, [output.kept[node] for node in verdict.path])
    cache.commit(model.stream_layers, verdict.path)
    cache.advance(len(verdict.path))
    return Checked(pruned, output.kept, verdict, output.trunk, output.streams)


def _survivors(model: StreamingLM, tree: DraftTree, keep: Keep, trunk: Tensor) -> tuple[int, ...]:
    edges = edge_scores(tree.topology, tree.tokens, model.exit_logits(trunk[0]))
    return keep(tree.topology, edges)


@torch.inference_mode()
def stream_logits(model: StreamingLM, checked: Checked, streams: int, cache: StreamCache) -> Float[Tensor, "G V"]:
    """Logits of the accepted node's streams: picked out of the pass (fused) or computed behind it (deferred)."""
    last = checked.verdict.path[-1]
    if checked.streams.shape[1]:
        return model.logits(checked.streams[0, :, last])
    return model.logits(model.streams_behind(checked.trunk[:, last : last + 1], streams, cache)[0])


def streams_in_use(model: StreamingLM, settings: DecodeSettings) -> int:
    """G for this run.

    Raises:
        ConfigError: more than were trained.
    """
    trained = model.stream_config.streams
    if largest_tree(settings, trained) == 1:
        return 0  # a root alone drafts nothing
    if settings.streams is not None and settings.streams > trained:
        raise ConfigError(f"streams is {settings.streams}; this adapter was trained with {trained}")
    return trained if settings.streams is None else settings.streams


def tree_limit(settings: DecodeSettings, streams: int) -> int:
    """Most nodes that a tree can have in this run.

    Raises:
        ConfigError: more than a pass can sensibly hold.
    """
    nodes = largest_tree(settings, streams)
    if nodes > LARGEST_TREE:
        raise ConfigError(
            f"a full tree with k = {settings.k} and {streams} streams has {nodes} nodes; at most {LARGEST_TREE} are "
            "taken: lower k or streams, or use a budget tree"
        )
    return nodes


def usual_passes(settings: DecodeSettings, streams: int) -> set[int]:
    """Numbers of slots that the layers meet in pass after pass; the last passes of a text may have fewer."""
    nodes = largest_tree(settings, streams)
    kept = nodes if settings.prune_to is None else min(nodes, settings.prune_to)
    if settings.carriers == "fused":
        return {nodes, kept * (1 + streams)}
    return {nodes, kept, streams} - {0}


def token_limit(model: StreamingLM, prompt: Sequence[int], settings: DecodeSettings) -> int:
    """How many tokens may be written: the caller's cap, or what is left before the context limit.

    Raises:
        PromptError: the prompt is empty or leaves no room.
    """
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token, such as the begin-of-text token")
    end = model.port.room(len(prompt))
    if end <= len(prompt):
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the model's context ends at {end}; shorten the prompt"
        )
    return min(settings.max_new_tokens, end - len(prompt))


def until_end(tokens: tuple[int, ...], eos: Sequence[int]) -> tuple[int, ...]:
    """`tokens` up to and including the first that ends the text."""
    for place, token in enumerate(tokens, start=1):
        if token in eos:
            return tokens[:place]
    return tokens


def finish_reason(tokens: tuple[int, ...], written: int, limit: int, eos: Sequence[int]) -> Finish | None:
    """Why decoding ends after `tokens`, or None while it goes on."""
    if tokens[-1] in eos:
        return "stop"
    return "length" if written >= limit else None
