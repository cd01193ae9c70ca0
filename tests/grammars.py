"""Grammars for the tests: a tiny byte-level tokenizer, a grammar of each form, texts that random logits write."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from forestream.grammar import CompiledGrammar, Grammar, GrammarProcessor
from forestream.sampling import greedy

EOS, OTHER_EOS = 0, 1
PROMPT = [7, 8, 9]
PIECES = ["true", "false", '":', '",', "12", "ab", "é", "東", "\n\n"]
"""What the tiny tokenizer has beside the single bytes; the two letters' own bytes are tokens, too."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "on": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"enum": [1, 12, "é", None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "on", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DATE = r"(19|20)\d\d-[0-9]{2}(é|東+|ab)?"
NESTED = 'start: "(" start ")" | "ab" | "é"'


def byte_level(alphabet: Sequence[str] | None = None, pieces: Sequence[str] = PIECES) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: two ends of text, the bytes, and `pieces` merged from them from left to right."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = ["<eos>", "<end>", *(alphabet or sorted(pre_tokenizers.ByteLevel.alphabet()))]
    merges = []
    for piece in pieces:
        symbols = split.pre_tokenize_str(piece)[0][0]
        for length in range(1, len(symbols)):
            if symbols[: length + 1] not in vocabulary:
                vocabulary.append(symbols[: length + 1])
                merges.append((symbols[:length], symbols[length]))
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = byte_level()
V = len(TOKENIZER) + 5
"""Wider than the tokenizer, as padded heads are."""


@cache
def compiled(grammar: Grammar) -> CompiledGrammar:
    return grammar.compile(TOKENIZER, [EOS, OTHER_EOS], V)


GRAMMARS = {"json": Grammar.json_schema(SCHEMA), "regex": Grammar.regex(DATE), "lark": Grammar.lark(NESTED)}


def masked(processor: GrammarProcessor, history: Sequence[int], scores: Tensor | None = None) -> Tensor:
    given = torch.zeros(1, V) if scores is None else scores
    return processor(torch.tensor([list(history)], dtype=torch.long), given)


def allowed(processor: GrammarProcessor, history: Sequence[int]) -> set[int]:
    return set(masked(processor, history)[0].isfinite().nonzero().flatten().tolist())


def sample(processor: GrammarProcessor, prompt: Sequence[int], seed: int) -> list[int]:
    """Tokens by random logits, one a step, up to the end of the text, which is left out."""
    generator = torch.Generator().manual_seed(seed)
    written: list[int] = []
    while True:
        scores = masked(processor, [*prompt, *written], 4 * torch.randn(1, V, generator=generator))
        token = greedy(scores)[0]
        if token in (EOS, OTHER_EOS):
            return written
        written.append(token)
        assert len(written) < 600


def is_schema_json(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "on", "sizes"]
    assert isinstance(value["on"], bool)
    assert len(value["name"]) <= 6
    return 1 <= len(value["sizes"]) <= 3 and all(size in [1, 12, "é", None] for size in value["sizes"])


FITS: dict[str, Callable[[str], object]] = {
    "json": is_schema_json,
    "regex": re.compile(DATE).fullmatch,
    "lark": re.compile(r"(\(*)(ab|é)(\)*)").fullmatch,
}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def ids_of_bytes(text: str) -> list[int]:
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return [TOKENIZER.get_vocab()[symbol] for symbol in symbols]
