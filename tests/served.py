"""Exported tiny models, and what vLLM makes of them. Imported where vLLM is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Vector

import zoo
from forestream import checkpoint
from forestream.acceptance import stream_states
from forestream.bases import fingerprint, load_base
from forestream.config import StreamConfig
from forestream.drafting import FullTree
from forestream.export import export_vllm
from forestream.manifest import BaseModel
from forestream.model import StreamingLM
from forestream.paths import Paths
from forestream.vocabulary import DraftVocabulary
from tiny import tiny_tokenizer
from wrapped import shake

STREAMS = 3
FORCED = "forced.Forced"
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama-tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 128, "dropout": 0.0, "init_std": 0.35}),
    "opt-post": (
        "opt",
        {
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "dropout": 0.0,
            "init_std": 0.35,
            "do_layer_norm_before": False,
            "tie_word_embeddings": False,
        },
    ),
}
"""Families, and settings with heads of a size that vLLM's attention has code for on a CPU."""


def exported(
    folder: Path, host: str = "llama", sampler: bool = False, vocabulary: Sequence[int] = (), **changes: Any
) -> tuple[Path, StreamingLM]:
    """An exported random model in float32, and the same in our own engine; `changes` go to its StreamConfig.

    Args:
        sampler: with a path sampler.
        vocabulary: what streams may draft; any token if empty.
    """
    family, settings = HOSTS[host]
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": 512, "vocab_size": len(tokenizer)}
    if family == "opt":
        del sizes["intermediate_size"]
    stock: Any = zoo.custom(family, **sizes, **settings)
    if host == "opt-post":  # as in the zoo: or blocks would drown the token, and texts would be constant
        for layer in stock.model.decoder.layers:
            layer.fc2.weight.data *= 0.004
            layer.self_attn.out_proj.weight.data *= 0.004
    stock.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    base, _ = load_base(str(folder / "base"))
    origin = BaseModel(str(folder / "base"), family, fingerprint(base))
    config = {"streams": STREAMS, "stream_layers": 2, "lora_rank": 4, "lora_alpha": 8, "scorer_rank": 0, **changes}
    model = StreamingLM(base, StreamConfig(**config))
    model.add_lora()
    if vocabulary:
        model.restrict(DraftVocabulary(vocabulary, len(tokenizer)))
    if sampler:
        model.add_sampler(16)
    shake(model, 1)
    if model.sampler is not None:
        model.sampler.up.data *= 10  # so that what a stream says depends on the token before
    assert model.start is not None
    if model.start.embedding is not None:
        model.start.embedding.data *= 20  # so that every stream says something else
    checkpoint.save(model, folder / "adapter", origin, {}, torch.float32)
    export_vllm(folder / "adapter", folder / "exported", dtype=torch.float32)
    own, _ = checkpoint.load(folder / "adapter")
    return folder / "exported", own


def chains(model: StreamingLM, start: Sequence[int], text: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """The chain that our own engine drafts at every place of a text, by the text that it is behind."""
    states = stream_states(model, start, text)
    trees = [FullTree(1).follow(root, Paths(model, own, 1)) for root, own in zip(text, states, strict=True)]
    return {(*start, *text[: t + 1]): [*tree.tokens[1:]] for t, tree in enumerate(trees)}


def texts(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int = 70, batch: int = 8, **law: Any
) -> list[tuple[int, ...]]:
    """What vLLM writes after each prompt, `batch` requests at a time; greedy unless `law` says otherwise."""
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **law})
    found: list[tuple[int, ...]] = []
    for begin in range(0, len(prompts), batch):
        some = [{"prompt_token_ids": list(one)} for one in prompts[begin : begin + batch]]
        found += [tuple(one.outputs[0].token_ids) for one in llm.generate(some, asked, use_tqdm=False)]
    return found


def counted(llm: LLM, name: str) -> list[int]:
    """vLLM's own counter of this engine: one number, or one for each place of a draft."""
    own = llm.llm_engine.vllm_config.model_config.served_model_name
    for metric in llm.get_metrics():
        if metric.name == f"vllm:{name}" and metric.labels.get("model_name") == own:
            if isinstance(metric, Vector):
                return list(metric.values)
            assert isinstance(metric, Counter)
            return [metric.value]
    raise AssertionError(f"vLLM counts no {name}")
