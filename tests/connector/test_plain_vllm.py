"""The connector under plain vLLM's own server: what an answer carries is what the next request sends, verbatim."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from offline_engines import OWN, Answer, prompt, same

from baton.models.store import ModelStore
from baton.settings import load_settings
from baton_kv.contract import PARAMS_KEY, new_key, params_to_load, params_to_save

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
README = Path(__file__).parents[2] / "connectors" / "README.md"
READY_WITHIN_S = 120


class PlainServer:
    """`python -m vllm.entrypoints.openai.api_server` with the command of connectors/README.md."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, store: Path) -> None:
        self.process = process
        self.url = url
        self._store = store

    def ask(self, *asked: tuple[list[int], int, dict[str, Any] | None]) -> list[Answer]:
        """Prompts, tokens to generate, transfer parameters."""
        return [self._ask(*one) for one in asked]

    def _ask(self, tokens: list[int], count: int, params: dict[str, Any] | None) -> Answer:
        body: dict[str, Any] = {"model": "m", "prompt": tokens, "max_tokens": count, "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        if params is not None:
            body["kv_transfer_params"] = params
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
        (choice,) = answer["choices"]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "cached": (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
            "params": answer["kv_transfer_params"],
        }

    def saved(self, params: dict[str, Any]) -> Path:
        path = self._store / "entries" / f"{params[PARAMS_KEY]['load']}.kv"
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, "not saved"
            time.sleep(0.005)
        return path


def shown_config(store: Path) -> str:
    """The `--kv-transfer-config` that the README shows, with another folder."""
    found = re.search(r"--kv-transfer-config '(\{.*?\})'", README.read_text(), re.DOTALL)
    assert found
    return found[1].replace("file:/dev/shm/relay", f"file:{store}")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain") / "store"


@pytest.fixture(scope="module")
def first(store: Path) -> Iterator[PlainServer]:
    """Without prefix caching, so that nothing but the connector can bring KV."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", ModelStore(load_settings().models_folder).resolve("smollm2")]
    command += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--block-size", "32", "--no-enable-prefix-caching", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(192 * 1024 * 1024), "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", shown_config(store)]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = os.environ | quiet | {"VLLM_CPU_OMP_THREADS_BIND": cores}
    with (store.parent / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    server = PlainServer(process, f"http://127.0.0.1:{port}", store)
    try:
        wait_until_ready(server, store.parent / "server.log")
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_until_ready(server: PlainServer, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        assert server.process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if httpx.get(f"{server.url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)


def handed_over(server: PlainServer, length: int, seed: int) -> tuple[list[int], dict[str, Any]]:
    """A's whole context, and what B sends to start from it."""
    asked = prompt(length, seed)
    (answer,) = server.ask((asked, 5, params_to_save()))
    server.saved(answer["params"])
    return asked + answer["tokens"], answer["params"]


@pytest.mark.parametrize("length", [1, 27, 128, 319])
def test_b_sends_back_what_a_s_answer_carried(first: PlainServer, length: int) -> None:
    context, params = handed_over(first, length, seed=length)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    (relayed,) = first.ask(([*context, *OWN], 8, params))
    same(relayed, plain)
    assert (plain["cached"], relayed["cached"]) == (0, len(context) - 1)


def test_a_wrong_prefix_is_never_used(first: PlainServer) -> None:
    context, params = handed_over(first, 100, seed=6)
    other = [*context[:50], 7, *context[51:], *OWN]
    (plain,) = first.ask((other, 8, None))
    (relayed,) = first.ask((other, 8, params))
    same(relayed, plain)
    assert relayed["cached"] == 50
    (elsewhere,) = first.ask(([8, *context, *OWN], 4, params))
    assert elsewhere["cached"] == 0


@pytest.mark.parametrize(
    "params", [{PARAMS_KEY: {"load": "x"}}, {PARAMS_KEY: 7}, params_to_load(new_key("local"))]
)
def test_what_cannot_be_loaded_is_computed(first: PlainServer, params: dict[str, Any]) -> None:
    (plain, relayed) = first.ask((prompt(60, 8), 6, None), (prompt(60, 8), 6, params))
    same(relayed, plain)
    assert relayed["cached"] == 0


def test_a_corrupt_entry_is_computed_anew(first: PlainServer, store: Path) -> None:
    context, params = handed_over(first, 300, seed=9)
    path = store / "entries" / f"{params[PARAMS_KEY]['load']}.kv"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    for _ in range(3):
        (relayed,) = first.ask(([*context, *OWN], 8, params))
        same(relayed, plain)
    assert not path.exists()
    assert len(list((store / "quarantine").iterdir())) == 1


def test_a_wrong_block_would_be_noticed_here(first: PlainServer, store: Path) -> None:
    """The test of the tests: KV of another prompt under this one's key must change the answer."""
    from baton_kv.entry import Description, Entry, write
    from baton_kv.secret import store_secret
    from baton_kv.stores.file import FileStore

    context, params = handed_over(first, 200, seed=11)
    other, others = handed_over(first, 200, seed=12)
    secret, files = store_secret(store), FileStore(store)
    key, wrong = params[PARAMS_KEY]["load"], others[PARAMS_KEY]["load"]
    with files.open(wrong) as data:
        entry = Entry(data, wrong, secret)
        size = entry.description.blocks * entry.description.block_bytes
        layers = [
            bytearray(b"".join(bytes(entry.chunk(layer, index)) for index in range(entry.description.chunks)))
            for layer in range(entry.description.layers)
        ]
    assert all(len(layer) == size for layer in layers)
    described = Description(**(vars(entry.description) | {"key": key}))
    step = described.block_bytes
    planted = write(
        described,
        context,
        lambda layer: [memoryview(layers[layer])[at : at + step] for at in range(0, size, step)],
        secret,
    )
    files.put(key, planted)
    (plain,) = first.ask(([*context, *OWN], 8, None))
    (relayed,) = first.ask(([*context, *OWN], 8, params))
    assert len(other) == len(context)
    assert relayed["cached"] == len(context) - 1
    assert relayed["logprobs"] != pytest.approx(plain["logprobs"], abs=2e-3)
