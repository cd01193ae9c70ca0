"""Medusa heads for tests: random ones that are no copies of the host's head, and ones that have learned some texts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import torch

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.data import Tokens
from forestream.model import StreamingLM
from forestream.rivals.medusa import MedusaConfig, MedusaHeads
from forestream.rivals.medusa_training import fit_heads
from forestream.steps import tokens_of
from forestream.training import TrainConfig
from wrapped import prompt, wrapped

HEADS = 4


def shaken(model: StreamingLM, projection: Literal["own", "shared"] = "own", seed: int = 0) -> MedusaHeads:
    """Heads that differ from each other and from the host's; the same for equal hosts."""
    heads = MedusaHeads.fresh(MedusaConfig(HEADS, projection), model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return heads.requires_grad_(False)


def learned(host: str, tokens: int, updates: int = 120) -> tuple[StreamingLM, MedusaHeads, list[tuple[int, ...]]]:
    """A model, heads that were trained on what it writes after some prompts, and these prompts."""
    model = wrapped(host)
    starts = [prompt(6, seed=seed) for seed in range(6)]
    settings = DecodeSettings(max_new_tokens=tokens)
    texts = [Tokens(start, tokens_of(list(plain(model, start, settings)))) for start in starts]
    heads = MedusaHeads.fresh(MedusaConfig(HEADS), model)
    config = TrainConfig(batch_size=6, epochs=updates, learning_rate=0.01, warmup=2, dtype="float32", save_every=1000)
    with tempfile.TemporaryDirectory() as folder:
        fit_heads(model, heads, texts, 0, Path(folder), config)
    return model, heads.requires_grad_(False), starts
