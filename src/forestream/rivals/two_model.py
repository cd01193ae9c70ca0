"""Two-model decoding: a small model drafts token by token, and the model checks the whole draft in one pass.

The draft model runs on the same engine: packed weights, compiled layers, a cache that is rewound to the accepted text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.config import JsonConfig, SamplingSettings, whole
from forestream.errors import ConfigError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.prefill import prompt_pass
from forestream.processors import warpers
from forestream.rivals.lookup import line
from forestream.rivals.loop import Offer
from forestream.rows import Row
from forestream.sampling import draw, greedy
from forestream.topology import chain


@dataclass(frozen=True)
class TwoModelSettings(JsonConfig):
    """How much is drafted.

    Attributes:
        gamma: tokens that the draft model writes ahead of every pass.
    """

    gamma: int = 4

    def __post_init__(self) -> None:
        whole("gamma", self.gamma, 1, 64)


def check_same_tokens(target: Generator, draft: Generator) -> None:
    """Make sure that both models mean the same by every id.

    Raises:
        ConfigError: vocabularies or tokenizers differ.
    """
    sizes = [one.host.config.vocab_size for one in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model knows {sizes[1]} ids and the model {sizes[0]}; expected one vocabulary: train a draft "
            "model for this base with `forestream train-draft-model`"
        )
    ours, theirs = (one.tokenizer.get_vocab() for one in (target, draft))
    if ours != theirs:
        some = next(token for token in (*ours, *theirs) if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"the draft model's tokenizer has {theirs.get(some)} as the id of {some!r} and the model's has "
            f"{ours.get(some)}; expected one tokenizer: train a draft model for this base with `forestream "
            "train-draft-model`"
        )


@dataclass(frozen=True)
class TwoModel:
    """Drafts are written by `draft`, greedily, or drawn as the text is: by the same numbers at the same places.

    Raises:
        ConfigError: when it begins: the two vocabularies differ in size.
    """

    draft: StreamingLM
    settings: TwoModelSettings = TwoModelSettings()

    @property
    def passes(self) -> set[int]:
        return {1 + self.settings.gamma}

    def begin(self, model: StreamingLM, rows: Sequence[Row], chunk: int) -> TwoModelDrafts:
        sizes = [one.port.model.config.vocab_size for one in (model, self.draft)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"the draft model knows {sizes[1]} ids and the model {sizes[0]}; expected one vocabulary")
        return TwoModelDrafts(self.draft, self.settings.gamma, rows, chunk)


class TwoModelDrafts:
    """A draft model that has read the prompts.

    Attributes:
        cache: of the draft model, a row for each text.
    """

    @torch.inference_mode()
    def __init__(self, model: StreamingLM, gamma: int, rows: Sequence[Row], chunk: int) -> None:
        self.model, self.gamma = model, gamma
        model.layers.fix({1, 2})  # behind a draft that was accepted whole, two tokens are unread
        self.cache = model.new_cache(max(len(row.request.prompt) + row.limit for row in rows) + 2, len(rows))
        self._rooms = [model.port.room(len(row.request.prompt)) for row in rows]
        self._held: list[list[int]] = [[] for _ in rows]  # what the cache holds
        self._sure = [0] * len(rows)  # how much of it is known to be the text's
        for place, row in enumerate(rows):
            prompt = row.request.prompt
            if len(prompt) >= self._rooms[place]:
                continue  # too long for this model, which has nothing to say of it
            alone = self.cache
            if len(rows) > 1:
                alone = self.cache.row(place)
                model.layers.admit(alone)
            prompt_pass(model, prompt, 0, alone, chunk)
            self.cache.lengths[place] = len(prompt)
            self._held[place] = list(prompt)

    @torch.inference_mode()
    def offer(self, rows: Sequence[Row]) -> list[Offer]:
        depths = [
            max(0, min(self.gamma, row.left - 1, room - len(row.text)))
            for row, room in zip(rows, self._rooms, strict=True)
        ]
        unread = [self._unread(place, row) if depths[place] else [] for place, row in enumerate(rows)]
        written: list[list[int]] = [[] for _ in rows]
        for step in range(max(depths)):
            logits = self._pass(unread)
            for place, row in enumerate(rows):
                unread[place] = []
                if step < depths[place]:
                    token = _choice(logits[place], row, step)
                    written[place].append(token)
                    if step + 1 < depths[place]:
                        unread[place] = [token]
        return [Offer(row.legal(line(row.text[-1], own)), len(own)) for row, own in zip(rows, written, strict=True)]

    def learn(self, logits: Sequence[Float[Tensor, "asked V"]]) -> None:
        """Nothing yet: which drafts were accepted is read off the text when the next ones are wanted."""

    def keep(self, places: Sequence[int]) -> None:
        self.cache.keep(places)
        self.model.layers.admit(self.cache)
        self._rooms = [self._rooms[place] for place in places]
        self._held = [self._held[place] for place in places]
        self._sure = [self._sure[place] for place in places]

    def _unread(self, place: int, row: Row) -> list[int]:
        """Take back what was refused; return what the model has not read of the text."""
        held, text = self._held[place], row.text
        known = self._sure[place]
        while known < min(len(held), len(text) - 1) and held[known] == text[known]:
            known += 1
        del held[known:]
        self.cache.rewind(known, place)
        self._sure[place] = known
        return text[known:]

    def _pass(self, unread: Sequence[Sequence[int]]) -> Float[Tensor, "B V"]:
        """Read these tokens, and commit them; logits behind the last of each row, of no use where there are none."""
        lengths = [max(1, len(own)) for own in unread]
        ids = torch.tensor([[*own, *[0] * (max(lengths) - len(own))] for own in unread], device=self.model.device)
        trees = [chain(length) for length in lengths]
        output = self.model(ids, Pack.forest(trees, [()] * len(trees)), self.cache)
        for place, own in enumerate(unread):
            self.cache.advance(len(own), place)
            self._held[place] += own
        return self.model.logits(output.main[range(len(lengths)), [length - 1 for length in lengths]])


def _choice(logits: Float[Tensor, " V"], row: Row, ahead: int) -> int:
    """The draft model's own token, `ahead` places behind the text."""
    sampling: SamplingSettings = row.request.sampling
    if sampling.greedy:
        return greedy(logits[None])[0]
    scores = logits[None].to(torch.float32, copy=True)
    ids = torch.tensor([row.text], device=scores.device)
    for warper in warpers(sampling):
        scores = warper(ids, scores)
    return draw(scores[0], sampling.seed, row.request.row, len(row.text) + ahead)
