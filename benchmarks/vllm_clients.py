"""Tokens a second of vLLM by the number of clients: plain, with n-gram drafts, and with an adapter's streams.

    .venv-vllm/bin/python benchmarks/vllm_clients.py --data-dir data --json benchmarks/results/vllm-e2e-float32.json

All engines are in this process and serve the same exported folder. So many requests are kept in flight as there are
clients: when a text ends, its client asks for the next one. Engines take turns, and who begins changes from round to
round. Greedy texts with drafts are compared with plain vLLM's. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

from forestream.vllm.server import cpu_settings, options

SETTINGS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PLAIN: Final = "vllm"
NGRAM: Final = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
"""vLLM's settings of drafts that repeat what stood behind the same words before."""

Text = tuple[int, ...]


@dataclass
class Served:
    """One engine, and what it was seen to do.

    Attributes:
        llm: vLLM's engine.
        drafts: most tokens drafted at a time.
        speeds: tokens a second of every round, by the number of clients.
        waits: seconds from asking to the last token, of every text, by the number of clients.
        texts: what it wrote, by the number of clients; of the last round.
        brought: how many steps brought a text 1, 2, ... tokens, those of prompts apart; by the number of clients.
    """

    llm: Any
    drafts: int
    speeds: dict[int, list[float]] = field(default_factory=dict)
    waits: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[int, list[Text]] = field(default_factory=dict)
    brought: dict[int, Counter[int]] = field(default_factory=dict)

    def serve(self, prompts: Sequence[Text], clients: int, tokens: int) -> None:
        """All prompts once, `clients` at a time."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        law = SamplingParams(temperature=0.0, max_tokens=tokens)
        texts: list[Text] = [()] * len(prompts)
        asked: dict[str, tuple[int, float]] = {}
        brought = self.brought.setdefault(clients, Counter())
        waiting = iter(range(len(prompts)))

        def ask() -> None:
            if (place := next(waiting, None)) is not None:
                asked[f"text {place}"] = place, perf_counter()
                engine.add_request(f"text {place}", {"prompt_token_ids": list(prompts[place])}, law)

        began = perf_counter()
        for _ in range(clients):
            ask()
        while asked:
            for output in engine.step():
                place, since = asked[output.request_id]
                text = tuple(output.outputs[0].token_ids)
                if texts[place]:
                    brought[len(text) - len(texts[place])] += 1
                texts[place] = text
                if output.finished:
                    del asked[output.request_id]
                    self.waits.setdefault(clients, []).append(perf_counter() - since)
                    ask()
        seconds = perf_counter() - began
        self.speeds.setdefault(clients, []).append(sum(map(len, texts)) / seconds)
        self.texts[clients] = texts

    def margin(self, start: Text, text: Text, other: Text) -> float | None:
        """How much likelier the engine calls the first token of `text` that `other` has not, in nats behind `start`.

        None: the token that `other` has in its place is not among the 20 likeliest.
        """
        from vllm import SamplingParams

        place = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
        if place is None:  # one goes on where the other ends
            return None
        law = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        asked = {"prompt_token_ids": [*start, *text[:place]]}
        (answer,) = self.llm.generate([asked], law, use_tqdm=False)
        (likely,) = answer.outputs[0].logprobs
        pair = [likely.get(token) for token in (text[place], other[place])]
        return None if None in pair else abs(pair[0].logprob - pair[1].logprob)


def main() -> None:
    given = arguments()
    if missing := {name: value for name, value in (SETTINGS | cpu_settings()).items() if name not in os.environ}:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})  # libraries read them early
    from vllm import __version__

    from forestream import provenance
    from forestream.data import prompts_of
    from forestream.tasks import get_task

    made = provenance.collect(sys.argv[1:], program="benchmarks/vllm_clients.py")
    with TemporaryDirectory() as folder:
        model = exported(given, Path(folder) / "model")
        engines = started(given, model)
        task = get_task(given.task)
        tokenizer = engines[PLAIN].llm.get_tokenizer()
        prompts = prompts_of(tokenizer, task.grouped(given.split, given.data_dir)[: given.limit])
        tokens = given.max_new_tokens or task.max_new_tokens
        for one in engines.values():  # not counted: first passes of every size
            for clients in given.clients:
                Served(one.llm, one.drafts).serve(prompts[: 2 * clients], clients, tokens)
        for round_ in range(given.rounds):
            for clients in given.clients:
                for name in [*engines][:: -1 if round_ % 2 else 1]:
                    engines[name].serve(prompts, clients, tokens)
                    print(round_, clients, name, f"{engines[name].speeds[clients][-1]:.1f}", flush=True)
        record = {
            "provenance": made,
            "settings": {
                "task": given.task,
                "split": given.split,
                "prompts": len(prompts),
                "max_new_tokens": tokens,
                "dtype": given.dtype,
                "adapter": given.adapter.resolve().name,
                "vllm": __version__,
                "eager": given.eager,
                "drafts": given.drafts,
                "rows": given.rows,
                "ngram": dict(zip(NGRAM, given.ngram, strict=True)),
                "rounds": given.rounds,
            },
            "served": {str(clients): summary(engines, clients, prompts) for clients in given.clients},
        }
        print(json.dumps(record["served"], indent=1))
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n")
        while engines:
            engines.popitem()[1].llm.llm_engine.engine_core.shutdown()
        gc.collect()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, default=Path("adapters/smollm2-135m-e2e"))
    parser.add_argument("--task", default="e2e")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--clients", type=numbers, default=(1, 4, 8))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--drafts", type=int, help="tokens drafted at a time; one a stream by default")
    parser.add_argument("--rows", type=int, help="most tokens that a step verifies, prompts apart")
    parser.add_argument("--ngram", type=numbers, default=(4, 4, 2), help=",".join(NGRAM))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def exported(given: argparse.Namespace, folder: Path) -> Path:
    import torch

    from forestream.export import export_vllm

    export_vllm(given.adapter, folder, dtype=getattr(torch, given.dtype))
    return folder


def started(given: argparse.Namespace, model: Path) -> dict[str, Served]:
    """The engines, by name."""
    from vllm import LLM

    ngram = {"method": "ngram", **dict(zip(NGRAM, given.ngram, strict=True))}
    streams = options(model, given.drafts, rows=given.rows)
    # Numba, which n-gram drafts load, makes vLLM 0.32 fail to start a further engine, so they go last.
    told = {PLAIN: {}, "vllm+forestream": streams, "vllm+ngram": {"speculative_config": ngram}}
    engines = {}
    for name, own in told.items():
        llm = LLM(
            **{
                **options(model, drafts=0),
                **own,
                "enforce_eager": given.eager,
                "max_model_len": 1024,
                "max_num_seqs": max(given.clients),
                "num_gpu_blocks_override": 16 * max(given.clients),
                "distributed_executor_backend": "uni",
                "disable_log_stats": False,
                "enable_prefix_caching": False,  # every round would find its prompts read
                "served_model_name": name,  # engines of one process share the registry of metrics
            }
        )
        drafts = own.get("speculative_config", {}).get("num_speculative_tokens", 0)
        engines[name] = Served(llm, drafts)
    return engines


def summary(engines: dict[str, Served], clients: int, prompts: Sequence[Text]) -> dict[str, Any]:
    """What the engines did with so many clients, beside plain vLLM in the same rounds."""
    plain = engines[PLAIN]
    found = {}
    for name, one in engines.items():
        speeds = one.speeds[clients]
        ratios = sorted(own / base for own, base in zip(speeds, plain.speeds[clients], strict=True))
        waits = sorted(one.waits[clients])
        row: dict[str, Any] = {
            "tokens_per_second": {"median": round(median(speeds), 1), "all": [round(speed, 1) for speed in speeds]},
            "over_plain": {"median": round(median(ratios), 3), "min": round(ratios[0], 3), "max": round(ratios[-1], 3)},
            "seconds_a_text": {"p50": round(median(waits), 3), "p95": round(waits[int(0.95 * (len(waits) - 1))], 3)},
        }
        texts, wanted = one.texts[clients], plain.texts[clients]
        unequal = [place for place, (own, other) in enumerate(zip(texts, wanted, strict=True)) if own != other]
        row["equal_texts"] = len(texts) - len(unequal)
        if unequal:
            margins = [plain.margin(prompts[place], wanted[place], texts[place]) for place in unequal]
            row["margins"] = [None if margin is None else round(margin, 4) for margin in margins]
        brought = one.brought[clients]
        row["steps"] = brought.total()
        row["accepted_by_place"] = [
            sum(count for tokens, count in brought.items() if tokens > place) for place in range(1, one.drafts + 1)
        ]
        row["mean_acceptance_length"] = round(1 + sum(row["accepted_by_place"]) / max(brought.total(), 1), 3)
        found[name] = row
    return found


if __name__ == "__main__":
    main()
