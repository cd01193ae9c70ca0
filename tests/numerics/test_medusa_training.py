"""The loss of Medusa heads against one written out by hand, runs that learn and go on, and folders that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner, Result

import tiny
from forestream import checkpoint
from forestream.bench.methods import Medusa, method
from forestream.cli import app
from forestream.config import DecodeSettings
from forestream.data import Collator, Tokens
from forestream.errors import CheckpointError, ConfigError
from forestream.generation import Generator
from forestream.model import StreamingLM
from forestream.objective import LossConfig, TargetBatch, count_targets
from forestream.rivals.medusa import MedusaConfig, MedusaHeads
from forestream.rivals.medusa_folder import ACCEPTANCE, MANIFEST, HeadsManifest, best_shape, load_heads, save_heads
from forestream.rivals.medusa_training import PUBLISHED, HeadsObjective, fit_heads
from forestream.training import TrainConfig, fit
from medusae import HEADS, shaken
from wrapped import prompt, trainable, wrapped

FILE = "medusa.safetensors"
LOSS = LossConfig(main=0.0, stream=0.8, decay=0.8, scorer=0.0, chunk=5)


def examples(count: int) -> list[Tokens]:
    """Ragged; the completion of one is a single token, which no head foretells anything behind."""
    sizes = torch.randint(1, 8, (count, 2), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Tokens(prompt(before, seed=i), prompt(1 if i % 4 == 3 else 4 + after, seed=1000 + i))
        for i, (before, after) in enumerate(sizes)
    ]


def slow_loss(model: StreamingLM, heads: MedusaHeads, texts: list[Tokens], main: float) -> Tensor:
    """Text by text and place by place, on the states of the host library's own forward."""
    entropies: list[list[Tensor]] = [[] for _ in range(HEADS + 1)]
    lm_head = model.port.model.get_output_embeddings()
    for one in texts:
        whole = torch.tensor((*one.prompt, *one.completion))
        states = model.host(input_ids=whole[None], output_hidden_states=True).hidden_states[-1][0]
        for t in range(len(one.prompt) - 1, len(whole) - 1):
            entropies[0].append(functional.cross_entropy(lm_head(states[t]), whole[t + 1]))
            for j in range(1, HEADS + 1):
                if t + 1 + j < len(whole):
                    block = states[t] + functional.silu(heads.blocks[j - 1](states[t]))
                    own = heads.projections[j - 1] if heads.projections else lm_head
                    entropies[j].append(functional.cross_entropy(own(block), whole[t + 1 + j]))
    weights = [main, *(0.8**j for j in range(1, HEADS + 1))]
    return torch.stack([w * torch.stack(own).mean() for w, own in zip(weights, entropies, strict=True)]).sum()


