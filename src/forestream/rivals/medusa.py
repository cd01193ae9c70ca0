"""Medusa: heads on the final state of a finished model, each of which foretells one token further ahead.

Head j is one residual block, x + SiLU(W x + b), and a projection to the vocabulary behind it; x is what the host's own
head reads. It foretells the token that stream j foretells. The model itself is left as it is, so the text is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from forestream import weights
from forestream.acceptance import ROWS, Trace
from forestream.config import JsonConfig, one_of, whole
from forestream.errors import CheckpointError, ConfigError, PromptError
from forestream.model import StreamingLM
from forestream.packing import Pack
from forestream.ports import Port
from forestream.ranking import best_tokens


@dataclass(frozen=True)
class MedusaConfig(JsonConfig):
    """What the heads are.

    Attributes:
        heads: G, how many there are.
        projection: "own" gives every head a projection of its own, V x E numbers that begin as the host's: Medusa as it
            was published. "shared" takes the host's, which stays frozen: smaller by far, and read once for all heads.
    """

    heads: int = 4
    projection: Literal["own", "shared"] = "own"

    def __post_init__(self) -> None:
        whole("heads", self.heads, 1, 64)
        one_of("projection", self.projection, ("own", "shared"))


class MedusaHeads(nn.Module):
    """G heads on the states that a model's last layer leaves.

    Args:
        port: the host; not a part of this module.
        tensors: what `state_dict` gives: blocks.J.weight [E,E] and bias [E], projections.J.weight [V,E]; E is the width
            that the host's head reads.

    Attributes:
        added: numbers that drafting needs beside the model's own.

    Raises:
        CheckpointError: the tensors are not those of such heads on this host.
    """

    def __init__(self, config: MedusaConfig, port: Port, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.port = port
        vocabulary = port.head_size
        block = tensors.get("blocks.0.weight")
        width = port.hidden_size if block is None else block.shape[1]
        own = config.heads if config.projection == "own" else 0
        bias = "projections.0.bias" in tensors
        with torch.device("meta"):  # nothing is drawn at random, nothing is held twice
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(config.heads))
            self.projections = nn.ModuleList(nn.Linear(width, vocabulary, bias) for _ in range(own))
        wanted = self.state_dict()
        wrong = sorted(
            name
            for name in {*wanted, *tensors}
            if name not in wanted or name not in tensors or wanted[name].shape != tensors[name].shape
        )
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} tensors of the heads are missing, unknown or of another shape than {config} has on this "
                f"model, first {wrong[0]!r}"
            )
        self.load_state_dict(dict(tensors), assign=True)
        self.added = sum(tensor.numel() for tensor in tensors.values())

    @staticmethod
    def fresh(config: MedusaConfig, model: StreamingLM) -> MedusaHeads:
        """Float32 heads that say what the model's own head says: blocks that add nothing, copies of its projection.

        Raises:
            ConfigError: the model's head is packed or quantised and cannot be copied.
        """
        source = model.port.output
        weight = getattr(source, "weight", None)
        if type(weight) is not nn.Parameter:
            raise ConfigError("heads begin as copies of the model's own: load it without preparing and quantising it")
        tensors, width = {}, weight.shape[1]
        for head in range(config.heads):
            tensors[f"blocks.{head}.weight"] = torch.zeros(width, width, device=weight.device)
            tensors[f"blocks.{head}.bias"] = torch.zeros(width, device=weight.device)
            if config.projection == "own":
                for name, part in source.state_dict().items():
                    tensors[f"projections.{head}.{name}"] = part.to(torch.float32, copy=True)
        return MedusaHeads(config, model.port, tensors)

    @property
    def count(self) -> int:
        """G."""
        return self.config.heads

    def prepare(self) -> None:
        """Lay the weights out as those of a prepared model are, for decoding only."""
        self.requires_grad_(False)
        if weights.can_pack(self):
            weights.pack(self)

    def block(self, head: int, finished: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
        """What head `head`, counted from 0, projects."""
        return finished + functional.silu(self.blocks[head](finished))

    def project(self, head: int, states: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows V"]:
        """Logits of head `head` from what its block made."""
        if not self.projections:
            return self.port.head(states)
        return self.port.head(states, self.projections[head])

    def forward(self, states: Float[Tensor, "B D"], count: int) -> Float[Tensor, "B G V"]:
        """Logits of the first `count` heads, from final states before the host's norm."""
        finished = self.port.finish(states)
        blocks = torch.stack([self.block(head, finished) for head in range(count)], dim=1)
        if not self.projections:
            return self.port.head(blocks)  # one reading of the host's projection serves all heads
        return torch.stack([self.project(head, blocks[:, head]) for head in range(count)], dim=1)


@torch.inference_mode()
def record(
    model: StreamingLM,
    heads: MedusaHeads,
    prompt: Sequence[int],
    tokens: Sequence[int],
    candidates: int = 32,
    limit: int | None = None,
) -> Trace:
    """What the heads would have drafted at every place of a text. Arguments and errors as in `acceptance.record`."""
    if not prompt:
        raise PromptError("the prompt is empty; give the one that the text was written after")
    if not tokens or candidates < 1:
        raise ConfigError(f"{len(tokens)} tokens and {candidates} candidates; expected at least one of both")
    text = [*prompt, *tokens[:-1]]
    none = torch.empty(1, 0, dtype=torch.long)
    output = model(torch.tensor([text], device=model.device), Pack.text(len(text), none, 0))
    ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    for rows in output.main[0, len(prompt) - 1 :].split(max(ROWS // heads.count, 1)):
        logits = heads(rows, heads.count).flatten(0, 1)  # heads of token 0, then of token 1, ...
        best, scores = best_tokens(logits, candidates)
        ids += best
        log_probs += scores
    return Trace(
        tuple(tokens),
        torch.tensor(ids).unflatten(0, (-1, heads.count)),
        torch.tensor(log_probs).unflatten(0, (-1, heads.count)),
        logits.shape[1],
        len(tokens) if limit is None else limit,
    )
