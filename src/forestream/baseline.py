"""Plain decoding, one token a pass: the oracle that speculation must equal and the denominator of every speedup.

It shares the cache, the choice of token and the Step type with the speculative loop, and nothing of its logic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.decode import ROOT_ALONE, finish_reason, prompt_pass, token_limit
from forestream.drafting import DraftTree
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.sampling import greedy
from forestream.steps import Step


def plain(
    model: StreamingLM, prompt: Sequence[int], settings: DecodeSettings, eos: Sequence[int] = ()
) -> Iterator[Step]:
    """Write greedily after `prompt`, one token a pass. Arguments and errors as in `decode`."""
    limit = token_limit(model, prompt, settings)
    if limit == 0:
        return
    cache = model.new_cache(len(prompt) + limit + 1)
    began = perf_counter()
    token, _ = prompt_pass(model, prompt, 0, cache)
    step = Step((token,), 0, perf_counter() - began, finish=finish_reason((token,), 1, limit, eos))
    written = 1
    while True:
        yield step
        if step.finish:
            return
        began = perf_counter()
        root = DraftTree(ROOT_ALONE, (token,))
        token = _next_token(model, token, cache)
        written += 1
        finish = finish_reason((token,), written, limit, eos)
        step = Step((token,), 0, perf_counter() - began, root, (0,), (0,), finish)


@torch.inference_mode()
def _next_token(model: StreamingLM, token: int, cache: StreamCache) -> int:
    ids = torch.tensor([[token]], device=model.device)
    output = model(ids, Pack.tree(ROOT_ALONE), cache)
    cache.advance(1)
    return greedy(model.logits(output.main[0]))[0]
