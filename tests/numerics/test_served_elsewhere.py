"""A joint adapter without forestream: PEFT alone, merged into an ordinary model, and several of them on one base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from forestream import checkpoint
from forestream.bases import fingerprint, load_base, smollm2_folder
from forestream.checkpoint import LORA
from forestream.cli.options import SHIPPED
from forestream.config import DecodeSettings, StreamConfig
from forestream.decode import decode
from forestream.generation import Generator
from forestream.manifest import BaseModel
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.steps import Step, tokens_of
from tiny import tiny_bases
from wrapped import SMALL, shake

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "name[Zizzi], food[Thai] ->"
TOKENS = 24
SETTINGS = DecodeSettings(max_new_tokens=TOKENS, nodes=8)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_bases(tmp_path_factory.mktemp("bases"))


def adapter_on(base: Path, folder: Path, seed: int = 1, **changes: Any) -> Path:
    """A random adapter of float32 weights."""
    host, _ = load_base(str(base))
    origin = BaseModel(str(base), host.config.model_type, fingerprint(host))
    model = StreamingLM(host, StreamConfig(**{**SMALL, **changes}))
    model.add_lora()
    shake(model, seed, scale=0.05)
    checkpoint.save(model, folder, origin, {}, torch.float32)
    return folder


@torch.no_grad()
def written(host: Any, ids: list[int], tokens: int = TOKENS) -> list[int]:
    """What the host library's own greedy generate writes."""
    prompt = torch.tensor([ids])
    out = host.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


@torch.no_grad()
def test_peft_alone_gives_the_main_streams_logits_bit_for_bit(bases: dict[str, Path], tmp_path: Path) -> None:
    for name, base in bases.items():
        adapter = adapter_on(base, tmp_path / name)
        model, tokenizer = checkpoint.load(adapter, merge=False)
        ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
        alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
        wanted = model.logits(model(ids, Pack.text(ids.shape[1], torch.zeros(1, 0, dtype=torch.long), 0)).main)
        assert torch.equal(alone(input_ids=ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_merged_saved_and_loaded_anew_it_writes_the_same_text(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = adapter_on(bases[kind], tmp_path / "adapter")
    generator = Generator.from_pretrained(adapter, dtype=torch.float32, settings=SETTINGS)
    result = generator.generate(PROMPT)
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases[kind]), str(adapter))
    alone.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.tie_word_embeddings == (kind == "tied")
    ids = list(generator.tokenizer(PROMPT)["input_ids"])
    assert written(merged, ids) == list(result.tokens)
    assert written(AutoModelForCausalLM.from_pretrained(bases[kind]).eval(), ids) != list(result.tokens)


@pytest.mark.slow
def test_the_shipped_adapter_is_served_without_forestream(tmp_path: Path) -> None:
    """PEFT, merged, saved in bfloat16's own values, loaded by the host library."""
    adapter, base = ROOT / SHIPPED, smollm2_folder()
    prompt = "name[Blue Spice], eatType[coffee shop], area[city centre] ->"
    generator = Generator.from_pretrained(adapter, dtype=torch.float32, settings=SETTINGS)
    result = generator.generate(prompt)
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter))
    alone.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    found = written(merged, list(generator.tokenizer(prompt)["input_ids"]))
    assert found == list(result.tokens)
    assert "Blue Spice" in result.text


# --- several adapters -----------------------------------------------------------------------------------------


def run(model: StreamingLM, ids: list[int]) -> list[Step]:
    return list(decode(model, ids, SETTINGS))


def trees(steps: list[Step]) -> list[tuple[int, ...]]:
    return [step.tree.tokens for step in steps if step.tree is not None]


def test_two_adapters_are_switched_between_calls(bases: dict[str, Path], tmp_path: Path) -> None:
    """On one base in memory: drafts and text are each time those of the adapter that was read last."""
    folders = [adapter_on(bases["tied"], tmp_path / str(seed), seed) for seed in (1, 2)]
    alone = [checkpoint.load(folder, merge=False)[0] for folder in folders]
    tokenizer = checkpoint.load(folders[0])[1]
    ids = list(tokenizer(PROMPT)["input_ids"])
    wanted = [run(model, ids) for model in alone]
    assert tokens_of(wanted[0]) != tokens_of(wanted[1])
    shared = checkpoint.load(folders[0], merge=False)[0]
    for turn in (0, 1, 0, 0, 1):
        checkpoint.read_weights(shared, folders[turn])
        found = run(shared, ids)
        assert tokens_of(found) == tokens_of(wanted[turn])
        assert trees(found) == trees(wanted[turn])


def test_two_generators_side_by_side_do_not_meet(bases: dict[str, Path], tmp_path: Path) -> None:
    folders = [adapter_on(bases["untied"], tmp_path / str(seed), seed) for seed in (1, 2)]
    both = [Generator.from_pretrained(folder, dtype=torch.float32, settings=SETTINGS) for folder in folders]
    first = [generator.generate(PROMPT).tokens for generator in both]
    assert first[0] != first[1]
    running = [generator.steps(PROMPT) for generator in both]
    steps: list[list[Step]] = [[], []]
    while any(still := [next(own, None) for own in running]):
        for own, step in zip(steps, still, strict=True):
            own += [step] if step is not None else []
    assert [tokens_of(own) for own in steps] == first


def test_an_adapter_acts_where_it_was_trained_and_nowhere_else(bases: dict[str, Path], tmp_path: Path) -> None:
    """Lossless adapters leave the trunk's layers alone; no adapter touches embeddings, norms or the head."""
    from peft.tuners.lora import LoraLayer

    for mode, layers in (("joint", range(4)), ("lossless", range(2, 4))):
        folder = adapter_on(bases["untied"], tmp_path / mode, mode=mode)
        model, _ = checkpoint.load(folder, merge=False)
        touched = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
        inside = [f"layers.{i}." for i in layers]
        assert len(touched) == 7 * len(inside)
        assert all(any(place in name for place in inside) and name.endswith("_proj") for name in touched)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["modules_to_save"] is None
        assert (folder / LORA).is_file()
