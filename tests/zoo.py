"""Tiny random hosts built from configs: no downloads, seeded, float32, four layers.

Initial weights are far larger than a fresh model's, and norms and biases are shaken, so that logits are
spread out, greedy text is not constant, and a forgotten norm, bias or scale shows.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

POSITIONS = 128
WINDOW = 8
# No token is special: tests decode to a length, never to an end of text.
_NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_COMMON: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.35,
    **_NO_SPECIAL_TOKENS,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


def build(cls: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model in evaluation mode; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval()


def _llama() -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**_GROUPED))


def _llama_tied() -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**_GROUPED, tie_word_embeddings=True))


def _opt(**keywords: Any) -> PreTrainedModel:
    settings = {
        "vocab_size": 97,
        "hidden_size": 48,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "init_std": 0.35,
        "initializer_range": 0.35,
        "dropout": 0.0,
        **_NO_SPECIAL_TOKENS,
    }
    return build(OPTForCausalLM, OPTConfig(**{**settings, **keywords}))


def _opt_pre() -> PreTrainedModel:
    return _opt(do_layer_norm_before=True, word_embed_proj_dim=48)


def _opt_post() -> PreTrainedModel:
    model = _opt(do_layer_norm_before=False, word_embed_proj_dim=32, tie_word_embeddings=False)
    # normed after each block, what blocks add would drown the token and greedy text would be constant
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc2.weight.mul_(0.1)
            layer.self_attn.out_proj.weight.mul_(0.1)
    return model


def _phi() -> PreTrainedModel:
    return build(PhiForCausalLM, PhiConfig(**_GROUPED, partial_rotary_factor=0.5))


def _phi3() -> PreTrainedModel:
    return build(Phi3ForCausalLM, Phi3Config(**_GROUPED, original_max_position_embeddings=POSITIONS))


def _mistral() -> PreTrainedModel:
    return build(MistralForCausalLM, MistralConfig(**_GROUPED, sliding_window=None))


def _mistral_window() -> PreTrainedModel:
    return build(MistralForCausalLM, MistralConfig(**_GROUPED, sliding_window=WINDOW))


def _qwen2() -> PreTrainedModel:
    return build(Qwen2ForCausalLM, Qwen2Config(**_GROUPED))


def _qwen3() -> PreTrainedModel:
    return build(Qwen3ForCausalLM, Qwen3Config(**_GROUPED, head_dim=16))


def _gemma() -> PreTrainedModel:
    return build(GemmaForCausalLM, GemmaConfig(**_GROUPED, head_dim=16))


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **_GROUPED,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        tie_word_embeddings=False,  # tied and scaled, it would repeat one token for ever
    )
    return build(Gemma2ForCausalLM, config)


def _gemma3() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **_GROUPED,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        tie_word_embeddings=False,  # tied and scaled, it would repeat one token for ever
    )
    return build(Gemma3ForCausalLM, config)


def _gpt_neox(parallel: bool) -> PreTrainedModel:
    return build(GPTNeoXForCausalLM, GPTNeoXConfig(**_COMMON, use_parallel_residual=parallel))


def _gpt_neox_parallel() -> PreTrainedModel:
    return _gpt_neox(True)


def _gpt_neox_sequential() -> PreTrainedModel:
    return _gpt_neox(False)


def _gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=73,
        n_embd=48,
        n_layer=4,
        n_head=4,
        n_positions=POSITIONS,
        initializer_range=0.35,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **_NO_SPECIAL_TOKENS,
    )
    return build(GPT2LMHeadModel, config)


def custom(family: str, **keywords: Any) -> PreTrainedModel:
    """A tiny random host of any family the library knows."""
    config = AutoConfig.for_model(family, **{**_COMMON, **keywords})
    return build(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


HOSTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-tied": _llama_tied,
    "opt-pre": _opt_pre,
    "opt-post": _opt_post,
    "phi": _phi,
    "phi3": _phi3,
    "mistral": _mistral,
    "mistral-window": _mistral_window,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_neox-parallel": _gpt_neox_parallel,
    "gpt_neox-sequential": _gpt_neox_sequential,
    "gpt2": _gpt2,
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("llama", "llama-tied"),
    "opt": ("opt-pre", "opt-post"),
    "phi": ("phi",),
    "phi3": ("phi3",),
    "mistral": ("mistral", "mistral-window"),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3_text": ("gemma3",),
    "gpt_neox": ("gpt_neox-parallel", "gpt_neox-sequential"),
    "gpt2": ("gpt2",),
}
"""Every supported `config.model_type` and the hosts that stand for it."""
