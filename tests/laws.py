"""The law that sampled text must follow: worked out slowly from a host's own logits, and compared by chi-square."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp
from typing import Any

import torch

from forestream.baseline import plain_batch
from forestream.config import DecodeSettings
from forestream.decode import decode_batch
from forestream.drafting import Drafter
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.steps import Counters, tokens_of

Text = tuple[int, ...]


def slow_law(
    logits: Sequence[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    forbidden: Iterable[int] = (),
) -> dict[int, float]:
    """Probabilities of the tokens that survive masks and cuts, one rule after the other, with numbers of Python."""
    left = {token: logit / temperature for token, logit in enumerate(logits) if token not in set(forbidden)}
    if top_k:
        least = sorted(left.values())[-min(top_k, len(left))]
        left = {token: logit for token, logit in left.items() if logit >= least}
    if top_p < 1:
        above, kept = 0.0, {}
        for token, share in sorted(softmax(left).items(), key=lambda pair: -pair[1]):
            if above < top_p:
                kept[token] = left[token]
            above += share
        left = kept
    law = softmax(left)
    return softmax({token: left[token] for token, share in law.items() if share >= min_p * max(law.values())})


def softmax(logits: dict[int, float]) -> dict[int, float]:
    best = max(logits.values())
    rates = {token: exp(logit - best) for token, logit in logits.items()}
    return {token: rate / sum(rates.values()) for token, rate in rates.items()}


@torch.no_grad()
def exact_texts(model: StreamingLM, prompt: Text, length: int, **law: Any) -> dict[Text, float]:
    """The probability of every text of `length` tokens, by the stock forward on each of its beginnings."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        ids = torch.tensor([prompt + text for text in texts])
        rows = model.port.model(input_ids=ids, use_cache=False).logits[:, -1].double().tolist()
        texts = {
            (*text, token): above * share
            for (text, above), logits in zip(texts.items(), rows, strict=True)
            for token, share in slow_law(logits, **law).items()
        }
    return texts


def written(
    model: StreamingLM, asked: Sequence[Request], settings: DecodeSettings | None, drafter: Drafter | None = None
) -> tuple[list[Text], Counters]:
    """The texts of a batch, by speculation or (settings None) plainly, and the sums over all their steps."""
    found: list[list[Any]] = [[] for _ in asked]
    run = decode_batch(model, asked, settings, drafter) if settings else plain_batch(model, asked, DecodeSettings())
    for outcome in run:
        for number, step in outcome:
            found[number].append(step)
    counters = Counters()
    for steps in found:
        counters.extend(steps)
    return [tokens_of(steps) for steps in found], counters


def chi_square(found: Iterable[Any], law: dict[Any, float]) -> float:
    """How probable it is that draws from `law` lie as far off as `found`; 0 if something impossible is among them.

    Outcomes that are expected less than 5 times count as one.
    """
    seen = Counter(found)
    if any(law.get(outcome, 0.0) <= 0 for outcome in seen):
        return 0.0
    draws = seen.total()
    cells = [(seen[outcome], draws * share) for outcome, share in law.items() if draws * share >= 5]
    rare = draws - sum(count for count, _ in cells), draws - sum(expected for _, expected in cells)
    if rare[1] >= 5:
        cells.append(rare)
    elif cells:
        count, expected = cells.pop()
        cells.append((count + rare[0], expected + rare[1]))
    if len(cells) < 2:
        return 1.0
    off = sum((count - expected) ** 2 / expected for count, expected in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2.0), torch.tensor(off / 2.0)))
