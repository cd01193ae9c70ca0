"""DIST: sampled text with speculation follows the target law (cases B01, B02, B05, B07, B10, B11, B13 to B18, F13).

`LEAST` bounds the false alarms of all chi-square tests here together by 1e-4 (Bonferroni). Seeds are fixed, so an alarm
would come in every run or in none.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from forestream.config import DecodeSettings, SamplingSettings
from forestream.drafting import DraftTree
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.rows import Row
from forestream.sampling import draw
from forestream.topology import Topology
from laws import chi_square, exact_texts, slow_law, written
from wrapped import wrapped
from zoo import custom

LEAST = 1e-4 / 100
"""Fewer than a hundred chi-square tests are made below, and the p-value of each has to be above this."""

PROMPT = (1, 5, 2)
NUCLEUS: dict[str, Any] = {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05}


@cache
def tiny(family: str = "llama", vocabulary: int = 8) -> StreamingLM:
    return wrapped(custom(family, vocab_size=vocabulary, num_key_value_heads=2))


def asked(rows: int, tokens: int = 4, seeds: int = 1, processors: Any = (), **law: Any) -> list[Request]:
    """Texts behind one prompt, told apart by their rows and by `seeds` seeds."""
    laws = [SamplingSettings(**{"temperature": 1.0, "seed": 11 + seed, **law}) for seed in range(seeds)]
    return [
        Request(PROMPT, sampling=laws[row % seeds], row=row // seeds, max_new_tokens=tokens, processors=processors)
        for row in range(rows)
    ]


def p_value(model: StreamingLM, rows: int, settings: DecodeSettings, masked: Any = (), **law: Any) -> float:
    """Of the first three tokens of `rows` texts; speculation writes the second and the third."""
    forbid = (Forbid(masked),) if masked else ()
    texts, counters = written(model, asked(rows, seeds=5, processors=forbid, **law), settings)
    assert counters.accepted > rows / 100, "too few drafts were accepted to call this a test"
    return chi_square([text[:3] for text in texts], exact_texts(model, PROMPT, 3, forbidden=masked, **law))


class Forbid:
    """Masks tokens."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor(self.tokens), -torch.inf)


# --- one draw ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [{"temperature": 0.3}, {}, {"temperature": 1.5}, NUCLEUS], ids=str)
def test_draws_follow_the_law_by_every_part_of_their_key(law: dict[str, Any]) -> None:
    logits = (2.5 * torch.randn(8, generator=torch.Generator().manual_seed(4))).tolist()
    wanted = slow_law(logits, **law)
    scores = torch.tensor([log(wanted[token]) if token in wanted else -torch.inf for token in range(8)])
    for part in ("seed", "row", "place"):
        found = [draw(scores, **{"seed": 7, "row": 3, "place": 5, part: number}) for number in range(8000)]
        assert chi_square(found, wanted) > LEAST


def test_a_token_outside_the_nucleus_is_never_emitted_and_all_within_it_are() -> None:
    """B06: a hundred thousand draws."""
    scores = torch.tensor([0.5, -torch.inf, 1.0, -torch.inf, -3.0, 0.0, -torch.inf, 2.0])
    found = Counter(draw(scores, 0, row, place) for row in range(1000) for place in range(100))
    assert set(found) == {0, 2, 4, 5, 7}
    assert chi_square(found.elements(), slow_law(scores.tolist(), forbidden=(1, 3, 6))) > LEAST


def test_neighbouring_draws_know_nothing_of_each_other() -> None:
    """Pairs of draws whose keys differ in one part by one, or have two parts exchanged."""
    scores = torch.tensor([0.0, 0.7, -0.5])
    law = {(a, b): p * q for a, p in slow_law(scores.tolist()).items() for b, q in slow_law(scores.tolist()).items()}
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        keys = [(2 * seed, 2 * row, 2 * place) for seed in range(20) for row in range(20) for place in range(10)]
        pairs = [(draw(scores, *key), draw(scores, *map(sum, zip(key, other, strict=True)))) for key in keys]
        assert chi_square(pairs, law) > LEAST
    swapped = [(row, place) for row in range(90) for place in range(row)]
    pairs = [(draw(scores, 0, row, place), draw(scores, 0, place, row)) for row, place in swapped]
    assert chi_square(pairs, law) > LEAST


