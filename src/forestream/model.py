"""One pass: trunk layers, pruning, attachment of the streams, stream layers. The host's own layers do the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import pi

import torch
from jaxtyping import Float, Int
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from forestream import weights
from forestream.attention import group_heads
from forestream.cache import PassCache, StreamCache
from forestream.compiled import CompiledLayers, EagerLayers
from forestream.config import Compile, Quantise, StreamConfig, one_of
from forestream.errors import ConfigError
from forestream.masks import additive
from forestream.packing import Pack
from forestream.ports import LayerInputs, Rotary, port_for
from forestream.pruning import ExitScorer
from forestream.streams import PathSampler, SlotGate, StreamStart, rotate_values
from forestream.topology import Topology, renumbered
from forestream.vocabulary import DraftVocabulary

# From the trunk's output [B, N, D] to the nodes that survive in each row's tree, in increasing order.
Prune = Callable[[Tensor], tuple[tuple[int, ...], ...]]

# Weight [K, E] and bias [K] of a head.
Rows = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class PassOutput:
    """What a pass leaves behind; logits are taken from it lazily, by `logits` and `draft_logits`.

    Attributes:
        trunk: main states at the entry of the stream layers, of the surviving nodes.
        main: main states after the last layer, of the surviving nodes.
        streams: stream states after the last layer.
        kept: per row, numbers of the surviving nodes in the tree that was offered; all nodes where nothing was pruned.
    """

    trunk: Float[Tensor, "B N D"]
    main: Float[Tensor, "B N D"]
    streams: Float[Tensor, "B G C D"]
    kept: tuple[tuple[int, ...], ...]


class StreamingLM(nn.Module):
    """A host model, its port, its adapter, and the streams on its top layers.

    Attributes:
        vocabulary: the tokens that streams draft, as `restrict` set them; None is all V.

    Raises:
        ConfigError: more stream layers than the host has layers.
        UnsupportedModel: the host cannot be driven exactly.
    """

    def __init__(self, base: PreTrainedModel, config: StreamConfig) -> None:
        super().__init__()
        self.port = port_for(base)
        self.stream_config = config
        layers = self.port.num_layers
        if config.stream_layers > layers:
            raise ConfigError(f"stream_layers is {config.stream_layers}; the model has {layers} layers")
        self.trunk_layers = range(layers - config.stream_layers)
        self.stream_layers = range(layers - config.stream_layers, layers)
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        self.prepared: Compile | None = None
        self.quantised: Quantise = "off"
        self.host: PreTrainedModel | PeftModel = base
        self.start = StreamStart(config, self.port.hidden_size) if config.streams else None
        self.scorer = ExitScorer(self.port.hidden_size, config.scorer_rank) if self._scored() else None
        self.vocabulary: DraftVocabulary | None = None
        self.draft_head: nn.Module | None = None
        self.sampler: PathSampler | None = None
        self._plain_rows: Rows | None = None
        self.gate: SlotGate | None = None
        self.layers: EagerLayers = EagerLayers(self.port)
        own = next(base.parameters())
        for part in (self.start, self.scorer):
            if part is not None:
                part.to(own.device)

    def _scored(self) -> bool:
        return self.stream_config.streams > 0 and self.stream_config.scorer_rank > 0 and len(self.trunk_layers) > 0

    def adopt(self, host: PeftModel) -> None:
        """Take `host`, this model's base with a LoRA adapter in place, as the model to drive."""
        self.host = host
        if self.stream_config.mode == "lossless":
            self.gate = SlotGate(self.port.layers[i] for i in self.stream_layers)

    def add_lora(self) -> None:
        """Put a fresh LoRA adapter into the base: into all layers (joint) or the stream layers only (lossless)."""
        only = list(self.stream_layers) if self.stream_config.mode == "lossless" else None
        lora = LoraConfig(
            r=self.stream_config.lora_rank,
            lora_alpha=self.stream_config.lora_alpha,
            target_modules=list(self.port.lora_targets),
            layers_to_transform=only,
            fan_in_fan_out=self.port.transposed_weights,
            task_type="CAUSAL_LM",
        )
        host = get_peft_model(self.port.model, lora)
        assert isinstance(host, PeftModel)
        self.adopt(host)

    def merge(self) -> None:
        """Merge a joint adapter into the base weights, so that decoding pays nothing for it.

        Raises:
            ConfigError: the adapter is gated to stream slots (lossless mode) and cannot be merged.
        """
        if self.stream_config.mode == "lossless":
            raise ConfigError("a lossless adapter acts on stream slots only and cannot be merged")
        if isinstance(self.host, PeftModel):
            self.host = self.host.merge_and_unload()

    def restrict(self, vocabulary: DraftVocabulary | None) -> None:
        """Let streams draft the tokens of `vocabulary` only, for the head's rows of these alone; None: all V.

        The text does not depend on it. Rows are copied out of the head as it is.

        Raises:
            ConfigError: the vocabulary is of another number of tokens than the head has, or the model is prepared.
            UnsupportedModel: the head is no plain linear layer.
        """
        if vocabulary is self.vocabulary or (vocabulary is not None and vocabulary.same(self.vocabulary)):
            return
        if self.prepared is not None:
            raise ConfigError("the model is prepared and its plain head is gone; set the draft vocabulary before that")
        if vocabulary is not None and vocabulary.among != (found := self.port.head_size):
            raise ConfigError(f"the draft vocabulary is one of {vocabulary.among} tokens; the model's head has {found}")
        self.draft_head = self.port.head_of(vocabulary.ids) if vocabulary is not None else None
        self.vocabulary = vocabulary.to(self.device) if vocabulary is not None else None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.host.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.host.parameters()).device

    def prepare(self, compile: Compile = "off") -> None:
        """Make passes as fast as this machine allows, for decoding only; joint adapters are merged first, by `merge`.

        Weights are packed where the machine has a layout for them, grouped heads are attended to without copies, and
        with "layer" or "full" the layers become compiled code: one layer for all alike, or whole spans.

        Raises:
            ConfigError: compiling is asked for and there is no compiler, or the model is prepared already.
        """
        if self.prepared is not None:
            raise ConfigError(f"the model is prepared already, with compile {self.prepared!r}; load it anew")
        one_of("compile", compile, ("off", "layer", "full"))
        self.eval()
        if self.gate is not None:
            self.gate.open(1, 1, self.device)  # whatever pass came before, the probes have main slots only
        shared = self.port.shared_inputs if compile != "off" else ()
        rows, embedding = self.draft_rows, self.port.model.get_input_embeddings().weight
        if self.sampler is not None and rows is not None and (self.draft_head is not None or rows[0] is embedding):
            self._plain_rows = rows  # packing copies: they stay where they are few, or lie there anyway
        if weights.can_pack(self.port.model):
            # the whole model, head included: nothing else in it multiplies
            weights.pack(self, shared)
        group_heads(self.port)
        if compile != "off":
            self.layers = CompiledLayers(self.port, self.gate, whole=compile == "full")
        self.prepared = compile

    @contextmanager
    def as_host(self) -> Iterator[PreTrainedModel | PeftModel]:
        """The model as the host library's own `generate` is to see it: lossless adapters never touch the text."""
        if isinstance(self.host, PeftModel) and self.stream_config.mode == "lossless":
            with self.host.disable_adapter():
                yield self.host
        else:
            yield self.host

    def new_cache(self, capacity: int, rows: int = 1) -> StreamCache:
        """An empty cache for `capacity` slots in each row: committed text and the largest pass behind it."""
        cache = StreamCache(self.port.kept, capacity, self.dtype, self.device, rows)
        self.layers.admit(cache)
        return cache

    def logits(self, states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """The host's final norm and head."""
        logits: Tensor = self.port.head(self.port.finish(states))
        return logits

    def draft_logits(self, states: Float[Tensor, "*rows D"], rows: Rows | None = None) -> Float[Tensor, "*rows X"]:
        """Logits of stream states: the host's final norm, and the head's rows of the draft vocabulary, or all of it.

        Args:
            rows: multiply by these of the `draft_rows` alone.
        """
        head: Callable[[Tensor], Tensor] | None = self.draft_head
        if rows is not None:
            head = partial(functional.linear, weight=rows[0], bias=rows[1])
        logits: Tensor = self.port.head(self.port.finish(states), head)
        return logits

    @property
    def draft_ids(self) -> Int[Tensor, " K"] | None:
        """The tokens that the columns of `draft_logits` are of, in increasing order; None where they are all V."""
        return None if self.vocabulary is None else self.vocabulary.ids

    @property
    def draft_rows(self) -> Rows | None:
        """Weight and bias of the streams' head, where they lie in memory row by row."""
        head = self.port.output if self.draft_head is None else self.draft_head
        if type(head) is nn.Linear and type(head.weight) is nn.Parameter:
            return head.weight, head.bias
        return self._plain_rows

    def ahead(self, states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows X"]:
        """What drafts are made of: logits of stream states, or with a path sampler the states, which need a path."""
        return states if self.sampler is not None else self.draft_logits(states)

    def add_sampler(self, width: int) -> None:
        """Put a fresh path sampler in, which changes nothing until it is trained."""
        weight = self.port.model.get_input_embeddings().weight
        self.sampler = PathSampler(self.port.hidden_size, weight.shape[1], width).to(self.device)

    def behind(self, states: Float[Tensor, "*rows D"], tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows D"]:
        """Final states of streams once `tokens` stand before what they foretell; as they are without a path sampler."""
        if self.sampler is None:
            return states
        sampled: Tensor = self.sampler(states, self.port.model.get_input_embeddings()(tokens))
        return sampled

    def exit_logits(self, trunk: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """What the exit scorer thinks comes after each state, long before the last layer.

        Raises:
            ConfigError: the model was trained without a scorer.
        """
        if self.scorer is None:
            raise ConfigError("pruning needs the exit scorer; this adapter has none (scorer_rank 0)")
        return self.logits(self.scorer(trunk))

    def forward(
        self,
        ids: Int[Tensor, "B N"],
        pack: Pack,
        cache: StreamCache | None = None,
        prune: Prune | None = None,
        trees: Sequence[Topology] = (),
    ) -> PassOutput:
        """One pass over `pack`, behind the text committed in `cache`.

        With `prune`, trunk layers see all N nodes and stream layers only the survivors, with the streams of those that
        carry any; `trees` are then the rows' trees that were offered.
        """
        lengths = cache.lengths if cache is not None else [0]
        nodes = pack.main_only()
        places = nodes.positions(self._behind(lengths), "same").to(ids.device)
        states = self.port.embed(ids, places.expand(ids.shape))
        given = self._inputs(nodes, lengths, states)
        states = self._drive(self.trunk_layers, states, nodes, given, cache)
        kept = tuple(tuple(range(len(tree))) for tree in trees) or (tuple(range(pack.mains)),) * len(ids)
        pruned = False
        if prune is not None and trees:
            kept = prune(states)
            pruned = any(len(own) < len(tree) for own, tree in zip(kept, trees, strict=True))
            if pruned:
                left = [tree.subset(own) for tree, own in zip(trees, kept, strict=True)]
                carriers = [renumbered(*pair) for pair in zip(pack.carriers.tolist(), kept, strict=True)]
                pack = Pack.forest(left, carriers, pack.streams)
                states = _picked(states, kept)
        slots = self._attach(states, pack)
        if pack.streams or pruned:
            given = self._inputs(pack, lengths, slots)
        outcome = self._drive(self.stream_layers, slots, pack, given, cache)
        main, streams = outcome[:, : pack.mains], outcome[:, pack.mains :]
        shape = (pack.streams, pack.carriers.shape[1]) if pack.streams else (0, 0)
        return PassOutput(states, main, streams.unflatten(1, shape), kept)

    def streams_behind(self, trunk: Float[Tensor, "B 1 D"], streams: int, cache: StreamCache) -> Float[Tensor, "B G D"]:
        """Final states of the streams of the last committed token, from its state at the stream layers' entry."""
        if self.start is None:
            raise ConfigError("this adapter was trained without streams")
        pack, states = Pack.behind(streams, len(trunk)), self.start(trunk, streams)
        given = self._inputs(pack, cache.lengths, states)
        return self._drive(self.stream_layers, states, pack, given, cache)

    def _attach(self, mains: Float[Tensor, "B N D"], pack: Pack) -> Float[Tensor, "B Q D"]:
        if not pack.streams:
            return mains
        if self.start is None:
            raise ConfigError("this adapter was trained without streams")
        index = pack.carriers.to(mains.device)[:, :, None].expand(-1, -1, mains.shape[2])
        carriers = torch.gather(mains.expand(index.shape[0], -1, -1), 1, index)
        return torch.cat([mains, self.start(carriers, pack.streams)], dim=1)

    def _inputs(self, pack: Pack, lengths: Sequence[int], states: Float[Tensor, "B Q D"]) -> dict[int, LayerInputs]:
        """What every layer is handed with the slots of `pack`: one mask per window, one rotary table per kind."""
        ahead = self.stream_config.positions if not self.port.learned_positions else "same"
        positions = pack.positions(self._behind(lengths), ahead)
        # Streams may reach past the end of the text's room, where some rotary types change their frequencies for all.
        reaches = (positions[:, : pack.mains].amax(dim=1) + 1).tolist() if pack.mains else list(lengths)
        rooms = [self.port.room(reach) for reach in reaches]
        placed = positions.minimum(torch.tensor(rooms)[:, None] - 1).to(states.device)
        masks: dict[int | None, Tensor] = {}
        rotary: dict[str, Rotary | None] = {}
        given: dict[tuple[int | None, str], LayerInputs] = {}
        inputs = {}
        for i in range(self.port.num_layers):
            window, kind = self.port.window(i), self.port.rotary_kind(i)
            if window not in masks:
                masks[window] = additive(pack, lengths, positions, window, states.dtype, states.device)
            if kind not in rotary:
                rotary[kind] = self._rotary(states, placed, pack.mains, i, rooms)
            if (window, kind) not in given:
                given[window, kind] = LayerInputs(masks[window], placed, rotary[kind])
            inputs[i] = given[window, kind]
        return inputs

    def _drive(
        self,
        layers: range,
        states: Float[Tensor, "B Q D"],
        pack: Pack,
        inputs: dict[int, LayerInputs],
        cache: StreamCache | None,
    ) -> Float[Tensor, "B Q D"]:
        store = self._storage(pack, cache)
        if cache is not None:
            cache.begin(layers)
        if self.gate is not None:
            self.gate.open(pack.mains, len(pack), states.device)
        states = self.layers(layers, states, inputs, store)
        if cache is not None:
            cache.expect(layers, len(pack))
        return states

    def _rotary(
        self, states: Tensor, positions: Int[Tensor, "B Q"], mains: int, layer: int, rooms: Sequence[int]
    ) -> Rotary | None:
        # Some rotary types pick frequencies by the largest position of the call: streams, and rows whose frequencies
        # may not be the others', get calls of their own.
        rows = [positions] if len(set(rooms)) == 1 else list(positions.split(1))
        tables = [
            [self.port.rotary(states, part, layer) for part in (row[:, :mains], row[:, mains:]) if part.shape[1]]
            for row in rows
        ]
        joined = [
            [torch.cat(parts, dim=1) for parts in zip(*(part for part in row if part is not None), strict=True)]
            for row in tables
        ]
        if not all(joined):
            return None
        cosine, sine = (torch.cat(parts) for parts in zip(*joined, strict=True))
        return cosine, sine

    @staticmethod
    def _behind(lengths: Sequence[int]) -> int | Int[Tensor, "B 1"]:
        """What positions are counted from."""
        return lengths[0] if len(lengths) == 1 else torch.tensor(lengths)[:, None]

    def _storage(self, pack: Pack, cache: StreamCache | None) -> StreamCache | PassCache | None:
        if not self.stream_config.value_rotation or not pack.streams:
            if cache is not None:
                cache.value_map = None
            return cache
        angle = self.stream_config.rotation_angle
        if angle is None:
            angle = pi / (2 * (self.port.position_limit + self.stream_config.streams))
        turn = partial(rotate_values, indices=pack.indices, angle=angle)
        if cache is None:
            return PassCache(turn)
        cache.value_map = turn
        return cache


def _picked(states: Float[Tensor, "B N D"], kept: Sequence[Sequence[int]]) -> Float[Tensor, "B n D"]:
    """The states of the nodes in `kept`; shorter rows are filled up with their root's."""
    most = max(map(len, kept))
    index = torch.tensor([[*own, *[0] * (most - len(own))] for own in kept], device=states.device)
    return states.gather(1, index[:, :, None].expand(-1, -1, states.shape[2]))
