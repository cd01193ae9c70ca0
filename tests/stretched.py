"""Hosts whose rotary frequencies change with the length of the text."""

from typing import Any

from forestream.model import StreamingLM
from wrapped import wrapped
from zoo import custom

BORDER = 24


def stretched(kind: str) -> StreamingLM:
    """A host whose rotary frequencies change once a call reaches position BORDER."""
    if kind == "dynamic":
        rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        host = custom("llama", num_key_value_heads=2, max_position_embeddings=BORDER, rope_parameters=rope)
    else:
        rope = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 6,
            "long_factor": [4.0] * 6,
            "original_max_position_embeddings": BORDER,
        }
        host = custom("phi3", num_key_value_heads=2, rope_parameters=rope, original_max_position_embeddings=BORDER)
    return wrapped(host)