# --- whole texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_chains_and_trees_at_every_temperature(k: int, temperature: float) -> None:
    """B02, B07, B14, B15."""
    family = "qwen2" if k == 1 else "llama"  # whose chains are accepted more often
    settings = DecodeSettings(tree="full", k=k, streams=2 if k > 1 else 4, carriers="fused" if k == 3 else "deferred")
    assert p_value(tiny(family), 1000, settings, temperature=temperature) > LEAST


@pytest.mark.parametrize("nodes", [5, 16])
@pytest.mark.parametrize("law", [NUCLEUS, {**NUCLEUS, "temperature": 0.7, "min_p": 0.0}], ids=str)
def test_top_k_top_p_and_min_p_together(law: dict[str, Any], nodes: int) -> None:
    """B05, B18."""
    assert p_value(tiny("llama", 11), 1500, DecodeSettings(nodes=nodes), **law) > LEAST


@pytest.mark.parametrize(
    "settings", [DecodeSettings(tree="full", k=1), DecodeSettings(nodes=12)], ids=["chain", "tree"]
)
def test_with_a_mask(settings: DecodeSettings) -> None:
    """F13."""
    assert p_value(tiny("qwen2"), 1200, settings, masked=(0, 6), temperature=1.2) > LEAST
    assert p_value(tiny(), 1200, settings, masked=(2, 3, 7), **NUCLEUS) > LEAST


def test_every_row_of_a_batch_of_four() -> None:
    """G11: texts of four prompts under way together, one seed after the other; each row has its own prompt's law."""
    prompts = [PROMPT, (4,), (3, 3, 0, 6, 1), (7, 2)]
    found = []
    for seed in range(150):
        law = SamplingSettings(temperature=1.0, seed=seed)
        batch = [Request(one, sampling=law, row=row, max_new_tokens=3) for row, one in enumerate(prompts)]
        found.append(written(tiny(), batch, DecodeSettings(nodes=6))[0])
    for texts, prompt in zip(zip(*found, strict=True), prompts, strict=True):
        assert chi_square([text[:2] for text in texts], exact_texts(tiny(), prompt, 2)) > LEAST


def test_at_temperature_one_every_probable_token_appears() -> None:
    """B11: of 300 texts; what the pass with drafts wrote is no argmax."""
    texts, _ = written(tiny(), asked(300), DecodeSettings(nodes=8))
    for length in (1, 2):
        for text, share in exact_texts(tiny(), PROMPT, length).items():
            assert share <= 0.05 or text in {one[:length] for one in texts}


def test_entropy_with_speculation_is_the_laws() -> None:
    """B17: within four standard errors of the exact value, and so is plain decoding's, which wrote the same texts."""
    law = exact_texts(tiny(), PROMPT, 3)
    exact = -sum(share * log(share) for share in law.values())
    spread = sum(share * (log(share) + exact) ** 2 for share in law.values()) ** 0.5
    requests = asked(1000)
    texts, _ = written(tiny(), requests, DecodeSettings(nodes=8))
    surprise = [-log(law[text[:3]]) for text in texts]
    assert abs(sum(surprise) / len(texts) - exact) < 4 * spread / len(texts) ** 0.5
    assert texts == written(tiny(), requests, None)[0]


