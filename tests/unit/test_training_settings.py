"""What every setting of a training changes, each on a tiny host; and runs that begin with an adapter's weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from forestream import checkpoint, recipes
from forestream.bases import fingerprint
from forestream.checkpoint import begin_from
from forestream.data import Collator, Tokens
from forestream.errors import CheckpointError
from forestream.manifest import BaseModel, Manifest
from forestream.model import StreamingLM
from forestream.objective import LossConfig, TargetBatch, joint_loss
from forestream.packing import Pack
from forestream.recipes import Recipe
from forestream.recomputed import RecomputedLayers
from forestream.training import TrainConfig, fit, training_model
from wrapped import SMALL, prompt, shake, trainable, trained

TEXTS = [Tokens(prompt(3 + i % 3, seed=i), prompt(4 + i % 4, seed=50 + i)) for i in range(8)]
LOSS = LossConfig()


def run(folder: Path, **settings: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """By how much training changed what it changes, by name, and the lines of its log."""
    model = trainable("llama", streams=2, start="low_rank")
    before = trained(model)
    config = TrainConfig(**{"batch_size": 4, "warmup": 0, "log_every": 1, "dtype": "float32", **settings})
    fit(model, TEXTS, 0, folder, config, LOSS)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {name: after - before[name] for name, after in trained(model).items()}, lines


def gradients(model: StreamingLM, batch: TargetBatch) -> dict[str, Tensor]:
    model.zero_grad()
    pack = Pack.text(batch.ids.shape[1], batch.carriers, model.stream_config.streams)
    joint_loss(model, model(batch.ids, pack), batch, LOSS).total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- the shape of the streams, by its recipe ------------------------------------------------------------------


def made(*changes: str) -> StreamingLM:
    """A model as a recipe with these changes makes it, filled with weights that depend on names alone."""
    small = [f"streams.{key}={value}" for key, value in SMALL.items()]
    recipe = Recipe.from_dict(recipes.overridden({"task": "synthetic"}, [*small, *changes]))
    model = training_model(zoo.HOSTS["llama"](), recipe.streams)
    shake(model, 1)
    return model.eval()


@torch.no_grad()
def states(model: StreamingLM) -> Tensor:
    output = model(torch.tensor([prompt(9)]), Pack.text(9, torch.tensor([[3, 6]]), model.stream_config.streams))
    streams: Tensor = output.streams
    return streams


@pytest.mark.parametrize(
    ("change", "base"),
    [
        ("streams.positions=same", ()),
        ("streams.start=low_rank", ()),
        ("streams.value_rotation=true", ()),
        ("streams.rotation_angle=0.5", ("streams.value_rotation=true",)),
        ("streams.lora_alpha=16", ()),
    ],
)
def test_settings_that_change_what_streams_compute(change: str, base: tuple[str, ...]) -> None:
    before, after = states(made(*base)), states(made(*base, change))
    assert before.shape == after.shape
    assert float((before - after).abs().max()) > 1e-3
    assert torch.equal(before, states(made(*base)))


@pytest.mark.parametrize(
    ("change", "base", "part", "size"),
    [
        ("streams.start_rank=7", ("streams.start=low_rank",), "start.map.down", 7),
        ("streams.lora_rank=3", (), "q_proj.lora_A.default.weight", 3),
        ("streams.scorer_rank=5", (), "scorer.down", 5),
        ("streams.streams=6", (), "start.embedding", 6),
    ],
)
def test_settings_that_change_shapes(change: str, base: tuple[str, ...], part: str, size: int) -> None:
    before, after = (
        {name: tuple(p.shape) for name, p in made(*base, *more).named_parameters() if name.endswith(part)}
        for more in ((), (change,))
    )
    assert before.keys() == after.keys() != set()
    assert all(size in shape for shape in after.values())
    assert not any(size in shape for shape in before.values())


# --- rates ----------------------------------------------------------------------------------------------------


def test_the_streams_start_learns_at_its_own_rate(tmp_path: Path) -> None:
    """AdamW's first step is the rate, whatever the gradient: twenty times the rate is twenty times the step."""
    once, more, none = (run(tmp_path / str(rate), stream_rate=rate, batch_size=8) for rate in (1.0, 20.0, 0.0))
    for name, step in once[0].items():
        if "lora_B" in name or name in ("start.embedding", "start.map.up", "scorer.up"):  # others wait for these
            times, moved = 20.0 if name.startswith("start.") else 1.0, step.abs() > 5e-4
            assert moved.any(), name
            torch.testing.assert_close(more[0][name][moved], times * step[moved], rtol=1e-3, atol=1e-6)
        if name.startswith("start."):
            assert not none[0][name].any()
    assert more[1][0]["learning_rate"] == once[1][0]["learning_rate"] == 1e-3  # of everything else


