"""What decoding yields, pass by pass, and the counters that are read off it: one definition for every method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from jaxtyping import Float
from torch import Tensor

from forestream.drafting import DraftTree
from forestream.ranking import best_tokens

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenScore:
    """What the model itself thought of a token, before processors and temperature.

    Attributes:
        logprob: log-probability of the token.
        top: the most probable tokens with theirs, best first, exact ties to the lowest id.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def of(token: int, logits: Float[Tensor, " V"], top: int) -> TokenScore:
        """The score of `token` under `logits`, beside the `top` most probable tokens."""
        law = logits.float().log_softmax(dim=-1)
        ids, values = best_tokens(logits[None], top)
        return TokenScore(float(law[token]), tuple(zip(ids[0], values[0], strict=True)))


@dataclass(frozen=True)
class Step:
    """The outcome of one pass for one text.

    Attributes:
        tokens: new tokens, 1 to G + 1 of them. The last one is the main stream's own, unless a draft ended the text.
        accepted: how many of them were drafted and accepted.
        seconds: wall clock of the pass with everything that belongs to it; a text's share of it in a batch.
        tree: the draft tree that was checked; None for the prompt pass.
        kept: its nodes that survived pruning.
        path: its nodes that were verified and written, from the root.
        finish: why decoding ended with this step, or None.
        scores: one for each of the tokens, if they were asked for.
        draft_calls: passes of a draft model that came before it; a prompt it reads is not counted.
        draft_seconds: how many of the seconds went by before the model's own pass, on what a method drafts with.
    """

    tokens: tuple[int, ...]
    accepted: int
    seconds: float
    tree: DraftTree | None = None
    kept: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    finish: Finish | None = None
    scores: tuple[TokenScore, ...] = ()
    draft_calls: int = 0
    draft_seconds: float = 0.0

    @property
    def offered_depth(self) -> int:
        """Depth of the surviving draft tree: the most drafts that could have been accepted."""
        return max((self.tree.topology.depths[node] for node in self.kept), default=0) if self.tree else 0


_SUMS: Final = (
    *("generated", "prompts", "prompted", "passes", "accepted", "nodes", "drafting", "draft_calls"),
    *("prompt_seconds", "decode_seconds", "draft_seconds"),
)


@dataclass
class Counters:
    """Sums over steps. "Passes" are verify passes: the prompt pass is counted apart, and so is its time.

    Attributes:
        generated: tokens.
        prompts: prompt passes, each of which delivers one token.
        passes: forward passes after the prompt pass.
        accepted: drafted tokens that were accepted.
        nodes: nodes checked after pruning, all passes together, roots included.
        drafting: passes that had drafts to check.
        histogram: entry a counts the passes that accepted a drafts.
        prompt_seconds, decode_seconds: wall clock of prompt passes and of everything after them.
        draft_calls: passes of a draft model after the prompt pass.
        draft_seconds: the part of `decode_seconds` that went into drafting ahead of the model's own passes.
        prompted: tokens that prompt passes delivered; more than one each where they had drafts to check.
    """

    generated: int = 0
    prompts: int = 0
    passes: int = 0
    accepted: int = 0
    nodes: int = 0
    drafting: int = 0
    histogram: list[int] = field(default_factory=list)
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_calls: int = 0
    draft_seconds: float = 0.0
    prompted: int = 0
    _offered: list[int] = field(default_factory=list)
    _reached: list[int] = field(default_factory=list)
    _arrived: list[int] = field(default_factory=list)

    @staticmethod
    def of(steps: Iterable[Step]) -> Counters:
        """The counters of one run."""
        counters = Counters()
        counters.extend(steps)
        return counters

    def add(self, step: Step) -> None:
        self.generated += len(step.tokens)
        if step.tree is None:
            self.prompts += 1
            self.prompted += len(step.tokens)
            self.prompt_seconds += step.seconds
            return
        self.passes += 1
        self.decode_seconds += step.seconds
        self.draft_calls += step.draft_calls
        self.draft_seconds += step.draft_seconds
        self.accepted += step.accepted
        self.nodes += len(step.kept)
        self.drafting += len(step.kept) > 1
        self.histogram.extend([0] * (step.accepted + 1 - len(self.histogram)))
        self.histogram[step.accepted] += 1
        for depth in range(step.offered_depth):
            while len(self._offered) <= depth:
                self._offered.append(0)
                self._reached.append(0)
                self._arrived.append(0)
            self._offered[depth] += 1
            self._arrived[depth] += step.accepted >= depth
            self._reached[depth] += step.accepted > depth

    def extend(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.add(step)

    def merge(self, other: Counters) -> None:
        """Add what `other` counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for own, theirs in (
            (self.histogram, other.histogram),
            (self._offered, other._offered),
            (self._reached, other._reached),
            (self._arrived, other._arrived),
        ):
            own.extend([0] * (len(theirs) - len(own)))
            for depth, count in enumerate(theirs):
                own[depth] += count

    @property
    def call_reduction(self) -> float:
        """CR: generated tokens per pass after the prompt pass."""
        return self.generated / max(self.passes, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts per verify pass."""
        return 1 + self.accepted / max(self.passes, 1)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry j - 1: share of the passes with drafts of depth j that accepted one there (not conditional)."""
        return [reached / offered for reached, offered in zip(self._reached, self._offered, strict=True)]

    @property
    def acceptance_given_previous(self) -> list[float]:
        """Entry j - 1: share of the passes with drafts of depth j *and* all before it accepted that accepted one there.

        0 where no pass came that far.
        """
        return [reached / max(arrived, 1) for reached, arrived in zip(self._reached, self._arrived, strict=True)]

    @property
    def nodes_per_pass(self) -> float:
        return self.nodes / max(self.passes, 1)

    @property
    def request_metrics(self) -> dict[str, Any]:
        """The counters under the names that clients of vLLM read.

        A draft token is a node that was checked beside the root; of a tree, at most one path of them is accepted.
        """
        drafts = self.nodes - self.passes
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.accepted / drafts if drafts else 0.0,
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": self.drafting,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": drafts,
            "num_spec_tokens": len(self._offered),
        }

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first of each prompt over the time after the prompt passes."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decoded(self) -> int:
        """Tokens that passes after the prompt pass delivered."""
        return self.generated - self.prompted


def acceptance_by_place(steps: Sequence[Step], prompt: int, bucket: int = 256) -> list[float]:
    """Mean acceptance length by place in the text, prompt included: entry i is of places from i * bucket on.

    It falls where a text gets longer than what streams were trained on. 1 where no pass ended up.
    """
    passes: list[int] = []
    accepted: list[int] = []
    place = prompt
    for step in steps:
        if step.tree is not None:
            more = place // bucket + 1 - len(passes)
            passes += [0] * more
            accepted += [0] * more
            passes[place // bucket] += 1
            accepted[place // bucket] += step.accepted
        place += len(step.tokens)
    return [1 + own / max(count, 1) for own, count in zip(accepted, passes, strict=True)]


def by_text(run: Iterable[Sequence[tuple[int, Step]]], texts: int) -> list[list[Step]]:
    """Run a batch to the end: the steps of each of its `texts`, none of a text that may have no tokens."""
    steps: list[list[Step]] = [[] for _ in range(texts)]
    for outcome in run:
        for number, step in outcome:
            steps[number].append(step)
    return steps


def tokens_of(steps: Sequence[Step]) -> tuple[int, ...]:
    """All tokens of a run in order."""
    return tuple(token for step in steps for token in step.tokens)
