"""Logits processors on draft trees: called as in plain decoding, with the node's own path (cases F01 to F05, F11)."""

from collections.abc import Callable
from dataclasses import replace
from inspect import isclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process

from batch import Prophets, alone, together
from forestream.config import DecodeSettings, SamplingSettings
from forestream.decode import decode_batch
from forestream.drafting import drafter_for
from forestream.requests import Request
from forestream.rows import Row
from forestream.sampling import Processor
from forestream.steps import Step, tokens_of
from oracle import Prophet
from subject import model_of
from wrapped import prompt

MODEL = model_of("llama", "joint")
V = 89
START = prompt(7)
EOS = (3, 30)
SOURCE = torch.arange(0, V, 2)[None]
DRAFTS = (2, 8, 48)
GREEDY, HOT = SamplingSettings(), SamplingSettings(temperature=2.0, seed=4)

# What each class is made with, in two laws; a fresh one for every run, since some keep a state.
MADE: dict[str, Callable[[], Any]] = {
    "EncoderNoRepeatNGramLogitsProcessor": lambda: made("EncoderNoRepeatNGram", 1, SOURCE),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda: made("EncoderRepetitionPenalty", 0.2, SOURCE),
    "EpsilonLogitsWarper": lambda: transformers.EpsilonLogitsWarper(0.02),
    "EtaLogitsWarper": lambda: transformers.EtaLogitsWarper(0.1),
    "ExponentialDecayLengthPenalty": lambda: logits_process.ExponentialDecayLengthPenalty((4, 1.9), list(EOS), 7),
    "ForcedBOSTokenLogitsProcessor": lambda: made("ForcedBOSToken", 5),
    "ForcedEOSTokenLogitsProcessor": lambda: made("ForcedEOSToken", len(START) + 9, list(EOS)),
    "InfNanRemoveLogitsProcessor": lambda: made("InfNanRemove"),
    "LogitNormalization": lambda: logits_process.LogitNormalization(),
    "MinLengthLogitsProcessor": lambda: made("MinLength", len(START) + 5, list(range(0, V, 2))),
    "MinNewTokensLengthLogitsProcessor": lambda: made("MinNewTokensLength", len(START), 6, list(range(0, V, 2))),
    "MinPLogitsWarper": lambda: transformers.MinPLogitsWarper(0.3),
    "NoBadWordsLogitsProcessor": lambda: made("NoBadWords", [[t] for t in range(0, V, 2)] + [[11, 13]], list(EOS)),
    "NoRepeatNGramLogitsProcessor": lambda: made("NoRepeatNGram", 1),
    "PrefixConstrainedLogitsProcessor": lambda: made("PrefixConstrained", followers, 1),
    "RepetitionPenaltyLogitsProcessor": lambda: made("RepetitionPenalty", 3.0),
    "SequenceBiasLogitsProcessor": lambda: made("SequenceBias", [[[t, t + 1], 9.0] for t in range(V - 1)]),
    "SuppressTokensAtBeginLogitsProcessor": lambda: made("SuppressTokensAtBegin", list(range(60, V)), len(START)),
    "SuppressTokensLogitsProcessor": lambda: made("SuppressTokens", list(range(1, V, 2))),
    "SynthIDTextWatermarkLogitsProcessor": lambda: made(
        "SynthIDTextWatermark", 3, [654, 400, 836, 123], 2**10, 0, 64, torch.device("cpu")
    ),
    "TemperatureLogitsWarper": lambda: transformers.TemperatureLogitsWarper(0.3),
    "TopHLogitsWarper": lambda: transformers.TopHLogitsWarper(0.3),
    "TopKLogitsWarper": lambda: transformers.TopKLogitsWarper(2),
    "TopPLogitsWarper": lambda: transformers.TopPLogitsWarper(0.4),
    "TypicalLogitsWarper": lambda: transformers.TypicalLogitsWarper(0.3),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda: made(
        "UnbatchedClassifierFreeGuidance", 1.7, MODEL.port.model, use_cache=False
    ),
    "WatermarkLogitsProcessor": lambda: made("Watermark", V, "cpu", bias=9.0),
}
LEFT_OUT = {
    "LogitsProcessor": "what the others derive from",
    "AlternatingCodebooksLogitsProcessor": "codebooks of audio",
    "BarkEosPrioritizerLogitsProcessor": "audio",
    "ClassifierFreeGuidanceLogitsProcessor": "two rows for a text: guided music",
    "DiaClassifierFreeGuidanceLogitsProcessor": "audio",
    "DiaEOSChannelFilterLogitsProcessor": "audio",
    "DiaEOSDelayPatternLogitsProcessor": "audio",
    "LinearTemperatureScheduleLogitsProcessor": "counts the steps that denoise a block of tokens",
    "WhisperNoSpeechDetection": "speech",
    "WhisperTimeStampLogitsProcessor": "speech",
}
SILENT = {
    "ForcedBOSTokenLogitsProcessor": "has its say behind a single token",
    "InfNanRemoveLogitsProcessor": "there are none",
    "LogitNormalization": "changes no law",
}


