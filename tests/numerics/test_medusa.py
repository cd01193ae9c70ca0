"""Medusa heads in the engine: the text is plain decoding's, and drafts come from the accepted node's own state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from forestream.acceptance import rates, simulate
from forestream.baseline import plain
from forestream.config import DecodeSettings, SamplingSettings
from forestream.cost import best_static_tree
from forestream.decode import decode, decode_batch
from forestream.drafting import DraftTree, drafter_for
from forestream.errors import ConfigError
from forestream.model import StreamingLM
from forestream.requests import Request
from forestream.rivals.medusa import MedusaConfig, MedusaHeads, record
from forestream.steps import Counters, Step, by_text, tokens_of
from forestream.vocabulary import DraftVocabulary
from medusae import HEADS, learned, shaken
from oracle import Prophet
from subject import Subject, lively, model_of
from wrapped import prompt, wrapped
from zoo import POSITIONS

TOKENS = 24
SHAPE = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (4, 0), (4, 3), (7, 0))
TREES: dict[str, dict[str, Any]] = {
    "budget": {"nodes": 8},
    "large budget": {"nodes": 25},
    "full": {"tree": "full", "k": 2},
    "chain": {"tree": "full", "k": 1},
    "static": {"tree": "static", "shape": SHAPE},
    "root": {"nodes": 1},
}
hosts = pytest.mark.parametrize("host", ["llama", "llama-tied", "gpt2", "gemma2", "gpt_neox-parallel", "opt-post"])


@dataclass
class Overhearing:
    """A prophet that keeps the length of each text and the logits that came with it."""

    prophet: Prophet
    heard: list[tuple[int, Tensor]] = field(default_factory=list)

    def __call__(self, text: Sequence[int], logits: Tensor) -> DraftTree:
        self.heard.append((len(text), logits.clone()))
        return self.prophet(text, logits)


def foretelling(here: Subject, settings: DecodeSettings, rate: float = 0.7) -> Prophet:
    return Prophet(drafter_for(settings), here.start + here.text, rate)


def outline(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    return [(s.tokens, s.accepted, s.tree, s.kept, s.path, s.finish) for s in steps]


# --- equality ---------------------------------------------------------------------------------------------------


@hosts
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_the_text_is_plain_decodings(host: str, projection: Any) -> None:
    here = lively(model_of(host, "joint"), TOKENS)
    heads = shaken(here.model, projection)
    counters = Counters()
    for name, tree in TREES.items():
        for count in (None, 1, 2):
            settings = DecodeSettings(max_new_tokens=TOKENS, streams=count, **tree)
            drafter = foretelling(here, settings)
            steps = list(decode(here.model, here.start, settings, drafter=drafter, heads=heads))
            assert tokens_of(steps) == here.text, f"{name} with {count} heads"
            assert all(step.accepted <= (count or HEADS) for step in steps)
            counters.extend(steps)
    assert counters.mean_acceptance_length > 1.5, "too few drafts were accepted to call this a test"


def test_a_model_without_streams_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's case; and where a model has streams, no pass carries any."""
    twin, joint = wrapped("llama", streams=0), model_of("llama", "joint")
    settings = DecodeSettings(nodes=8, max_new_tokens=TOKENS, carriers="fused")
    monkeypatch.setattr(StreamingLM, "streams_behind", None)
    attach = StreamingLM._attach

    def unburdened(model: StreamingLM, mains: Tensor, pack: Any) -> Tensor:
        assert not pack.streams
        return attach(model, mains, pack)

    monkeypatch.setattr(StreamingLM, "_attach", unburdened)
    found = []
    for model in (twin, joint):
        start = prompt(6)
        text = tokens_of(list(plain(model, start, settings)))
        drafter = foretelling(Subject(model, start, text), settings)
        steps = list(decode(model, start, settings, drafter=drafter, heads=shaken(model, "own")))
        assert tokens_of(steps) == text
        found.append(outline(steps))
    assert found[0] == found[1]


def test_streams_are_not_looked_at() -> None:
    here = lively(model_of("llama", "joint"), TOKENS)
    heads = shaken(here.model, "own")
    settings = DecodeSettings(nodes=8, max_new_tokens=TOKENS)
    ahead = Overhearing(foretelling(here, settings))
    list(decode(here.model, here.start, settings, drafter=ahead, heads=heads))
    streamed = Overhearing(foretelling(here, settings))
    list(decode(here.model, here.start, settings, drafter=streamed))
    assert not torch.allclose(ahead.heard[0][1][:2], streamed.heard[0][1][:2])


