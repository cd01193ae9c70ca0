"""What a training will cost: slots, head rows, operations, memory and seconds, before anything is trained.

Rows are counted on the very batches that training will meet. Operations follow from them and from the sizes of the
host's matrices; seconds and activations from a few passes that are really run (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any

from forestream.data import Collator, TokenDataset, Tokens
from forestream.model import StreamingLM
from forestream.objective import IGNORED, LossConfig, count_targets
from forestream.training import TrainConfig
from forestream.vocabulary import DraftVocabulary

# --- rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What one pass computes.

    Attributes:
        main: main slots, B * T.
        stream: stream slots, B * G * C.
        padding: slots of both kinds that hold no text.
        heads: rows that go through the head, for every term of the loss in its order.
        ahead: those of them that are streams': a draft vocabulary has a smaller head for them.
        trunk_pairs: pairs of slots that attention computes in a trunk layer: all, whether visible or not.
        pairs: the same in a stream layer.
    """

    main: int
    stream: int
    padding: int
    heads: tuple[int, ...]
    trunk_pairs: int
    pairs: int
    ahead: int = 0

    @property
    def slots(self) -> int:
        """In a stream layer."""
        return self.main + self.stream

    @property
    def head(self) -> int:
        """Rows through the head, of all terms."""
        return sum(self.heads)


def rows_of(
    examples: Sequence[Tokens], collate: Collator, scored: bool, vocabulary: DraftVocabulary | None = None
) -> Rows:
    """Rows of the pass over one batch; `scored` if the exit scorer has a term of its own.

    Args:
        vocabulary: the model's draft vocabulary: targets outside of it take no row through the head.
    """
    batch = collate.batch(examples)
    (texts, width), (_, streams, carriers) = batch.ids.shape, batch.stream_targets.shape
    main, stream = texts * width, texts * streams * carriers
    # The last token of a text is a target only; a carrier has a target for stream 1 at least.
    own = sum(len(e) - 1 for e in examples)
    carrying = int((batch.stream_targets[:, 0] != IGNORED).sum()) if streams else 0
    first, *further = count_targets(batch, vocabulary).tolist()
    return Rows(
        main=main,
        stream=stream,
        padding=main - own + stream - streams * carrying,
        heads=(first, *further, *([first] if scored else [])),
        trunk_pairs=texts * width**2,
        pairs=texts * (width + streams * carriers) ** 2,
        ahead=sum(further),
    )


# --- operations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Sizes of one decoder layer: weights of its matrices, those of the LoRA beside them, operations per pair."""

    weights: int
    lora: int
    pair: int


