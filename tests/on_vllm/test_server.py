"""`forestream serve --engine vllm` and the OpenAI client: whole texts and streamed ones are those of plain decoding."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from forestream.baseline import plain
from forestream.config import DecodeSettings
from forestream.steps import tokens_of
from served import STREAMS, exported
from tiny import tiny_tokenizer
from wrapped import prompt

TOKENS = 40
PATIENCE = 900  # seconds; a busy machine takes its time

PROMPTS = [prompt(length, 90, seed=length) for length in (5, 30, 33, 64)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, list[tuple[int, ...]]]]:
    """Address, model's name, and what it has to write behind each prompt."""
    folder, model = exported(tmp_path_factory.mktemp("server"))
    wanted = [tuple(tokens_of(list(plain(model, one, DecodeSettings(max_new_tokens=TOKENS))))) for one in PROMPTS]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "forestream", "serve", "--engine", "vllm", "--model", str(folder), "--eager"]
    further = ["--max-model-len", "384", "--block-size", "32", "--max-num-seqs", "4"]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = (folder.parent / "log").open("w")
    server = subprocess.Popen(
        [*command, "--port", str(port), "--", *further], stdout=log, stderr=subprocess.STDOUT, env=environment
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + PATIENCE
        while True:
            assert server.poll() is None, (folder.parent / "log").read_text()[-4000:]
            assert time.monotonic() < until, "the server did not come up"
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
                    assert answer.status == 200
                    break
            except OSError:
                time.sleep(1)
        yield address, folder.name, wanted
    finally:
        server.terminate()
        server.wait(60)
        log.close()


@pytest.mark.slow
def test_clients_read_the_texts_of_plain_decoding(served: tuple[str, str, list[tuple[int, ...]]]) -> None:
    address, name, wanted = served
    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=PATIENCE)
    tokenizer = tiny_tokenizer()
    texts = [tokenizer.decode(text, skip_special_tokens=True) for text in wanted]
    law = {"model": name, "max_tokens": TOKENS, "temperature": 0.0, "extra_body": {"ignore_eos": True}}

    def whole(one: tuple[int, ...]) -> str:
        return client.completions.create(prompt=list(one), **law).choices[0].text

    def streamed(one: tuple[int, ...]) -> str:
        return "".join(part.choices[0].text for part in client.completions.create(prompt=list(one), stream=True, **law))

    with ThreadPoolExecutor(4) as clients:
        for ask in (whole, streamed):
            assert list(clients.map(ask, PROMPTS)) == texts
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    places = re.findall(r'spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)"', metrics)
    assert sorted(set(places)) == [str(place) for place in range(STREAMS)]