def test_what_restricts_streams_does_not_restrict_heads() -> None:
    """A draft vocabulary and a path sampler are the streams' own."""
    free, restricted = wrapped("llama"), wrapped("llama")
    restricted.restrict(DraftVocabulary(torch.arange(0, 89, 7), 89))
    restricted.add_sampler(4)
    settings = DecodeSettings(nodes=8, max_new_tokens=TOKENS)
    runs = [list(decode(one, prompt(6), settings, heads=shaken(one, "own"))) for one in (free, restricted)]
    assert outline(runs[0]) == outline(runs[1])
    assert any(token % 7 for step in runs[1] if step.tree is not None for token in step.tree.tokens[1:])


@pytest.mark.parametrize("law", [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2}])
def test_sampled_texts_are_plain_decodings(law: dict[str, Any]) -> None:
    model = model_of("gpt2", "joint")
    heads = shaken(model, "own")
    settings = DecodeSettings(nodes=12, max_new_tokens=TOKENS)
    accepted = 0
    for seed in range(4):
        request = Request(prompt(6), sampling=SamplingSettings(seed=seed, **law))
        text = tokens_of(list(plain(model, request, settings)))
        drafter = foretelling(Subject(model, request.prompt, text), settings, 0.8)
        steps = list(decode(model, request, settings, drafter=drafter, heads=heads))
        assert tokens_of(steps) == text
        accepted += sum(step.accepted for step in steps)
    assert accepted > 20


def test_texts_together_are_what_they_are_alone() -> None:
    model, heads = model_of("llama", "joint"), shaken(model_of("llama", "joint"), "own")
    settings = DecodeSettings(nodes=6, max_new_tokens=TOKENS)
    requests = [Request(prompt(length, seed=length), max_new_tokens=cap) for length, cap in ((5, 24), (1, 3), (9, 17))]
    requests.append(requests[0])
    found = by_text(decode_batch(model, requests, settings, heads=heads), len(requests))
    for request, steps in zip(requests, found, strict=True):
        assert tokens_of(steps) == tokens_of(list(plain(model, request, settings)))
        assert outline(steps) == outline(list(decode(model, request, settings, heads=heads)))


def test_the_end_may_lie_inside_an_accepted_block() -> None:
    here = lively(model_of("llama", "joint"), TOKENS)
    heads = shaken(here.model, "own")
    settings = DecodeSettings(nodes=8, max_new_tokens=TOKENS)
    inside = 0
    for end in sorted(set(here.text)):
        request = Request(here.start, (end,))
        text = tokens_of(list(plain(here.model, request, settings)))
        steps = list(decode(here.model, request, settings, drafter=foretelling(here, settings, 0.9), heads=heads))
        assert tokens_of(steps) == text
        assert steps[-1].finish == "stop"
        inside += 1 < len(steps[-1].tokens) == steps[-1].accepted
    assert inside > 0


@pytest.mark.parametrize("spare", [1, 2, 3, 7])
def test_the_context_limit(spare: int) -> None:
    model = model_of("gpt2", "joint")
    request = Request(prompt(POSITIONS - spare), max_new_tokens=50)
    settings = DecodeSettings(nodes=8, prompt_chunk=40)
    text = tokens_of(list(plain(model, request, settings)))
    assert len(text) == spare
    drafter = foretelling(Subject(model, request.prompt, text), settings, 1.0)
    steps = list(decode(model, request, settings, drafter=drafter, heads=shaken(model, "own")))
    assert tokens_of(steps) == text
    assert steps[-1].finish == "length"


