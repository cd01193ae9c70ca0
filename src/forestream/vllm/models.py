"""vLLM's own model classes with streams on their top layers, by one mixin.

Imported by vLLM alone, when it loads an exported folder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.opt import OPTForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader

from forestream.config import StreamConfig
from forestream.errors import CheckpointError, ConfigError
from forestream.streams import PathSampler, StreamStart
from forestream.vllm import check_version
from forestream.vllm.exported import COPIES, KEY, SAMPLER, VOCABULARY, stream_config
from forestream.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Pass:
    """What streams need of a pass of the model over N tokens of its requests.

    Attributes:
        trunk: states at the entry of the stream layers.
        positions: of the tokens in their texts.
        attention: what the attention of the stream layers was told: where requests begin, their blocks.
    """

    trunk: Float[Tensor, "N D"]
    positions: Int[Tensor, " N"]
    attention: Any


class Streaming:
    """Mixin: keeps the trunk's states of every pass, and runs streams through the top layers.

    To the rest of vLLM the class is the one it is mixed into. Without speculation, or with that of others, it does
    nothing but load: the same folder serves as its own baseline.

    Attributes:
        stream_config: what was trained.
        copies: the stream layers as streams go through them, where these are not the model's own (lossless).
        sampler: tells streams the token before what they foretell; None if the adapter has none.
        vocabulary: the tokens that streams draft; None is all V.
        streaming: whether vLLM was started with a proposer of its user, which is the streams'.
        last: the last pass over requests; None before the first, and of those that only measure memory.

    Raises:
        ConfigError: the version of vLLM is not the tested one, or layers would lie on several machines.
        CheckpointError: the model's config.json holds no entry of an export; while weights are loaded, also: the path
            sampler in the folder does not fit the model.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_version()
        stock: Any = super()
        stock.__init__(vllm_config=vllm_config, prefix=prefix)
        speculative = vllm_config.speculative_config
        hub: Any = vllm_config.model_config.hf_config
        self.stream_config: StreamConfig = stream_config(getattr(hub, KEY, None), vllm_config.model_config.model)
        self.start = StreamStart(self.stream_config, hub.hidden_size)
        self.streaming = speculative is not None and speculative.method == "custom_class"
        self.copies: nn.ModuleList | None = None
        self.sampler: PathSampler | None = None
        self.vocabulary: DraftVocabulary | None = None
        self._draft_head: ParallelLMHead | None = None
        self.last: Pass | None = None
        if self.streaming:
            if vllm_config.parallel_config.pipeline_parallel_size > 1:
                raise ConfigError(
                    "layers are spread over several stages (pipeline_parallel_size above 1); streams need their layers "
                    "in one place: serve with pipeline_parallel_size 1, or without speculation"
                )
            self.keep_trunk(vllm_config)
            # Compiled code is kept under a print of the configuration, in which n-grams and streams would be alike.
            getattr(hub, KEY)["hands_out_trunk"] = True

    @property
    def layers(self) -> nn.ModuleList:
        """All decoder layers."""
        model: Any = self
        return model.model.layers

    @property
    def stream_layers(self) -> Iterable[Any]:
        """The top layers, as streams go through them."""
        own = self.layers[len(self.layers) - self.stream_config.stream_layers :]
        return own if self.copies is None else self.copies

    @property
    def attention_names(self) -> list[str]:
        """What vLLM calls the attention of the stream layers."""
        return [layer.self_attn.attn.layer_name for layer in self.stream_layers]

    def keep_trunk(self, vllm_config: VllmConfig) -> None:
        """Have the model hand out the states at the stream layers' entry; compiled code does so too."""
        model: Any = self
        model.set_aux_hidden_state_layers((len(self.layers) - self.stream_config.stream_layers,))

    def taken(self, output: Any) -> tuple[Tensor, Tensor]:
        """A pass's output parted: final states, and the trunk's."""
        final, (trunk,) = output
        return final, trunk

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        stock: Any = super()
        output = stock.forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if not self.streaming:
            return output
        final, trunk = self.taken(output)
        told = get_forward_context().attn_metadata
        self.last = Pass(trunk, positions, told[self.attention_names[0]]) if isinstance(told, dict) else None
        return final

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        stock: Any = super()
        kept: dict[str, Tensor] = {}

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith((COPIES, SAMPLER, VOCABULARY)):
                    kept[name] = tensor
                else:
                    yield name, tensor

        loaded: set[str] = stock.load_weights(others())
        if not self.streaming:
            return loaded
        self._draft_head = None  # of other weights, if there were any
        if copied := [(name, tensor) for name, tensor in kept.items() if name.startswith(COPIES)]:
            self.copies = nn.ModuleList(_twin(layer, self) for layer in self.stream_layers)
            loaded |= AutoWeightsLoader(self).load_weights(copied, mapper=stock.hf_to_vllm_mapper)
        model: Any = self
        own = next(self.start.parameters())
        if found := {name.removeprefix(SAMPLER): t for name, t in kept.items() if name.startswith(SAMPLER)}:
            self.sampler = _sampler(found, model.config).to(own)
            loaded |= {f"{SAMPLER}{name}" for name in found}  # vLLM sees to it that every parameter was loaded
        if VOCABULARY in kept:
            self.vocabulary = DraftVocabulary(kept[VOCABULARY], model.config.vocab_size).to(own.device)
        return loaded

    def restrict(self) -> None:
        """Copy the head's rows of the draft vocabulary, once the head is as it will be.

        Of a head that is parted among processes (tensor parallel) or quantised there are no plain rows here: then the
        whole head is asked, and the vocabulary's columns are taken.
        """
        model: Any = self
        head = model.lm_head
        if self.vocabulary is None or head.tp_size > 1 or type(head.quant_method) is not UnquantizedEmbeddingMethod:
            return
        ids, whole = self.vocabulary.ids, head.weight.data
        rows: Any = ParallelLMHead(len(ids), head.embedding_dim, params_dtype=whole.dtype).to(whole.device)
        rows.weight.data.zero_()  # it is longer than the vocabulary
        rows.weight.data[: len(ids)] = whole[ids]
        rows.quant_method.process_weights_after_loading(rows)
        self._draft_head = rows

    def run_streams(self, states: Float[Tensor, "S D"], positions: Int[Tensor, " S"]) -> Float[Tensor, "S D"]:
        """Streams through the top layers: their final states."""
        residual: Any = None
        for layer in self.stream_layers:
            states, residual = layer(positions, states, residual)
        return states + residual

    def finish(self, states: Float[Tensor, "S D"]) -> Float[Tensor, "S E"]:
        """The final norm: what the head reads."""
        model: Any = self
        return model.model.norm(states)

    def behind(self, states: Float[Tensor, "S D"], tokens: Int[Tensor, " S"]) -> Float[Tensor, "S D"]:
        """Final states of streams once `tokens` stand before what they foretell; as they are without a path sampler."""
        model: Any = self
        return states if self.sampler is None else self.sampler(states, model.embed_input_ids(tokens))

    def best(self, states: Float[Tensor, "S D"]) -> Int[Tensor, " S"]:
        """The best token by each final state of a stream, out of the draft vocabulary; exact ties to the lowest id."""
        model: Any = self
        finished = self.finish(states)
        if self.vocabulary is None:
            return model.compute_logits(finished).argmax(dim=-1)
        ids = self.vocabulary.ids
        if self._draft_head is None:
            logits = model.compute_logits(finished)[:, ids]
        else:
            logits = model.logits_processor(self._draft_head, finished)[:, : len(ids)]
        return ids[logits.argmax(dim=-1)]