def made(name: str, *args: Any, **keywords: Any) -> Any:
    return getattr(transformers, f"{name}LogitsProcessor")(*args, **keywords)


def followers(batch: int, text: Tensor) -> list[int]:
    """Tokens that leave another rest by 5 than the last one."""
    return [token for token in range(V) if token % 5 != int(text[-1]) % 5]


def speculated(asked: Request, drafts: int, truth: tuple[int, ...], **settings: Any) -> list[Step]:
    """The request's text with trees of so many drafts, of which some are right."""
    chosen = DecodeSettings(**{"nodes": drafts + 1, **settings})
    prophet = Prophet(drafter_for(chosen), asked.prompt + truth, 0.7)
    return [steps[0][1] for steps in decode_batch(MODEL, [asked], chosen, prophet)]


def asked(law: SamplingSettings = GREEDY, *processors: Processor, tokens: int = 12) -> Request:
    return Request(START, EOS, law, tuple(processors), max_new_tokens=tokens)


# --- the host library's processors --------------------------------------------------------------------------------


def test_every_processor_of_the_host_library_is_tried_or_left_out_for_a_reason() -> None:
    names = {name for name in dir(transformers) if name.endswith(("LogitsProcessor", "LogitsWarper"))}
    names |= {name for name, one in vars(logits_process).items() if isclass(one) and issubclass(one, LogitsProcessor)}
    assert names == {*MADE, *LEFT_OUT}
    assert not {*MADE} & {*LEFT_OUT}


@pytest.mark.parametrize("name", MADE)
def test_text_with_a_processor_is_plain_decodings(name: str) -> None:
    """F01, F03: greedy and sampled, with 2, 8 and 48 drafts; the processor has its say."""
    spoke = False
    for law in (GREEDY, HOT):
        truth, hits = tokens_of(alone(MODEL, asked(law, MADE[name]()))), 0
        for drafts, carriers in zip(DRAFTS, ("deferred", "fused", "deferred"), strict=True):
            steps = speculated(asked(law, MADE[name]()), drafts, truth, carriers=carriers)
            assert tokens_of(steps) == truth, f"with {drafts} drafts"
            hits += sum(step.accepted for step in steps)
        assert hits > 0
        spoke |= truth != tokens_of(alone(MODEL, asked(law)))
    assert spoke == (name not in SILENT)


def test_all_processors_that_get_on_together_in_a_batch() -> None:
    """Each row has processors of its own, with a state of their own."""
    names = [name for name in MADE if name not in ("PrefixConstrainedLogitsProcessor", "MinLengthLogitsProcessor")]

    def batch() -> list[Request]:
        return [replace(asked(HOT, MADE[name]()), row=row) for row, name in enumerate(names)]

    truths = [tokens_of(alone(MODEL, one)) for one in batch()]
    found = together(MODEL, batch(), DecodeSettings(nodes=9))
    assert [tokens_of(steps) for steps in found] == truths


# --- exactly the calls of plain decoding --------------------------------------------------------------------------


class Recorder:
    """Writes down every call, and leans on how many there were: whoever is called otherwise changes the text."""

    def __init__(self) -> None:
        self.histories: list[list[int]] = []
        self.scores: list[Tensor] = []
        self.bias = torch.randn(40, V, generator=torch.Generator().manual_seed(2))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.histories.append(input_ids[0].tolist())
        self.scores.append(scores[0].clone())
        assert scores.shape == (1, V)
        assert scores.dtype == torch.float32
        return scores.add_(self.bias[len(self.histories)])  # into what it was handed: that must hurt nobody