@pytest.mark.parametrize("compile", ["off", "layer"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_prepared_models_and_heads_draft_the_same(projection: Any, compile: Any) -> None:
    eager, prepared = wrapped("llama"), wrapped("llama")
    start, settings = prompt(6), DecodeSettings(nodes=6, max_new_tokens=TOKENS)
    text = tokens_of(list(plain(eager, start, settings)))
    runs = []
    for model in (eager, prepared):
        heads = shaken(model, projection)
        if model is prepared:
            model.prepare(compile)
            heads.prepare()
        drafter = Overhearing(foretelling(Subject(model, start, text), settings))
        steps = list(decode(model, start, settings, drafter=drafter, heads=heads))
        assert tokens_of(steps) == text
        runs.append((outline(steps), drafter.heard))
    assert runs[0][0] == runs[1][0]
    for (_, one), (_, other) in zip(runs[0][1], runs[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_more_heads_than_there_are_are_refused() -> None:
    model = model_of("llama", "joint")
    with pytest.raises(ConfigError, match=rf"streams is 9; these heads were trained with {HEADS}"):
        list(decode(model, prompt(3), DecodeSettings(streams=9), heads=shaken(model, "own")))


# --- which state the heads read -----------------------------------------------------------------------------------


def by_hand(model: StreamingLM, heads: MedusaHeads, text: Sequence[int], count: int) -> Tensor:
    """Logits of the heads behind `text`, from the host library's own forward: its last hidden state is the normed."""
    with torch.no_grad():
        out = model.port.model(torch.tensor([list(text)]), output_hidden_states=True)
    state = out.hidden_states[-1][0, -1]
    tensors = dict(heads.state_dict())
    rows = []
    for j in range(count):
        inner = tensors[f"blocks.{j}.weight"] @ state + tensors[f"blocks.{j}.bias"]
        block = state + inner * torch.sigmoid(inner)
        own = tensors.get(f"projections.{j}.weight", model.port.model.get_output_embeddings().weight)
        rows.append(own @ block)
    logits = torch.stack(rows)
    cap = getattr(model.port.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("host", ["llama", "llama-tied", "gpt2", "gemma2", "gpt_neox-parallel"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_drafts_come_from_the_accepted_nodes_state(host: str, projection: Any) -> None:
    here = lively(model_of(host, "joint"), TOKENS)
    heads = shaken(here.model, projection)
    settings = DecodeSettings(nodes=8, max_new_tokens=TOKENS)
    drafter = Overhearing(foretelling(here, settings))
    steps = list(decode(here.model, here.start, settings, drafter=drafter, heads=heads))
    assert max(step.accepted for step in steps) >= 2
    whole = (*here.start, *here.text)
    for length, logits in drafter.heard:
        if not len(logits):
            continue  # the last token is never drafted
        wanted = by_hand(here.model, heads, whole[: length - 1], len(logits))
        torch.testing.assert_close(logits, wanted, atol=2e-3, rtol=1e-3)
    length, logits = drafter.heard[2]
    for wrong in (whole[:length], whole[: length - 2]):  # a neighbour's state would be noticed
        assert not torch.allclose(logits, by_hand(here.model, heads, wrong, len(logits)), atol=2e-2)


def test_fresh_heads_say_what_the_models_head_says() -> None:
    for host in ("llama", "llama-tied", "gpt2", "gemma2", "phi", "opt-post"):
        model = model_of(host, "joint")
        states = torch.randn(3, model.port.hidden_size, generator=torch.Generator().manual_seed(0))
        wanted = model.logits(states)[:, None].expand(-1, HEADS, -1)
        for projection in ("own", "shared"):
            heads = MedusaHeads.fresh(MedusaConfig(HEADS, projection), model)
            torch.testing.assert_close(heads(states, HEADS), wanted)
            changed = shaken(model, projection)(states, HEADS)
            assert not torch.allclose(changed[:, 0], changed[:, 1], atol=1e-2)


# --- traces -------------------------------------------------------------------------------------------------------


@cache
def taught() -> tuple[StreamingLM, MedusaHeads, list[tuple[int, ...]]]:
    """Heads that have learned what the model writes after some prompts."""
    return learned("llama", TOKENS)


def test_heads_that_have_learned_speed_texts_up() -> None:
    model, heads, starts = taught()
    settings = DecodeSettings(nodes=8, max_new_tokens=TOKENS)
    counters = Counters()
    for start in starts:
        counters.extend(decode(model, start, settings, heads=heads))
    assert counters.mean_acceptance_length > 1.5


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("count", [HEADS, 2])
def test_a_simulated_run_counts_what_decoding_counts(name: str, count: int) -> None:
    model, heads, starts = taught()
    settings = DecodeSettings(max_new_tokens=TOKENS, streams=count, **TREES[name])
    accepted = 0
    for start in starts:
        steps = list(decode(model, start, settings, heads=heads))
        trace = record(model, heads, start, tokens_of(steps), candidates=40)
        found = simulate(trace, drafter_for(settings), count)
        passes = [step for step in steps if step.tree is not None]
        assert found.nodes == tuple(len(step.kept) for step in passes)
        assert found.accepted == tuple(step.accepted for step in passes)
        accepted += sum(found.accepted)
    assert (accepted > 5) == (name != "root")


def test_another_heads_candidates_would_be_noticed() -> None:
    """Head j foretells the token that stream j foretells: shifted by one it is right far less often."""
    model, heads, starts = taught()
    traces = []
    for start in starts:
        text = tokens_of(list(plain(model, start, DecodeSettings(max_new_tokens=TOKENS))))
        traces.append(record(model, heads, start, text))
    right = rates(traces, HEADS)
    shifted = rates([replace(one, ids=one.ids.roll(1, 1), log_probs=one.log_probs.roll(1, 1)) for one in traces], HEADS)
    for own, other in zip(right, shifted, strict=True):
        assert own[0] > other[0] + 0.2
    parents, ranks = best_static_tree(right, 6)
    assert len(parents) == 6
    assert max(ranks) < 5


def test_what_cannot_be_recorded() -> None:
    model, heads, _ = taught()
    with pytest.raises(Exception, match="the prompt is empty"):
        record(model, heads, (), (1,))
    with pytest.raises(ConfigError, match="0 tokens and 32 candidates"):
        record(model, heads, (1,), ())