@dataclass(frozen=True)
class Sizes:
    """What rows are multiplied by.

    Attributes:
        layers: of the host, first to last.
        trunk: how many of them are trunk layers.
        head: weights of the head.
        trunk_learns: whether gradients go through the trunk: in joint mode they do.
        recomputed: whether layers run again for their gradients.
        draft_head: weights of the streams' head: of a draft vocabulary's rows; None where it is the whole head.
    """

    layers: tuple[Layer, ...]
    trunk: int
    head: int
    trunk_learns: bool
    recomputed: bool = False
    draft_head: int | None = None

    @staticmethod
    def of(model: StreamingLM, recomputed: bool = False) -> Sizes:
        """Of a model with its LoRA in place."""
        heads, layers = int(model.port.config.num_attention_heads), []
        for layer, kept in zip(model.port.layers, model.port.kept, strict=True):
            matrices = [p for p in layer.parameters() if p.dim() == 2]
            lora = sum(p.numel() for p in matrices if p.requires_grad)
            weights = sum(p.numel() for p in matrices if not p.requires_grad)
            layers.append(Layer(weights, lora, 2 * heads * (kept.key_size + kept.value_size)))
        weight = model.port.model.get_output_embeddings().weight
        drafted = None if model.vocabulary is None else len(model.vocabulary) * weight.shape[1]
        learns = model.stream_config.mode == "joint"
        return Sizes(tuple(layers), len(model.trunk_layers), weight.numel(), learns, recomputed, drafted)

    def forward(self, rows: Rows) -> int:
        """Operations of a pass forward, a multiplication with its addition being two."""
        return sum(self._layer(i, rows) for i in range(len(self.layers))) + self._heads(rows)

    def backward(self, rows: Rows) -> int:
        """Operations of its gradients. Base weights pass them on; LoRA weights take their own as well."""
        learning = range(0 if self.trunk_learns else self.trunk, len(self.layers))
        own = 2 * sum(self._layer(i, rows) for i in learning)
        # Twice a forward pass, less the gradients that frozen weights have none of.
        own -= sum(2 * self.layers[i].weights * self._slots(i, rows) for i in learning)
        again = sum(self._layer(i, rows) for i in learning) if self.recomputed else 0
        return own + again + self._heads(rows)

    def total(self, rows: Rows) -> int:
        """Forward and backward."""
        return self.forward(rows) + self.backward(rows)

    def lora_only(self) -> Sizes:
        """Sizes of the twin without streams: a LoRA on every layer, all of which learn."""
        lora = max(layer.lora for layer in self.layers)
        layers = tuple(Layer(layer.weights, layer.lora or lora, layer.pair) for layer in self.layers)
        return replace(self, layers=layers, trunk_learns=True, draft_head=None)

    def _heads(self, rows: Rows) -> int:
        small = self.head if self.draft_head is None else self.draft_head
        return 2 * (self.head * (rows.head - rows.ahead) + small * rows.ahead)

    def _slots(self, i: int, rows: Rows) -> int:
        return rows.main if i < self.trunk else rows.slots

    def _layer(self, i: int, rows: Rows) -> int:
        layer, pairs = self.layers[i], rows.trunk_pairs if i < self.trunk else rows.pairs
        return 2 * self._slots(i, rows) * (layer.weights + layer.lora) + pairs * layer.pair


def without_streams(rows: Rows) -> Rows:
    """Rows of the twin's pass over the same batch; its padding is that of the texts, which is not asked for here."""
    return Rows(rows.main, 0, 0, rows.heads[:1], rows.trunk_pairs, rows.trunk_pairs)


# --- memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """Bytes that one layer keeps for its gradients: per slot, and per pair of slots."""

    slot: float
    pair: float

    @staticmethod
    def fitted(small: tuple[int, int, int], large: tuple[int, int, int]) -> Activations:
        """From two passes, each as slots and pairs summed over layers and the bytes that were kept."""
        (s, p, kept), (S, P, Kept) = small, large
        pair = max(0.0, (Kept * s - kept * S) / (P * s - p * S)) if P * s != p * S else 0.0
        return Activations((Kept - pair * P) / S, pair)

    def bytes(self, slots: int, pairs: int) -> float:
        """Of so many slots and pairs, both summed over layers."""
        return self.slot * slots + self.pair * pairs


