"""Plain decoding, one token a pass: the oracle that speculation must equal and the denominator of every speedup.

It shares the cache, the way a text begins, the choice of token and the Step type with the speculative loop, and nothing
of its logic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

from forestream.config import DecodeSettings
from forestream.drafting import DraftTree
from forestream.memory import Memory
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.prefill import ROOT_ALONE, begin
from forestream.requests import Request
from forestream.steps import Step


def plain(
    model: StreamingLM,
    prompt: Sequence[int] | Request,
    settings: DecodeSettings,
    eos: Sequence[int] = (),
    memory: Memory | None = None,
) -> Iterator[Step]:
    """Write after `prompt`, one token a pass. Arguments and errors as in `decode`."""
    for steps in plain_batch(model, [Request.of(prompt, eos)], settings, memory):
        yield steps[0][1]


def plain_batch(
    model: StreamingLM, requests: Sequence[Request], settings: DecodeSettings, memory: Memory | None = None
) -> Iterator[list[tuple[int, Step]]]:
    """Write several texts together, one token each a pass. Arguments, errors and yields as in `decode_batch`."""
    begun = begin(model, requests, settings, 0, 1, memory)
    if begun is None:
        return
    rows, numbers, cache = begun.rows, begun.numbers, begun.cache
    yield list(zip(numbers, begun.steps, strict=True))
    while going := [place for place, row in enumerate(rows) if row.finish is None]:
        if len(going) < len(rows):
            cache.keep(going)
            model.layers.admit(cache)
            rows, numbers = [rows[i] for i in going], [numbers[i] for i in going]
        began = perf_counter()
        if memory is not None:
            memory.check(rows[0].text)
        roots = [DraftTree(ROOT_ALONE, (row.text[-1],)) for row in rows]
        with torch.inference_mode():
            ids = torch.tensor([[row.text[-1]] for row in rows], device=model.device)
            output = model(ids, Pack.forest([ROOT_ALONE] * len(rows), [()] * len(rows)), cache)
            logits = model.logits(output.main)
            for place in range(len(rows)):
                cache.advance(1, place)
            read = [row.read(root, own) for row, root, own in zip(rows, roots, logits, strict=True)]
        seconds = (perf_counter() - began) / len(rows)
        yield [
            (number, Step((row.text[-1],), 0, seconds, root, (0,), (0,), row.finish, scores))
            for number, row, root, (_, scores) in zip(numbers, rows, roots, read, strict=True)
        ]
