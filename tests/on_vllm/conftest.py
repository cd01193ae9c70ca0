"""Tests on vLLM: collected where it is installed, which is an environment of its own (`make test-vllm`).

Engines run in this process, eagerly, in float32, with small blocks so that short texts cross their borders.
"""

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

Engine = Callable[..., Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Starts vLLM on a folder: `engine(folder, drafts=3, proposer=..., **its_own_options)`; without drafts, plain."""
    from vllm import LLM

    from forestream.vllm import PROPOSER

    started: list[LLM] = []

    def start(folder: Path, drafts: int = 0, proposer: str = PROPOSER, **changes: Any) -> LLM:
        speculative = {"method": "custom_class", "model": proposer, "num_speculative_tokens": drafts}
        options: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 384,
            "block_size": 32,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 192,  # on a CPU too: a few megabytes of cache instead of a gigabyte
            "distributed_executor_backend": "uni",
            "disable_log_stats": False,
        }
        # Engines of one process share the registry of metrics: counters are told apart by the served name.
        options["served_model_name"] = f"model-{os.urandom(4).hex()}"
        if drafts:
            options["speculative_config"] = speculative
        llm = LLM(**{"model": str(folder), **options, **changes})
        started.append(llm)
        return llm

    yield start
    while started:
        started.pop().llm_engine.engine_core.shutdown()
    gc.collect()
