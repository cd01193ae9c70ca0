"""A model that runs as it was loaded, and one like it that was prepared: both must do the same, pass by pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from forestream.baseline import plain
from forestream.config import Compile, DecodeSettings
from forestream.decode import decode
from forestream.drafting import Drafter, DraftTree, drafter_for
from forestream.model import StreamingLM
from forestream.steps import Step, tokens_of
from oracle import Prophet, first_difference
from wrapped import wrapped

CLOSE = 1e-4


@dataclass
class Overheard:
    """A drafter that keeps the stream logits it is asked with."""

    inner: Drafter
    logits: list[Tensor] = field(default_factory=list)

    def __call__(self, text: Sequence[int], logits: Tensor) -> DraftTree:
        self.logits.append(logits.clone())
        return self.inner(text, logits)


@dataclass(frozen=True)
class Twins:
    """The same host and adapter twice.

    Attributes:
        eager: as it was loaded.
        prepared: the same weights, prepared.
    """

    eager: StreamingLM
    prepared: StreamingLM

    def text(self, start: Sequence[int], tokens: int) -> tuple[int, ...]:
        """What both write by plain decoding."""
        wanted, found = written(self.eager, start, tokens), written(self.prepared, start, tokens)
        place = first_difference(found, wanted)
        assert found == wanted, f"plain decoding differs at token {place}: {found[place:]}, {wanted[place:]} eagerly"
        return wanted

    def check(self, start: Sequence[int], tokens: int, rate: float = 0.7, **settings: Any) -> list[Step]:
        """Decode with both: the text of plain decoding, by the same trees and acceptances. Returns the steps."""
        truth = self.text(start, tokens)
        return self._compare(start, truth, rate, DecodeSettings(max_new_tokens=tokens, **settings))

    def begin(self, start: Sequence[int], tokens: int, rate: float = 0.7, **settings: Any) -> list[Step]:
        """The same for the beginning of a longer text: it ends in no smaller passes, and no plain ones are compiled."""
        truth = written(self.eager, start, tokens)
        return self._compare(start, truth, rate, DecodeSettings(max_new_tokens=tokens + 20, **settings))

    def _compare(
        self, start: Sequence[int], truth: tuple[int, ...], rate: float, settings: DecodeSettings
    ) -> list[Step]:
        runs, logits = [], []
        for model in (self.eager, self.prepared):
            drafter = Overheard(Prophet(drafter_for(settings), (*start, *truth), rate))
            steps: list[Step] = []
            for step in decode(model, start, settings, drafter=drafter):
                steps.append(step)
                if len(found := tokens_of(steps)[: len(truth)]) == len(truth):
                    break
            place = first_difference(found, truth)
            assert found == truth, f"{settings} differs at {place}: {found[place:]}, {truth[place:]} by plain decoding"
            runs.append(steps)
            logits.append(drafter.logits)
        for number, (one, other) in enumerate(zip(*map(outline, runs), strict=True)):
            assert one == other, f"{settings} differs in step {number}: {other}, {one} eagerly"
        for number, (one, other) in enumerate(zip(*logits, strict=True)):
            off, largest = (float(t.abs().max()) if t.numel() else 0.0 for t in (one - other, one))
            assert off <= CLOSE * largest, f"{settings}: stream logits of step {number} differ by {off:.3g}"
        return runs[1]


def written(model: StreamingLM, start: Sequence[int], tokens: int) -> tuple[int, ...]:
    """What `model` writes by plain decoding."""
    return tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=tokens))))


def outline(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    """Everything about steps but the time they took."""
    return [(s.tokens, s.accepted, s.tree, s.kept, s.path, s.finish) for s in steps]


def twins(
    host: str | Callable[[], PreTrainedModel], mode: str = "joint", compile: Compile = "layer", **changes: Any
) -> Twins:
    """Two models of one host, by its name in the zoo or built alike twice; one of them prepared."""
    one, other = (wrapped(host if isinstance(host, str) else host(), mode, **changes) for _ in range(2))
    other.prepare(compile)
    return Twins(one, other)


def graphs() -> int:
    """How many graphs were traced so far."""
    return int(counters["stats"]["unique_graphs"])
