"""How good the texts are: outputs for a task's inputs, by any way of decoding, and their score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from forestream.data import prompt_ids
from forestream.generation import Generation, Generator
from forestream.memory import Memory
from forestream.requests import padded
from forestream.tasks.base import Example, user

Way = Literal["forestream", "plain", "batched"]


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


@torch.inference_mode()
def _batched(
    generator: Generator, examples: Sequence[Example], batch_size: int, advance: Callable[[int], None]
) -> list[str]:
    prompts = [prompt_ids(generator.tokenizer, example.asked) for example in examples]
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
