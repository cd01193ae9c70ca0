"""An adapter folder gives back the model it was written from, or says by name why it does not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from forestream import checkpoint
from forestream.bases import fingerprint, load_base
from forestream.checkpoint import LORA, PROVENANCE, STREAMS
from forestream.config import DecodeSettings, StreamConfig
from forestream.decode import decode
from forestream.errors import CheckpointError
from forestream.manifest import MANIFEST, BaseModel, Manifest
from forestream.model import StreamingLM
from forestream.packing import Pack
from tiny import tiny_bases
from wrapped import SMALL, prompt, shake, trained, wrapped
from zoo import HOSTS

MADE = {"command": "forestream train", "commit": None}
TEXT = prompt(9)
FILES = {LORA, STREAMS, MANIFEST, PROVENANCE, "adapter_config.json", "README.md"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_bases(tmp_path_factory.mktemp("bases"))


def model_on(base: Path, **changes: Any) -> tuple[StreamingLM, BaseModel]:
    """A random adapter on a base folder, and the folder's record."""
    host, _ = load_base(str(base))
    origin = BaseModel(str(base), host.config.model_type, fingerprint(host))
    model = StreamingLM(host, StreamConfig(**{**SMALL, **changes}))
    model.add_lora()
    shake(model, 1, scale=0.05)
    return model.eval(), origin


@torch.no_grad()
def says(model: StreamingLM) -> dict[str, torch.Tensor]:
    """Logits of main, of streams and of the scorer after a text, and the drafts and tokens of a run."""
    streams = model.stream_config.streams
    output = model(torch.tensor([TEXT]), Pack.text(len(TEXT), torch.tensor([[3, 8]]), streams))
    told = {"main": model.logits(output.main), "streams": model.logits(output.streams)}
    if model.scorer is not None:
        told["scorer"] = model.exit_logits(output.trunk)
    steps = list(decode(model, TEXT, DecodeSettings(max_new_tokens=12, nodes=8)))
    told["drafts"] = torch.tensor([token for step in steps if step.tree for token in step.tree.tokens])
    told["tokens"] = torch.tensor([token for step in steps for token in step.tokens])
    return {name: tensor.contiguous() for name, tensor in told.items()}


@pytest.fixture
def adapter(bases: dict[str, Path], tmp_path: Path) -> Path:
    """A joint adapter folder in float32."""
    model, origin = model_on(bases["untied"])
    checkpoint.save(model, tmp_path / "adapter", origin, MADE, torch.float32)
    return tmp_path / "adapter"


# --- what goes in comes out ---------------------------------------------------------------------------------

_ELSEWHERE = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from forestream import checkpoint
from test_checkpoint import says
for folder in map(Path, sys.argv[1:]):
    model, _ = checkpoint.load(folder)
    save_file(says(model), folder.with_suffix(".told"))
"""


def test_a_new_process_loads_the_same_model(bases: dict[str, Path], tmp_path: Path) -> None:
    """Bit for bit: logits, drafts and text."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("untied", {}),
        ("tied", {}),
        ("tied", {"mode": "lossless"}),
        ("untied", {"mode": "lossless", "start": "low_rank", "positions": "same", "value_rotation": True}),
        ("untied", {"streams": 0}),
    ]
    folders, wanted = [], []
    for number, (base, changes) in enumerate(kinds):
        model, origin = model_on(bases[base], **changes)
        folders.append(tmp_path / str(number))
        checkpoint.save(model, folders[-1], origin, MADE, torch.float32)
        assert {file.name for file in folders[-1].iterdir()} == FILES
        if model.stream_config.mode == "joint":
            model.merge()
        wanted.append(says(model))
    paths = ":".join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}.split(':')\n{_ELSEWHERE}", *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    for folder, told in zip(folders, wanted, strict=True):
        found = load_file(folder.with_suffix(".told"))
        assert found.keys() == told.keys()
        assert [name for name in told if not torch.equal(found[name], told[name])] == []


def test_by_default_weights_are_stored_in_bfloat16(bases: dict[str, Path], tmp_path: Path) -> None:
    model, origin = model_on(bases["untied"])
    checkpoint.save(model, tmp_path / "adapter", origin, MADE)
    stored = load_file(tmp_path / "adapter" / LORA) | load_file(tmp_path / "adapter" / STREAMS)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    loaded, _ = checkpoint.load(tmp_path / "adapter", merge=False)
    weights = dict(loaded.named_parameters())
    assert {p.dtype for p in weights.values()} == {torch.float32}
    for name, tensor in trained(model).items():
        assert torch.equal(weights[name], tensor.bfloat16().float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_everything_loads_in_the_dtype_asked_for(adapter: Path, dtype: torch.dtype) -> None:
    model, _ = checkpoint.load(adapter, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not isinstance(model.host, PeftModel)
    assert not model.training
    assert all(bool(tensor.isfinite().all()) for tensor in says(model).values())


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, ["scorer.down", "scorer.up", "start.embedding"]),
        ({"scorer_rank": 0}, ["start.embedding"]),
        ({"value_rotation": True, "start": "low_rank", "scorer_rank": 0}, ["start.map.down", "start.map.up"]),
        ({"mode": "lossless"}, ["scorer.down", "scorer.up", "start.embedding"]),
        ({"stream_layers": 4}, ["start.embedding"]),  # no trunk, nothing to exit from
        ({"streams": 0}, []),
    ],
    ids=str,
)
def test_exactly_what_was_trained_is_stored(
    changes: dict[str, Any], own: list[str], bases: dict[str, Path], tmp_path: Path
) -> None:
    model, origin = model_on(bases["tied"], **changes)
    checkpoint.save(model, tmp_path / "adapter", origin, MADE)
    assert sorted(load_file(tmp_path / "adapter" / STREAMS)) == own
    lora = load_file(tmp_path / "adapter" / LORA)
    layers = model.stream_layers if model.stream_config.mode == "lossless" else range(4)
    parts = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    assert set(lora) == {
        f"base_model.model.model.layers.{i}.{part}.lora_{ab}.weight" for i in layers for part in parts for ab in "AB"
    }
    stored = sum(t.numel() for t in lora.values()) + sum(
        t.numel() for t in load_file(tmp_path / "adapter" / STREAMS).values()
    )
    assert stored == sum(p.numel() for p in trained(model).values())


