"""Operations against products that are watched while they run, and parameters against the tensors (K13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forestream import paths
from forestream.baseline import plain
from forestream.bench.work import Work, matrices, sizes_of
from forestream.config import DecodeSettings
from forestream.decode import decode
from forestream.drafting import drafter_for
from forestream.model import StreamingLM
from forestream.plan import Sizes
from forestream.steps import tokens_of
from forestream.vocabulary import DraftVocabulary
from oracle import Prophet
from subject import WHO
from wrapped import prompt, wrapped

SETTINGS = [
    {"nodes": 8},
    {"tree": "full", "k": 2, "streams": 2},
    {"nodes": 8, "prune_to": 4},
    {"nodes": 8, "prune_below": 1e-3},
]
START = prompt(7)


@contextmanager
def watched(model: StreamingLM) -> Iterator[list[int]]:
    """Operations of every linear layer, LoRA included, that runs inside."""
    done: list[int] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        done.append(2 * inputs[0].numel() * module.out_features)

    hooks = [one.register_forward_hook(note) for one in model.modules() if isinstance(one, nn.Linear)]
    try:
        yield done
    finally:
        for hook in hooks:
            hook.remove()


def products(model: StreamingLM, settings: DecodeSettings | None, tokens: int = 16) -> tuple[int, int, int]:
    """Of the passes behind the prompt's: operations as counted, as watched, and passes."""
    usual = settings or DecodeSettings(max_new_tokens=tokens)
    truth = tokens_of(list(plain(model, START, usual)))
    prophet = Prophet(drafter_for(usual), START + truth, 0.6)
    run = plain(model, START, usual) if settings is None else decode(model, START, usual, drafter=prophet)
    steps = [next(run)]
    with watched(model) as done:
        steps += run
    work = Work.of(model, settings)
    # What attention multiplies is no linear layer's: pairs are left out of the comparison by making them free.
    counted = replace(work, sizes=_free(work.sizes), stream_sizes=_free(work.stream_sizes))
    return counted.operations(len(START), steps), sum(done), len(steps) - 1


def _free(sizes: Sizes) -> Sizes:
    return replace(sizes, layers=tuple(replace(layer, pair=0) for layer in sizes.layers))


@pytest.mark.parametrize("mode", ["joint", "lossless"])
def test_plain_passes_are_counted_as_they_run(mode: str) -> None:
    model = wrapped("llama", mode)
    counted, seen, passes = products(model, None)
    assert counted == seen > 0
    assert passes == 15


@pytest.mark.parametrize("mode", ["joint", "lossless"])
@pytest.mark.parametrize("who", WHO, ids=str)
@pytest.mark.parametrize("shape", SETTINGS, ids=str)
def test_passes_with_drafts_are_counted_as_they_run(mode: str, who: dict[str, Any], shape: dict[str, Any]) -> None:
    model = wrapped("llama", mode)
    settings = DecodeSettings(max_new_tokens=16, **who, **shape)
    counted, seen, _ = products(model, settings)
    scorer = model.scorer if settings.prune_to or settings.prune_below else None
    if scorer is not None:
        # Its own two matrices are no linear layers; it reads every node that was offered.
        counted -= sum(_scored(model, settings))
    assert counted == seen > 0


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("shape", [{"tree": "full", "k": 2}, {"tree": "static", "shape": ((0, 0), (1, 0), (0, 1))}])
def test_a_smaller_head_and_a_path_sampler_are_counted_as_they_run(trimmed: bool, shape: dict[str, Any]) -> None:
    model = wrapped("llama", "joint")
    without = Work.of(model, DecodeSettings(**shape)).parameters
    if trimmed:
        model.restrict(DraftVocabulary(range(0, 89, 2), 89))
    model.add_sampler(8)
    assert model.sampler is not None
    settings = DecodeSettings(max_new_tokens=16, **shape)
    run = decode(model, START, settings)
    steps = [next(run)]
    with watched(model) as done:
        steps += run
    work = Work.of(model, settings)
    own = sum(p.numel() for p in model.sampler.parameters())
    assert work.parameters == without + own
    # How many nodes of each tree had children: so many rows were asked for.
    asked = [sum(bool(children) for children in step.tree.topology.children) for step in steps if step.tree is not None]
    assert sum(asked[1:]) > 0
    counted = replace(work, sizes=_free(work.sizes), stream_sizes=_free(work.stream_sizes))
    # The sampler's two matrices are no linear layers; what the first tree was made of belongs to the prompt's pass.
    head = next((model.draft_head or model.port.output).parameters()).numel()
    products = sum(done) - 2 * asked[0] * head
    assert counted.operations(len(START), steps) - 2 * own * sum(asked[1:]) == products


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_short_list_of_candidates_is_counted_as_it_runs(trimmed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "NEAR", 9)
    model = wrapped("llama", "joint")
    if trimmed:
        model.restrict(DraftVocabulary(range(0, 89, 2), 89))
    model.add_sampler(8)
    assert model.sampler is not None
    settings = DecodeSettings(max_new_tokens=16, tree="full", k=2)
    run = decode(model, START, settings)
    steps, left = [next(run)], []
    with watched(model) as done:
        for step in run:
            left.append(16 - sum(len(one.tokens) for one in steps))
            steps.append(step)
    work = Work.of(model, settings)
    own, size = sum(p.numel() for p in model.sampler.parameters()), model.port.hidden_size
    assert work.near == 9 * size
    asked = [sum(bool(children) for children in step.tree.topology.children) for step in steps if step.tree is not None]
    counted = replace(work, sizes=_free(work.sizes), stream_sizes=_free(work.stream_sizes))
    # Rows of candidates are multiplied by outside of any layer. Streams that could no longer be used are counted too;
    # what the first tree was made of belongs to the prompt's pass.
    head = next((model.draft_head or model.port.output).parameters()).numel()
    whole = [min(work.streams, room - 1) for room in left]
    unused = sum(work.streams - rows for rows in whole[1:] if rows)
    seen = sum(done) - 2 * whole[0] * head + 2 * unused * head
    assert counted.operations(len(START), steps) == seen + 2 * sum(asked[1:]) * (own + 9 * size)


