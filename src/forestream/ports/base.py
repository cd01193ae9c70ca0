"""What a host family calls its parts: the one interface the rest of the package drives a model through.

A port never copies, subclasses or patches modelling code. It names the embedding, the decoder layers, the
final norm and the head of a loaded model, and calls the *stock* layer with an explicit mask, explicit
positions and our cache.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from forestream.errors import UnsupportedModel

# What decoder layers have called the cache argument. A layer swallows a wrong name in **kwargs and then
# caches nothing, so the name is read from the signature and never assumed.
CACHE_KEYWORDS = ("cache", "layer_past", "past_key_values", "past_key_value")

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class KVShape:
    """What one layer keeps of every slot: `heads` keys of `key_size` numbers and values of `value_size`."""

    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class LayerInputs:
    """What a layer is handed beside the hidden states.

    Attributes:
        mask: additive, [B or 1,1,Q,K]; always given: with none, sdpa would take a causal shortcut that is wrong for
            a warm cache.
        positions: [B,Q].
        rotary: cosine and sine [B,Q,d], or None where layers are handed no table.
    """

    mask: Tensor
    positions: Tensor
    rotary: Rotary | None


class LayerCache(Protocol):
    """What a stock layer asks of the cache it is handed."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, /, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take keys and values [B,h,Q,d] of one layer; return all keys and values [B,h,K,d] to attend to."""
        ...


class Port(ABC):
    """One loaded causal language model, its parts under common names.

    Modules are looked up when they are called, so adapters that replace linear layers, embeddings or the
    head in place after the port was made are honoured.

    Attributes:
        implementations: attention implementations that read an additive mask rightly in this family.
        learned_positions: positions enter at the input only, by a table.
        lora_targets: the family's names of the attention and MLP projections: PEFT's `target_modules`.
        shared_inputs: projections of one module that read the same input, group by group.
        transposed_weights: projections are stored [in, out] (GPT-2's Conv1D): PEFT's `fan_in_fan_out`.
        model: the host.
        family: its `config.model_type`.
        attention: the attention implementation it was loaded with.
        cache_keyword: what its layers call the cache.
        kept: what every layer keeps in the cache; set when parity is checked.

    Raises:
        UnsupportedModel: the layers name no cache argument, or the attention takes no additive mask.
    """

    implementations: tuple[str, ...] = ("sdpa", "eager")
    learned_positions: bool = False
    lora_targets: tuple[str, ...] = ()
    shared_inputs: tuple[tuple[str, ...], ...] = ()
    transposed_weights: bool = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: Any = model.config
        self.family: str = self.config.model_type
        self.attention: str = self.config._attn_implementation
        if self.attention not in self.implementations:
            raise UnsupportedModel(
                f"{self.family} runs with attention implementation {self.attention!r}; one that takes any "
                f"additive mask is needed: {', '.join(self.implementations)}. Load the model with "
                f"attn_implementation={self.implementations[0]!r}."
            )
        parameters = inspect.signature(type(self.layers[0]).forward).parameters
        self.cache_keyword: str = self._cache_keyword(tuple(parameters))
        self.kept: tuple[KVShape, ...] = ()
        self._takes_positions = "position_ids" in parameters
        self._takes_rotary = "position_embeddings" in parameters
        self._takes_use_cache = "use_cache" in parameters

    def _cache_keyword(self, parameters: tuple[str, ...]) -> str:
        for name in CACHE_KEYWORDS:
            if name in parameters:
                return name
        raise UnsupportedModel(
            f"{self.family}: the decoder layer takes ({', '.join(parameters)}), none of which is a cache "
            f"argument ({', '.join(CACHE_KEYWORDS)}); its keys and values could not be kept."
        )

    @property
    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """The stock decoder layers, first to last."""

    @property
    def num_layers(self) -> int:
        """N_L, the number of decoder layers."""
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """D, the width of the hidden states between layers."""
        return int(self.config.hidden_size)

    @property
    def position_limit(self) -> int:
        """The number of positions the host allows; positions must stay below it."""
        return int(self.config.max_position_embeddings)

    def room(self, prompt: int) -> int:
        """The number of positions a text may reach that starts from `prompt` tokens.

        It is `position_limit` unless rotary frequencies change on the way there: the cached keys would then
        be left turned by the old ones.
        """
        return self.position_limit

    def window(self, i: int) -> int | None:
        """Sliding window of layer i: keys at distance < window are seen. None is full attention."""
        return None

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What enters the first layer, [B,N,D], for ids and positions [B,N]; scale and dropout included."""

    def rotary_kind(self, i: int) -> str:
        """Layers of one kind share their rotary tables: a key for the caller's cache within one pass."""
        return "none"

    def rotary(self, hidden: Tensor, positions: Tensor, i: int) -> Rotary | None:
        """Cosine and sine [B,n,d] of layer i for positions [B,n], or None where layers are handed no table.

        Some scalings pick their frequencies from the largest position in the call: ask for main and for
        stream positions separately, and for all of a prompt at once. hidden [B,n,D] gives dtype and device
        only.
        """
        return None

    def run(self, i: int, hidden: Tensor, inputs: LayerInputs, cache: LayerCache | None) -> Tensor:
        """Call stock layer i: hidden [B,Q,D] -> [B,Q,D]. cache is None in training."""
        return self.call(self.layers[i], hidden, inputs, cache)

    def call(self, layer: Callable[..., Any], hidden: Tensor, inputs: LayerInputs, cache: LayerCache | None) -> Tensor:
        """Call `layer`, a stock layer or what stands for one, the way this family's layers are called."""
        keywords: dict[str, Any] = {"attention_mask": inputs.mask, self.cache_keyword: cache}
        if self._takes_positions:
            keywords["position_ids"] = inputs.positions
        if self._takes_rotary:
            keywords["position_embeddings"] = inputs.rotary
        if self._takes_use_cache:
            keywords["use_cache"] = cache is not None
        # hidden goes positionally: gradient checkpointing only tracks positional tensors
        output = layer(hidden, **keywords)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    @abstractmethod
    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection: hidden [B,n,D] -> what the head reads, [B,n,E]."""

    @property
    def output(self) -> Any:
        """The projection to logits, as the host keeps it."""
        return self.model.lm_head

    @property
    def head_size(self) -> int:
        """V, the number of tokens that there are logits for."""
        return int(self.config.vocab_size)

    def head(self, finished: Tensor, rows: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """LM head with logit scale or softcap: finished [B,n,E] -> logits [B,n,V]; [B,n,K] by K `rows` of it."""
        logits: Tensor = (self.output if rows is None else rows)(finished)
        return logits

    def head_of(self, ids: Tensor) -> nn.Linear:
        """The projection to the logits of the tokens `ids` [K] alone: copies of its rows, frozen.

        Raises:
            UnsupportedModel: the host's own projection is no plain linear layer (any more).
        """
        output = self.output
        if type(output) is not nn.Linear or type(output.weight) is not nn.Parameter:
            raise UnsupportedModel(
                f"the head of this {self.family} is a {type(output).__name__}; rows of it can be taken from a plain "
                "linear layer only, before weights are packed or quantised."
            )
        rows = nn.Linear(output.in_features, len(ids), device="meta")
        ids = ids.to(output.weight.device)
        rows.weight = nn.Parameter(output.weight.detach()[ids], requires_grad=False)
        rows.bias = None if output.bias is None else nn.Parameter(output.bias.detach()[ids], requires_grad=False)
        return rows
