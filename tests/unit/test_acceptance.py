"""A recorded trace against the model's own streams, and simulated runs against the decoding that they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from forestream import acceptance
from forestream.acceptance import Simulated, Trace, rates, record, simulate
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import BudgetTree, DraftTree, FullTree, StaticTree, drafter_for
from forestream.errors import ConfigError, PromptError
from forestream.ranking import best_tokens
from forestream.steps import Step
from forestream.topology import chain
from oracle import Prophet
from subject import Subject, lively, model_of
from wrapped import STREAMS, wrapped

TOKENS = 24
SHAPE = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (4, 0), (4, 3), (7, 0))
SETTINGS = {
    "budget": DecodeSettings(nodes=8),
    "large budget": DecodeSettings(nodes=25),
    "full": DecodeSettings(tree="full", k=2),
    "chain": DecodeSettings(tree="full", k=1),
    "static": DecodeSettings(tree="static", shape=SHAPE),
    "root": DecodeSettings(nodes=1),
}


def here(mode: str = "joint", host: str = "llama") -> Subject:
    return lively(model_of(host, mode), TOKENS)


@dataclass
class Catch:
    """An inner drafter that keeps the logits it was given."""

    caught: list[Tensor] = field(default_factory=list)

    def __call__(self, text: Sequence[int], logits: Tensor) -> DraftTree:
        self.caught.append(logits)
        return DraftTree(chain(1), (text[-1],))


def foreseen(trace: Trace, prophet: Prophet, prompt: int, candidates: int) -> Trace:
    """`trace`, which holds the whole vocabulary, as it were if the prophet spoke through the streams."""
    assert trace.candidates == trace.vocabulary
    catch = Catch()
    for place in range(len(trace.tokens)):
        logits = torch.empty(trace.streams, trace.vocabulary)
        logits.scatter_(1, trace.ids[place], trace.log_probs[place])
        replace(prophet, inner=catch)(prophet.truth[: prompt + place + 1], logits)
    pairs = [best_tokens(logits, candidates) for logits in catch.caught]
    return replace(
        trace, ids=torch.tensor([ids for ids, _ in pairs]), log_probs=torch.tensor([scores for _, scores in pairs])
    )


def counted(steps: Sequence[Step]) -> Simulated:
    """What a real run counted."""
    passes = [step for step in steps if step.tree is not None]
    nodes = tuple(len(step.kept) for step in passes)
    ends = tuple(step.tree.ends.index(step.path[-1]) for step in passes if step.tree is not None)
    return Simulated(sum(len(step.tokens) for step in steps), nodes, tuple(step.accepted for step in passes), ends)


# --- recording ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "mode"), [("llama", "joint"), ("gpt2", "lossless"), ("gemma3", "joint")])
def test_a_trace_holds_what_the_streams_say_to_decoding_at_every_token(host: str, mode: str) -> None:
    subject = here(mode, host)
    catch = Catch()  # drafts nothing, so every token becomes the root of a pass
    list(decode(subject.model, subject.start, DecodeSettings(max_new_tokens=TOKENS), drafter=catch))
    trace = record(subject.model, subject.start, subject.text, candidates=5)
    assert trace.tokens == subject.text
    assert (trace.limit, trace.streams, trace.candidates) == (TOKENS, STREAMS, 5)
    assert [len(logits) for logits in catch.caught] == [STREAMS] * (TOKENS - STREAMS - 1) + [3, 2, 1, 0]
    for ids, log_probs, logits in zip(trace.ids, trace.log_probs, catch.caught, strict=False):
        depth = len(logits)
        expected = logits.argsort(dim=1, descending=True)[:, :5]
        assert ids[:depth].tolist() == expected.tolist()
        wanted = logits.log_softmax(dim=1).gather(1, expected)
        torch.testing.assert_close(log_probs[:depth], wanted, atol=2e-4, rtol=1e-4)


def test_the_heads_rows_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = here()
    whole = record(subject.model, subject.start, subject.text)
    sizes: list[int] = []
    head = subject.model.draft_logits

    def logits(states: Tensor) -> Tensor:
        sizes.append(len(states))
        return head(states)

    monkeypatch.setattr(subject.model, "draft_logits", logits)
    monkeypatch.setattr(acceptance, "ROWS", 7)
    parts = record(subject.model, subject.start, subject.text)
    assert max(sizes) == 7
    assert sum(sizes) == TOKENS * STREAMS
    assert torch.equal(parts.ids, whole.ids)
    torch.testing.assert_close(parts.log_probs, whole.log_probs)


def test_the_vocabulary_bounds_the_candidates() -> None:
    subject = here()
    trace = record(subject.model, subject.start, subject.text[:1], candidates=1000)
    assert trace.ids.shape == (1, STREAMS, trace.vocabulary)


def test_exact_ties_are_recorded_by_lowest_id() -> None:
    subject = here()
    model = wrapped("llama")
    with torch.no_grad():
        model.port.model.get_output_embeddings().weight.zero_()
    trace = record(model, subject.start, (0, 0, 0), candidates=4)
    assert trace.ids.tolist() == [[[0, 1, 2, 3]] * STREAMS] * 3


def test_what_cannot_be_recorded() -> None:
    subject = here()
    with pytest.raises(PromptError, match="the prompt is empty"):
        record(subject.model, (), subject.text)
    with pytest.raises(ConfigError, match="0 tokens and 32 candidates; expected"):
        record(subject.model, subject.start, ())
    with pytest.raises(ConfigError, match="3 tokens and 0 candidates; expected"):
        record(subject.model, subject.start, (1, 2, 3), candidates=0)
    with pytest.raises(ConfigError, match="limit is 2; expected at least 3"):
        record(subject.model, subject.start, (1, 2, 3), limit=2)
    with pytest.raises(ConfigError, match="0 streams"):
        record(wrapped("llama", streams=0), subject.start, (1, 2, 3))


def test_a_trace_has_a_row_for_each_token() -> None:
    scores = torch.zeros(2, 3, 4)
    with pytest.raises(ConfigError, match="no tokens"):
        Trace((), scores.long(), scores, 9, 1)
    with pytest.raises(ConfigError, match=r"are \(2, 3, 4\) and \(2, 3, 4\); expected \[3, G, K\]"):
        Trace((1, 2, 3), scores.long(), scores, 9, 3)
    with pytest.raises(ConfigError, match=r"are \(2, 3, 1\) and \(2, 3, 4\); expected \[2, G, K\]"):
        Trace((1, 2), scores.long()[:, :, :1], scores, 9, 3)


# --- simulating -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [0, 1, 3, STREAMS])
@pytest.mark.parametrize("form", SETTINGS)
def test_a_simulated_run_counts_what_decoding_counts(form: str, streams: int) -> None:
    subject = here()
    settings = replace(SETTINGS[form], streams=streams, max_new_tokens=TOKENS)
    drafter = drafter_for(settings)
    whole = record(subject.model, subject.start, subject.text, candidates=1000)
    prophet = Prophet(drafter, subject.start + subject.text, 0.7)
    real = counted(list(decode(subject.model, subject.start, settings, drafter=prophet)))
    trace = foreseen(whole, prophet, len(subject.start), max(drafter.width, 1))
    simulated = simulate(trace, drafter, streams)
    assert simulated == real
    assert simulated.passes == len(real.nodes)
    assert (sum(real.accepted) > 2) == (streams > 0 and form != "root")


@pytest.mark.parametrize("form", SETTINGS)
def test_streams_that_know_nothing_are_simulated_as_well(form: str) -> None:
    subject = here("lossless")
    settings = replace(SETTINGS[form], max_new_tokens=TOKENS)
    trace = record(subject.model, subject.start, subject.text)
    real = counted(list(decode(subject.model, subject.start, settings)))
    assert simulate(trace, drafter_for(settings), STREAMS) == real


@pytest.mark.parametrize("form", SETTINGS)
def test_the_end_of_the_text_may_be_a_draft(form: str) -> None:
    """Behind a text that ends by itself there is room for drafts: only the cap cuts trees."""
    subject = here()
    settings = replace(SETTINGS[form], max_new_tokens=TOKENS)
    drafter = drafter_for(settings)
    ends = [place for place in range(1, TOKENS) if subject.text[place] not in subject.text[:place]]
    drafted = 0
    for end in ends:
        text = subject.text[: end + 1]
        prophet = Prophet(drafter, subject.start + subject.text, 0.8)
        steps = list(decode(subject.model, subject.start, settings, (text[-1],), prophet))
        whole = record(subject.model, subject.start, text, 1000, limit=TOKENS)
        simulated = simulate(foreseen(whole, prophet, len(subject.start), 40), drafter, STREAMS)
        assert simulated == counted(steps)
        drafted += steps[-1].accepted == len(steps[-1].tokens)
    assert drafted > 0 or form == "root"


def made_up(tokens: Sequence[int], ids: Sequence[Sequence[Sequence[int]]], limit: int | None = None) -> Trace:
    """A trace of given candidates, all of them less likely than the ones before."""
    table = torch.tensor(ids)
    scores = -torch.arange(1.0, table.shape[2] + 1).expand(table.shape)
    return Trace(tuple(tokens), table, scores, 100, limit or len(tokens))


# stream 1 of token t drafts token t + 1, stream 2 token t + 2; candidates by rank
TEXT = (10, 11, 12, 13, 14)
IDS = (((11, 0), (12, 1)), ((1, 12), (0, 2)), ((2, 13), (14, 1)), ((3, 4), (4, 3)), ((9, 8), (7, 6)))


def test_a_run_by_hand() -> None:
    trace = made_up(TEXT, IDS)
    # root 10: chain 11, 12 is right, 13 follows; root 13: one token is missing, so nothing is drafted
    assert simulate(trace, FullTree(1), 2) == Simulated(5, (3, 1), (2, 0), (2, 0))
    assert simulate(trace, FullTree(1), 0) == Simulated(5, (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0))
    # with room behind the end, trees stay whole
    assert simulate(replace(trace, limit=50), FullTree(1), 2) == Simulated(5, (3, 3), (2, 0), (2, 0))
    assert simulate(made_up(TEXT[1:], IDS[1:]), StaticTree.of(((0, 0), (0, 1), (2, 0))), 2).accepted == (1, 0)
    assert simulate(made_up(TEXT[:1], IDS[:1]), FullTree(2), 2) == Simulated(1, (), (), ())


def test_a_trace_that_is_too_narrow_is_refused() -> None:
    trace = made_up(TEXT, IDS)
    simulate(trace, BudgetTree(3), 2)
    for drafter in (BudgetTree(4), FullTree(3), StaticTree((-1, 0), (0, 2))):
        with pytest.raises(ConfigError, match=r"the trace has 2 candidates per stream and .* takes up to 3"):
            simulate(trace, drafter, 2)
    assert simulate(replace(trace, vocabulary=2), FullTree(3), 1) == simulate(trace, FullTree(2), 1)
    for streams in (-1, 3):
        with pytest.raises(ConfigError, match=f"streams is {streams}; the trace has 2"):
            simulate(trace, FullTree(1), streams)


# --- rates ----------------------------------------------------------------------------------------------------


def test_rates_by_hand() -> None:
    trace = made_up(TEXT, IDS)
    assert trace.hits.tolist() == [[0, 0], [1, -1], [1, 0], [-1, -1], [-1, -1]]
    # depth 1: of four places with a next token, rank 0 hits once and rank 1 twice; depth 2: of the three places with
    # two more tokens, stream 1 hits in all, and stream 2 by rank 0 in two
    assert rates([trace], 2) == [[0.25, 0.5], [pytest.approx(2 / 3), 0.0]]
    assert rates([trace], 1) == [[0.25, 0.5]]
    assert rates([trace], 0) == []


def test_a_deeper_hit_counts_only_behind_hits() -> None:
    trace = made_up((10, 11, 12), (((0, 1), (12, 1)), ((0, 12), (0, 1)), ((0, 1), (0, 1))))
    assert trace.hits.tolist() == [[-1, 0], [1, -1], [-1, -1]]
    assert rates([trace], 2) == [[0.0, 0.5], [0.0, 0.0]]


def test_rates_pool_traces_of_all_widths_place_by_place() -> None:
    wide = made_up(TEXT, IDS)
    narrow = made_up((10, 11), (((11,), (5,)), ((0,), (5,))))
    assert rates([wide, narrow], 2) == [[0.4, 0.4], [pytest.approx(2 / 3), 0.0]]


def test_rates_of_random_traces_are_those_of_counting() -> None:
    traces = []
    for size in (1, 2, 9, 30):
        ids = torch.stack([torch.randperm(6)[:4] for _ in range(size * 3)]).view(size, 3, 4)
        traces.append(made_up(torch.randint(6, (size,)).tolist(), ids.tolist()))
    found = rates(traces, 3)
    for depth in range(1, 4):
        outcomes = []
        for trace in traces:
            for root in range(len(trace.tokens) - depth):
                path = trace.tokens[root + 1 : root + depth + 1]
                lists = [trace.ids[root, j].tolist() for j in range(depth)]
                if all(token in row for token, row in zip(path[:-1], lists, strict=False)):
                    outcomes.append(lists[-1].index(path[-1]) if path[-1] in lists[-1] else -1)
        expected = [outcomes.count(rank) / len(outcomes) for rank in range(4)]
        assert found[depth - 1] == pytest.approx(expected)


def test_rates_need_traces_with_streams() -> None:
    with pytest.raises(ConfigError, match="0 traces"):
        rates([], 1)
    with pytest.raises(ConfigError, match="streams is 3; the trace has 2"):
        rates([made_up(TEXT, IDS)], 3)
