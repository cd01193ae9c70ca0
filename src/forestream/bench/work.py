"""What a method adds to the model it runs on: parameters, memory, and operations per pass.

Operations are counted, not measured: rows times matrices, as for a training, and pairs of slots in attention. Norms,
P_j and the low-rank start are left out. A multiplication with its addition is two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from forestream.config import DecodeSettings
from forestream.decode import Plan, carrying
from forestream.drafting import drafter_for
from forestream.model import StreamingLM
from forestream.paths import shortlisted
from forestream.plan import Layer, Rows, Sizes
from forestream.rivals.medusa import MedusaHeads
from forestream.steps import Step
from forestream.weights import PackedLinear


@dataclass(frozen=True)
class Work:
    """One way of decoding on one model.

    Attributes:
        sizes: of the model's matrices, without a LoRA that only streams use.
        stream_sizes: the same with it; equal in joint mode.
        scorer: weights of the exit scorer, 0 where nothing is pruned.
        streams: G in use; 0 of plain decoding.
        settings: of drafting; None of plain decoding and of heads.
        nodes: of a budget tree that grows along sampled paths, which asks about as many a level; 0 of other trees.
        sampler: weights of the path sampler, 0 where there is none.
        near: weights of the head's rows of a stream's candidates along paths; 0 where these are all its tokens.
        heads: weights of the heads that foretell in place of streams.
        parameters: beside the model's own.
        bytes: of these, of copies of the head's rows, and of the slots that the cache needs beyond plain decoding's.
    """

    sizes: Sizes
    stream_sizes: Sizes
    scorer: int = 0
    streams: int = 0
    settings: DecodeSettings | None = None
    nodes: int = 0
    sampler: int = 0
    near: int = 0
    heads: int = 0
    parameters: int = 0
    bytes: int = 0

    @staticmethod
    def of(model: StreamingLM, settings: DecodeSettings | None = None) -> Work:
        """Of drafting under `settings`, or of plain decoding where there are none.

        Raises:
            ConfigError: the settings do not fit the model.
        """
        bare, gated = sizes_of(model), sizes_of(model, gated=True)
        if settings is None:
            return Work(bare, bare)
        plan = Plan.of(model, settings)
        slot = slot_bytes(model)
        if not plan.streams:
            return Work(bare, bare, bytes=(plan.slots - 1) * slot)
        scorer = 0
        own = [] if model.start is None else list(model.start.parameters())
        if plan.keep is not None and model.scorer is not None:
            scorer = sum(p.numel() for p in model.scorer.parameters())
            own += model.scorer.parameters()
        sampler = [] if model.sampler is None else list(model.sampler.parameters())
        own += sampler
        lora = [p for i in model.stream_layers for p in lora_of(model.port.layers[i])] if model.gate is not None else []
        held = sum(p.numel() * p.element_size() for p in (*own, *lora)) + copied(model)
        return Work(
            bare,
            gated,
            scorer,
            plan.streams,
            settings,
            settings.nodes if settings.tree == "budget" else 0,
            sum(p.numel() for p in sampler),
            near_weights(model, drafter_for(settings).width),
            0,
            sum(p.numel() for p in (*own, *lora)),
            held + (plan.slots - 1) * slot,
        )

    @staticmethod
    def of_heads(model: StreamingLM, settings: DecodeSettings, heads: MedusaHeads) -> Work:
        """Of drafting by heads in place of streams. Errors as in `of`."""
        bare, slots = sizes_of(model), Plan.of(model, settings, heads=heads).slots
        slot = slot_bytes(model)
        held = sum(p.numel() * p.element_size() for p in heads.state_dict().values())
        weights = sum(p.numel() for p in heads.state_dict().values() if p.dim() > 1)
        if heads.config.projection == "shared":
            weights += heads.config.heads * bare.head
        return Work(bare, bare, heads=weights, parameters=heads.added, bytes=held + (slots - 1) * slot)

    def record(self, texts: Sequence[tuple[int, Sequence[Step]]]) -> dict[str, Any]:
        """Entries of the bench file.

        Args:
            texts: length of the prompt, and steps, of each text.
        """
        passes = sum(step.tree is not None for _, steps in texts for step in steps)
        own, plain = (sum(part(prompt, steps) for prompt, steps in texts) for part in (self.operations, self.plain))
        return {
            "extra_parameters": self.parameters,
            "extra_bytes": self.bytes,
            "operations_per_pass": round(own / max(passes, 1)),
            "extra_operations_per_pass": round((own - plain) / max(passes, 1)),
        }

    def plain(self, prompt: int, steps: Sequence[Step]) -> int:
        """Operations of as many passes of plain decoding, at the same places of the text."""
        return sum(
            self.sizes.forward(Rows(1, 0, 0, (1,), place + 1, place + 1)) for place, _, _ in _passes(prompt, steps)
        )

    def operations(self, prompt: int, steps: Sequence[Step]) -> int:
        """Operations of the passes behind the prompt's, of this text alone."""
        return sum(self._pass(*one) for one in _passes(prompt, steps))

    def _pass(self, place: int, step: Step, following: Step | None) -> int:
        """A pass behind `place` committed tokens, and the streams that are computed behind it."""
        assert step.tree is not None
        offered, kept, drafted = len(step.tree.tokens), len(step.kept), len(step.tree.tokens) > 1
        carriers = {*carrying(step.tree, self.settings)} & {*step.kept} if self.settings and drafted else set[int]()
        fused = self.streams * len(carriers)
        wanted = following is not None and following.tree is not None and len(following.tree.tokens) > 1
        asked = self._asked(following) if wanted and following is not None and self.sampler else 0
        ahead = asked if self.sampler and not self.near else self.streams * wanted
        sizes, top = self.stream_sizes if fused else self.sizes, kept + fused
        rows = Rows(kept, fused, 0, (kept + ahead,), kept * (place + offered), top * (place + top), ahead)
        count = sizes.forward(rows) + 2 * asked * (self.sampler + self.near) + (2 * self.heads if wanted else 0)
        trunk = Sizes(sizes.layers[: sizes.trunk], sizes.trunk, sizes.head, False)
        pruned = offered - kept
        count += trunk.forward(Rows(pruned, 0, 0, (), pruned * (place + offered), 0))
        if self.scorer and drafted:
            count += 2 * offered * (self.scorer + sizes.head)
        if wanted and self.streams and step.path[-1] not in carriers:
            G, behind = self.streams, place + len(step.path)
            count += self.stream_sizes.forward(Rows(0, G, 0, (), 0, G * (behind + G)))
        return count

    def _asked(self, step: Step) -> int:
        """Rows of streams that the path sampler told what stands before, for the tree of `step`."""
        assert step.tree is not None
        if self.nodes:
            return 1 + (self.streams - 1) * (self.nodes - 1)
        return sum(bool(children) for children in step.tree.topology.children)