def test_weight_decay_spares_the_streams_start(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain", batch_size=8)
    decayed, _ = run(tmp_path / "decayed", weight_decay=0.5, batch_size=8)
    fresh = trained(trainable("llama", streams=2, start="low_rank"))
    for name, step in plain.items():
        if name.startswith("start."):
            assert torch.equal(decayed[name], step)
        else:
            torch.testing.assert_close(decayed[name], step - 1e-3 * 0.5 * fresh[name], rtol=1e-3, atol=1e-6)
    assert any(float((decayed[name] - plain[name]).abs().max()) > 1e-5 for name in plain)


def test_schedules_fall_as_they_are_called(tmp_path: Path) -> None:
    rates = {}
    for schedule in ("linear", "cosine"):
        _, log = run(tmp_path / schedule, schedule=schedule, epochs=4)
        rates[schedule] = [line["learning_rate"] for line in log if "learning_rate" in line]
    assert rates["linear"] == pytest.approx([1e-3 * (1 - step / 8) for step in range(8)])
    waves = torch.cos(torch.pi * torch.arange(8) / 8)
    assert rates["cosine"] == pytest.approx((1e-3 * (1 + waves) / 2).tolist(), rel=1e-5)


# --- the loss -------------------------------------------------------------------------------------------------


def test_decay_weighs_streams_down_by_their_place() -> None:
    flat = LossConfig().weights(3, True)
    assert flat == {"main": 1.0, "stream_1": 0.1, "stream_2": 0.1, "stream_3": 0.1, "scorer": 0.1}
    falling = LossConfig(main=2.0, stream=0.4, scorer=0.3, decay=0.5).weights(3, True)
    wanted = {"main": 2.0, "stream_1": 0.4, "stream_2": 0.2, "stream_3": 0.1, "scorer": 0.3}
    assert falling == pytest.approx(wanted)
    assert list(LossConfig().weights(2, False)) == ["main", "stream_1", "stream_2"]
    assert "scorer" not in LossConfig(scorer=0.0).weights(2, True)


def test_decay_reaches_the_loss() -> None:
    model = trainable("llama", streams=3)
    shake(model, 2)
    batch = Collator(3, 0).batch(TEXTS)
    output = model(batch.ids, Pack.text(batch.ids.shape[1], batch.carriers, 3))
    config = LossConfig(decay=0.5)
    loss = joint_loss(model, output, batch, config)
    weights = config.weights(3, True)
    wanted = sum(weights[name] * term.loss / term.count for name, term in loss.terms.items())
    assert float(loss.total.detach()) == pytest.approx(wanted, rel=1e-5)
    assert float(joint_loss(model, output, batch, LOSS).total.detach()) > 1.01 * wanted


# --- checkpointing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "changes"),
    [
        ("llama", {}),
        ("llama", {"mode": "lossless"}),
        ("llama", {"value_rotation": True}),
        ("opt-pre", {}),
        ("gpt2", {}),
    ],
)
def test_layers_that_run_again_give_the_same_gradients(host: str, changes: dict[str, Any]) -> None:
    model = trainable(host, **changes)
    shake(model, 3)
    model.train()
    batch = Collator(model.stream_config.streams, 0).batch(TEXTS[:4])
    plain = gradients(model, batch)
    model.layers = RecomputedLayers(model.port)
    again = gradients(model, batch)
    assert plain.keys() == again.keys() == trained(model).keys()
    assert all(torch.equal(plain[name], gradient) for name, gradient in again.items())


