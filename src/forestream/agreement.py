"""How a text agrees with plain decoding of the same model: equal, or within a margin wherever it is not.

EQ: the text is plain decoding's, token for token; what float32 has to give.
NT: read by plain decoding, one token a pass, every token is its choice or a stated margin below it at most; what half
precision has to give, where passes of several tokens round otherwise than passes of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from forestream.errors import ForestreamError
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.topology import chain

UNITS: Final = 4
"""The margin that rounding explains, in units in the last place of the largest logit, unless another one is stated."""


@dataclass(frozen=True)
class Agreement:
    """One prompt's text, held against plain decoding's.

    Attributes:
        number: of the prompt, as the caller counts.
        tokens: of the text, all of which were compared.
        first_difference: the first place where the texts differ, from 0, or None.
        plain, written: plain decoding's token there and the text's; None of a text that had ended.
        margin: how far apart the logits of these two are, by plain decoding; infinite where one text had ended.
        worst: the most that a token of the text falls short of plain decoding's best logit.
        unit: one unit in the last place of the largest logit, in the model's dtype; 0 of equal texts, where no logits
            had to be looked at.
    """

    number: int
    tokens: int
    first_difference: int | None = None
    plain: int | None = None
    written: int | None = None
    margin: float = 0.0
    worst: float = 0.0
    unit: float = 0.0

    @property
    def equal(self) -> bool:
        """EQ."""
        return self.first_difference is None

    def allowed(self, margin: float | None = None) -> float:
        """The margin that this text is judged by: the one given, or else `UNITS` units."""
        return UNITS * self.unit if margin is None else margin

    def near(self, margin: float | None = None) -> bool:
        """NT: no token is further off than `allowed`. Logits that are no numbers are not near anything."""
        allowed = self.allowed(margin)
        return self.equal or (self.margin <= allowed and self.worst <= allowed)

    def record(self) -> dict[str, Any]:
        """As JSON has it, which knows neither infinities nor NaN: they become null."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def compare(
    model: StreamingLM, prompt: Sequence[int], plain: Sequence[int], written: Sequence[int], number: int = 0
) -> Agreement:
    """Hold a text against the one that plain decoding wrote after the same prompt.

    Equal texts consist of plain decoding's choices and are not read again; others are, from beginning to end.
    """
    place = first_difference(plain, written)
    if place is None:
        return Agreement(number, len(written))
    falls, unit, margin = [0.0], 0.0, math.inf
    for at, logits in enumerate(plain_logits(model, prompt, written)):
        row = logits.float()
        falls.append(shortfall(row, written[at]))
        unit = max(unit, torch.finfo(logits.dtype).eps * float(row.abs().max()))
        if at == place < len(plain):
            margin = float((row[plain[at]] - row[written[at]]).abs())
    return Agreement(
        number,
        len(written),
        place,
        plain[place] if place < len(plain) else None,
        written[place] if place < len(written) else None,
        margin,
        float(torch.tensor(falls).max()),  # of a tensor: NaN is its own maximum
        unit,
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two texts differ, the shorter one's end if the other goes on, None if they are equal."""
    differing = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, None if len(a) == len(b) else min(len(a), len(b)))


def first_difference_margin(
    model: StreamingLM, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> float:
    """How far apart the two tokens' logits are where the texts part, by plain decoding.

    A small margin is rounding at a near tie; a large one is a fault.

    Raises:
        ForestreamError: one text is a prefix of the other, which no rounding explains.
    """
    place = first_difference(plain, other)
    upto = 0 if place is None else place + 1
    margin = compare(model, prompt, plain[:upto], other[:upto]).margin
    if margin == math.inf:
        raise ForestreamError(
            f"of two texts one stops after {min(len(plain), len(other))} tokens and the other goes on; this is a fault "
            "of the decoding loop, please report it with the prompt"
        )
    return margin


def shortfall(row: Float[Tensor, " V"], token: int) -> float:
    """How far the logit of `token` is below the best one; 0 of the best and of whatever ties with it."""
    return float(row.max() - row[token])


def plain_logits(model: StreamingLM, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[Float[Tensor, " V"]]:
    """The logits that plain decoding, one token a pass, has before each of `tokens`, in the model's dtype.

    The passes are those of `baseline.plain`, which is told every token instead of choosing it.
    """
    cache = model.new_cache(len(prompt) + len(tokens) + 1)
    text, one = Pack.text(len(prompt), torch.empty(1, 0, dtype=torch.long), 0), Pack.tree(chain(1))
    for read, pack in [(prompt, text), *(([token], one) for token in tokens[:-1])][: len(tokens)]:
        # Around each pass, not around the yield: what the caller does in between is his own.
        with torch.inference_mode():
            output = model(torch.tensor([list(read)], device=model.device), pack, cache)
            cache.advance(len(read))
            row = model.logits(output.main[:, -1])[0]
        yield row
