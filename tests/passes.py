"""Single passes of one greedy text, for tests that look between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forestream import decode, prefill
from forestream.cache import StreamCache
from forestream.config import DecodeSettings
from forestream.drafting import DraftTree
from forestream.model import StreamingLM
from forestream.pruning import Keep
from forestream.sampling import greedy
from forestream.verify import Verdict, verify


@dataclass(frozen=True)
class Checked:
    """A committed pass over one tree."""

    tree: DraftTree
    kept: tuple[int, ...]
    verdict: Verdict
    whole: decode.Checked

    @property
    def streams(self) -> Tensor:
        return self.whole.streams


def prompt_pass(model: StreamingLM, prompt: Sequence[int], streams: int, cache: StreamCache) -> tuple[int, Tensor]:
    """The first token, and the logits of the prompt's streams."""
    main, ahead = prefill.prompt_pass(model, prompt, streams, cache)
    return greedy(main)[0], ahead


def check(
    model: StreamingLM,
    tree: DraftTree,
    cache: StreamCache,
    streams: int,
    settings: DecodeSettings,
    keep: Keep | None,
) -> Checked:
    """One pass over `tree`, verified greedily and committed."""
    whole = decode.check(model, [tree], cache, streams, settings, keep)
    verdict = verify(whole.trees[0], greedy(whole.logits[0]).__getitem__)
    decode.commit(model, whole, [verdict], cache)
    return Checked(whole.trees[0], whole.kept[0], verdict, whole)


@torch.inference_mode()
def stream_logits(model: StreamingLM, checked: Checked, streams: int, cache: StreamCache) -> Tensor:
    """Logits of the streams of the node accepted last."""
    return decode.look_ahead(model, checked.whole, [(0, checked.verdict.path[-1])], streams, cache)[0]
