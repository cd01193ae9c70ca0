"""How good the texts are: outputs for a task's inputs, by any way of decoding, and their score."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, Self

import torch

from forestream.data import prompt_ids, prompts_of
from forestream.errors import DataError
from forestream.generation import Generation, Generator
from forestream.memory import Memory
from forestream.requests import padded
from forestream.tasks.base import Example, Message, user

Way = Literal["forestream", "plain", "batched"]

_NEEDED: Final = ("adapter", "task", "split", "inputs", "dtype", "max_new_tokens")


@dataclass(frozen=True)
class Written:
    """Texts for the first inputs of a task's split, and how they were made.

    Attributes:
        outputs: one text per input.
        settings: adapter (a name), task, split, inputs (their number), dtype, max_new_tokens and so on; `prompts` is a
            digest of the inputs, which records from before it was taken lack.
    """

    outputs: tuple[str, ...]
    settings: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The texts of a record that `forestream evaluate --json` wrote.

        Raises:
            DataError: the file is missing or no such record.
        """
        try:
            record = json.loads(path.read_text())
            outputs, settings = tuple(record["outputs"]), dict(record["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} holds no texts ({type(error).__name__}: {error}); expected a record of `forestream evaluate "
                "--json`"
            ) from error
        if missing := [name for name in _NEEDED if name not in settings]:
            raise DataError(f"the settings in {path} lack {', '.join(missing)}; write the record anew")
        if len(outputs) != settings["inputs"] or not all(isinstance(text, str) for text in outputs):
            raise DataError(f"{path} holds {len(outputs)} texts for {settings['inputs']} inputs; write the record anew")
        return cls(outputs, settings)

    def on(self, task: str, split: str, examples: Sequence[Example], count: int) -> Self:
        """The first `count` texts, once they are known to belong to these inputs.

        Args:
            examples: all of the split, in order.

        Raises:
            DataError: the texts are another task's or split's, of other inputs, or fewer.
        """
        own = f"{self.settings['task']}, split {self.settings['split']}"
        if own != f"{task}, split {split}":
            raise DataError(f"the texts of {self.settings['adapter']} are for {own}; expected {task}, split {split}")
        whole = len(self.outputs)
        if count > whole or whole > len(examples):
            name = self.settings["adapter"]
            raise DataError(f"found {whole} texts of {name} for {len(examples)} inputs; expected {count} of them")
        expected = digest(examples[:whole])
        if self.settings.get("prompts", expected) != expected:
            raise DataError(f"the texts of {self.settings['adapter']} were written for other inputs; write them anew")
        settings = {**self.settings, "inputs": count, "prompts": digest(examples[:count])}
        return replace(self, outputs=self.outputs[:count], settings=settings)


def digest(examples: Sequence[Example]) -> str:
    """A print of the inputs, which tells them from others: SHA-256, the first 16 of its hexadecimal digits."""
    return sha256(json.dumps([example.prompt for example in examples]).encode()).hexdigest()[:16]


def outputs(
    generator: Generator,
    examples: Sequence[Example],
    way: Way,
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """One text per example.

    Args:
        way: "forestream" and "plain" decode one prompt at a time; "batched" is the host's own greedy `generate` on
            `batch_size` prompts at a time: the same texts in float32, faster where only the score is wanted.
        advance: called with the number of examples done since the last call, for a progress bar.
    """
    if way == "batched":
        return _batched(generator, examples, batch_size, advance)
    run = generator.steps if way == "forestream" else generator.plain_steps
    texts = []
    for example in examples:
        texts.append(generator.collect(run(example.asked)).text)
        advance(1)
    return texts


def conversation(
    generator: Generator, example: Example, way: Literal["forestream", "plain"] = "forestream"
) -> list[Generation]:
    """The model's answers to all turns of a chat, each in view of what was said before it, its own answers included.

    What one turn has read is not read again for the next.

    Raises:
        PromptError: the model has no chat template, or the chat outgrows its context.
    """
    memory = Memory(generator.model)
    run = generator.steps if way == "forestream" else generator.plain_steps
    messages, answers = [], []
    for said in (example.prompt, *example.turns):
        messages.append(user(said))
        answers.append(generator.collect(run(messages, memory=memory)))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def prompts_of_turns(generator: Generator, example: Example) -> list[tuple[int, ...]]:
    """Token ids of the prompt of every turn of a chat, in view of what was said before it: plain decoding's answers.

    Errors as in `conversation`.
    """
    memory = Memory(generator.model)
    messages: list[Message] = []
    found: list[tuple[int, ...]] = []
    for said in (example.prompt, *example.turns):
        if found:
            answer = generator.collect(generator.plain_steps(messages, memory=memory)).text
            messages.append({"role": "assistant", "content": answer})
        messages.append(user(said))
        found.append(prompt_ids(generator.tokenizer, messages))
    return found


@torch.inference_mode()
def _batched(
    generator: Generator, examples: Sequence[Example], batch_size: int, advance: Callable[[int], None]
) -> list[str]:
    prompts = prompts_of(generator.tokenizer, examples)
    # Prompts of similar length share a batch, so that little is padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    pad = generator.eos[0] if generator.eos else 0
    texts = [""] * len(prompts)
    with generator.model.as_host() as host:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            ids, mask = padded([prompts[i] for i in batch], pad)
            written = host.generate(
                input_ids=ids.to(generator.model.device),
                attention_mask=mask.to(generator.model.device),
                max_new_tokens=generator.settings.max_new_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                eos_token_id=list(generator.eos) or None,
                pad_token_id=pad,
            )
            for i, row in zip(batch, written[:, ids.shape[1] :].tolist(), strict=True):
                texts[i] = generator.text(row)
            advance(len(batch))
    return texts
