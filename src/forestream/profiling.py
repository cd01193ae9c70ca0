"""What passes cost on this machine: one layer and the head by rows, and everything else a pass spends its time on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Final

import torch

from forestream.baseline import plain
from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.cost import Curve, Profile, pass_seconds, plain_seconds
from forestream.decode import decode
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.sampling import greedy
from forestream.steps import Step
from forestream.topology import chain
from forestream.tuning import Setup

ROWS: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 64, 96, 128)
"""Numbers of slots that are measured; what lies between is interpolated."""

ROUNDS: Final = 9
"""How often each of them is."""
_PROBE: Final = DecodeSettings(nodes=8, carriers="deferred", max_new_tokens=48)


@torch.inference_mode()
def profile(
    model: StreamingLM,
    name: str,
    setup: Setup,
    rows: Sequence[int] = ROWS,
    context: int = 128,
    advance: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure a prepared model.

    Every size is run `ROUNDS` times, in turns, and the median counts, so that a drift of the machine hits all sizes
    alike.

    Args:
        name: of the model, for the record.
        context: tokens in front of the pass.
        advance: called after each size of the first round, which compiles, and after each further round.
    """
    layers: dict[int, list[float]] = {count: [] for count in rows}
    head: dict[int, list[float]] = {count: [] for count in rows}
    draft_head: dict[int, list[float]] = {count: [] for count in rows}
    model.layers.fix(rows)
    # One for each size and all its rounds: memory that was never touched would count as cost.
    caches = {count: model.new_cache(context + count) for count in rows}
    for cache in caches.values():
        cache.advance(context)
    for turn in range(ROUNDS + 1):
        for count in rows:
            spent = _one_pass(model, count, caches[count])
            if turn:  # the first round warms up
                for times, seconds in zip((layers, head, draft_head), spent, strict=True):
                    times[count].append(seconds)
            else:
                advance()
        if turn:
            advance()
    depth = model.port.num_layers
    bare = Profile(
        model=name,
        **vars(setup),
        layers=depth,
        stream_layers=len(model.stream_layers),
        layer=_curve(layers, depth),
        head=_curve(head),
        overhead=0.0,
        draft_overhead=0.0,
        draft_head=None if model.vocabulary is None else _curve(draft_head),
    )
    return _with_overheads(model, bare, context)


def _curve(times: dict[int, list[float]], share: int = 1) -> Curve:
    """Medians by rows, over `share`."""
    return Curve(tuple((rows, median(measured) / share) for rows, measured in times.items()))


def _one_pass(model: StreamingLM, rows: int, cache: StreamCache) -> tuple[float, float, float]:
    """Seconds of all layers, and of the head and the streams' head with the choice of tokens, for a chain of slots."""
    pack = Pack.tree(chain(rows))
    ids = torch.zeros(1, rows, dtype=torch.long, device=model.device)
    began = perf_counter()
    output = model(ids, pack, cache)
    _settle(model)
    middle = perf_counter()
    greedy(model.logits(output.main[0]))
    late = perf_counter()
    if model.vocabulary is not None:
        greedy(model.draft_logits(output.main[0]))
    return middle - began, late - middle, perf_counter() - late


def _settle(model: StreamingLM) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _with_overheads(model: StreamingLM, bare: Profile, context: int) -> Profile:
    """`bare` with what real steps take beyond its layers and head; never below nothing, whatever the noise."""
    vocabulary = model.port.model.get_input_embeddings().weight.shape[0]
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (context,), generator=draw).tolist()
    streams = model.stream_config.streams
    for steps in (plain(model, prompt, _PROBE), decode(model, prompt, _PROBE)):
        list(steps)
    own = _typical(list(plain(model, prompt, _PROBE)))
    overhead = max(own - plain_seconds(bare), 0.0)
    if not streams:
        return _replace(bare, overhead, 0.0)
    drafted = _typical([step for step in decode(model, prompt, _PROBE) if len(step.kept) == _PROBE.nodes])
    expected = pass_seconds(bare, _PROBE.nodes, streams, "deferred")
    return _replace(bare, overhead, max(drafted - expected - overhead, 0.0))


def _typical(steps: Sequence[Step]) -> float:
    return median([step.seconds for step in steps if step.tree is not None])


def _replace(bare: Profile, overhead: float, draft_overhead: float) -> Profile:
    return Profile(**{**vars(bare), "overhead": overhead, "draft_overhead": draft_overhead})
