"""A node of Ray dies under load: requests go on, and its handoffs are loaded on the other one."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.ray_cluster import RayCluster, with_ray
from support.shared_stores import BINARIES, store_server
from support.watched_streams import wait_for

pytestmark = [
    with_ray,
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BINARIES["valkey"] is None, reason="no valkey-server is installed"),
]
REQUESTS = 500
CLIENTS = 8
SESSIONS = 40
GONE_WITHIN_S = 20
DOCUMENT = " ".join(f"The code of room {number} is {number * 7919 % 9973}." for number in range(60))
FAKE_ENGINES = [{"name": name, "model": "fake", "handoff": True} for name in ("alpha", "slow")]
REAL_ENGINE = {
    "name": "alpha",
    "model": "smollm2",
    "handoff": True,
    "kv_cache_memory": "192MiB",
    "args": {
        "dtype": "float32",
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "block_size": 32,
    },
}


@contextmanager
def sharing(folder: Path, app: str, engines: list[dict[str, Any]]) -> Iterator[RayCluster]:
    """Two nodes, a gateway on each, with one store for both."""
    secret = folder / "secret"
    secret.write_text("the secret that all nodes of this cluster have")
    with ExitStack() as stack:
        server = stack.enter_context(store_server("valkey", folder))
        environment = {
            "BATON_AUTH__ALLOW_UNAUTHENTICATED": "true",
            "BATON_ENGINES": json.dumps(engines),
            "BATON_HANDOFFS__SHARED": server.url,
            "BATON_HANDOFFS__SHARED_SECRET_FILE": str(secret),
            "BATON_HANDOFFS__AUTO": "off",
            "BATON_HANDOFFS__AUDIT": "0",
            "BATON_RESPONSES__BUDGET": "0",
            "BATON_LOG_FORMAT": "json",
        }
        cluster = stack.enter_context(RayCluster(folder / "log", environment))
        cluster.run(app, replicas=2, per_node=1)
        yield cluster


def ask(client: httpx.Client, session: str, **body: Any) -> httpx.Response:
    asked = {"model": "alpha", "temperature": 0, "max_tokens": 4} | body
    return client.post("/v1/completions", json=asked, headers={"x-session-id": session})


def session_on(client: httpx.Client, node: str) -> str:
    """A session whose requests come to a node."""
    found: list[str] = []

    def look() -> bool:
        for number in range(SESSIONS):
            answer = ask(client, str(number), prompt="Hello", max_tokens=1)
            if answer.headers.get("x-node") == node:
                found.append(str(number))
                return True
        return False

    wait_for(look, 30)
    return found[0]


def load(url: str, seen: Counter[str], over: Callable[[], bool], number: int) -> None:
    """Requests one after the other, each on a connection of its own, until it is over."""
    while not over():
        with httpx.Client(base_url=url, timeout=60) as client:
            try:
                answer = ask(client, f"load-{number}-{seen.total()}", prompt="one two three")
                seen[str(answer.status_code) if answer.is_success else answer.text] += 1
            except httpx.HTTPError as error:
                seen[type(error).__name__] += 1


def killed_under_load(cluster: RayCluster) -> dict[str, Any]:
    """What is saved on the second node is loaded on the first, once the second was killed."""
    seen: Counter[str] = Counter()
    after: Counter[str] = Counter()
    killed, enough = threading.Event(), threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool, cluster.client(timeout=120) as client:
        session = session_on(client, "two")
        saved = ask(client, session, prompt=DOCUMENT, handoff={"save": True})
        assert saved.headers["x-node"] == "two"
        handoff = saved.json()["handoff"]
        wait_for(lambda: client.get(f"/v1/handoffs/{handoff['id']}").json()["state"] == "ready", 60)
        plain = ask(client, session, prompt=" The code of room 7 is", handoff={"from": handoff["id"]}).json()
        time.sleep(1)  # its KV is pushed
        processes = [psutil.Process(pid) for pid in cluster.tell("of_second")]
        try:
            for number in range(CLIENTS):
                pool.submit(load, cluster.url, seen, killed.is_set, number)
            wait_for(lambda: seen.total() >= 50, 120)
            began = time.monotonic()
            cluster.tell("kill_second")
            killed.set()
            for number in range(CLIENTS):
                pool.submit(load, cluster.url, after, enough.is_set, number)
            answer = ask(client, session, prompt=" The code of room 7 is", handoff={"from": handoff["id"]})
            took = time.monotonic() - began
            assert answer.status_code == 200, answer.text
            wait_for(lambda: after.total() >= REQUESTS, 200)
        finally:
            killed.set()
            enough.set()
    source: dict[str, Any] = answer.json()["handoff"]["source"]
    print(f"loaded {took:.1f} s after the death: {source}; then {dict(after)}; before {dict(seen)}")
    assert answer.headers["x-node"] == "one"
    assert answer.json()["choices"][0]["text"] == plain["choices"][0]["text"]
    assert set(after) == {"200"}
    _gone, left = psutil.wait_procs(processes, GONE_WITHIN_S)
    assert not left, left
    return source


def test_a_node_that_dies_fails_no_new_request(tmp_path: Path) -> None:
    """With fake engines, whose handoffs carry tokens."""
    with sharing(tmp_path, "support.ray_replicas:fake", FAKE_ENGINES) as cluster:
        killed_under_load(cluster)


@pytest.mark.engine
def test_what_a_dead_node_computed_is_loaded_on_another(tmp_path: Path) -> None:
    with sharing(tmp_path, "support.ray_replicas:real", [REAL_ENGINE]) as cluster:
        source = killed_under_load(cluster)
        assert (source["outcome"], source["loaded_tokens"]) == ("loaded", source["tokens"] - 1)