def gradients(*modules: torch.nn.Module) -> dict[str, Tensor]:
    found = {
        f"{place} {name}": parameter.grad.clone()
        for place, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    for module in modules:
        module.zero_grad()
    return found


@pytest.mark.parametrize("host", ["llama", "llama-tied", "gpt2", "gpt_neox-parallel"])
@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("joint", [False, True], ids=["frozen", "joint"])
def test_loss_and_gradients_are_those_of_the_text_read_place_by_place(host: str, projection: Any, joint: bool) -> None:
    model = trainable(host, streams=0) if joint else wrapped(host).requires_grad_(False)
    heads = shaken(model, projection).requires_grad_(True)
    texts, main = examples(4), 1.0 if joint else 0.0
    objective = HeadsObjective(model, heads, LossConfig(main=main, stream=0.8, decay=0.8, scorer=0.0, chunk=5))
    batch = Collator(HEADS, pad=0)(texts)
    loss = objective(batch, None)
    loss.total.backward()
    found = gradients(model, heads)
    slow = slow_loss(model, heads, texts, main)
    slow.backward()
    wanted = gradients(model, heads)
    assert float(loss.total.detach()) == pytest.approx(float(slow.detach()), rel=1e-5)
    assert found.keys() == wanted.keys()
    assert any(name.startswith("0") for name in found) == joint
    assert len([name for name in found if name.startswith("1")]) == HEADS * (3 if projection == "own" else 2)
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= 1e-4 * scale, name


def test_a_target_one_place_off_is_noticed() -> None:
    model = wrapped("llama").requires_grad_(False)
    heads, texts = shaken(model), examples(4)
    objective = HeadsObjective(model, heads, LOSS)
    right = Collator(HEADS, pad=0)(texts)
    wanted = float(slow_loss(model, heads, texts, 0.0))
    assert float(objective(right, None).total) == pytest.approx(wanted, rel=1e-5)
    for head in range(HEADS):
        wrong = {**right, "stream_targets": right["stream_targets"].clone()}
        wrong["stream_targets"][:, head] = right["stream_targets"][:, head].roll(1, -1)
        assert float(objective(wrong, None).total) != pytest.approx(wanted, rel=1e-3)


def test_parts_of_an_update_add_up() -> None:
    model = wrapped("llama").requires_grad_(False)
    objective, texts = HeadsObjective(model, shaken(model), LOSS), examples(6)
    collate = Collator(HEADS, pad=0)
    whole, parts = collate(texts), [collate(texts[:2]), collate(texts[2:])]
    totals = count_targets(TargetBatch(**whole))
    together = sum(float(objective(part, totals).total) for part in parts)
    assert together == pytest.approx(float(objective(whole, None).total), rel=1e-5)


def test_soft_targets_are_refused() -> None:
    model = wrapped("llama")
    with pytest.raises(ConfigError, match="heads are trained towards hard targets"):
        HeadsObjective(model, shaken(model), LossConfig(target="soft"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("projection", ["own", "shared"])
def test_it_learns_and_the_model_stays(projection: Any, dtype: Any, tmp_path: Path) -> None:
    model = wrapped("gpt2")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    heads = MedusaHeads.fresh(MedusaConfig(HEADS, projection), model)
    texts = [Tokens(prompt(3, seed=i % 4), prompt(8, seed=50 + i % 4)) for i in range(160)]
    config = TrainConfig(batch_size=4, learning_rate=0.02, warmup=2, dtype=dtype, log_every=1)
    report = fit_heads(model, heads, texts, 0, tmp_path / "run", config, PUBLISHED)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    for term in ("stream_1", "stream_4"):
        losses = [line[f"{term}_loss"] for line in lines if f"{term}_loss" in line]
        assert losses[-1] < 0.6 * losses[0]
    assert report["last_log"]["stream_1_accuracy"] > 0.5
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not model.training  # dropout would show the heads other states than they will read


def test_heads_and_lora_learn_together_and_go_on(tmp_path: Path) -> None:
    """Plain heads in the joint loss: an interrupted run gives what an uninterrupted one does."""
    texts = [Tokens(prompt(3, seed=i % 4), prompt(8, seed=50 + i % 4)) for i in range(80)]
    config = TrainConfig(batch_size=4, learning_rate=0.02, warmup=2, dtype="float32", log_every=1, save_every=8)
    loss = LossConfig(main=1.0, stream=0.3)

    def trained(folder: Path) -> dict[str, Tensor]:
        model = trainable("llama", streams=0)
        heads = MedusaHeads.fresh(MedusaConfig(HEADS, "shared"), model)
        objective = HeadsObjective(model, heads, loss)
        fit(model, texts, 0, folder, config, loss, resume=True, objective=objective)
        return {**dict(heads.named_parameters()), **{n: p for n, p in model.named_parameters() if p.requires_grad}}

    once = trained(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    for term in ("main", "stream_1", "stream_4"):
        losses = [line[f"{term}_loss"] for line in lines if f"{term}_loss" in line]
        assert losses[-1] < 0.7 * losses[0], term
    for path in (tmp_path / "run").glob("checkpoint-20*"):
        shutil.rmtree(path)
    again = trained(tmp_path / "run")
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return tiny.tiny_adapter(tmp_path / "tiny")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def common(adapter: Path, output: Path) -> tuple[object, ...]:
    settings = ("--task", "synthetic", "--examples", 60, "--batch-size", 6, "--learning-rate", 0.01, "--measure", 2)
    return ("train-medusa", "--adapter", adapter, "--output", output, *settings, "--dtype", "float32")


def test_a_folder_is_written_and_bench_runs_it(adapter: Path, tmp_path: Path) -> None:
    output, record = tmp_path / "heads", tmp_path / "bench.json"
    result = run(*common(adapter, output))
    assert result.exit_code == 0, result.output
    assert {path.name for path in output.iterdir()} == {FILE, MANIFEST, ACCEPTANCE, "provenance.json"}
    made = json.loads((output / "provenance.json").read_text())
    assert (made["task"], made["updates"], made["training"]["schedule"]) == ("synthetic", 10, "cosine")
    assert made["loss"] | {"main": 0.0, "stream": 0.8, "decay": 0.8} == made["loss"]
    log = [json.loads(line) for line in (tmp_path / "heads.run" / "log.jsonl").read_text().splitlines()]
    assert {"main_loss", "stream_1_loss", "stream_4_loss"} <= log[0].keys()
    names = "plain,budget-4,medusa,medusa-static-6,medusa-budget-4,medusa-full-2"
    where = ("--adapter", adapter, "--task", "synthetic", "--limit", 2, "--max-new-tokens", 8, "--compile", "off")
    asked = ("--methods", names, "--medusa", output, "--dtype", "float32", "--json", record)
    result = run("bench", *where, *asked)
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_text())
    assert found["settings"]["medusa"] == "heads"
    for name, row in found["methods"].items():
        assert row["equal_outputs"] == 2, name
        assert row["extra_parameters"] == (made["parameters"] if "medusa" in name else row["extra_parameters"])
    methods = found["methods"]
    assert methods["plain"]["extra_parameters"] == 0 < methods["budget-4"]["extra_parameters"] < made["parameters"]
    assert methods["medusa-static-6"]["settings"]["tree"] == "static"
    assert len(methods["medusa-static-6"]["settings"]["shape"]) == 5
    assert methods["medusa-full-2"]["settings"]["k"] == 2


def test_an_interrupted_run_goes_on(adapter: Path, tmp_path: Path) -> None:
    output = tmp_path / "heads"
    assert run(*common(adapter, output), "--save-every", 5).exit_code == 0
    whole = load_file(output / FILE)
    latest = tmp_path / "heads.run" / "checkpoint-10"
    for path in sorted(latest.rglob("*"), reverse=True):
        path.unlink()
    latest.rmdir()
    refused = run(*common(adapter, output), "--save-every", 5)
    assert refused.exit_code == 1
    assert "--resume" in refused.stderr
    assert run(*common(adapter, output), "--save-every", 5, "--resume").exit_code == 0
    again = load_file(output / FILE)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_it_writes_over_no_other_folder(adapter: Path, tmp_path: Path) -> None:
    result = run(*common(adapter, adapter))
    assert result.exit_code == 1
    assert f"holds no {MANIFEST}" in " ".join(result.stderr.split())


# --- folders ------------------------------------------------------------------------------------------------------


def loaded(adapter: Path) -> StreamingLM:
    return checkpoint.load(adapter)[0]


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_heads_come_back_as_they_were(projection: Any, adapter: Path, tmp_path: Path) -> None:
    model = loaded(adapter)
    heads = shaken(model, projection)
    save_heads(heads, tmp_path / "heads", adapter, {}, torch.float32)
    again = load_heads(tmp_path / "heads", adapter, model)
    assert again.config == heads.config
    assert again.added == heads.added
    assert not again.training
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    manifest = HeadsManifest.read(tmp_path / "heads")
    assert manifest == HeadsManifest.of(heads.config, adapter)


def test_another_base_or_adapter_is_refused(adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    save_heads(shaken(loaded(adapter)), folder, adapter, {})
    other_base = tiny.tiny_adapter(tmp_path / "foreign", tiny.tiny_base(tmp_path / "base", initializer_range=0.3))
    with pytest.raises(CheckpointError, match=r"were trained on the base .* but .*foreign has"):
        load_heads(folder, other_base, loaded(other_base))
    base = tmp_path / "tiny-base"
    other = tiny.tiny_adapter(tmp_path / "other", base, lora_alpha=16)
    with pytest.raises(CheckpointError, match=r"were trained on the adapter tiny .* but .*other has"):
        load_heads(folder, other, loaded(other))
    lora = other / checkpoint.LORA
    changed = tiny.tiny_adapter(tmp_path / "changed", base)
    save_file({name: tensor + 0.01 for name, tensor in load_file(lora).items()}, changed / checkpoint.LORA)
    with pytest.raises(CheckpointError, match="give that adapter, or train heads for this one"):
        load_heads(folder, changed, loaded(changed))
    # other streams make no other model
    streams = load_file(adapter / checkpoint.STREAMS)
    save_file({name: tensor + 1 for name, tensor in streams.items()}, adapter / checkpoint.STREAMS)
    load_heads(folder, adapter, loaded(adapter))
    lossless = tiny.tiny_adapter(tmp_path / "lossless", base, mode="lossless")
    with pytest.raises(CheckpointError, match="is a lossless adapter"):
        save_heads(shaken(loaded(adapter)), tmp_path / "more", lossless, {})


def test_torn_folders_are_refused_by_name(adapter: Path, tmp_path: Path) -> None:
    folder, model = tmp_path / "heads", loaded(adapter)
    with pytest.raises(CheckpointError, match=f"holds no {MANIFEST}"):
        load_heads(folder, adapter, model)
    save_heads(shaken(model), folder, adapter, {})
    with pytest.raises(CheckpointError, match=f"holds no {ACCEPTANCE}"):
        best_shape(folder, 4)
    (folder / ACCEPTANCE).write_text("{}")
    with pytest.raises(CheckpointError, match="is malformed"):
        best_shape(folder, 4)
    tensors = load_file(folder / FILE)
    tensors.pop("blocks.1.bias")
    save_file(tensors, folder / FILE)
    with pytest.raises(CheckpointError, match=r"1 tensors of the heads .* first 'blocks.1.bias'"):
        load_heads(folder, adapter, model)
    (folder / FILE).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="missing, corrupt or no safetensors"):
        load_heads(folder, adapter, model)
    manifest = json.loads((folder / MANIFEST).read_text())
    for change, told in (({"format": 9}, "has format 9"), ({"strange": 1}, "is malformed"), ({"config": 3}, "malform")):
        (folder / MANIFEST).write_text(json.dumps(manifest | change))
        with pytest.raises(CheckpointError, match=told):
            load_heads(folder, adapter, model)


def test_settings_of_heads() -> None:
    config = MedusaConfig(3, "shared")
    assert MedusaConfig.from_json(config.to_json()) == config
    for wrong in ({"heads": 0}, {"heads": 65}, {"projection": "both"}, {"depth": 1}):
        with pytest.raises(ConfigError):
            MedusaConfig.from_dict(wrong)


def test_packed_heads_cannot_be_begun_from() -> None:
    model = wrapped("llama")
    model.prepare()
    with pytest.raises(ConfigError, match="load it without preparing"):
        MedusaHeads.fresh(MedusaConfig(), model)


def test_heads_are_asked_for_by_name(adapter: Path, tmp_path: Path) -> None:
    generator = Generator.from_pretrained(adapter, dtype=torch.float32, settings=DecodeSettings(nodes=5))
    with pytest.raises(ConfigError, match="medusa-budget-3 needs heads"):
        method("medusa-budget-3", generator)
    with pytest.raises(ConfigError, match="unknown method 'medusa-3'"):
        method("medusa-3", generator)
    folder = tmp_path / "heads"
    save_heads(shaken(loaded(adapter)), folder, adapter, {})
    found = method("medusa", generator, medusa=Medusa.load(folder, generator))
    assert found.settings is not None
    assert found.settings.nodes == 5
