"""Generators with tokenizers whose tokens are bytes, texts that are dictated, and drafts that are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from forestream.config import DecodeSettings
from forestream.drafting import Drafter, DraftTree, drafter_for
from forestream.generation import Generator
from oracle import Prophet
from tiny import tiny_tokenizer
from wrapped import wrapped
from zoo import custom

END = "<end>"
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ã", "¤")]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, a few strings of several bytes are one; "<end>" is special and has the last id."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*letters, *("".join(pair) for pair in MERGES)])}
    of_bytes = Tokenizer(models.BPE(vocabulary, MERGES))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token=END)


@cache
def writer(tokens: str = "characters", layers: int = 4, mode: str = "joint") -> Generator:
    """A tiny random host with a random adapter that writes characters, or bytes. Tests share it."""
    tokenizer = byte_tokenizer() if tokens == "bytes" else tiny_tokenizer()
    host = custom(
        "llama",
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        num_hidden_layers=layers,
        max_position_embeddings=512,
    )
    model = wrapped(host, mode, stream_layers=layers // 2)
    return Generator(model, tokenizer, DecodeSettings(nodes=8, max_new_tokens=16))


class Dictated(LogitsProcessor):
    """Leaves the next token of `tokens` as the only one possible, and the end of text behind them."""

    def __init__(self, prompt: int, tokens: Sequence[int], end: int) -> None:
        self.prompt, self.tokens, self.end = prompt, list(tokens), end

    def __call__(self, input_ids: Int[Tensor, "1 T"], scores: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        place = input_ids.shape[1] - self.prompt
        wanted = self.tokens[place] if place < len(self.tokens) else self.end
        told = torch.full_like(scores, -torch.inf)
        told[:, wanted] = 0.0
        return told


def dictated(generator: Generator, prompt: str, text: str) -> Dictated:
    start, tokens = (generator.tokenizer(one)["input_ids"] for one in (prompt, text))
    return Dictated(len(start), tokens, generator.eos[0])


@dataclass(frozen=True)
class Foreseen:
    """Drafts that are right at `rate` wherever the text is the front of a known one; elsewhere the streams' own."""

    inner: Drafter
    truths: tuple[tuple[int, ...], ...]
    rate: float

    def __call__(self, text: Sequence[int], logits: Float[Tensor, "G V"]) -> DraftTree:
        known = [truth for truth in self.truths if truth[: len(text)] == tuple(text)]
        return Prophet(self.inner, known[0], self.rate)(text, logits) if known else self.inner(text, logits)


@contextmanager
def foreseen(*truths: Sequence[int], rate: float = 0.8) -> Iterator[None]:
    """Whoever decodes in here drafts what these texts, prompts included, go on with."""
    known = tuple(map(tuple, truths))
    with patch("forestream.decode.drafter_for", lambda settings: Foreseen(drafter_for(settings), known, rate)):
        yield


def of_host(generator: Generator, prompt: str, tokens: int, processors: Sequence[Any] = (), **asked: Any) -> list[int]:
    """What `generate` of the host library writes behind `prompt`, greedily unless asked otherwise."""
    ids = torch.tensor([generator.tokenizer(prompt)["input_ids"]])
    host, end = generator.model.port.model, list(generator.eos)
    given = {"do_sample": False, "eos_token_id": end or None, "pad_token_id": end[0] if end else 0, **asked}
    with torch.no_grad():
        whole = host.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            logits_processor=LogitsProcessorList(processors),
            **given,
        )
    return whole[0, ids.shape[1] :].tolist()