def _scored(model: StreamingLM, settings: DecodeSettings) -> Iterator[int]:
    assert model.scorer is not None
    truth = tokens_of(list(plain(model, START, settings)))
    prophet = Prophet(drafter_for(settings), START + truth, 0.6)
    for step in decode(model, START, settings, drafter=prophet):
        if step.tree is not None and len(step.tree.tokens) > 1:
            yield 2 * len(step.tree.tokens) * sum(p.numel() for p in model.scorer.parameters())


def test_attention_grows_with_the_text() -> None:
    model = wrapped("llama", "joint")
    steps = list(plain(model, START, DecodeSettings(max_new_tokens=6)))
    work = Work.of(model)
    longer, shorter = work.operations(len(START) + 10, steps), work.operations(len(START), steps)
    pair = sum(layer.pair for layer in work.sizes.layers)
    assert longer - shorter == 5 * 10 * pair > 0
    assert work.operations(len(START), steps) == work.plain(len(START), steps)


@pytest.mark.parametrize("host", ["llama", "gpt2", "opt-pre"])
def test_packed_weights_count_as_plain_ones(host: str) -> None:
    model = wrapped(host, "joint")
    model.merge()
    before = sizes_of(model)
    model.prepare("off")
    assert sizes_of(model) == before
    layer = model.port.layers[0]
    assert matrices(layer) == before.layers[0].weights > 0


def test_parameters_are_those_that_only_drafting_needs() -> None:
    joint, lossless = wrapped("llama", "joint"), wrapped("llama", "lossless")
    assert Work.of(joint).parameters == Work.of(joint, DecodeSettings(nodes=1)).parameters == 0
    assert joint.start is not None
    assert joint.scorer is not None
    start = sum(p.numel() for p in joint.start.parameters())
    scorer = sum(p.numel() for p in joint.scorer.parameters())
    assert Work.of(joint, DecodeSettings()).parameters == start
    assert Work.of(joint, DecodeSettings(prune_to=3)).parameters == start + scorer
    gated = sum(p.numel() for name, p in lossless.host.named_parameters() if ".lora_" in name)
    assert Work.of(lossless, DecodeSettings()).parameters == start + gated > start
    assert Work.of(lossless).parameters == 0


def test_bytes_are_parameters_and_the_slots_of_a_larger_pass() -> None:
    model = wrapped("llama", "joint")
    small, large = (Work.of(model, DecodeSettings(nodes=nodes)).bytes for nodes in (8, 9))
    kept = model.port.kept
    assert large - small == sum(one.heads * (one.key_size + one.value_size) for one in kept) * 4
    assert Work.of(model).bytes == 0
    assert model.dtype == torch.float32


@pytest.mark.parametrize("compile", [None, "off"])
def test_bytes_hold_what_was_copied_out_of_the_head(compile: Any) -> None:
    """Once as a head of few rows, and once more as rows that lie plainly, where the first are packed."""
    bytes_of = {}
    for trimmed in (False, True):
        for width in (0, 8):
            model = wrapped("llama", "joint")
            if trimmed:
                model.restrict(DraftVocabulary(range(40), 89))
            if width:
                model.add_sampler(width)
            if compile is not None:
                model.prepare(compile)
            bytes_of[trimmed, width] = Work.of(model, DecodeSettings()).bytes
    rows = 40 * 4 * model.port.hidden_size
    assert bytes_of[True, 0] - bytes_of[False, 0] == rows
    assert bytes_of[True, 8] - bytes_of[False, 8] == (rows if compile is None else 2 * rows)