# --- how often drafts are accepted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [(0,), (7,), (0, 3, 7)])
def test_acceptance_is_the_probability_of_the_drafted_tokens(drafts: tuple[int, ...]) -> None:
    """B13: not less than it could be; within four standard errors."""

    def drafter(text: Sequence[int], logits: Tensor) -> DraftTree:
        tokens = drafts if len(logits) else ()
        return DraftTree(Topology((-1, *(0 for _ in tokens))), (text[-1], *tokens))

    share = sum(p for (_, second), p in exact_texts(tiny(), PROMPT, 2).items() if second in drafts)
    _, counters = written(tiny(), asked(2000, tokens=3), DecodeSettings(nodes=4, streams=1), drafter)
    assert counters.drafting == 2000
    assert abs(counters.accepted / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5


# --- what the tests above notice ------------------------------------------------------------------------------------

TREE = DecodeSettings(tree="full", k=3, streams=2)
RIGHT_CHOICE = Row._choose


def per_candidate(self: Row, logits: Tensor, drafts: list[int]) -> tuple[int, Tensor]:
    """B10: each draft is compared with a target sample of its own."""
    token, law = RIGHT_CHOICE(self, logits, drafts)
    for place, draft in enumerate(drafts, start=1):
        if draw(law, self.request.sampling.seed, self.request.row + 10**6 * place, len(self.text)) == draft:
            return draft, law
    return token, law


def argmax(self: Row, logits: Tensor, drafts: list[int]) -> tuple[int, Tensor]:
    """B11, B17: draws are forgotten where there are drafts."""
    token, law = RIGHT_CHOICE(self, logits, drafts)
    return (int(law.argmax()) if drafts else token), law


def untempered(self: Row, logits: Tensor, drafts: list[int]) -> tuple[int, Tensor]:
    """B02, B15: acceptance by the law before temperature and cuts."""
    token, law = RIGHT_CHOICE(self, logits, drafts)
    raw = draw(logits, self.request.sampling.seed, self.request.row, len(self.text))
    return (raw if raw in drafts else token), law


class Speculative:
    """B01: the usual rule, accept by min(1, p/q) and else draw from what is left of p - q; but drafts are argmaxes."""

    def __init__(self) -> None:
        self.laws: dict[int, tuple[int, Tensor]] = {}

    def mirrored(self, row: Row, logits: Tensor) -> Tensor:
        self.laws[id(row)] = len(row.text), logits.softmax(dim=-1)
        return logits

    def choose(self, row: Row, logits: Tensor, drafts: list[int]) -> tuple[int, Tensor]:
        token, law = RIGHT_CHOICE(row, logits, drafts)
        if not drafts:
            return token, law
        start, streams = self.laws[id(row)]
        p, q = law.softmax(dim=-1), streams[len(row.text) - start]
        uniform = torch.rand((), generator=torch.Generator().manual_seed(1000 * row.request.row + len(row.text)))
        if uniform < p[drafts[0]] / q[drafts[0]]:
            return drafts[0], law
        left = (p - q).clamp_min(0).log()
        return draw(left, row.request.sampling.seed, row.request.row, len(row.text)), law


@pytest.mark.parametrize("wrong", [per_candidate, argmax, untempered])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_wrong_choices_are_noticed(wrong: Any, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "_choose", wrong)
    assert p_value(tiny(), 1500, TREE, temperature=temperature) < LEAST


def test_argmax_drafts_treated_as_samples_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Speculative()
    monkeypatch.setattr(Row, "mirrored", lambda row, logits, vocabulary: wrong.mirrored(row, logits))
    monkeypatch.setattr(Row, "_choose", lambda row, logits, drafts: wrong.choose(row, logits, drafts))
    assert p_value(tiny("qwen2"), 1500, DecodeSettings(tree="full", k=1), temperature=1.0) < LEAST


@pytest.mark.parametrize("forgotten", ["seed", "row", "place"])
def test_a_key_that_lacks_a_part_is_noticed(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(scores: Tensor, seed: int, row: int, place: int) -> int:
        return draw(scores, **{"seed": seed, "row": row, "place": place, forgotten: 0})

    monkeypatch.setattr("forestream.rows.draw", wrong)
    assert p_value(tiny(), 1000, TREE) < LEAST


def test_a_mask_that_only_drafts_obey_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F13: the mask forgotten where the main stream chooses."""
    monkeypatch.setattr(Forbid, "__call__", lambda self, input_ids, scores: scores)
    assert p_value(tiny(), 500, TREE, masked=(0,)) < LEAST
