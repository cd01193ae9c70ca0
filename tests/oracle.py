"""The standing oracles: slow, obvious, and independent of what they judge.

EQ    `assert_equal_texts`   speculation writes what plain decoding writes
NT    `near_tie`             in half precision every token is within a margin of plain decoding's choice
INV   `assert_no_trace`      rejected drafts and streams leave nothing in the cache
      `slow_tree_logits`     what ordinary causal sequences say, which is what a packed pass has to say
      `sees`                 who sees whom, one pair of slots at a time

And drafters that know what comes next: they never, always, sometimes or with a given probability hit it.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from peft import PeftModel
from torch import Tensor

from forestream import agreement
from forestream.agreement import first_difference, shortfall
from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import Drafter, DraftTree
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.ports import LayerInputs
from forestream.steps import Step, tokens_of
from forestream.topology import Topology, chain

# (node, index), or (node, index, place) where a node carries streams at more than one place.
Slot = tuple[int, ...]


# --- who sees whom --------------------------------------------------------------------------------------------


def slots(topology: Topology, carriers: Sequence[int], streams: int) -> list[Slot]:
    """All slots in the order that a pass has them: mains, stream 1 of all carriers, stream 2, ..."""
    mains: list[Slot] = [(node, 0) for node in range(len(topology))]
    return mains + [(node, index, place) for index in range(1, streams + 1) for place, node in enumerate(carriers)]


def sees(topology: Topology, carriers: Sequence[int], q: Slot, k: Slot) -> bool:
    """Does query slot q see key slot k? Walks from node to parent."""
    (q_node, q_index, *q_place), (k_node, k_index, *k_place) = q, k
    for node, index in ((q_node, q_index), (k_node, k_index)):
        if index > 0 and node not in carriers:
            raise ValueError(f"node {node} carries no streams")
    if k_index > 0:
        return q_node == k_node and q_place == k_place and k_index <= q_index
    node = q_node
    while node != k_node and node >= 0:
        node = topology.parents[node]
    return node == k_node


def visible(topology: Topology, carriers: Sequence[int], streams: int) -> Bool[Tensor, "Q Q"]:
    """`sees` for all pairs of slots, query by key."""
    every = slots(topology, carriers, streams)
    return torch.tensor([[sees(topology, carriers, q, k) for k in every] for q in every])


# --- which drafts ---------------------------------------------------------------------------------------------


def best_paths(logits: Float[Tensor, "G V"], count: int) -> list[tuple[int, ...]]:
    """Of all token paths that G streams can form, the most probable ones; ties to the lowest ids, place by place."""
    log_probs = (logits - logits.logsumexp(dim=-1, keepdim=True)).tolist()
    depths = range(1, logits.shape[0] + 1)
    every = [path for depth in depths for path in product(range(logits.shape[1]), repeat=depth)]
    score = {path: sum(log_probs[row][token] for row, token in enumerate(path)) for path in every}
    return sorted(every, key=lambda path: (-score[path], path))[:count]


# --- packed equals plain --------------------------------------------------------------------------------------


class GrowingCache:
    """The simplest true cache: each call's keys and values are appended to the layer's own.

    Attributes:
        angle: by which the values of the next call are rotated (eq. 7).
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.angle = 0.0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        left, right = value_states.chunk(2, dim=-1)
        turned = torch.complex(left, right) * torch.polar(torch.tensor(1.0), torch.tensor(self.angle))
        value_states = torch.cat([turned.real, turned.imag], dim=-1)
        if layer_idx in self.kept:
            keys, values = self.kept[layer_idx]
            key_states = torch.cat([keys, key_states], dim=2)
            value_states = torch.cat([values, value_states], dim=2)
        self.kept[layer_idx] = (key_states, value_states)
        return key_states, value_states


@torch.no_grad()
def slow_tree_logits(
    model: StreamingLM, text: Sequence[int], tree_path: Sequence[int], streams: int
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "G V"]]:
    """What ordinary causal sequences, without a packed mask, say at the end of `text` and a path behind it.

    The streams of one node come after nobody but its own past, so text, path and streams in a row are an ordinary
    sequence: stream states are fed one by one through the stream layers, as if they were tokens.

    Args:
        model: in float32, its LoRA merged or not.
        text: the committed tokens.
        tree_path: tokens of the nodes from the root to the node asked about, at least one.
        streams: how many streams that node has.

    Returns:
        Main logits of every node of the path, by the stock forward, and logits of the last node's streams.
    """
    whole = [*text, *tree_path]
    ids = torch.tensor([whole])
    places = list(range(len(whole)))
    cache = GrowingCache()
    with _mains_untouched(model):
        mains = model.port.model(input_ids=ids, use_cache=False).logits[0, len(text) :]
        trunk = model.port.embed(ids, torch.tensor([places]))
        trunk = _causal(model, model.trunk_layers, trunk, places, places, cache)
        _causal(model, model.stream_layers, trunk, places, places, cache)
    outcomes = []
    for j in range(1, streams + 1):
        ahead = model.stream_config.positions == "ahead" and not model.port.learned_positions
        place = len(whole) - 1 + (j if ahead else 0)
        places.append(place)
        cache.angle = j * _rotation_angle(model)
        if model.gate is not None:
            model.gate.open(mains=0, slots=1, device=trunk.device)
        state = _causal(model, model.stream_layers, _start(model, trunk[:, -1:], j), [place], places, cache)
        outcomes.append(model.port.head(model.port.finish(state))[0, 0])
    return mains, torch.stack(outcomes) if outcomes else mains[:0]


