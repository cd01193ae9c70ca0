"""Grammars under speculation: legal text, plain decoding's own, and no illegal draft in any pass (cases F09 to F11)."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from batch import alone
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import DraftTree, drafter_for
from forestream.errors import ConfigError
from forestream.generation import Generation, Generator
from forestream.grammar import GrammarProcessor
from forestream.requests import Request
from forestream.rows import Row
from forestream.steps import Step, tokens_of
from grammars import EOS, FITS, GRAMMARS, PROMPT, TOKENIZER, V, allowed, compiled
from oracle import Prophet
from wrapped import wrapped
from zoo import custom

TREES: dict[str, dict[str, Any]] = {
    "budget": {"nodes": 12},
    "fused": {"nodes": 24, "carriers": "fused"},
    "few carriers": {"nodes": 24, "carriers": "fused", "carried": 3},
    "full": {"tree": "full", "k": 3, "streams": 3},
    "pruned": {"nodes": 16, "prune_to": 6},
    "looked up": {"nodes": 6, "lookup_beside": 3, "lookup_behind": 3},
}
LAWS: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 48},
    {"max_new_tokens": 48, "temperature": 2.0, "seed": 1, "top_p": 0.95},
    {"max_new_tokens": 48, "temperature": 1.5, "seed": 2, "repetition_penalty": 1.2, "mirror": True},
)


@cache
def generator() -> Generator:
    host = custom("llama", vocab_size=V, num_key_value_heads=2, max_position_embeddings=512)
    return Generator(wrapped(host), TOKENIZER)


@cache
def plain(form: str, law: int, prompt: tuple[int, ...] = tuple(PROMPT), row: int = 0) -> Generation:
    here, asked = generator(), {**LAWS[law], "row": row, "grammar": GRAMMARS[form]}
    return here.collect(here.plain_steps(prompt, **asked))


def foretold(monkeypatch: pytest.MonkeyPatch, *texts: tuple[int, ...]) -> None:
    """From now on drafters know these texts, as trained streams would."""

    def drafter(settings: DecodeSettings) -> Any:
        def draft(text: Any, logits: torch.Tensor) -> DraftTree:
            own = next((one for one in texts if one[: len(text)] == tuple(text)), ())
            return Prophet(drafter_for(settings), own, 0.7)(text, logits)

        return draft

    monkeypatch.setattr("forestream.decode.drafter_for", drafter)


def assert_no_illegal_draft(form: str, prompt: tuple[int, ...], steps: tuple[Step, ...]) -> int:
    """Every node of every tree could be written where it stands; the number of drafts."""
    processor, text, drafts = compiled(GRAMMARS[form]).start(), [*prompt], 0
    allowed(processor, prompt)
    for step in steps:
        for node in range(len(step.tree.tokens) if step.tree else 0):
            assert step.tree is not None
            path = [*text[:-1], *(step.tree.tokens[above] for above in step.tree.topology.path(node))]
            for child in step.tree.topology.children[node]:
                assert step.tree.tokens[child] in allowed(processor, path)
                drafts += 1
        text += step.tokens
    return drafts


@pytest.mark.parametrize("law", range(len(LAWS)))
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("form", GRAMMARS)
def test_text_is_legal_and_plain_decodings(form: str, tree: str, law: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """F09, F10: and no pass holds a draft that the grammar forbids."""
    wanted = plain(form, law)
    foretold(monkeypatch, (*PROMPT, *wanted.tokens))
    found = generator().generate(PROMPT, grammar=GRAMMARS[form], **TREES[tree], **LAWS[law])
    assert found.tokens == wanted.tokens
    assert found.finish == wanted.finish
    assert found.finish == "length" or FITS[form](found.text)
    assert found.counters.accepted > 0
    assert assert_no_illegal_draft(form, tuple(PROMPT), found.steps) >= found.counters.accepted


def test_most_texts_above_are_finished() -> None:
    ends = [plain(form, law).finish for form in GRAMMARS for law in range(len(LAWS))]
    assert ends.count("stop") >= 5


def test_drafts_were_dropped() -> None:
    """Streams that know nothing of the grammar draft tokens that it forbids: the trees are smaller than asked."""
    found = generator().generate(PROMPT, grammar=GRAMMARS["json"], nodes=12, **LAWS[1])
    sizes = [len(step.tree.tokens) for step in found.steps[:-4] if step.tree]
    assert min(sizes) < 12
    assert found.tokens == plain("json", 1).tokens


@pytest.mark.parametrize("method", ["forestream", "plain"])
def test_rows_of_a_batch_have_places_of_their_own(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts, two of them alike: each text is what it is alone."""
    for form in GRAMMARS:
        prompts = [(7, 8, 9), (40,), (7, 8, 9)]
        wanted = [plain(form, 1, one, row) for row, one in enumerate(prompts)]
        foretold(monkeypatch, *((*one, *text.tokens) for one, text in zip(prompts, wanted, strict=True)))
        found = generator().generate_batch(prompts, method, grammar=GRAMMARS[form], nodes=12, **LAWS[1])
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
        assert wanted[0].tokens != wanted[2].tokens
        for prompt, one in zip(prompts, found, strict=True):
            drafts = assert_no_illegal_draft(form, prompt, one.steps)
            assert (drafts > 0) == (method == "forestream")


def test_beside_other_processors_and_behind_another_history() -> None:
    """The grammar follows what processors see, which need not begin with the prompt."""
    processors = [compiled(GRAMMARS["json"]).start() for _ in range(2)]
    law = generator().request(PROMPT, temperature=2.0, seed=3, bad_words=((4,), (5,))).sampling
    texts = []
    for processor, run in zip(processors, (alone, None), strict=True):
        asked = Request(tuple(PROMPT), (EOS,), law, (processor,), max_new_tokens=40, history=(50, 60))
        steps = alone(generator().model, asked) if run else list(decode(generator().model, asked, DecodeSettings()))
        texts.append(tokens_of(steps))
    assert texts[0] == texts[1]
    assert {4, 5}.isdisjoint(texts[0])


def test_grammars_are_fitted_once_and_leave_no_state() -> None:
    here = generator()
    once = here.generate(PROMPT, grammar=GRAMMARS["regex"], **LAWS[1])
    fitted = dict(here._grammars)
    again = here.generate(PROMPT, grammar=GRAMMARS["regex"], **LAWS[1])
    assert once.tokens == again.tokens
    assert here._grammars == fitted
    with pytest.raises(ConfigError, match="grammr"):
        here.generate(PROMPT, grammr=GRAMMARS["regex"])


def test_drafts_that_advance_the_grammar_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: a state that is brought forward by drafts that are then refused."""
    right = GrammarProcessor.legal

    def wrong(self: GrammarProcessor, text: list[int], tree: DraftTree) -> tuple[int, ...]:
        kept = right(self, text, tree)
        for _, node in pairwise(kept[:2]):
            self._place.take(tree.tokens[node])
            self._place.tokens.pop()  # forgotten that it was taken
        return kept

    monkeypatch.setattr(GrammarProcessor, "legal", wrong)
    found = generator().generate(PROMPT, grammar=GRAMMARS["json"], nodes=12, **LAWS[1])
    assert found.tokens != plain("json", 1).tokens


def test_drafts_that_are_not_asked_about_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "legal", lambda row, tree: tree)
    found = generator().generate(PROMPT, grammar=GRAMMARS["json"], nodes=12, **LAWS[1])
    assert found.tokens == plain("json", 1).tokens, "the text is safe all the same"
    with pytest.raises(AssertionError):
        assert_no_illegal_draft("json", tuple(PROMPT), found.steps)
