"""The adapter that the repository carries, on vLLM in float32: the same drafts and texts, and drafts that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forced import Forced
from forestream import checkpoint
from forestream.acceptance import record, simulate
from forestream.cli.options import SHIPPED
from forestream.drafting import FullTree
from forestream.export import export_vllm
from forestream.vllm import PROPOSER
from forestream.vllm.server import options
from served import FORCED, chains, counted, texts

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 24
PROMPTS = (
    "name[Blue Spice], eatType[coffee shop], area[city centre] ->",
    "name[The Punter], food[Italian], priceRange[cheap], familyFriendly[yes] ->",
)


@pytest.mark.slow
def test_the_shipped_adapter_drafts_and_writes_what_it_does_in_our_own_engine(tmp_path: Path, engine: Any) -> None:
    export_vllm(ROOT / SHIPPED, tmp_path / "model", dtype=torch.float32)
    model, tokenizer = checkpoint.load(ROOT / SHIPPED)
    prompts = [tuple(tokenizer(one)["input_ids"]) for one in PROMPTS]
    wanted = texts(engine(tmp_path / "model"), prompts, TOKENS)
    drafts = model.stream_config.streams
    told = options(tmp_path / "model")
    assert told["speculative_config"].pop("model") == PROPOSER
    told["speculative_config"]["model"] = FORCED
    streaming = engine(tmp_path / "model", **told, block_size=128, num_gpu_blocks_override=32)
    Forced.expect([], model.port.config.vocab_size)
    assert texts(streaming, prompts, TOKENS) == wanted
    assert "Blue Spice" in tokenizer.decode(wanted[0])
    assert model.sampler is not None
    assert model.vocabulary is not None
    expected = 0
    for start, text in zip(prompts, wanted, strict=True):
        for behind, chain in chains(model, start, text).items():
            own = Forced.seen.get(behind, ())
            assert list(own) == chain[: len(own)]
        expected += simulate(record(model, start, text, candidates=1), FullTree(1), drafts).passes
    places = counted(streaming, "spec_decode_num_accepted_tokens_per_pos")
    passes = counted(streaming, "spec_decode_num_drafts")[0]
    assert len(places) == drafts
    assert places[0] > passes / 2  # untrained streams are right once in 49,152 times
    assert passes == expected  # the texts end within one block, so no draft is cut short
