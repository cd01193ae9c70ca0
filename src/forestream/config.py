"""Settings: frozen, self-validating dataclasses that survive a JSON round trip.

`StreamConfig` describes what was trained and is stored with the weights. `DecodeSettings` describes how a trained
model is run and can be changed freely: in float32 the shape of the draft trees never changes the text.
`SamplingSettings` describe the law that the text is drawn from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self

from forestream.errors import ConfigError

Compile = Literal["off", "layer", "full"]
"""How layers are run: as they are, one layer compiled for all alike, or whole spans of layers compiled."""

Quantise = Literal["off", "int8", "int4"]
"""How the weights of the host's linear layers are held: as they were loaded, or in integers of 8 or 4 bits."""

Shape = tuple[tuple[int, int], ...]
"""A fixed draft tree: (parent, rank) of node 1, node 2, ...; node 0 is the root, rank 0 a stream's best candidate."""


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError unless `value` is among `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")


def in_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise ConfigError unless low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")


def whole(name: str, value: int, low: int, high: float = float("inf")) -> None:
    """Raise ConfigError unless `value` is a whole number with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; expected a whole number from {low} to {high:g}")
    in_range(name, value, low, high)


def check_shape(shape: object) -> Shape:
    """`shape` as tuples, whatever kind of sequences its pairs came in.

    Raises:
        ConfigError: an entry is no pair of whole numbers, a parent does not precede its child, a rank is negative, or
            siblings have the same rank.
    """
    if not isinstance(shape, list | tuple):
        raise ConfigError(f"shape is {shape!r}; expected a list of [parent, rank], a pair per node but the root")
    if len(shape) > 4095:
        raise ConfigError(f"shape has {len(shape)} nodes besides the root; expected 4095 at most")
    pairs: dict[tuple[int, int], int] = {}
    for node, pair in enumerate(shape, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(f"node {node} of shape is {pair!r}; expected a pair [parent, rank]")
        parent, rank = pair
        whole(f"parent of node {node} of shape", parent, 0, node - 1)
        whole(f"rank of node {node} of shape", rank, 0)
        if (twin := pairs.setdefault((parent, rank), node)) != node:
            raise ConfigError(
                f"nodes {twin} and {node} of shape are both {[parent, rank]}; expected siblings of different ranks"
            )
    return tuple(pairs)


@dataclass(frozen=True)
class JsonConfig:
    """Base of all settings: JSON in and out, unknown keys are errors."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from a mapping.

        Raises:
            ConfigError: a key is unknown, or a value is out of range.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(
                f"unknown keys in {cls.__name__}: {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{cls.__name__} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.__name__} is a JSON {type(values).__name__}; expected an object")
        return cls.from_dict(values)


@dataclass(frozen=True)
class StreamConfig(JsonConfig):
    """What was trained: the shape of the streams and of the adapters.

    Attributes:
        streams: G, streams per carrier; 0 trains a plain LoRA (the twin that quality is compared with).
        stream_layers: N_s, the top decoder layers that carry streams.
        mode: "joint" (LoRA on all linear layers, seen by main and streams alike) or "lossless" (LoRA in the
            stream layers, acting on stream slots only: the output is the base model's).
        positions: "ahead" gives stream j the rotary position t + j, "same" gives it t. Families with learned
            positions ignore it: there only P_j tells the streams apart.
        start: f of eq. 3, "identity" or "low_rank" (rank `start_rank`).
        value_rotation: eq. 7 instead of P_j: stream n's value vectors are rotated by `rotation_angle` * n.
        rotation_angle: eps of eq. 7 in radians; None takes pi / (2 (position limit + G)).
        lora_rank, lora_alpha: of the LoRA adapter; scale is alpha / rank.
        scorer_rank: rank of the exit scorer that prunes draft trees; 0 leaves the scorer out.
    """

    streams: int = 4
    stream_layers: int = 15
    mode: Literal["joint", "lossless"] = "joint"
    positions: Literal["ahead", "same"] = "ahead"
    start: Literal["identity", "low_rank"] = "identity"
    start_rank: int = 8
    value_rotation: bool = False
    rotation_angle: float | None = None
    lora_rank: int = 32
    lora_alpha: int = 64
    scorer_rank: int = 8

    def __post_init__(self) -> None:
        whole("streams", self.streams, 0, 64)
        whole("stream_layers", self.stream_layers, 1)
        one_of("mode", self.mode, ("joint", "lossless"))
        one_of("positions", self.positions, ("ahead", "same"))
        one_of("start", self.start, ("identity", "low_rank"))
        whole("start_rank", self.start_rank, 1)
        whole("lora_rank", self.lora_rank, 1)
        whole("lora_alpha", self.lora_alpha, 1)
        whole("scorer_rank", self.scorer_rank, 0)
        if not isinstance(self.value_rotation, bool):
            raise ConfigError(f"value_rotation is {self.value_rotation!r}; expected true or false")
        if self.rotation_angle is not None:
            in_range("rotation_angle", self.rotation_angle, 0.0)
        if self.mode == "lossless" and self.streams == 0:
            raise ConfigError("lossless mode with 0 streams trains nothing; set streams to 1 or more")


@dataclass(frozen=True)
class DecodeSettings(JsonConfig):
    """How a trained model is run. Beside the cap on tokens nothing here changes greedy text in float32, only its speed.

    Attributes:
        tree: "budget" keeps the `nodes` most probable nodes, "full" takes `k` tokens from each stream, "static" has the
            same `shape` every pass.
        nodes: M, size of a budget tree with its root.
        k: candidates per stream of a full tree; size 1 + k + ... + k^G.
        shape: of a static tree, and only there: a pair (parent, rank) for every node but the root, which is node 0.
            Parents precede children; rank 0 is the best candidate of the stream of the node's depth.
        streams: G to use, at most the trained G; None uses all.
        carriers: "deferred" computes streams for the accepted node in a second short pass, "fused" for every
            surviving node in the same pass. The drafts are the same.
        carried: of fused streams: only the so many nodes where the pass most likely ends carry any, and where it ends
            elsewhere streams are deferred. Budget trees know their nodes' probabilities; of other trees it is the
            first nodes. None: every node.
        lookup_beside: nodes that prompt lookup adds to every tree, from the root on: what followed when the text last
            read like its end. Where the tree holds its beginning already, the nodes lengthen that path. 0 adds none.
        lookup_behind: the same behind the streams' first choices: what followed when the text last read like their end.
        prune_below: drop edges whose scorer probability is below this; 0 keeps all.
        prune_to: keep the best so many nodes by product of edge scores, and always the chain of first choices; None
            keeps all.
        max_new_tokens: cap on generated tokens.
        prompt_chunk: most tokens of a prompt in one pass.
    """

    tree: Literal["budget", "full", "static"] = "budget"
    nodes: int = 8
    k: int = 2
    shape: Shape | None = None
    streams: int | None = None
    carriers: Literal["deferred", "fused"] = "deferred"
    carried: int | None = None
    lookup_beside: int = 0
    lookup_behind: int = 0
    prune_below: float = 0.0
    prune_to: int | None = None
    max_new_tokens: int = 128
    prompt_chunk: int = 512

    def __post_init__(self) -> None:
        one_of("tree", self.tree, ("budget", "full", "static"))
        whole("nodes", self.nodes, 1, 4096)
        whole("k", self.k, 1, 64)
        if (self.tree == "static") != (self.shape is not None):
            found = "no shape" if self.shape is None else "a shape"
            raise ConfigError(f"tree is {self.tree!r} with {found}; expected a shape for a static tree and no other")
        if self.shape is not None:
            object.__setattr__(self, "shape", check_shape(self.shape))  # JSON knows lists only
        if self.streams is not None:
            whole("streams", self.streams, 0, 64)
        one_of("carriers", self.carriers, ("deferred", "fused"))
        if self.carried is not None:
            whole("carried", self.carried, 1)
        whole("lookup_beside", self.lookup_beside, 0, 64)
        whole("lookup_behind", self.lookup_behind, 0, 64)
        in_range("prune_below", self.prune_below, 0.0, 1.0)
        if self.prune_to is not None:
            whole("prune_to", self.prune_to, 1)
            if self.prune_below > 0:
                raise ConfigError("prune_below and prune_to are two pruning rules; set one of them")
        whole("max_new_tokens", self.max_new_tokens, 0)
        whole("prompt_chunk", self.prompt_chunk, 1)


Acceptance = Literal["exact", "typical", "top_k", "ratio"]

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy decoding."""


_LEAST: Final = 1e-9
_MOST: Final = 1e30
"""Beyond this a logit may overflow, and what is forbidden with it."""


def _word(name: str, word: object) -> tuple[int, ...]:
    """`word` as a tuple.

    Raises:
        ConfigError: it is empty or holds something else than token ids.
    """
    tokens = tuple(word) if isinstance(word, Iterable) else ()
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        raise ConfigError(f"{name} holds {word!r}; expected sequences of token ids, none of them empty")
    return tokens


def _bias(pair: object) -> tuple[tuple[int, ...], float]:
    """A pair of `logit_bias`.

    Raises:
        ConfigError: it is none, or its number is undefined or plus infinity.
    """
    if isinstance(pair, list | tuple) and len(pair) == 2:
        word, number = pair
        if isinstance(number, int | float) and not isinstance(number, bool) and number < float("inf"):
            return _word("logit_bias", word), float(number)
    raise ConfigError(f"logit_bias holds {pair!r}; expected pairs (token ids, number), minus infinity the least")


@dataclass(frozen=True)
class SamplingSettings(JsonConfig):
    """The law that the text's tokens are drawn from, with the meaning these names have in `transformers`.

    Attributes:
        temperature: 0 (or anything below 1e-5) is greedy; else logits are divided by it.
        top_k: only the k most probable tokens; 0 keeps all.
        top_p: only the smallest set of tokens whose probabilities sum to this; 1 keeps all.
        min_p: only tokens at least this share as probable as the most probable one; 0 keeps all.
        repetition_penalty: divides (or multiplies, below 0) the logits of tokens in the prompt or the text; 1 is none.
        presence_penalty: taken from the logits of tokens that the text written so far holds.
        frequency_penalty: taken from the logits of such tokens once for each time they were written.
        bad_words: token sequences that are never completed.
        logit_bias: pairs (token sequence, number added to the logit of its last token behind the rest of it).
        min_new_tokens: no end of text before so many tokens.
        seed: draws are keyed by it, by the row and by the place in the text: the same with speculation and without.
        mirror: let penalties, biases and bad words act on drafts too; changes what is accepted, not the text.
        accept: "exact" writes what plain decoding writes. The others are lossy: a draft is also taken where it is
            merely probable enough: "typical" above min(threshold, sqrt(threshold) * exp(-entropy)), "top_k" among the
            `threshold` most probable tokens, "ratio" at least `threshold` times as probable as the best token.
        threshold: of the lossy rules.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    min_new_tokens: int = 0
    seed: int = 0
    mirror: bool = False
    accept: Acceptance = "exact"
    threshold: float | None = None

    def __post_init__(self) -> None:
        in_range("temperature", self.temperature, 0.0, _MOST)
        whole("top_k", self.top_k, 0)
        in_range("top_p", self.top_p, _LEAST, 1.0)
        in_range("min_p", self.min_p, 0.0, 1.0)
        in_range("repetition_penalty", self.repetition_penalty, _LEAST, _MOST)
        for name in ("presence_penalty", "frequency_penalty"):
            in_range(name, getattr(self, name), -1e4, 1e4)
        whole("min_new_tokens", self.min_new_tokens, 0)
        whole("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.mirror, bool):
            raise ConfigError(f"mirror is {self.mirror!r}; expected true or false")
        for name in ("bad_words", "logit_bias"):
            if not isinstance(getattr(self, name), list | tuple):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected a list")
        # JSON knows lists only
        object.__setattr__(self, "bad_words", tuple(_word("bad_words", word) for word in self.bad_words))
        object.__setattr__(self, "logit_bias", tuple(_bias(pair) for pair in self.logit_bias))
        one_of("accept", self.accept, ("exact", "typical", "top_k", "ratio"))
        if self.lossy != (self.threshold is not None):
            wanted = "a threshold" if self.lossy else "none: it belongs to the lossy rules"
            raise ConfigError(f"accept is {self.accept!r} with threshold {self.threshold}; expected {wanted}")
        if self.threshold is not None:
            if self.accept == "top_k":
                whole("threshold", self.threshold, 1)  # type: ignore[arg-type]  # which is what is checked
            else:
                in_range("threshold", self.threshold, 0.0, 1.0)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a drawn one."""
        return self.temperature < GREEDY_BELOW

    @property
    def lossy(self) -> bool:
        """Whether the text may differ from plain decoding's."""
        return self.accept != "exact"