def _causal(
    model: StreamingLM,
    layers: range,
    states: Tensor,
    places: Sequence[int],
    all_places: Sequence[int],
    cache: GrowingCache,
) -> Tensor:
    """Run `layers` over states at `places`, the last ones of `all_places`; each sees itself and all before it."""
    before = len(all_places) - len(places)
    positions = torch.tensor([places])
    for i in layers:
        window = model.port.window(i)
        seen = [
            [k <= before + row and (window is None or place - other < window) for k, other in enumerate(all_places)]
            for row, place in enumerate(places)
        ]
        mask = torch.where(torch.tensor([[seen]]), 0.0, torch.finfo(states.dtype).min)
        rotary = model.port.rotary(states, positions, i)
        states = model.port.run(i, states, LayerInputs(mask.to(states.dtype), positions, rotary), cache)
    return states


def _start(model: StreamingLM, main: Float[Tensor, "1 1 D"], j: int) -> Float[Tensor, "1 1 D"]:
    """Eq. 3 by hand."""
    start = model.start
    assert start is not None
    state = main
    if start.map is not None:
        state = main + torch.einsum("bnd,dr,re->bne", main, start.map.down, start.map.up)
    return state if start.embedding is None else state + start.embedding[j - 1]


def _rotation_angle(model: StreamingLM) -> float:
    config = model.stream_config
    if not config.value_rotation:
        return 0.0
    if config.rotation_angle is not None:
        return config.rotation_angle
    return torch.pi / (2 * (model.port.position_limit + config.streams))


@contextmanager
def _mains_untouched(model: StreamingLM) -> Iterator[None]:
    """In lossless mode the main states are the base model's own: the adapter is taken away."""
    if model.gate is None:
        yield
        return
    assert isinstance(model.host, PeftModel)
    wanted = {parameter: parameter.requires_grad for parameter in model.host.parameters()}
    with model.host.disable_adapter():
        yield
    for parameter, trained in wanted.items():
        parameter.requires_grad_(trained)


@torch.no_grad()
def assert_packed_equals_plain(
    model: StreamingLM,
    text: Sequence[int],
    tree: DraftTree,
    carriers: Sequence[int],
    streams: int,
    tolerance: float = 2e-5,
) -> float:
    """One packed pass over `tree` behind `text` gives every node, and every carrier's streams, their plain logits.

    In float32, up to `tolerance` of the largest logit. Returns the largest difference as such a share.
    """
    pack = Pack.tree(tree.topology, carriers, streams)
    cache = prefilled(model, text, spare=len(pack)) if text else model.new_cache(len(pack))
    output = model(torch.tensor([tree.tokens]), pack, cache)
    worst = 0.0
    for node in range(len(tree.topology)):
        path = [tree.tokens[step] for step in tree.topology.path(node)]
        carried = streams if node in carriers else 0
        mains, ahead = slow_tree_logits(model, text, path, carried)
        pairs = [("main", output.main[0, node], mains[-1])]
        pairs += [(f"stream {j + 1}", output.streams[0, j, carriers.index(node)], ahead[j]) for j in range(carried)]
        for name, state, wanted in pairs:
            off, largest = float((model.logits(state) - wanted).abs().max()), float(wanted.abs().max())
            assert off <= tolerance * largest, f"{name} of node {node}: logits differ by {off:.3g} of {largest:.3g}"
            worst = max(worst, off / largest)
    return worst


# --- EQ: speculation writes what plain decoding writes ----------------------------------------------------------


def assert_equal_texts(
    model: StreamingLM,
    prompt: Sequence[int],
    settings: DecodeSettings,
    eos: Sequence[int] = (),
    drafter: Drafter | None = None,
) -> list[Step]:
    """EQ: the same tokens, ended for the same reason, as by plain decoding. Returns the speculative steps."""
    ours, theirs = list(decode(model, prompt, settings, eos, drafter)), list(plain(model, prompt, settings, eos))
    found, wanted = tokens_of(ours), tokens_of(theirs)
    if found != wanted:
        place = first_difference(found, wanted)
        raise AssertionError(
            f"after a prompt of {len(prompt)} tokens, texts differ at token {place}: "
            f"{found[place : place + 5]} with speculation, {wanted[place : place + 5]} without"
        )
    assert [s.finish for s in ours[-1:]] == [s.finish for s in theirs[-1:]], "same text, other reason to end it"
    return ours