def _passes(prompt: int, steps: Sequence[Step]) -> list[tuple[int, Step, Step | None]]:
    """Of every pass behind the prompt's: tokens committed before it, its step, and the next one."""
    found, written = [], 0
    for number, step in enumerate(steps):
        if step.tree is not None:
            # The last token written is the pass's root: it is not committed yet.
            found.append((prompt + written - 1, step, steps[number + 1] if number + 1 < len(steps) else None))
        written += len(step.tokens)
    return found


def sizes_of(model: StreamingLM, gated: bool = False) -> Sizes:
    """Sizes of a model that is ready for decoding, packed or not; `gated` counts a LoRA that acts on streams only."""
    heads, layers = int(model.port.config.num_attention_heads), []
    for i, (layer, kept) in enumerate(zip(model.port.layers, model.port.kept, strict=True)):
        lora = lora_of(layer)
        adds = model.gate is None or (gated and i in model.stream_layers)
        own = sum(p.numel() for p in lora) if adds else 0
        weights = matrices(layer) - sum(p.numel() for p in lora)
        layers.append(Layer(weights, own, 2 * heads * (kept.key_size + kept.value_size)))
    head, small = model.port.model.get_output_embeddings(), model.draft_head
    drafted = None if small is None else matrices(small)
    return Sizes(tuple(layers), len(model.trunk_layers), matrices(head), False, draft_head=drafted)


def slot_bytes(model: StreamingLM) -> int:
    """Bytes of the keys and values of one slot, in all layers."""
    return sum(kept.heads * (kept.key_size + kept.value_size) for kept in model.port.kept) * model.dtype.itemsize


def copied(model: StreamingLM) -> int:
    """Bytes of the head's rows that were copied for streams alone."""
    if model.draft_head is None:
        return 0
    times = 2 if isinstance(model.draft_head, PackedLinear) and model.draft_rows is not None else 1
    return times * matrices(model.draft_head) * model.dtype.itemsize


def near_weights(model: StreamingLM, width: int) -> int:
    """Weights of the head's rows that are multiplied by again for every path that a path sampler is asked about."""
    short = shortlisted(model, width)
    return 0 if short is None else short[0] * short[1][0].shape[1]


def lora_of(module: nn.Module) -> list[nn.Parameter]:
    """Weights of all LoRA branches below `module`; none once they are merged."""
    layers = [one for one in module.modules() if isinstance(one, LoraLayer)]
    return [p for one in layers for branch in (one.lora_A, one.lora_B) for p in branch.parameters()]


def matrices(module: nn.Module) -> int:
    """Weights of all matrices at and below `module`, wherever they are packed."""
    packed = [one for one in module.modules() if isinstance(one, PackedLinear)]
    plain = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    return plain + sum((one.end - one.first) * one.packed.shape[1] for one in packed)
