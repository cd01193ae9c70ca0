"""Is the driven forward the stock forward? Asked on a few random tokens, answered with numbers."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forestream.errors import UnsupportedModel
from forestream.ports.base import KVShape, LayerCache, LayerInputs, Port

# Largest difference to the stock forward under its own masks, relative to the largest logit: there sdpa may
# pick another kernel, so rounding differs. Under the same masks the two must be equal.
TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_TOKENS = 12
_SHORT_WINDOW = 8  # below _TOKENS, so that the check reaches past the border


class RecordingCache:
    """Keeps nothing, hands keys and values straight back, and notes which layer called with what."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.shapes: list[KVShape] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what came in; note the layer and the shape."""
        self.calls.append(layer_idx)
        self.shapes.append(KVShape(key_states.shape[1], key_states.shape[3], value_states.shape[3]))
        return key_states, value_states


def drive(
    port: Port, ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: LayerCache | None = None
) -> Tensor:
    """The driven forward without streams: logits [B,N,V] for ids and positions [B,N], one mask per layer."""
    hidden = port.embed(ids, positions)
    for i, mask in enumerate(masks):
        hidden = port.run(i, hidden, LayerInputs(mask, positions, port.rotary(hidden, positions, i)), cache)
    return port.head(port.finish(hidden))


@torch.no_grad()
def probe(port: Port) -> Tensor:
    """The driven forward on two rows of random tokens: logits [2,N,V]."""
    embedding: Any = port.model.get_input_embeddings()
    weight: Tensor = embedding.weight
    ids, positions = _random_text(port, weight)
    return drive(port, ids, positions, causal_masks(port, ids.shape[1], weight.dtype, weight.device)).double()


def _random_text(port: Port, weight: Tensor) -> tuple[Tensor, Tensor]:
    length = min(_TOKENS, port.position_limit)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(weight.shape[0], (2, length), generator=draw).to(weight.device)
    return ids, torch.arange(length, device=weight.device).expand(2, -1)


def causal_masks(port: Port, length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One additive mask [1,1,T,T] per layer: causal, within the layer's window."""
    steps = torch.arange(length, device=device)
    distance = steps[:, None] - steps[None, :]
    masks = []
    for i in range(port.num_layers):
        window = port.window(i)
        seen = (distance >= 0) & (distance < (length if window is None else window))
        blocked = torch.zeros(length, length, dtype=dtype, device=device)
        masks.append(blocked.masked_fill(~seen, torch.finfo(dtype).min)[None, None])
    return masks


@contextmanager
def _at_rest(port: Port) -> Iterator[None]:
    """Evaluation mode, and a window short enough to be tested; both put back afterwards."""
    modules = [module for module in port.model.modules() if module.training]
    window = getattr(port.config, "sliding_window", None)
    port.model.eval()
    if window is not None and window > _SHORT_WINDOW:
        port.config.sliding_window = _SHORT_WINDOW
    try:
        yield
    finally:
        for module in modules:
            module.training = True
        if window is not None:
            port.config.sliding_window = window


def _stock(port: Port, ids: Tensor, **keywords: Any) -> Tensor:
    logits: Tensor = port.model(input_ids=ids, use_cache=False, **keywords).logits
    return logits.double()


def _difference(ours: Tensor, theirs: Tensor) -> float:
    # not-a-number must count as a difference
    return float((ours - theirs).abs().nan_to_num(nan=math.inf).max())


@torch.no_grad()
def check_parity(port: Port) -> float:
    """Compare the driven forward with the stock forward on two rows of random tokens.

    Under the same masks both must be equal bit for bit. Under the stock forward's own masks, which shows
    that windows are understood, the difference must stay below `TOLERANCE`. A long window is shortened for
    the check. Every layer must write to the cache it is given, once; what it writes is noted in `port.kept`.

    Returns:
        The largest absolute difference of logits to the stock forward under its own masks.

    Raises:
        UnsupportedModel: with the numbers, when one of this does not hold.
    """
    with _at_rest(port):
        embedding: Any = port.model.get_input_embeddings()
        weight: Tensor = embedding.weight
        ids, positions = _random_text(port, weight)
        masks = causal_masks(port, ids.shape[1], weight.dtype, weight.device)
        cache = RecordingCache()
        ours = drive(port, ids, positions, masks, cache).double()
        own = _stock(port, ids, attention_mask=torch.ones_like(ids), position_ids=positions)
        same = _stock(port, ids, attention_mask=_as_stock_mask(port, masks), position_ids=positions)
    if cache.calls != list(range(port.num_layers)):
        raise UnsupportedModel(
            f"{port.family}: of {port.num_layers} layers, {cache.calls} wrote to the cache; "
            "each should, once, in order."
        )
    port.kept = tuple(cache.shapes)
    exact, loose = _difference(ours, same), _difference(ours, own)
    largest = float(own.abs().max())
    if exact != 0.0 or loose > TOLERANCE[weight.dtype] * largest:
        raise UnsupportedModel(
            f"{port.family}: driven layer by layer, logits differ from the stock forward by {exact:.3g} "
            f"under the same masks (0 expected) and by {loose:.3g} under its own (at most "
            f"{TOLERANCE[weight.dtype] * largest:.3g}); the largest logit is {largest:.3g}."
        )
    return loose


def _as_stock_mask(port: Port, masks: list[Tensor]) -> Tensor | dict[str, Tensor]:
    """What the stock forward takes: one mask for all layers, or one per layer type where layers differ."""
    if len({port.window(i) for i in range(port.num_layers)}) == 1:
        return masks[0]
    return dict(zip(port.config.layer_types, masks, strict=True))