def test_layers_run_twice_where_gradients_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = trainable("llama", streams=2)
    calls: list[int] = []
    drive = model.port.run

    def run_layer(i: int, *given: Any) -> Tensor:
        calls.append(i)
        return drive(i, *given)

    monkeypatch.setattr(model.port, "run", run_layer)
    counts = []
    for checkpointing in (False, True):
        calls.clear()
        config = TrainConfig(batch_size=8, dtype="float32", checkpointing=checkpointing)
        fit(model, TEXTS, 0, tmp_path / str(checkpointing), config, LOSS)
        counts.append(sorted(calls))
    assert counts == [[0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]]
    calls.clear()
    with torch.no_grad():
        model(torch.tensor([prompt(4)]), Pack.text(4, torch.tensor([[1]]), 2))
    assert calls == [0, 1, 2, 3]


# --- a start from an adapter ----------------------------------------------------------------------------------


def saved(folder: Path, **changes: Any) -> StreamingLM:
    base = zoo.HOSTS["llama"]()
    origin = BaseModel("tiny", "llama", fingerprint(base))
    model = trainable(base, **changes)
    shake(model, 5)
    checkpoint.save(model, folder, origin, {})
    return model


def test_a_run_begins_with_the_adapters_weights(tmp_path: Path) -> None:
    earlier = trained(saved(tmp_path / "first"))
    base = zoo.HOSTS["llama"]()
    known = fingerprint(base)
    fresh = trainable(base, seed=9)
    digest = begin_from(fresh, tmp_path / "first", known)
    for name, parameter in trained(fresh).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, earlier[name].bfloat16().float()), name
    assert all(parameter.requires_grad for name, parameter in fresh.named_parameters() if name in earlier)
    assert len(digest) == 64
    model = saved(tmp_path / "other", lora_alpha=9)
    shake(model, 6)
    checkpoint.save(model, tmp_path / "other", BaseModel("tiny", "llama", known), {})
    assert begin_from(trainable("llama", lora_alpha=9), tmp_path / "other", known) != digest


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"stream_layers": 3, "lora_rank": 8}, "it was trained with lora_rank 4, not 8"),
        ({"streams": 0, "lora_rank": 8}, "it was trained with lora_rank 4, not 8"),
        ({"positions": "same"}, "it was trained with positions 'ahead', not 'same'"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any], wanted: str) -> None:
    saved(tmp_path / "first")
    base = zoo.HOSTS["llama"]()
    known = fingerprint(base)
    with pytest.raises(CheckpointError, match=f"first cannot be started from: {wanted}"):
        begin_from(trainable(base, **changes), tmp_path / "first", known)


@pytest.mark.parametrize("changes", [{"stream_layers": 3}, {"streams": 0}, {"streams": 0, "scorer_rank": 0}])
def test_a_joint_lora_starts_whatever_streams(tmp_path: Path, changes: dict[str, Any]) -> None:
    earlier = trained(saved(tmp_path / "first"))
    base = zoo.HOSTS["llama"]()
    fresh = trainable(base, seed=9, **changes)
    known = Manifest.read(tmp_path / "first").base.fingerprint
    begin_from(fresh, tmp_path / "first", known)
    for name, parameter in trained(fresh).items():
        assert torch.equal(parameter, earlier[name].bfloat16().float()), name


@pytest.mark.parametrize("mode", ["joint", "lossless"])
@pytest.mark.parametrize("streams", [2, 6])
def test_streams_that_an_adapter_lacks_begin_as_its_last(tmp_path: Path, streams: int, mode: str) -> None:
    shape = {"mode": mode, "start": "low_rank", "start_rank": 4}
    saved(tmp_path / "first", **shape)
    earlier = trainable("llama", **shape)
    known = Manifest.read(tmp_path / "first").base.fingerprint
    begin_from(earlier, tmp_path / "first", known)
    fresh = trainable("llama", seed=9, streams=streams, **shape)
    begin_from(fresh, tmp_path / "first", known)
    assert fresh.start is not None
    assert earlier.start is not None
    found, wanted = fresh.start.embedding, earlier.start.embedding
    assert found is not None
    assert wanted is not None
    assert len(found) == streams
    assert [own.tolist() for own in found] == [wanted[min(j, 3)].tolist() for j in range(streams)]
    assert found.requires_grad
    kept = {name: tensor for name, tensor in trained(earlier).items() if not name.endswith("start.embedding")}
    assert any("start.map" in name for name in kept)
    assert all(torch.equal(tensor, trained(fresh)[name]) for name, tensor in kept.items())


