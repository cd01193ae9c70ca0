"""The packed training pass against a slow one without packing, and runs of the trainer: resumed, twins, bf16."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from forestream.checkpoint import STREAMS, VOCABULARY
from forestream.data import Collator, Tokens
from forestream.errors import DataError
from forestream.model import StreamingLM
from forestream.objective import IGNORED, LossConfig, TargetBatch, joint_loss
from forestream.packing import Pack
from forestream.ports import LayerInputs
from forestream.trainer import StreamTrainer
from forestream.training import TrainConfig, fit
from wrapped import prompt, shake, trainable, trained
from zoo import HOSTS

LOSS = LossConfig(main=1.0, stream=0.3, scorer=0.2, chunk=5)


def examples(count: int, seed: int = 0) -> list[Tokens]:
    """Ragged, with completions of one token (which carries no stream) among them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        before, after = torch.randint(1, 8, (2,), generator=generator).tolist()
        found.append(Tokens(prompt(before, seed=i), prompt(1 if i % 4 == 3 else 4 + after, seed=1000 + i)))
    return found


def packed_loss(model: StreamingLM, batch: TargetBatch, config: LossConfig = LOSS) -> Tensor:
    pack = Pack.text(batch.ids.shape[1], batch.carriers, model.stream_config.streams)
    return joint_loss(model, model(batch.ids, pack), batch, config).total


# --- the slow reference -------------------------------------------------------------------------------------


def causal(model: StreamingLM, layers: range, states: Tensor, positions: Tensor, mains: int) -> Tensor:
    """Drive `layers` over an ordinary sequence [1,T,D] under the plain causal mask."""
    length = states.shape[1]
    mask = torch.full((1, 1, length, length), torch.finfo(states.dtype).min).triu(1)
    if model.gate is not None:
        model.gate.open(mains, length, states.device)
    for i in layers:
        inputs = LayerInputs(mask, positions, model.port.rotary(states, positions, i))
        states = model.port.run(i, states, inputs, None)
    return states