# --- NT: within a margin of plain decoding's choice -------------------------------------------------------------


def near_tie(model: StreamingLM, prompt: Sequence[int], tokens: Sequence[int], margin: float) -> list[float]:
    """NT: by how much each token falls short of the top logit when the text is read by plain decoding.

    0 where the token is plain decoding's own choice (or tied with it exactly).

    Raises:
        AssertionError: some token is further off than `margin`; reports the first divergence.
    """
    logits = [row.float() for row in agreement.plain_logits(model, prompt, tokens)]
    margins = [shortfall(row, token) for row, token in zip(logits, tokens, strict=True)]
    first = next((i for i, (row, t) in enumerate(zip(logits, tokens, strict=True)) if int(row.argmax()) != t), None)
    if max(margins, default=0.0) > margin:
        assert first is not None
        raise AssertionError(
            f"a token is {max(margins):.4g} below the top logit, {margin:.4g} allowed; first divergence at token "
            f"{first}: {tokens[first]} written, plain decoding chooses {int(logits[first].argmax())}, "
            f"margin {margins[first]:.4g}"
        )
    return margins


def plain_logits(model: StreamingLM, prompt: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "T V"]:
    """Logits that plain decoding, one token a pass, has before each of `tokens`, at least one."""
    return torch.stack(list(agreement.plain_logits(model, prompt, tokens))).float()


# --- INV: no trace in the cache ---------------------------------------------------------------------------------


def assert_no_trace(cache_a: StreamCache, cache_b: StreamCache, tolerance: float = 1e-5) -> None:
    """INV: both caches hold the same committed text, layer by layer.

    In float32, up to `tolerance` of a layer's largest entry: passes of other sizes round differently.
    """
    assert cache_a.committed == cache_b.committed, "committed lengths differ"
    assert cache_a.shapes == cache_b.shapes, "shapes of layers differ"
    for layer in range(len(cache_a.shapes)):
        for what, a, b in zip(("keys", "values"), cache_a.content(layer), cache_b.content(layer), strict=True):
            assert a.shape == b.shape, f"{what} of layer {layer}: shapes {a.shape} and {b.shape} differ"
            if a.numel():
                off, largest = float((a - b).abs().max()), float(b.abs().max())
                assert off <= tolerance * largest, f"{what} of layer {layer} differ by {off:.3g} of {largest:.3g}"


@torch.no_grad()
def prefilled(model: StreamingLM, text: Sequence[int], spare: int = 0) -> StreamCache:
    """A cache that has read `text` in one pass and nothing else; `spare` more slots fit behind it."""
    cache = model.new_cache(len(text) + spare)
    model(torch.tensor([list(text)]), Pack.text(len(text), torch.empty(1, 0, dtype=torch.long), 0), cache)
    cache.advance(len(text))
    return cache


# --- drafters that know what comes next --------------------------------------------------------------------------


@dataclass(frozen=True)
class Prophet:
    """Mixes the true next tokens into the stream logits, so that drafts of an untrained model are accepted.

    Attributes:
        inner: makes the tree.
        truth: prompt and its plain continuation.
        rate: probability, place by place, that a stream is made to favour the true token.
        seed: of that choice, which depends on the place in the text alone.
        push: how far above the stream's best logit the true token is put; a little further with every stream, since
            paths of equal probability would be told apart by rounding.
    """

    inner: Drafter
    truth: tuple[int, ...]
    rate: float
    seed: int = 0
    push: float = 4.0

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        logits = logits.float().clone()
        for row in range(len(logits)):
            place = len(text) + row
            draw = random.Random(f"{self.seed} {len(text)} {row}").random()
            if place < len(self.truth) and draw < self.rate:
                logits[row, self.truth[place]] = logits[row].max() + self.push + row / 8
        return self.inner(text, logits)


@dataclass(frozen=True)
class SometimesDrafter:
    """A chain as deep as there are streams whose first len(text) % (depth + 1) tokens are right, and no more.

    Attributes:
        truth: prompt and its plain continuation.
    """

    truth: tuple[int, ...]

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        depth, vocabulary = logits.shape
        right = self.right(len(text), depth)
        tokens = [text[-1]]
        for row in range(depth):
            place = len(text) + row
            true = self.truth[place] if place < len(self.truth) else 0
            tokens.append(true if row < right else (true + 1) % vocabulary)
        return DraftTree(chain(depth + 1), tuple(tokens))

    def right(self, length: int, depth: int) -> int:
        """How many drafts behind a text of `length` tokens are right."""
        return length % (depth + 1)


@dataclass(frozen=True)
class NeverDrafter(SometimesDrafter):
    """Every draft is wrong."""

    def right(self, length: int, depth: int) -> int:
        return 0


@dataclass(frozen=True)
class AlwaysDrafter(SometimesDrafter):
    """Every draft is right, as far as the truth is known."""

    def right(self, length: int, depth: int) -> int:
        return depth