def test_streams_whose_values_turn_by_their_number_start_from_as_many(tmp_path: Path) -> None:
    saved(tmp_path / "first", value_rotation=True)
    known = Manifest.read(tmp_path / "first").base.fingerprint
    begin_from(trainable("llama", value_rotation=True), tmp_path / "first", known)
    with pytest.raises(CheckpointError, match="it was trained with streams 4, not 6"):
        begin_from(trainable("llama", value_rotation=True, streams=6), tmp_path / "first", known)


def test_an_adapter_that_cannot_be_read_leaves_the_start_as_it_was(tmp_path: Path) -> None:
    saved(tmp_path / "first")
    known = Manifest.read(tmp_path / "first").base.fingerprint
    fresh = trainable("llama", streams=6)
    start = fresh.start
    (tmp_path / "first" / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        begin_from(fresh, tmp_path / "first", known)
    assert fresh.start is start


def test_streams_do_not_start_from_an_adapter_without_any(tmp_path: Path) -> None:
    saved(tmp_path / "first", streams=0)
    known = Manifest.read(tmp_path / "first").base.fingerprint
    with pytest.raises(CheckpointError, match="it was trained with streams 0, not 4"):
        begin_from(trainable("llama"), tmp_path / "first", known)


def test_a_lossless_lora_starts_on_its_own_layers_only(tmp_path: Path) -> None:
    saved(tmp_path / "first", mode="lossless")
    known = Manifest.read(tmp_path / "first").base.fingerprint
    with pytest.raises(CheckpointError, match="it was trained with stream_layers 2, not 3"):
        begin_from(trainable("llama", mode="lossless", stream_layers=3), tmp_path / "first", known)


@pytest.mark.parametrize("layers", [1, 3])
def test_lossless_streams_begin_as_joint_ones_of_any_layers(tmp_path: Path, layers: int) -> None:
    """What looks ahead was learned already; the base's text stays its own."""
    earlier = trained(saved(tmp_path / "first"))
    base = zoo.HOSTS["llama"]()
    known = fingerprint(base)
    fresh = trainable(base, seed=9, mode="lossless", stream_layers=layers)
    begin_from(fresh, tmp_path / "first", known)
    found = trained(fresh)
    assert 0 < len(found) < len(earlier)
    for name, parameter in found.items():
        assert torch.equal(parameter, earlier[name].bfloat16().float()), name
    ids = torch.tensor([TEXTS[0].prompt + TEXTS[0].completion])
    with torch.no_grad():
        written = fresh(ids, Pack.text(ids.shape[1], torch.tensor([[1]]), 4)).main
        torch.testing.assert_close(fresh.logits(written), zoo.HOSTS["llama"]()(ids).logits)


def test_joint_streams_do_not_begin_as_lossless_ones(tmp_path: Path) -> None:
    saved(tmp_path / "first", mode="lossless")
    known = Manifest.read(tmp_path / "first").base.fingerprint
    with pytest.raises(CheckpointError, match="it was trained with mode 'lossless', not 'joint'"):
        begin_from(trainable("llama"), tmp_path / "first", known)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "first")
    wanted = r"trained on tiny with fingerprint .{12}, but this base has 0123456789ab"
    with pytest.raises(CheckpointError, match=wanted):
        begin_from(trainable("llama"), tmp_path / "first", "0123456789abcdef")


def test_a_run_goes_on_with_the_start_it_had(tmp_path: Path) -> None:
    config = TrainConfig(batch_size=4, save_every=1, dtype="float32")
    fit(trainable("llama"), TEXTS, 0, tmp_path, config, LOSS, started_from="one")
    with pytest.raises(CheckpointError, match="another setting of started_from"):
        fit(trainable("llama"), TEXTS, 0, tmp_path, config, LOSS, resume=True, started_from="two")
