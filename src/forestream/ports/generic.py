"""A port for families without a file of their own: trusted only after the parity check has found it exact."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forestream.errors import UnsupportedModel
from forestream.ports.base import Rotary
from forestream.ports.rotary_decoder import RotaryDecoderPort

_ROTARY = "rotary_emb"
_LAYER_KINDS = ("full_attention", "sliding_attention")


class GenericPort(RotaryDecoderPort):
    """Tells the parts of a decoder by what they are: an embedding, layers, a norm, perhaps a rotary table.

    Every child of the decoder must be accounted for; one more (a position table, a second norm) is refused.
    Dropout that a family applies to its embeddings without a module of its own is not repeated in training.

    Raises:
        UnsupportedModel: the decoder has parts this port has no place for.
    """

    # Names alone do not tell that projections read the same input.
    shared_inputs: tuple[tuple[str, ...], ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config
        self._find_parts()
        super().__init__(model)
        if self._takes_rotary and not self._has_rotary:
            raise UnsupportedModel(f"{self.family}: layers ask for rotary tables, which the decoder lacks.")
        self._kinds = self._layer_kinds()
        linear = (nn.Linear, Conv1D)
        projections = [m for layer in self.layers for m in layer.named_modules() if isinstance(m[1], linear)]
        self.lora_targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name, _ in projections))
        self.transposed_weights = any(isinstance(module, Conv1D) for _, module in projections)

    @property
    def decoder(self) -> Any:
        """The stack below the head."""
        return self.model.base_model

    def _find_parts(self) -> None:
        children = dict(self.decoder.named_children())
        embedding = self.model.get_input_embeddings()
        self._has_rotary = children.pop(_ROTARY, None) is not None
        names: dict[str, list[str]] = {"embedding": [], "layers": [], "dropout": [], "norm": []}
        for name, child in children.items():
            if child is embedding:
                names["embedding"].append(name)
            elif isinstance(child, nn.ModuleList) and len(child) == self.config.num_hidden_layers:
                names["layers"].append(name)
            elif isinstance(child, nn.Dropout):
                names["dropout"].append(name)
            else:
                names["norm"].append(name)
        counts = {part: len(found) for part, found in names.items()}
        if counts["dropout"] > 1 or any(counts[part] != 1 for part in ("embedding", "layers", "norm")):
            raise UnsupportedModel(
                f"{self.config.model_type}: the decoder should hold one embedding, one list of layers and "
                f"one norm; it holds {', '.join(dict(self.decoder.named_children()))}."
            )
        self._layers_name, self._norm_name = names["layers"][0], names["norm"][0]
        self._dropout_name = names["dropout"][0] if names["dropout"] else None

    def _layer_kinds(self) -> tuple[str, ...]:
        window = getattr(self.config, "sliding_window", None)
        uniform = _LAYER_KINDS[0] if window is None else _LAYER_KINDS[1]
        kinds = tuple(getattr(self.config, "layer_types", None) or [uniform] * self.num_layers)
        strange = sorted(set(kinds) - set(_LAYER_KINDS))
        if strange:
            raise UnsupportedModel(
                f"{self.family} has layers of type {', '.join(strange)}; known are {', '.join(_LAYER_KINDS)}."
            )
        return kinds

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The stock decoder layers, first to last."""
        layers: Sequence[nn.Module] = getattr(self.decoder, self._layers_name)
        return layers

    def window(self, i: int) -> int | None:
        """`config.sliding_window` in sliding layers; without `config.layer_types` all are, if it is set."""
        if self._kinds[i] == _LAYER_KINDS[0]:
            return None
        window: int | None = self.config.sliding_window
        return window

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Token embedding, and its dropout module where there is one: [B,N,D] for ids [B,N]."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        if self._dropout_name is not None:
            embedded = getattr(self.decoder, self._dropout_name)(embedded)
        return embedded

    def rotary_kind(self, i: int) -> str:
        """One table for all layers, or none."""
        return "rotary" if self._takes_rotary else "none"

    def rotary(self, hidden: Tensor, positions: Tensor, i: int) -> Rotary | None:
        """Cosine and sine for positions [B,n], or None where layers take positions themselves."""
        return super().rotary(hidden, positions, i) if self._takes_rotary else None

    def rope(self, i: int) -> dict[str, Any]:
        """The rotary settings, or the plain ones where the family has none."""
        settings: dict[str, Any] = getattr(self.config, "rope_parameters", None) or {"rope_type": "default"}
        return settings

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm, [B,n,D] -> [B,n,D]."""
        finished: Tensor = getattr(self.decoder, self._norm_name)(hidden)
        return finished

    @property
    def output(self) -> Any:
        """The output embedding alone; scaled logits make the parity check fail."""
        return self.model.get_output_embeddings()
