"""Many short requests of mixed settings to one model: each is as by a fresh one, and nothing piles up.

`make soak` sends 10,000 of them; the tests send a few hundred.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from forestream.errors import ForestreamError
from forestream.generation import Generator
from forestream.memory import Memory
from writers import foreseen, writer

LETTERS = "abcdefgh the cat"
EVERY = 20
"""One request in so many is compared with a fresh model's."""


def prompt_of(chance: random.Random) -> str:
    return "".join(chance.choices(LETTERS, k=chance.randint(1, 12)))


def settings_of(chance: random.Random) -> dict[str, Any]:
    """What a request asks for, beside its prompt."""
    trees: list[dict[str, Any]] = [
        {},
        {"nodes": chance.randint(1, 12)},
        {"tree": "full", "k": chance.randint(1, 2), "streams": chance.randint(0, 3)},
        {"tree": "static", "shape": ((0, 0), (0, 1), (1, 0))},
        {"nodes": 9, "prune_to": chance.randint(1, 6)},
        {"nodes": 9, "prune_below": 1e-4},
    ]
    laws: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": chance.choice([0.5, 1.0]), "seed": chance.randint(0, 9)},
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "row": chance.randint(0, 5)},
        {"repetition_penalty": 1.3, "mirror": chance.random() < 0.5},
        {"presence_penalty": 0.5, "min_new_tokens": 3},
    ]
    ends: list[dict[str, Any]] = [{}, {}, {"stop": chance.choice(["B", "+B", "a"])}, {"eos": [chance.randint(2, 90)]}]
    return {
        "max_new_tokens": chance.randint(1, 12),
        "carriers": chance.choice(["deferred", "fused"]),
        "prompt_chunk": chance.choice([1, 5, 512]),
        "logprobs": chance.choice([None, None, 0, 3]),
        **chance.choice(trees),
        **chance.choice(laws),
        **chance.choice(ends),
    }


@dataclass
class Soak:
    """Requests to one model, one after the other; what they ask for follows from `chance` alone."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    served: int = 0
    compared: int = 0

    def __post_init__(self) -> None:
        self.generator: Generator = writer.__wrapped__(layers=2)
        self.memory = Memory(self.generator.model)

    def serve(self) -> None:
        """One request, of one of several kinds."""
        prompt, asked, kind = prompt_of(self.chance), settings_of(self.chance), self.chance.random()
        if kind < 0.70:
            self._one(prompt, asked, self.chance.choice([None, self.memory]))
        elif kind < 0.80:
            self._batch([prompt, prompt_of(self.chance), prompt], asked)
        elif kind < 0.90:
            run = self.generator.stream(prompt, memory=self.memory, **asked)
            for _ in range(self.chance.randint(0, 3)):
                next(run, None)
            run.close()  # type: ignore[attr-defined]
        else:
            wrong = self.chance.choice([{"node": 3}, {"nodes": 0}, {"top_p": 0}, {"stop": ""}])
            with pytest.raises(ForestreamError):
                self.generator.generate(prompt, memory=self.memory, **asked | wrong)
        self.served += 1

    def _one(self, prompt: str, asked: dict[str, Any], memory: Memory | None) -> None:
        start = self.generator.tokenizer(prompt)["input_ids"]
        if self.served % EVERY:
            self.generator.generate(prompt, memory=memory, **asked)
            return
        fresh: Generator = writer.__wrapped__(layers=2)
        wanted = fresh.collect(fresh.plain_steps(prompt, **asked))
        with foreseen((*start, *wanted.tokens), rate=0.7):
            found, alike = (one.generate(prompt, **asked) for one in (self.generator, fresh))
            remembered = self.generator.generate(prompt, memory=self.memory, **asked)
        for one in (found, alike, remembered):
            assert (one.tokens, one.text, one.finish) == (wanted.tokens, wanted.text, wanted.finish), (prompt, asked)
        trees = [[(step.tree, step.kept, step.scores) for step in one.steps] for one in (found, alike)]
        assert trees[0] == trees[1], (prompt, asked)
        self.compared += 1

    def _batch(self, prompts: list[str], asked: dict[str, Any]) -> None:
        found = self.generator.generate_batch(prompts, **asked)
        if self.served % EVERY == 0:
            fresh: Generator = writer.__wrapped__(layers=2)
            first = asked.get("row", 0)
            wanted = [fresh.generate(prompt, **asked | {"row": first + row}) for row, prompt in enumerate(prompts)]
            assert [one.tokens for one in found] == [one.tokens for one in wanted], (prompts, asked)
            self.compared += 1


def resident() -> int:
    """Bytes of this process's memory; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def alive() -> tuple[int, int]:
    """Tensors and bytes of their storages, each storage once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return len(tensors), sum(storages.values())


@pytest.mark.slow
def test_many_requests_leave_nothing_behind(soak: int, capsys: pytest.CaptureFixture[str]) -> None:
    run, marks = Soak(), []
    for number in range(1, soak + 1):
        run.serve()
        if number in (soak // 2, soak):
            marks.append((*alive(), len(gc.get_objects()), resident()))
    with capsys.disabled():
        print(f"\n{run.served} requests, {run.compared} compared; (tensors, bytes in them, objects, resident): {marks}")
    assert run.compared >= soak // (2 * EVERY)
    more = [later - earlier for earlier, later in zip(marks[0], marks[-1], strict=True)]
    for grown, allowed in zip(more, (20, 2**20, 2000, 2**25), strict=True):
        assert grown <= allowed, f"grown by {more} from half way to the end"