@pytest.mark.parametrize("law", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_processor_sees_the_calls_of_plain_decoding(drafts: int, law: SamplingSettings) -> None:
    """F02, F05, F11: one call a token, in order, its history the prompt and the node's own path; none for a reject."""
    wanted, found = Recorder(), Recorder()
    truth = tokens_of(alone(MODEL, asked(law, wanted)))
    steps = speculated(asked(law, found), drafts, truth)
    assert tokens_of(steps) == truth
    assert any(len(step.path) > 1 for step in steps)
    assert any(1 + step.accepted < len(step.kept) for step in steps), "drafts were rejected"
    assert found.histories == wanted.histories == [[*START, *truth[:place]] for place in range(len(truth))]
    for ours, theirs in zip(found.scores, wanted.scores, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_rows_have_their_own_histories() -> None:
    """F05: in a batch, and behind a history that differs from the prompt."""
    recorders = [Recorder() for _ in range(3)]
    batch = [
        Request(prompt(length), (), HOT, (recorder,), max_new_tokens=10, row=length, history=history)
        for length, recorder, history in zip((5, 1, 9), recorders, (None, (1, 2), ()), strict=True)
    ]
    twins = [replace(one, processors=(Recorder(),)) for one in batch]
    truths = [tokens_of(alone(MODEL, one)) for one in twins]
    prophets = tuple(
        Prophet(drafter_for(DecodeSettings()), one.prompt + truth, 0.8)
        for one, truth in zip(batch, truths, strict=True)
    )
    found: list[list[Step]] = [[], [], []]
    for outcome in decode_batch(MODEL, batch, DecodeSettings(), Prophets(prophets)):
        for number, step in outcome:
            found[number].append(step)
    assert [tokens_of(steps) for steps in found] == truths
    for one, recorder, truth in zip(batch, recorders, truths, strict=True):
        front = one.prompt if one.history is None else one.history
        assert recorder.histories == [[*front, *truth[:place]] for place in range(len(truth))]


def test_criteria_see_the_calls_of_plain_decoding() -> None:
    """Once a token, with the token in it, and the text ends behind the first that says so."""

    def ends(log: list[list[int]]) -> Any:
        def at_the_seventh(input_ids: Tensor, scores: Tensor) -> bool:
            log.append(input_ids[0].tolist())
            return len(log) == 7

        return at_the_seventh

    wanted: list[list[int]] = []
    found: list[list[int]] = []
    truth = tokens_of(alone(MODEL, replace(asked(HOT), eos=(), criteria=(ends(wanted),))))
    steps = speculated(replace(asked(HOT), eos=(), criteria=(ends(found),)), 8, truth)
    assert found == wanted
    assert tokens_of(steps) == truth
    assert len(truth) == 7
    assert steps[-1].finish == "stop"


def test_scores_reported_are_the_models_own() -> None:
    """Log-probabilities come before processors, even before those that write into what they are handed."""
    truth = tokens_of(alone(MODEL, asked(HOT, Recorder())))
    found = speculated(replace(asked(HOT, Recorder()), logprobs=2), 8, truth)
    with torch.no_grad():
        logits = MODEL.port.model(input_ids=torch.tensor([START + truth]), use_cache=False).logits[0]
    law = logits.log_softmax(dim=-1)[len(START) - 1 :]
    scores = [score for step in found for score in step.scores]
    assert len(scores) == len(truth)
    for place, (token, score) in enumerate(zip(truth, scores, strict=True)):
        assert score.logprob == pytest.approx(float(law[place, token]), abs=1e-4)
        assert [token for token, _ in score.top] == law[place].topk(2).indices.tolist()


# --- one thing wrong at a time ------------------------------------------------------------------------------------


FAULTY: tuple[Callable[[], Any], ...] = (Recorder, MADE["SequenceBiasLogitsProcessor"])


def differs(truth: tuple[int, ...]) -> bool:
    """Whether speculation writes another text than plain decoding, which was not at fault, wrote before."""
    return tokens_of(speculated(asked(HOT, *(make() for make in FAULTY)), 8, truth)) != truth


@pytest.fixture
def truth() -> tuple[int, ...]:
    return tokens_of(alone(MODEL, asked(HOT, *(make() for make in FAULTY))))


def test_unchanged_nothing_is_noticed(truth: tuple[int, ...]) -> None:
    assert not differs(truth)


def test_a_history_without_the_path_is_noticed(truth: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    right, read = Row._ids, Row.read

    def reading(self: Row, tree: Any, logits: Tensor) -> Any:
        self.before = len(self.text)  # type: ignore[attr-defined]
        return read(self, tree, logits)

    def wrong(self: Row, device: torch.device) -> Tensor:
        return right(self, device)[:, : self.before]  # type: ignore[attr-defined]

    monkeypatch.setattr(Row, "read", reading)
    monkeypatch.setattr(Row, "_ids", wrong)
    assert differs(truth)


def test_calls_for_rejected_nodes_are_noticed(truth: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Row._choose

    def wrong(self: Row, logits: Tensor, drafts: list[int]) -> Any:
        for _ in drafts[1:]:
            right(self, logits, [])
        return right(self, logits, drafts)

    monkeypatch.setattr(Row, "_choose", wrong)
    assert differs(truth)


def test_a_processor_that_is_forgotten_is_noticed(truth: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """F03: ignored where there are drafts."""
    right = Row._choose

    def wrong(self: Row, logits: Tensor, drafts: list[int]) -> Any:
        kept, self._processors = self._processors, [] if drafts else self._processors
        chosen = right(self, logits, drafts)
        self._processors = kept
        return chosen

    monkeypatch.setattr(Row, "_choose", wrong)
    assert differs(truth)
