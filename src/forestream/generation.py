"""The user's object: text in, text out, and how it came about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from forestream import checkpoint
from forestream.baseline import plain
from forestream.config import Compile, DecodeSettings, Quantise
from forestream.data import prompt_ids
from forestream.decode import decode
from forestream.errors import PromptError
from forestream.model import StreamingLM
from forestream.steps import Counters, Step, tokens_of

_WARM_PROMPT = 24  # tokens


@dataclass(frozen=True)
class Generation:
    """A finished text.

    Attributes:
        text: what was written, without the prompt and without special tokens.
        tokens: its ids, the end-of-text token included if one was written.
        steps: pass by pass.
        counters: sums over the steps.
    """

    text: str
    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    counters: Counters


class Generator:
    """A model with its tokenizer and settings.

    >>> generator = Generator.from_pretrained("adapters/smollm2-135m-e2e")
    >>> generator.generate("name[Aromi], eatType[coffee shop] ->").text
    """

    def __init__(
        self, model: StreamingLM, tokenizer: PreTrainedTokenizerBase, settings: DecodeSettings | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or DecodeSettings()
        self.eos = end_tokens(model, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        adapter: str | Path,
        base: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        settings: DecodeSettings | None = None,
        device: str = "cpu",
        compile: Compile = "off",
        quantise: Quantise = "off",
    ) -> Generator:
        """Load an adapter folder and the base model it was trained on, prepared for decoding.

        Args:
            compile: "layer" makes every pass much cheaper, once the first passes have taken some seconds to compile
                (`warm_up` takes them beforehand); see `StreamingLM.prepare`.
            quantise: "int8" or "int4" holds the weights of the base's linear layers in integers; needs torchao.

        Raises:
            CheckpointError: the folder is missing, incomplete or corrupt, or the base is another one.
            ConfigError: compiling is asked for and there is no compiler, or quantising and it cannot be done here.
        """
        model, tokenizer = checkpoint.load(Path(adapter), base, dtype, quantise=quantise, device=device)
        model.prepare(compile)
        return cls(model, tokenizer, settings)

    def warm_up(self) -> None:
        """Meet every kind of pass once, so that none has to be compiled while somebody waits for text."""
        some = [self.eos[0] if self.eos else 0] * _WARM_PROMPT
        new = replace(self.settings, max_new_tokens=2 * self.model.stream_config.streams + 4)
        for steps in (plain(self.model, some, new), decode(self.model, some, new)):
            self.collect(steps)

    def steps(self, prompt: str | Sequence[int], **changes: Any) -> Iterator[Step]:
        """Decode speculatively, pass by pass; `changes` override single settings, such as max_new_tokens=32.

        Errors surface when the first step is asked for.
        """
        return decode(self.model, self._ids(prompt), replace(self.settings, **changes), self.eos)

    def plain_steps(self, prompt: str | Sequence[int], **changes: Any) -> Iterator[Step]:
        """The same text by plain decoding, one token a pass."""
        return plain(self.model, self._ids(prompt), replace(self.settings, **changes), self.eos)

    def generate(self, prompt: str | Sequence[int], **changes: Any) -> Generation:
        """Write after `prompt` until the text ends or the cap is reached.

        Raises:
            PromptError: the prompt is empty or leaves no room before the context limit.
        """
        return self.collect(self.steps(prompt, **changes))

    def collect(self, steps: Iterator[Step]) -> Generation:
        """Run `steps` to the end."""
        done = tuple(steps)
        counters = Counters()
        counters.extend(done)
        tokens = tokens_of(done)
        return Generation(self.text(tokens), tokens, done, counters)

    def stream(self, prompt: str | Sequence[int], **changes: Any) -> Iterator[str]:
        """Yield the text in pieces as passes deliver it; joined, they are the whole text.

        A character whose bytes are spread over several tokens is held back until it is complete.
        """
        tokens: list[int] = []
        sent = 0
        for step in self.steps(prompt, **changes):
            tokens += step.tokens
            text = self.text(tokens)
            if step.finish or not text.endswith("\N{REPLACEMENT CHARACTER}"):
                if len(text) > sent:
                    yield text[sent:]
                sent = len(text)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens."""
        decoded = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(decoded, str)
        return decoded

    def _ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if prompt == "":
            raise PromptError("the prompt is empty; give some text to go on from")
        return prompt_ids(self.tokenizer, prompt) if isinstance(prompt, str) else prompt


def end_tokens(model: StreamingLM, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a text, by the host's generation settings and by the tokenizer."""
    host = model.port.model.generation_config
    configured = host.eos_token_id if host is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int)}))
