"""A training tried out: what a few of its passes really take, from which its plan knows seconds and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from forestream.compiled import EagerLayers
from forestream.data import Collator, TokenDataset, Tokens
from forestream.model import PassOutput, StreamingLM
from forestream.objective import LossConfig, TargetBatch, batch_pass, joint_loss
from forestream.plan import Activations, Measured, Memory, Plan, Sizes, batches_of, layered, memory_of, planned, rows_of
from forestream.recomputed import RecomputedLayers
from forestream.training import TrainConfig

QUANTILES: Final = (0.1, 0.5, 1.0)
"""Of the sizes of the passes: which ones are run. The largest shows the peak of memory."""


def kept_bytes(model: StreamingLM, batch: TargetBatch, config: TrainConfig) -> int:
    """Bytes of all storages, parameters aside, that a pass keeps for its gradients, the head's aside."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in known:
            held[place] = tensor  # held on to, so that no address comes twice
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        one_pass(model, batch, config)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def peak_bytes(device: torch.device) -> int | None:
    """The most memory this process has had so far, on its GPU if it runs there; None where nobody counts it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def one_pass(model: StreamingLM, batch: TargetBatch, config: TrainConfig) -> PassOutput:
    """A pass forward, in the precision that the trainer computes in."""
    with _precision(model, config):
        return batch_pass(model, batch)


def _precision(model: StreamingLM, config: TrainConfig) -> torch.autocast:
    return torch.autocast(model.device.type, torch.bfloat16, enabled=config.on(model.device.type).dtype == "bfloat16")


class Trial:
    """One training, counted and, if asked for, measured."""

    def __init__(
        self,
        model: StreamingLM,
        data: TokenDataset,
        collate: Collator,
        config: TrainConfig,
        loss: LossConfig,
        processes: int = 1,
    ) -> None:
        self.model, self.data, self.collate, self.config, self.loss = model, data, collate, config, loss
        self.processes = processes
        self.sizes = Sizes.of(model, config.checkpointing)
        self.terms = loss.weights(model.stream_config.streams, model.scorer is not None)
        self.batches = batches_of(data, config.batch_size)
        self.examples = sum(bool(one.completion) for batch in self.batches for one in batch)  # others only fill up
        self.rows = [rows_of(batch, collate, "scorer" in self.terms, model.vocabulary) for batch in self.batches]

    def counted(self) -> Plan:
        """Without running anything."""
        return self._planned()

    def measured(self, quantiles: Sequence[float] = QUANTILES, done: Callable[[], None] = lambda: None) -> Plan:
        """With seconds and memory, from passes that are run forward and backward; the model stays as it is.

        Args:
            done: called behind each pass.
        """
        asking = [i for i, batch in enumerate(self.batches) if any(one.completion for one in batch)]
        order = sorted(asking, key=lambda i: self.sizes.total(self.rows[i]))
        chosen = sorted({round(share * (len(order) - 1)) for share in quantiles})
        places = [order[place] for place in chosen]
        found = []
        with self._as_in_training():
            activations = self._activations(order[0], order[len(order) // 2])
            for place in [places[0], *places]:  # the first pass of all only warms up
                found.append(self._measure(place))
                done()
        memory = memory_of(self.model, self.rows[order[-1]], self.sizes, activations, self.loss)
        return self._planned(memory, found[1:])

    def _planned(self, memory: Memory | None = None, measured: Sequence[Measured] = ()) -> Plan:
        terms = list(self.terms)
        return planned(self.rows, self.sizes, terms, self.config, self.examples, memory, measured, self.processes)

    def _measure(self, place: int) -> Measured:
        batch = self._batch(self.batches[place])
        start = perf_counter()
        output = one_pass(self.model, batch, self.config)
        with _precision(self.model, self.config):
            loss = joint_loss(self.model, output, batch, self.loss).total
        loss.backward()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        seconds = perf_counter() - start
        self.model.zero_grad(set_to_none=True)
        return Measured(self.sizes.total(self.rows[place]), seconds, peak_bytes(self.model.device))

    def _activations(self, *places: int) -> Activations:
        """From a few texts of two batches, with every layer's activations kept."""
        layers, self.model.layers = self.model.layers, EagerLayers(self.model.port)
        points = []
        for place in places:
            few = self.batches[place][:4]
            slots, pairs = layered(rows_of(few, self.collate, False), self.sizes)
            points.append((slots, pairs, kept_bytes(self.model, self._batch(few), self.config)))
        self.model.layers = layers
        return Activations.fitted(*points)

    def _batch(self, examples: Sequence[Tokens]) -> TargetBatch:
        moved = {name: tensor.to(self.model.device) for name, tensor in vars(self.collate.batch(examples)).items()}
        return TargetBatch(**moved)

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        training, layers = self.model.training, self.model.layers
        self.model.train()
        if self.config.checkpointing:
            self.model.layers = RecomputedLayers(self.model.port)
        try:
            yield
        finally:
            self.model.layers = layers
            self.model.train(training)
