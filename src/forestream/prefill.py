"""How a text begins: how long it may get, and the passes over its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.cache import StreamCache
from forestream.config import DecodeSettings, SamplingSettings
from forestream.drafting import DraftTree
from forestream.errors import ConfigError, PromptError
from forestream.memory import Memory
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.requests import Request
from forestream.rows import Row
from forestream.steps import Step
from forestream.topology import Topology

ROOT_ALONE: Final = Topology((-1,))
"""The tree of plain decoding: one node, no drafts."""


class Heads(Protocol):
    """What foretells tokens from a node's final state, for models that draft without streams."""

    @property
    def count(self) -> int:
        """G, how many heads there are."""
        ...

    def __call__(self, states: Float[Tensor, "B D"], count: int) -> Float[Tensor, "B G V"]:
        """Logits of the first `count` heads; row j - 1 foretells what stream j would, from states before the norm."""
        ...


@dataclass
class Begun:
    """Texts whose prompts are committed and whose first tokens are written.

    Attributes:
        rows: the texts, in the order of their requests; those that may have no tokens are left out.
        numbers: the request that each row belongs to.
        steps: what the prompt passes yielded, per row.
        cache: a row for each of them.
        streams: what the streams of the prompts' last tokens draft from, per row: see `StreamingLM.ahead`.
    """

    rows: list[Row]
    numbers: list[int]
    steps: list[Step]
    cache: StreamCache
    streams: list[Float[Tensor, "G X"]]


def token_limit(model: StreamingLM, prompt: Sequence[int], cap: int) -> int:
    """How many tokens may be written: `cap`, or what is left before the context limit.

    Raises:
        PromptError: the prompt is empty, leaves no room, or holds an id that the model does not know.
    """
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token, such as the begin-of-text token")
    if (strange := _strange(model, prompt)) is not None:
        raise PromptError(f"the prompt holds the id {strange}; this model knows ids from 0 to {_vocabulary(model) - 1}")
    end = model.port.room(len(prompt))
    if end <= len(prompt):
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the model's context ends at {end}; shorten the prompt"
        )
    return min(cap, end - len(prompt))


def check_words(model: StreamingLM, sampling: SamplingSettings) -> None:
    """Refuse bad words and biases of tokens that there are not.

    Raises:
        ConfigError: an id is beyond the model's vocabulary.
    """
    biased = tuple(word for word, _ in sampling.logit_bias)
    for name, words in (("bad_words", sampling.bad_words), ("logit_bias", biased)):
        for word in words:
            if (strange := _strange(model, word)) is not None:
                raise ConfigError(f"{name} holds id {strange}; the model knows 0 to {_vocabulary(model) - 1}")


def _vocabulary(model: StreamingLM) -> int:
    size: int = model.port.model.config.vocab_size
    return size


def _strange(model: StreamingLM, ids: Sequence[int]) -> int | None:
    """The first of `ids` that the model does not know."""
    size = _vocabulary(model)
    return next((i for i in ids if not 0 <= i < size), None)


@torch.inference_mode()
def prompt_pass(
    model: StreamingLM,
    prompt: Sequence[int],
    streams: int,
    cache: StreamCache,
    chunk: int | None = None,
    heads: Heads | None = None,
) -> tuple[Float[Tensor, "1 V"], Float[Tensor, "G X"]]:
    """Commit the prompt behind what `cache` holds of it; return logits of its last token, and what its streams say.

    The latter is what `StreamingLM.ahead` makes of them.

    Args:
        chunk: most tokens in one pass; None takes all at once.
        heads: foretell in place of the streams.
    """
    carried = streams if heads is None else 0
    # Tables of a rotary type that looks at the whole text's length are right for the whole text only.
    if chunk is None or model.port.room(1) < len(prompt):
        chunk = len(prompt)
    output = None
    while (start := cache.committed) < len(prompt):
        piece = prompt[start : start + chunk]
        last = start + len(piece) == len(prompt)
        carriers = torch.tensor([[len(piece) - 1]] if last and carried else [[]], dtype=torch.long)
        ids = torch.tensor([list(piece)], device=model.device)
        output = model(ids, Pack.text(len(piece), carriers, carried if last else 0), cache)
        cache.advance(len(piece))
    if output is None:
        raise PromptError("nothing of the prompt is left to read; at least its last token must be")
    if heads is not None and streams:
        ahead = heads(output.main[:, -1], streams)[0]
    else:
        ahead = model.ahead(output.streams[0, :, 0]) if streams else output.main[0, :0]
    return model.logits(output.main[:, -1]), ahead


def begin(
    model: StreamingLM,
    requests: Sequence[Request],
    settings: DecodeSettings,
    streams: int,
    slots: int,
    memory: Memory | None = None,
    heads: Heads | None = None,
) -> Begun | None:
    """Read the prompts and write every text's first token; None if no text may have any.

    A prompt that several requests share is read once.

    Args:
        streams: of each prompt's last token.
        slots: most slots of a pass behind the prompts.
        memory: what is known from an earlier text, for a single request.
        heads: foretell in place of the streams.

    Raises:
        PromptError: a prompt is empty, holds an unknown id, or leaves no room before the context limit.
        ConfigError: a memory for several texts or of another model, or words of ids that the model does not know.
    """
    if memory is not None and len(requests) != 1:
        raise ConfigError(f"a memory belongs to one text; {len(requests)} requests were given")
    if memory is not None and not isinstance(memory, Memory):
        raise ConfigError(f"memory is {memory!r}; expected a Memory")
    if memory is not None and memory.model is not model:
        raise ConfigError("the memory is another model's, whose keys and values mean nothing to this one")
    caps = [settings.max_new_tokens if one.max_new_tokens is None else one.max_new_tokens for one in requests]
    for one in requests:
        check_words(model, one.sampling)
    limits = [token_limit(model, one.prompt, cap) for one, cap in zip(requests, caps, strict=True)]
    numbers = [number for number, limit in enumerate(limits) if limit > 0]
    if not numbers:
        return None
    rows = [Row(requests[number], limits[number]) for number in numbers]
    capacity = max(len(row.text) + row.limit for row in rows) + slots
    began = perf_counter()
    cache = memory.open(rows[0].text, capacity) if memory else model.new_cache(capacity, len(rows))
    read: dict[tuple[int, ...], tuple[int, Tensor, Tensor]] = {}
    steps, drafts = [], []
    for place, row in enumerate(rows):
        prompt = row.request.prompt
        if prompt in read:
            source, main, ahead = read[prompt]
            cache.copy_row(source, place)
        else:
            alone = cache
            if len(rows) > 1:
                alone = cache.row(place)
                model.layers.admit(alone)
            main, ahead = prompt_pass(model, prompt, streams, alone, settings.prompt_chunk, heads)
            cache.lengths[place] = len(prompt)
            read[prompt] = place, main, ahead
        with torch.inference_mode():
            verdict, scores = row.read(DraftTree(ROOT_ALONE, (prompt[-1],)), main)
        seconds, began = perf_counter() - began, perf_counter()
        assert verdict.next_token is not None
        steps.append(Step((verdict.next_token,), 0, seconds, finish=row.finish, scores=scores))
        drafts.append(ahead)
    return Begun(rows, numbers, steps, cache, drafts)
