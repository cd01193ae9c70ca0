"""Drafts for all requests of a step by one pass of their streams through the target's own top layers.

With a path sampler the drafts of a request follow from each other: one small step for each place of the chains.

A stream writes its keys and values where the next pass writes those of the tokens that are then verified. So what a
stream may see (the text up to its anchor, and the streams before it) is plain causal attention over the request's own
blocks, and needs neither a mask nor memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from forestream.errors import ConfigError
from forestream.vllm import check_version
from forestream.vllm.exported import KEY, check_drafts, stream_config
from forestream.vllm.models import Pass, Streaming
from forestream.vllm.stream_pass import StreamPass


@dataclass(frozen=True)
class Anchors:
    """The requests that draft in a step, each with the last token whose keys and values are final.

    Attributes:
        rows: places of the requests in the batch.
        places: the anchors' positions in their texts.
        counts: streams of each, at least one.
    """

    rows: list[int]
    places: list[int]
    counts: list[int]


def anchored(
    sampled: Sequence[Sequence[int]], written: Sequence[int], lengths: Sequence[int], block_size: int, drafts: int
) -> Anchors:
    """Which requests draft, from where, and how many tokens.

    Streams need slots behind the anchor. The blocks of a request hold those up to the end of the last one that the pass
    wrote to; whoever has fewer slots left there than drafts to make makes fewer.

    Args:
        sampled: tokens that the pass yielded for each request; none while a prompt is being read.
        written: length of each text, those tokens included.
        lengths: slots that the pass used of each request, rejected drafts included.
        drafts: most tokens to draft.
    """
    rows, places, counts = [], [], []
    for row, tokens in enumerate(sampled):
        if not tokens:
            continue
        anchor = int(written[row]) - 2  # the last token sampled has no keys and values yet
        end = -(-int(lengths[row]) // block_size) * block_size
        if (count := min(drafts, end - 1 - anchor)) > 0:
            rows.append(row)
            places.append(anchor)
            counts.append(count)
    return Anchors(rows, places, counts)


class StreamProposer:
    """vLLM's `custom_class` proposer: built with its configuration, then called after every step.

    Raises:
        ConfigError: more drafts are asked for than there are streams, or the version of vLLM is not the tested one.
        CheckpointError: the model is no exported one.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        check_version()
        self.vllm_config = vllm_config
        self.drafts: int = vllm_config.speculative_config.num_speculative_tokens
        name: str = vllm_config.model_config.model
        self.config = stream_config(getattr(vllm_config.model_config.hf_config, KEY, None), name)
        check_drafts(self.config, self.drafts)
        schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        most = vllm_config.scheduler_config.max_num_seqs
        self._by_load = build_dynamic_sd_schedule_lookup(schedule, most, self.drafts) if schedule else None
        self.target: Any = None
        self.stream_pass: StreamPass | None = None
        self._builder: Any = None
        self._block_size = 0

    def load_model(self, target_model: Any) -> None:
        """Take the loaded target, whose layers and head the streams run through; their pass is compiled here."""
        if not isinstance(target_model, Streaming):
            raise ConfigError(
                f"the target is a {type(target_model).__name__}; expected a model that `forestream export vllm` wrote"
            )
        self.target = target_model
        self.target.restrict()
        with set_model_tag("streams"):
            self.stream_pass = StreamPass(vllm_config=self.vllm_config, target=target_model)
            self.stream_pass.warm(max(2, self.drafts))  # of one row a compiler would make a special case

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of every request of the step that has just been sampled: 0 to `drafts` tokens each, fewer by load."""
        drafted: list[list[int]] = [[] for _ in sampled_token_ids]
        assert self.stream_pass is not None
        last: Pass | None = self.target.last
        drafts = self.drafts if self._by_load is None else self._by_load[len(drafted)]
        if last is None or drafts == 0:
            return drafted
        builder = self._building(last.trunk.device)
        lengths = last.attention.seq_lens.tolist()
        anchors = anchored(sampled_token_ids, num_tokens_no_spec.tolist(), lengths, self._block_size, drafts)
        if not anchors.rows:
            return drafted
        device = last.trunk.device
        rows, places, counts = (torch.tensor(own) for own in (anchors.rows, anchors.places, anchors.counts))
        of = torch.repeat_interleave(torch.arange(len(rows)), counts)  # the anchor of every stream
        ends = counts.cumsum(0)
        ahead = torch.arange(len(of)) - (ends - counts)[of] + 1  # 1, 2, ... for each anchor
        slots = places[of] + ahead
        blocks = last.attention.block_table[rows.to(device)]
        mapping = blocks[of.to(device), (slots // self._block_size).to(device)].long() * self._block_size
        mapping = mapping + (slots % self._block_size).to(device)
        begins = torch.cat([torch.zeros(1, dtype=torch.long), ends]).int()
        told = builder.build(
            common_prefix_len=0,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=begins.to(device),
                query_start_loc_cpu=begins,
                seq_lens=(places + 1 + counts).int().to(device),
                num_reqs=len(rows),
                num_actual_tokens=len(of),
                max_query_len=int(counts.max()),
                max_seq_len=int((places + 1 + counts).max()),
                block_table_tensor=blocks,
                slot_mapping=mapping,
                causal=True,
            ),
        )
        states = self._started(last, rows, places, counts)
        positions = slots if self.config.positions == "ahead" else places[of]
        names = self.target.attention_names
        with set_forward_context(
            dict.fromkeys(names, told),
            self.vllm_config,
            num_tokens=len(of),
            slot_mapping=dict.fromkeys(names, mapping),
            skip_compiled=len(of) > self.vllm_config.scheduler_config.max_num_batched_tokens,  # code is for no more
        ):
            finished = self.stream_pass(states, positions.to(device))
        roots = torch.tensor([sampled_token_ids[row][-1] for row in anchors.rows])
        for row, chain in zip(anchors.rows, self._chains(finished, roots.to(device), counts), strict=True):
            drafted[row] = chain
        return drafted

    def _chains(self, states: Tensor, roots: Tensor, counts: Tensor) -> list[list[int]]:
        """The chain behind each of n roots [n], from the final states of its streams, anchor by anchor [S, D]."""
        if self.target.sampler is None:
            best = self.target.best(states)
        else:
            best = roots.new_empty(len(states))
            before, begins = roots.clone(), counts.cumsum(0) - counts
            for level in range(int(counts.max())):
                going = (counts > level).nonzero()[:, 0]
                places, going = (begins[going] + level).to(roots.device), going.to(roots.device)
                before[going] = self.target.best(self.target.behind(states[places], before[going]))
                best[places] = before[going]
        return [chain.tolist() for chain in best.split(counts.tolist())]

    def _started(self, last: Pass, rows: Tensor, places: Tensor, counts: Tensor) -> Tensor:
        """The streams' states at the entry of their layers, anchor by anchor, [S, D]."""
        device = last.trunk.device
        begins = last.attention.query_start_loc[rows.to(device)].long()
        index = begins + places.to(device) - last.positions[begins]
        most = int(counts.max())
        states = self.target.start(last.trunk[index][:, None], most)
        return states[(torch.arange(most) < counts[:, None]).to(device)]

    def _building(self, device: torch.device) -> Any:
        """What makes the attention's metadata; its block size is known once vLLM has laid out its cache."""
        if self._builder is None:
            names = self.target.attention_names
            attention = next(iter(self.target.stream_layers)).self_attn.attn
            spec = attention.get_kv_cache_spec(self.vllm_config)
            self._builder = attention.get_attn_backend().get_builder_cls()(spec, names, self.vllm_config, device)
            self._block_size = spec.block_size
        return self._builder