def layered(rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """Slots and pairs of a pass, summed over the layers that keep anything."""
    trunk, top = sizes.trunk if sizes.trunk_learns else 0, len(sizes.layers) - sizes.trunk
    return trunk * rows.main + top * rows.slots, trunk * rows.trunk_pairs + top * rows.pairs


@dataclass(frozen=True)
class Memory:
    """Bytes at the largest pass.

    Attributes:
        weights: of the frozen base.
        trained: trained parameters, float32.
        gradients: of those.
        optimizer: AdamW's two means of them.
        activations: what layers keep for their gradients, an estimate.
        logits: of the chunk of rows that is in the head, with their gradients.
    """

    weights: int
    trained: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def peak(self) -> int:
        """All together."""
        return sum(asdict(self).values())


def memory_of(model: StreamingLM, largest: Rows, sizes: Sizes, activations: Activations, loss: LossConfig) -> Memory:
    """Of a training whose largest pass has `largest` rows."""
    parameters = list(model.parameters())
    frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    slots, pairs = layered(largest, sizes)
    kept = activations.bytes(slots, pairs)
    if sizes.recomputed:
        # The input of every layer, and one layer in full.
        kept = slots * model.port.hidden_size * 4 + activations.bytes(largest.slots, largest.pairs)
    vocabulary = int(model.port.model.get_output_embeddings().weight.shape[0])
    logits = 2 * 4 * min(loss.chunk, largest.head) * vocabulary
    return Memory(frozen, trained, trained, 2 * trained, round(kept), logits)


# --- seconds ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A pass that was run forward and backward: its operations, seconds, and the process's peak of bytes behind it."""

    operations: int
    seconds: float
    peak_bytes: int | None


def seconds_for(operations: float, measured: Sequence[Measured]) -> float:
    """Seconds of a pass: between two measured ones on the line between them, else in proportion to the nearest."""
    points = sorted(measured, key=lambda one: one.operations)
    for low, high in pairwise(points):
        if low.operations <= operations < high.operations:
            share = (operations - low.operations) / (high.operations - low.operations)
            return low.seconds + share * (high.seconds - low.seconds)
    nearest = points[0] if operations < points[0].operations else points[-1]
    return nearest.seconds * operations / nearest.operations


# --- the plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A quantity of passes: the mean, the largest, and of the whole run."""

    mean: float
    largest: float
    total: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        found = list(values)
        return Spread(sum(found) / len(found), max(found), sum(found))


@dataclass(frozen=True)
class Plan:
    """What a training will cost; a step is an update, of `accumulate` passes in every process.

    Attributes:
        examples, passes, updates: of the whole run, all epochs and processes included.
        processes: that train together, each with passes of its own.
        main, stream: slots per pass.
        head: rows through the head per pass, by term.
        padding: share of the slots that hold no text.
        forward, backward: operations per pass.
        over_lora: operations over those of a LoRA without streams on the same batches.
        memory: at the largest pass; None unless measured.
        measured: passes that were run, the smallest first.
        seconds_per_update: mean; None unless measured.
        seconds: of the whole run; None unless measured.
    """

    examples: int
    passes: int
    updates: int
    main: Spread
    stream: Spread
    head: dict[str, Spread]
    padding: float
    forward: Spread
    backward: Spread
    over_lora: float
    processes: int = 1
    memory: Memory | None = None
    measured: tuple[Measured, ...] = ()
    seconds_per_update: float | None = None
    seconds: float | None = None

    def record(self) -> dict[str, Any]:
        """JSON-ready."""
        record = asdict(self)
        if self.memory is not None:
            record["memory"]["peak"] = self.memory.peak
        return record

    def line(self) -> str:
        """In a line, for the start of a run."""
        rows = sum(spread.mean for spread in self.head.values())
        among = f" of {self.processes} processes" if self.processes > 1 else ""
        return (
            f"{self.passes:,} passes in {self.updates:,} updates{among}; a pass has {self.main.mean:,.0f} main and "
            f"{self.stream.mean:,.0f} stream slots on average, {self.padding:.0%} of them padding, and {rows:,.0f} "
            f"rows in the head; {self.over_lora:.2f} times the operations of a LoRA without streams"
        )


def planned(
    rows: Sequence[Rows],
    sizes: Sizes,
    terms: Sequence[str],
    config: TrainConfig,
    examples: int,
    memory: Memory | None = None,
    measured: Sequence[Measured] = (),
    processes: int = 1,
) -> Plan:
    """The plan of passes with these rows, of all `processes`, whose loss has these terms."""
    twin = sizes.lora_only()
    updates = ceil(len(rows) / (config.accumulate * processes))
    totals = [sizes.total(one) for one in rows]
    seconds = sum(seconds_for(one, measured) for one in totals) / processes if measured else None
    return Plan(
        examples=examples,
        passes=len(rows),
        updates=updates,
        main=Spread.of(one.main for one in rows),
        stream=Spread.of(one.stream for one in rows),
        head={term: Spread.of(one.heads[place] for one in rows) for place, term in enumerate(terms)},
        padding=sum(one.padding for one in rows) / sum(one.slots for one in rows),
        forward=Spread.of(map(sizes.forward, rows)),
        backward=Spread.of(map(sizes.backward, rows)),
        over_lora=sum(totals) / sum(twin.total(without_streams(one)) for one in rows),
        processes=processes,
        memory=memory,
        measured=tuple(sorted(measured, key=lambda one: one.operations)),
        seconds_per_update=None if seconds is None else seconds / updates,
        seconds=seconds,
    )


def batches_of(data: TokenDataset, size: int) -> list[list[Tokens]]:
    """The batches that the trainer makes of `data`, in its order."""
    return [[data[i] for i in range(at, min(at + size, len(data)))] for at in range(0, len(data), size)]
