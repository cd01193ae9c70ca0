"""A text under way: what was written, how its next token is chosen, and whether it has ended."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from forestream.drafting import DraftTree
from forestream.errors import ConfigError, GrammarError
from forestream.lookup import NGrams
from forestream.processors import limits, penalties, warpers
from forestream.requests import Request
from forestream.sampling import Processor, acceptable, draw, greedy
from forestream.steps import Finish, TokenScore
from forestream.verify import Verdict, verify
from forestream.vocabulary import DraftVocabulary


@runtime_checkable
class DraftFilter(Protocol):
    """A processor that can tell beforehand which drafts it would forbid, such as a grammar."""

    def legal(self, text: list[int], tree: DraftTree) -> tuple[int, ...]:
        """Nodes of `tree` that may be written behind `text`, which ends with the root: whole paths, increasing."""
        ...


class Row:
    """The text of one request.

    Args:
        limit: cap on its tokens.

    Attributes:
        text: prompt and text, which grows by every token chosen.
        finish: why the text has ended, or None.
        ngrams: of the text, read as far as drafts were looked up in it.
    """

    def __init__(self, request: Request, limit: int) -> None:
        self.request = request
        self.limit = limit
        self.text = list(request.prompt)
        self.finish: Finish | None = None
        self.ngrams = NGrams()
        self._history = list(request.prompt if request.history is None else request.history)
        prompt, sampling = len(self._history), request.sampling
        self._penalties = penalties(sampling, prompt, request.eos)
        self._processors: list[Processor] = [
            *self._penalties,
            *limits(sampling, prompt, request.eos),
            *request.processors,
            *warpers(sampling),
        ]
        self._filters = [one for one in request.processors if isinstance(one, DraftFilter)]
        self._scores: list[TokenScore] = []
        self._looks = bool(self._processors) or not sampling.greedy or sampling.lossy or request.watch is not None

    @property
    def written(self) -> int:
        """Tokens behind the prompt."""
        return len(self.text) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return self.limit - self.written

    def legal(self, tree: DraftTree) -> DraftTree:
        """`tree` without the drafts that a grammar forbids."""
        for one in self._filters:
            kept = one.legal(self._seen, tree)
            if len(kept) < len(tree.tokens):
                tree = tree.subset(kept)
        return tree

    @property
    def mirrors(self) -> bool:
        """Whether penalties are asked to act on drafts, and there are any."""
        return bool(self.request.sampling.mirror and self._penalties)

    def mirrored(self, logits: Float[Tensor, "G K"], vocabulary: DraftVocabulary | None = None) -> Float[Tensor, "G K"]:
        """Logits of streams under the penalties, as far as they are asked to act on drafts.

        Args:
            vocabulary: the tokens that the columns are of; None where they are all V.
        """
        if not (self.mirrors and len(logits)):
            return logits
        logits, ids = logits.float(), self._ids(logits.device).expand(len(logits), -1)
        if vocabulary is not None:  # penalties know tokens, not columns
            logits = vocabulary.spread(logits)
        for processor in self._penalties:
            logits = processor(ids, logits)
        return logits if vocabulary is None else logits[:, vocabulary.ids]

    def read(self, tree: DraftTree, logits: Float[Tensor, "N V"]) -> tuple[Verdict, tuple[TokenScore, ...]]:
        """Verify `tree` by the main stream's logits at its nodes, and write what is chosen.

        Returns:
            The verdict, and the scores of the tokens chosen if they were asked for.
        """
        choices = None if self._looks else greedy(logits)
        self._scores = []

        def choose(node: int) -> int:
            if choices is not None:
                token, scores = choices[node], logits[node]
            else:
                token, scores = self._choose(logits[node], [tree.tokens[n] for n in tree.topology.children[node]])
            self._write(token, logits[node], scores)
            return token

        verdict = verify(tree, choose, lambda: self.finish is not None)
        return verdict, tuple(self._scores)

    def _choose(self, logits: Float[Tensor, " V"], drafts: list[int]) -> tuple[int, Float[Tensor, " V"]]:
        """The next token, and what the processors made of its logits."""
        scores = logits[None].to(torch.float32, copy=True)  # processors may write into what they are handed
        if self._processors:
            ids = self._ids(logits.device)
            for processor in self._processors:
                scores = processor(ids, scores)
                if not isinstance(scores, Tensor):
                    raise ConfigError(f"a processor returned {scores!r}; expected logits [1, V]")
        law = scores[0]
        if self._filters and not law.max() > -torch.inf:
            raise GrammarError(
                "the grammar allows nothing that the other rules allow: look at min_new_tokens, bad words, processors"
            )
        sampling = self.request.sampling
        if sampling.lossy and (draft := acceptable(law, drafts, sampling)) is not None:
            return draft, law
        if sampling.greedy:
            return greedy(scores)[0], law
        return draw(law, sampling.seed, self.request.row, len(self.text)), law

    def _write(self, token: int, logits: Float[Tensor, " V"], scores: Float[Tensor, " V"]) -> None:
        self.text.append(token)
        if self.request.logprobs is not None:
            self._scores.append(TokenScore.of(token, logits, self.request.logprobs))
        if self.request.watch is not None:
            self.request.watch(token, logits, scores)
        # All of them are called, whatever the others say: a criterion may count.
        said = []
        if self.request.criteria:
            ids = self._ids(scores.device)
            said = [criterion(ids, scores[None]) for criterion in self.request.criteria]
        if token in self.request.eos or any(one is not None and torch.as_tensor(one).any() for one in said):
            self.finish = "stop"
        elif self.left <= 0:
            self.finish = "length"

    @property
    def _seen(self) -> list[int]:
        """The text as processors and criteria see it, whose history may differ from the prompt."""
        return self._history + self.text[len(self.request.prompt) :]

    def _ids(self, device: torch.device) -> Int[Tensor, "1 T"]:
        return torch.tensor([self._seen], device=device)
