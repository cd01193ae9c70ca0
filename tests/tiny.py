"""A whole tiny set-up on disk: a character tokenizer, a random base model, and an untrained adapter for it."""

from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo
from forestream import checkpoint
from forestream.bases import fingerprint, load_base
from forestream.config import StreamConfig
from forestream.manifest import BaseModel
from forestream.model import StreamingLM

UNKNOWN, END = "<unk>", "<end>"
CHARACTERS = " \n" + ascii_letters + digits + punctuation
TRAINED_ON = {
    "command": "forestream train",
    "commit": "0123456789ab",
    "date": "2026-01-31T12:00:00+00:00",
    "examples": 7,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per ASCII character; no begin-of-text token, so an empty prompt has no tokens."""
    vocabulary = {token: number for number, token in enumerate([UNKNOWN, END, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, unk_token=UNKNOWN, eos_token=END)


def tiny_base(folder: Path, **changes: Any) -> Path:
    """Save a random Llama of four layers with the tokenizer into `folder`; `changes` go to its configuration."""
    tokenizer = tiny_tokenizer()
    settings = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 512}
    zoo.custom("llama", **settings | changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_bases(folder: Path) -> dict[str, Path]:
    """Bases below `folder`: one with its head tied to the embedding, one without."""
    return {
        "untied": tiny_base(folder / "untied"),
        "tied": tiny_base(folder / "tied", tie_word_embeddings=True),
    }


def tiny_adapter(folder: Path, base: Path | None = None, **changes: Any) -> Path:
    """Save a random adapter into `folder`; `changes` go to its StreamConfig.

    Its base is made in `folder`-base, beside it, unless one is given.
    """
    base = base or tiny_base(folder.with_name(f"{folder.name}-base"))
    host, _ = load_base(str(base))
    origin = BaseModel(str(base), host.config.model_type, fingerprint(host))
    settings = {"streams": 3, "stream_layers": 2, "lora_rank": 4, "lora_alpha": 8, **changes}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = StreamingLM(host, StreamConfig(**settings))
        model.add_lora()
        for module in model.modules():
            if isinstance(module, LoraLayer):  # a fresh one does nothing
                for branch in module.lora_B.values():
                    branch.weight.normal_(0.0, 0.02)
    checkpoint.save(model, folder, origin, TRAINED_ON)
    return folder