def slow_states(model: StreamingLM, ids: Tensor, carriers: list[int]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Trunk states [T,D], main states [T,D], and [G,D] final stream states by carrier, one carrier at a time."""
    positions = torch.arange(len(ids))[None]
    trunk = model.port.embed(ids[None], positions)
    trunk = causal(model, model.trunk_layers, trunk, positions, len(ids))
    main = causal(model, model.stream_layers, trunk, positions, len(ids))[0]
    streams = {}
    learned = model.port.learned_positions or model.stream_config.positions == "same"
    for t in carriers:
        assert model.start is not None
        assert model.start.embedding is not None
        start = (trunk[0, t] + model.start.embedding)[None]
        ahead = torch.full((1, len(start[0])), t) + (0 if learned else torch.arange(1, len(start[0]) + 1))
        sequence = torch.cat([trunk[:, : t + 1], start], dim=1)
        places = torch.cat([positions[:, : t + 1], ahead], dim=1)
        streams[t] = causal(model, model.stream_layers, sequence, places, t + 1)[0, t + 1 :]
    return trunk[0], main, streams


def slow_loss(model: StreamingLM, texts: list[Tokens], config: LossConfig = LOSS) -> Tensor:
    """Eq. 5 written out: a mean over its own targets for each term, summed with its weight."""
    entropies: dict[str, list[Tensor]] = {}

    def count(name: str, state: Tensor, target: int) -> None:
        logits = model.logits(state)
        entropies.setdefault(name, []).append(functional.cross_entropy(logits, torch.tensor(target)))

    for tokens in texts:
        whole = (*tokens.prompt, *tokens.completion)
        first = len(tokens.prompt) - 1
        places = range(first, len(whole) - 1)
        trunk, main, streams = slow_states(model, torch.tensor(whole[:-1]), list(places)[:-1])
        for t in places:
            count("main", main[t], whole[t + 1])
            if model.scorer is not None:
                count("scorer", model.scorer(trunk[t].detach()), whole[t + 1])
        for t, states in streams.items():
            for j, state in enumerate(states, start=1):
                if t + 1 + j < len(whole):
                    count(f"stream {j}", state, whole[t + 1 + j])
    weights = {"main": config.main, "scorer": config.scorer}
    terms = [weights.get(name, config.stream) * torch.stack(rows).mean() for name, rows in entropies.items()]
    return torch.stack(terms).sum()


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        ("llama", {}),
        ("llama", {"mode": "lossless"}),
        ("llama", {"positions": "same", "streams": 2}),
        ("opt-pre", {}),
        ("opt-pre", {"mode": "lossless"}),
        ("opt-post", {"stream_layers": 4}),
        ("gpt_neox-parallel", {"streams": 1}),
        ("gpt2", {"stream_layers": 3}),
    ],
)
def test_gradients_of_the_packed_pass_are_those_of_separate_streams(host: str, changes: dict[str, Any]) -> None:
    model = trainable(host, **{"streams": 3, **changes})
    shake(model, seed=3)
    texts = examples(4)
    gradients: list[dict[str, Tensor]] = []
    losses = []
    batch = Collator(model.stream_config.streams, pad=0).batch(texts)
    for loss in (packed_loss(model, batch), slow_loss(model, texts)):
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    packed, slow = gradients
    assert packed.keys() == slow.keys() == trained(model).keys()
    for name, gradient in packed.items():
        scale = float(slow[name].abs().max())
        assert scale > 1e-6, f"{name} gets no gradient"
        difference = float((gradient - slow[name]).abs().max())
        assert difference <= 1e-4 * scale, f"{name}: {difference:.2g} of {scale:.2g}"


def test_the_gradient_check_notices_one_wrong_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do not see the carrier's own main slot."""
    model = trainable("llama", streams=2)
    shake(model, seed=3)
    texts = examples(2)
    batch = Collator(2, pad=0).batch(texts)
    right = float(packed_loss(model, batch).detach())
    visible = Pack.visible.func  # type: ignore[attr-defined]

    def blind(pack: Pack) -> Tensor:
        seen: Tensor = visible(pack).clone()
        rows = seen.shape[0]
        for row in range(rows):
            for slot in range(pack.mains, len(pack)):
                seen[row, slot, pack.nodes[row, slot]] = False
        return seen

    monkeypatch.setattr(Pack, "visible", property(blind))
    wrong = float(packed_loss(model, batch).detach())
    slow = float(slow_loss(model, texts).detach())
    assert right == pytest.approx(slow, rel=1e-5)
    assert wrong != pytest.approx(slow, rel=1e-4)


@pytest.mark.parametrize("host", ["llama", "opt-pre", "gpt2"])
def test_main_term_is_the_hosts_own_loss(host: str) -> None:
    """Weights of zero for the streams leave the plain LoRA loss with its gradients; so does a twin without streams."""
    texts = examples(3)
    tunable = []
    for streams in (3, 0):
        model = trainable(host, streams=streams, scorer_rank=0)
        shake(model, seed=3)
        if model.start is not None:
            model.start.requires_grad_(False)
        batch = Collator(streams, pad=0).batch(texts)
        packed_loss(model, batch, LossConfig(main=1.0, stream=0.0)).backward()
        tunable.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    labels = torch.full_like(batch.ids, IGNORED)
    labels = torch.cat([labels, torch.full((len(texts), 1), IGNORED)], dim=1)
    ids = torch.zeros_like(labels)
    for row, tokens in enumerate(texts):
        whole = torch.tensor((*tokens.prompt, *tokens.completion))
        ids[row, : len(whole)] = whole
        labels[row, len(tokens.prompt) : len(whole)] = whole[len(tokens.prompt) :]
    model.zero_grad()
    loss = model.host(input_ids=ids, labels=labels).loss
    loss.backward()
    stock = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(stock) == len(tunable[1])
    own = packed_loss(model, batch, LossConfig(main=1.0, stream=0.0))
    assert float(own.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, gradient in stock.items():
        for found in tunable:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


# --- the trainer --------------------------------------------------------------------------------------------


def run(model: StreamingLM, folder: Path, resume: bool = False, texts: int = 40, **changes: Any) -> dict[str, Any]:
    """Ten updates of four examples unless changed."""
    settings = {"batch_size": 4, "warmup": 2, "save_every": 4, "log_every": 1, "dtype": "float32", **changes}
    return fit(model, examples(texts), 0, folder, TrainConfig(**settings), LOSS, resume)


Watch = Callable[[dict[str, Tensor]], None]


def watch(monkeypatch: pytest.MonkeyPatch, seen: Watch) -> None:
    """Show every batch that the trainer meets to `seen`."""
    compute = StreamTrainer.compute_loss

    def watched(self: StreamTrainer, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        seen(inputs)
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(StreamTrainer, "compute_loss", watched)


class Interrupted(Exception):
    """The power cut."""


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"mode": "lossless"}, {}),
        ({}, {"draft_vocabulary": 12, "sampler_width": 8}),
        ({}, {"stream_rate": 30.0, "schedule": "cosine", "weight_decay": 0.1, "checkpointing": True}),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainable("llama", **changes)
    report = run(whole, tmp_path / "whole", share=0.7, **settings)
    assert report["updates"] == 10
    met: list[Tensor] = []

    def cut(inputs: dict[str, Tensor]) -> None:
        met.append(inputs["ids"])
        if len(met) == 7:
            raise Interrupted

    with monkeypatch.context() as patch:
        watch(patch, cut)
        with pytest.raises(Interrupted):
            run(trainable("llama", **changes), tmp_path / "cut", share=0.7, **settings)
    assert sorted(p.name for p in (tmp_path / "cut").glob("checkpoint-*")) == ["checkpoint-4"]
    resumed = trainable("llama", seed=99, **changes)  # other fresh weights: all has to come out of the checkpoint
    with monkeypatch.context() as patch:
        later: list[Tensor] = []
        watch(patch, lambda inputs: later.append(inputs["ids"]))
        again = run(resumed, tmp_path / "cut", resume=True, share=0.7, **settings)
    assert again["updates"] == 10
    assert len(later) == 6
    assert torch.equal(later[0], met[4])
    before, after = trained(whole), trained(resumed)
    assert before.keys() == after.keys()
    unequal = [name for name in before if not torch.equal(before[name], after[name])]
    assert not unequal
    assert again["last_log"] == report["last_log"]


def test_a_draft_vocabulary_is_learned_and_kept_by_checkpoints(tmp_path: Path) -> None:
    model, texts = trainable("llama"), examples(40)
    report = run(model, tmp_path, draft_vocabulary=12, log_every=10)
    counts = Counter(token for text in texts for token in text.completion if token)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    assert model.vocabulary is not None
    assert model.vocabulary.ids.tolist() == sorted([0, *ranked[:11]])
    assert report["vocabulary"] == {"size": 12, "of": 89}
    stored = load_file(tmp_path / "checkpoint-8" / STREAMS)[VOCABULARY]
    assert stored.tolist() == model.vocabulary.ids.tolist()


def test_a_path_sampler_learns_with_the_streams_and_is_kept_by_checkpoints(tmp_path: Path) -> None:
    """All that is trained differs for it: streams learn beside a sampler what they would not learn alone."""
    alone, model = trainable("llama"), trainable("llama")
    run(alone, tmp_path / "alone")
    report = run(model, tmp_path / "own", sampler_width=8)
    assert report["sampler"] == {"width": 8, "examples": report["examples"]}
    assert model.sampler is not None
    assert model.sampler.up.detach().any()  # it begins at zero
    stored = load_file(tmp_path / "own" / "checkpoint-8" / STREAMS)
    assert stored["sampler.up"].shape == (8, model.port.hidden_size)
    without, beside = trained(alone), trained(model)
    assert set(without) < set(beside)
    assert any(not torch.equal(without[name], beside[name]) for name in without)


def test_nothing_is_put_into_a_model_without_streams(tmp_path: Path) -> None:
    twin = trainable("llama", streams=0)
    report = run(twin, tmp_path, sampler_width=8, draft_vocabulary=12)
    assert twin.sampler is None
    assert twin.vocabulary is None
    assert "sampler" not in report


def test_targets_outside_the_vocabulary_count_as_misses(tmp_path: Path) -> None:
    """One token, which streams cannot miss: they are right where it is asked for, and nowhere else."""
    model, texts = trainable("llama"), examples(40)
    report = run(model, tmp_path, draft_vocabulary=1, log_every=10)
    for j in range(1, model.stream_config.streams + 1):
        asked = [token for text in texts for token in text.completion[j:]]
        if asked.count(0):
            assert report["last_log"][f"stream_{j}_loss"] == 0.0
        assert report["last_log"][f"stream_{j}_accuracy"] == round(asked.count(0) / len(asked), 4)


def test_resuming_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    first, second = trainable("llama"), trainable("llama")
    run(first, tmp_path / "first", texts=8)
    run(second, tmp_path / "second", texts=8, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(trained(first).values(), trained(second).values(), strict=True))


def test_the_twin_without_streams_meets_the_same_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[int, list[Tensor]] = {0: [], 4: []}
    for streams, batches in met.items():
        with monkeypatch.context() as patch:
            watch(patch, lambda inputs, batches=batches: batches.append(inputs["ids"]))
            run(trainable("llama", streams=streams), tmp_path / str(streams), epochs=2)
    assert len(met[0]) == len(met[4]) == 20
    assert all(torch.equal(a, b) for a, b in zip(met[0], met[4], strict=True))
    assert not torch.equal(met[0][0], met[0][10])  # epochs are shuffled anew


def test_runs_repeat_and_seeds_matter(tmp_path: Path) -> None:
    weights = []
    for place, seed in enumerate((0, 0, 1)):
        model = trainable("llama")
        run(model, tmp_path / str(place), texts=12, seed=seed)
        weights.append(torch.cat([p.flatten() for p in trained(model).values()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_accumulated_batches_equal_a_large_one(tmp_path: Path) -> None:
    """With as many targets in every part, the mean of means is the mean."""
    texts = [Tokens(prompt(3, seed=i), prompt(6, seed=50 + i)) for i in range(16)]
    weights, logs = [], []
    for size, parts in ((8, 1), (4, 2)):
        model = trainable("llama")
        shake(model, seed=4, scale=0.03)
        config = TrainConfig(batch_size=size, accumulate=parts, warmup=0, dtype="float32", log_every=1)
        report = fit(model, texts, 0, tmp_path / str(size), config, LOSS)
        assert report["updates"] == 2
        weights.append(torch.cat([p.flatten() for p in trained(model).values()]))
        logs.append({k: v for k, v in report["last_log"].items() if k != "epoch"})
    assert float((weights[0] - weights[1]).abs().max()) < 1e-4
    # AdamW does not mind the gradient's scale, so a sum in place of a mean would show only here
    assert logs[0] == pytest.approx(logs[1], rel=1e-3)


def test_mixed_precision_stays_finite(tmp_path: Path) -> None:
    model = trainable(HOSTS["llama"]().bfloat16())
    before = trained(model)
    report = run(model, tmp_path / "run", dtype="bfloat16")
    terms = {name: value for name, value in report["last_log"].items() if name.endswith(("_loss", "grad_norm"))}
    assert {"main_loss", "stream_1_loss", "stream_4_loss", "scorer_loss"} <= set(terms)
    assert all(math.isfinite(value) for value in terms.values())
    after = trained(model)
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in after.values())
    assert all(not torch.equal(p, before[name]) for name, p in after.items())
    base = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert base == {torch.bfloat16}


def test_a_batch_without_any_stream_target_is_no_nan(tmp_path: Path) -> None:
    model = trainable("llama")
    texts = [Tokens(prompt(3, seed=i), prompt(1, seed=50 + i)) for i in range(8)]
    config = TrainConfig(batch_size=4, dtype="float32", log_every=1)
    report = fit(model, texts, 0, tmp_path / "run", config, LOSS)
    assert report["updates"] == 2
    assert math.isfinite(report["last_log"]["loss"])
    assert all(bool(p.isfinite().all()) for p in trained(model).values())


def test_examples_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    model = trainable("llama")
    report = run(model, tmp_path / "run", max_length=10)
    kept = sum(len(e) <= 10 for e in examples(40))
    assert 0 < kept < 40
    assert (report["examples"], report["left_out_as_too_long"]) == (kept, 40 - kept)
    with pytest.raises(DataError, match="none of 40 examples has at most 1 tokens"):
        run(model, tmp_path / "none", max_length=1)