def _sampler(found: dict[str, Tensor], config: Any) -> PathSampler:
    """The path sampler of an exported folder, for a model of this configuration."""
    embedding_size = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT may keep embeddings narrower
    sampler = PathSampler(config.hidden_size, embedding_size, len(found["up"]) if "up" in found else 1)
    expected = {name: tuple(tensor.shape) for name, tensor in sampler.state_dict().items()}
    if (shapes := {name: tuple(tensor.shape) for name, tensor in found.items()}) != expected:
        raise CheckpointError(
            f"the folder's path sampler has tensors {shapes}; this model expects {expected}: export the adapter again"
        )
    sampler.load_state_dict(found)
    return sampler


def _twin(layer: Any, model: Any) -> Any:
    """A second `layer` with weights of its own; its attention is the same, so one cache holds what both keep."""
    memo: dict[int, Any] = {id(model): model}  # hooks know the model
    for module in layer.modules():
        if module is layer.self_attn.attn or next(module.parameters(), None) is None:
            memo[id(module)] = module
    for parameter in layer.parameters():
        # vLLM's parameters cannot copy themselves, and carry how their weights are loaded.
        own = torch.Tensor._make_subclass(type(parameter), parameter.data.clone(), parameter.requires_grad)
        vars(own).update(vars(parameter))
        memo[id(parameter)] = own
    return copy.deepcopy(layer, memo)


class ForestreamLlamaForCausalLM(Streaming, LlamaForCausalLM):
    pass


class ForestreamMistralForCausalLM(Streaming, MistralForCausalLM):
    pass


class ForestreamQwen2ForCausalLM(Streaming, Qwen2ForCausalLM):
    pass


class ForestreamQwen3ForCausalLM(Streaming, Qwen3ForCausalLM):
    pass


class ForestreamOPTForCausalLM(Streaming, OPTForCausalLM):
    """OPT's class hands out no states between layers, so a hook takes them, which compiled code would not call."""

    @property
    def decoder(self) -> Any:
        """The stack below the head."""
        return self.model.decoder

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    def keep_trunk(self, vllm_config: VllmConfig) -> None:
        if vllm_config.compilation_config.mode not in (None, CompilationMode.NONE):
            raise ConfigError("streams on OPT run eagerly only: start vLLM with enforce_eager (--enforce-eager)")
        self._trunk: Tensor | None = None
        first = self.layers[len(self.layers) - self.stream_config.stream_layers]
        first.register_forward_pre_hook(self._take)

    def _take(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._trunk = inputs[0].clone()  # layers may add to it in place

    def taken(self, output: Any) -> tuple[Tensor, Tensor]:
        assert self._trunk is not None
        return output, self._trunk

    def run_streams(self, states: Float[Tensor, "S D"], positions: Int[Tensor, " S"]) -> Float[Tensor, "S D"]:
        for layer in self.stream_layers:
            states = layer(states)
        return states

    def finish(self, states: Float[Tensor, "S D"]) -> Float[Tensor, "S E"]:
        decoder = self.decoder
        if decoder.final_layer_norm is not None:
            states = decoder.final_layer_norm(states)
        if decoder.project_out is not None:
            states, _ = decoder.project_out(states)
        return states
