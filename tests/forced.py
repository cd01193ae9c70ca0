"""A proposer for tests on vLLM: writes down what the streams drafted, and can have known texts accepted in part.

The streams run as ever, so keys and values are written where they always are. Imported where vLLM is installed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from forestream.vllm.proposer import StreamProposer


class Forced(StreamProposer):
    """Replaces drafts of texts that are known beforehand, so that an untrained model's are accepted here and there.

    Of n tokens so far, the next n mod (drafts + 1) are drafted right and what follows is wrong.

    Attributes:
        truths: texts with their prompts; drafts of any other text are left alone.
        seen: the streams' own drafts, by the text that they were made behind.
        vocabulary: V.
        latest: the proposer whose target was loaded last.
    """

    truths: ClassVar[list[tuple[int, ...]]] = []
    seen: ClassVar[dict[tuple[int, ...], tuple[int, ...]]] = {}
    vocabulary: ClassVar[int] = 98
    latest: ClassVar[StreamProposer]

    @classmethod
    def expect(cls, truths: list[tuple[int, ...]], vocabulary: int) -> None:
        cls.truths, cls.vocabulary = truths, vocabulary
        cls.seen.clear()

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        Forced.latest = self

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        drafted = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)
        for row, own in enumerate(drafted):
            if not own:
                continue
            length = int(num_tokens_no_spec[row])
            text = tuple(token_ids_cpu[row, :length].tolist())
            self.seen[text] = tuple(own)
            truth = next((one for one in self.truths if one[:length] == text), None)
            if truth is not None:
                rest = truth[length : length + min(length % (self.drafts + 1), len(own))]
                wrong = (truth[length + len(rest)] + 1) % self.vocabulary if length + len(rest) < len(truth) else 0
                drafted[row] = [*rest, *[wrong] * (len(own) - len(rest))]
        return drafted