@pytest.mark.parametrize("host", ["llama", "llama-tied", "opt-pre", "gpt2", "gpt_neox-parallel"])
@torch.no_grad()
def test_a_joint_adapter_alone_loads_in_peft(host: str, tmp_path: Path) -> None:
    model = wrapped(host, merge=False)
    family = model.port.family
    checkpoint.save(model, tmp_path / "adapter", BaseModel("some/base", family, "0" * 64), MADE, torch.float32)
    alone = PeftModel.from_pretrained(HOSTS[host](), str(tmp_path / "adapter")).eval()
    ids = torch.tensor([TEXT])
    found = alone(input_ids=ids, use_cache=False).logits
    wanted = model.logits(model(ids, Pack.text(len(TEXT), torch.tensor([[8]]), 3)).main)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    plain = HOSTS[host]()(input_ids=ids, use_cache=False).logits
    assert float((found - plain).abs().max()) > 0.1


def test_the_manifest_comes_back(adapter: Path, bases: dict[str, Path]) -> None:
    manifest = Manifest.read(adapter)
    assert manifest.config == StreamConfig(**SMALL)
    assert manifest.base.name == str(bases["untied"])
    assert json.loads((adapter / PROVENANCE).read_text()) == MADE
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(bases["untied"])


# --- saving is all or nothing -------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provenance that is no JSON is found late, with the weights written already."""
    monkeypatch.setitem(MADE, "model", object())


def _disk_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, *rest: Any) -> None:
        Path(path).write_bytes(b"half")
        if Path(path).name == STREAMS:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)


def _cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step, once the earlier folder is out of the way."""

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)


@pytest.mark.parametrize("earlier", [False, True], ids=["fresh", "over an earlier one"])
@pytest.mark.parametrize("fault", [_no_json, _disk_full, _cannot_move])
def test_a_failing_save_leaves_no_trace(
    fault: Any, earlier: bool, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, origin = model_on(bases["untied"])
    if earlier:
        checkpoint.save(model, tmp_path / "adapter", origin, MADE)
    before = listing(tmp_path)
    assert bool(before) == earlier
    shake(model, 2)
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises((OSError, TypeError)):
            checkpoint.save(model, tmp_path / "adapter", origin, MADE)
    assert listing(tmp_path) == before
    checkpoint.save(model, tmp_path / "adapter", origin, MADE)
    assert {file.name for file in tmp_path.iterdir()} == {"adapter"}


def test_saving_again_replaces_the_folder(adapter: Path, bases: dict[str, Path]) -> None:
    before = listing(adapter)
    (adapter / "left-over.txt").write_text("from another time")
    model, origin = model_on(bases["untied"])
    shake(model, 2)
    checkpoint.save(model, adapter, origin, MADE, torch.float32)
    after = listing(adapter)
    assert after.keys() == before.keys()
    assert after[LORA] != before[LORA]
    assert after[MANIFEST] == before[MANIFEST]


def test_saving_changes_nothing_about_the_model_and_asks_nobody(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base's name need not be a folder, and a hub is not asked what it is, the second time neither."""

    def asked(*args: Any, **kwargs: Any) -> bool:
        raise AssertionError(f"the hub was asked for {args}")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", asked)
    model, origin = model_on(bases["untied"])
    assert isinstance(model.host, PeftModel)
    config = model.host.peft_config["default"].to_dict()
    told = says(model)
    for name in ("first", "second"):
        checkpoint.save(model, tmp_path / name, BaseModel("owner/base", origin.family, origin.fingerprint), MADE)
    # The card's heading is the folder's name.
    again = {name: content.replace(b"second", b"first") for name, content in listing(tmp_path / "second").items()}
    assert listing(tmp_path / "first") == again
    assert model.host.peft_config["default"].to_dict() == config
    assert all(torch.equal(a, b) for a, b in zip(told.values(), says(model).values(), strict=True))


def test_only_adapter_folders_are_written_over(bases: dict[str, Path], tmp_path: Path) -> None:
    model, origin = model_on(bases["untied"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("only copy")
    with pytest.raises(CheckpointError, match="mine exists and is no adapter folder; choose another"):
        checkpoint.save(model, tmp_path / "mine", origin, MADE)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "only copy"
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="file exists and is no adapter folder"):
        checkpoint.save(model, tmp_path / "file", origin, MADE)
    (tmp_path / "empty").mkdir()
    checkpoint.save(model, tmp_path / "empty", origin, MADE)
    assert {file.name for file in (tmp_path / "empty").iterdir()} == FILES


def test_a_merged_adapter_is_not_saved(bases: dict[str, Path], tmp_path: Path) -> None:
    model, origin = model_on(bases["untied"])
    model.merge()
    with pytest.raises(CheckpointError, match="was merged"):
        checkpoint.save(model, tmp_path / "adapter", origin, MADE)
    assert list(tmp_path.iterdir()) == []
