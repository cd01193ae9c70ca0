"""The best tokens of rows of logits, in an order that ties cannot change."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

FEW = 8192
"""Tokens that are ranked at once, such as those of a draft vocabulary."""

STRIPES = 1024
"""Into so many sets of tokens a vocabulary is dealt out for ranking it."""


def best_ids(logits: Float[Tensor, "G K"], k: int, ids: Int[Tensor, " K"] | None = None) -> list[list[int]]:
    """Ids of the k best tokens per row, or of all if there are fewer: best first, exact ties to the lowest id.

    Args:
        ids: the tokens that the columns are of, in increasing order; None where they are all V.
    """
    columns = _best_columns(logits, k)
    return columns if ids is None else _named(columns, ids)


def _named(columns: list[list[int]], ids: Int[Tensor, " K"]) -> list[list[int]]:
    named: list[list[int]] = ids[torch.tensor(columns, dtype=torch.long, device=ids.device)].tolist()
    return named


def _best_columns(logits: Float[Tensor, "G K"], k: int) -> list[list[int]]:
    rows, vocabulary = logits.shape
    k = min(k, vocabulary)
    if not rows or not k:
        return [[] for _ in range(rows)]
    if vocabulary <= FEW:
        # The library's own choice among ties may be any: it counts where there are none.
        values, columns = logits.topk(min(k + 1, vocabulary), dim=1)
        if bool((values[:, :-1] > values[:, 1:]).all()):
            chosen: list[list[int]] = columns[:, :k].tolist()
            return chosen
    # Token i is in stripe i mod S. The k-th largest of the stripes' peaks is reached by k tokens at least, and the
    # tokens that reach it, ties included, lie in stripes whose peaks do: the rest of the vocabulary is read only once.
    stripes = STRIPES if 4 * k <= STRIPES < vocabulary else vocabulary
    if vocabulary % stripes:
        logits = functional.pad(logits, (0, -vocabulary % stripes), value=-torch.inf)
    dealt = logits.unflatten(1, (-1, stripes))
    peaks = dealt.amax(dim=1)
    least = peaks.topk(k, dim=1).values[:, -1:]
    row, stripe = (peaks >= least).nonzero(as_tuple=True)
    values = dealt[row, :, stripe]
    some, place = (values >= least[row]).nonzero(as_tuple=True)
    found: list[list[tuple[float, int]]] = [[] for _ in range(rows)]
    tokens = (place * stripes + stripe[some]).tolist()
    for owner, value, token in zip(row[some].tolist(), values[some, place].tolist(), tokens, strict=True):
        found[owner].append((-value, token))
    return [[token for _, token in sorted(candidates)[:k]] for candidates in found]


def best_tokens(
    logits: Float[Tensor, "G K"], k: int, ids: Int[Tensor, " K"] | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """`best_ids`, and the log-probabilities of these tokens, relative to those that there are columns of."""
    columns = _best_columns(logits, k)
    if not columns or not columns[0]:
        return columns, [[] for _ in columns]
    logits = logits.float()
    places = torch.tensor(columns, device=logits.device)
    values = logits.gather(1, places)
    # The same as logsumexp, in half the time.
    norms = values[:, :1] - logits.log_softmax(dim=1).gather(1, places[:, :1])
    return columns if ids is None else _named(columns, ids), (values - norms).tolist()
