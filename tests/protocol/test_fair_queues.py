"""One tenant floods a queue with work that does not end; another tenant's request starts all the same.

Every test measures first how long the other tenant's request takes on an idle gateway.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from geo.sources.hosts import Handler, hosting, page
from support import image_files
from support.gateways import FakeGateway, run_fake
from support.plugin_gateways import until
from support.sample_plugins import Current, Files, plugin

from baton.admission.api_keys import create_key
from baton.engines.backend import ImageInput
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.http import request as request_body
from baton.images import reader
from baton.library.handoff import Handoff
from baton.library.holdings import THREADS
from baton.library.tiers import Here

pytestmark = pytest.mark.fault("E13")
LIMIT_S = 10.0
"""Two seconds are promised; what waits for the flood waits for a minute, or for good."""
PATIENCE_S = 40.0
"""How long a client waits in these tests before it counts as never served."""
SMALL = image_files.file_of(image_files.image())
GREEDY = image_files.file_of(image_files.image(40, 40))
LOOKS = ImageInput(limit=3)
STREAM = {"model": "a", "prompt": "one two", "max_tokens": 400, "stream": True}
SHORT = {"model": "a", "prompt": "one two", "max_tokens": 1}
JSON = {"content-type": "application/json"}


@dataclass
class Tenants:
    """A gateway with the keys of two tenants.

    Attributes:
        gateway: the gateway.
        greedy: the key of the tenant that floods.
        modest: the key of the other.
    """

    gateway: FakeGateway
    greedy: str
    modest: str

    def shown(self, series: str) -> float:
        """The value of one series in the metrics."""
        page = httpx.get(
            f"{self.gateway.metrics_url}/metrics", headers={"authorization": f"Bearer {self.modest}"}
        ).text
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"{series} "))

    def waits(self, series: str, count: int) -> bool:
        """Whether so many are in a series before long."""
        return until(lambda: self.shown(series) == count, 20)

    @contextmanager
    def flood(
        self, count: int, path: str, body: bytes, headers: dict[str, str], more: int = 0
    ) -> Iterator[None]:
        """So many requests of the greedy tenant, each on a connection of its own, until the block ends.

        Args:
            count: of requests.
            path: what they ask.
            body: of each.
            headers: of each.
            more: bytes of the body that are announced and do not come.
        """
        where = urlsplit(self.gateway.url)
        lines = {"host": where.netloc, "authorization": f"Bearer {self.greedy}", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        said = f"POST {path} HTTP/1.1\r\n{head}content-length: {len(body) + more}\r\n\r\n".encode() + body
        with ExitStack() as connections:
            for _ in range(count):
                line = connections.enter_context(socket.create_connection((where.hostname, where.port)))
                line.sendall(said)
            yield

    def ask(self, path: str, body: bytes, headers: dict[str, str] = JSON) -> float:
        """The seconds one request of the modest tenant takes; it must be answered."""
        began = time.monotonic()
        response = httpx.post(
            f"{self.gateway.url}{path}",
            content=body,
            headers={"authorization": f"Bearer {self.modest}", **headers},
            timeout=PATIENCE_S,
        )
        took = time.monotonic() - began
        assert response.status_code == 200, (response.text, took)
        return took


@contextmanager
def serving(folder: Path, *engines: FakeEngine, **settings: Any) -> Iterator[Tenants]:
    file = folder / "keys.json"
    keys = [create_key(file, tenant) for tenant in ("greedy", "modest")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        with run_fake(*engines, auth={"keys_file": file}, **settings) as gateway:
            yield Tenants(gateway, *keys)


def compare(queue: str, baseline: float, took: float) -> None:
    """Judge the other tenant's wait; a busy machine makes both times longer."""
    print(f"E13: {queue}: {took:.2f} s while flooded, {baseline:.2f} s idle")
    assert took < LIMIT_S + 4 * baseline


def coded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def chat(data: bytes, count: int = 1) -> bytes:
    parts = [image_files.part_of(data)] * count
    return coded({"model": "a", "messages": [{"role": "user", "content": parts}], "max_tokens": 1})


@contextmanager
def held_up(module: Any, name: str, greedy: bytes) -> Iterator[list[bytes]]:
    """A function of a module does not return for the greedy tenant's data, until the block ends.

    Gives what it was called with for that tenant so far.
    """
    released, original = threading.Event(), getattr(module, name)
    calls: list[bytes] = []

    def held(data: Any, *rest: Any) -> Any:
        if data == greedy:
            calls.append(data)
            released.wait(60)
        return original(data, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, held)
        try:
            yield calls
        finally:
            released.set()


def slow_engine() -> FakeEngine:
    return FakeEngine("a", behaviour=FakeBehaviour(token_seconds=0.5))


@pytest.mark.parametrize(
    ("admission", "places"), [({}, 256), ({"engine_requests": 4}, 4), ({"engine_requests": 1}, 1)]
)
def test_endless_streams_on_every_place_of_an_engine(tmp_path: Path, admission: Any, places: int) -> None:
    """With the default settings too: all 256 places are taken, and 44 requests wait."""
    with serving(tmp_path, slow_engine(), admission=admission) as tenants:
        baseline = tenants.ask("/v1/completions", coded(SHORT))
        with tenants.flood(places + 44, "/v1/completions", coded(STREAM), JSON):
            assert tenants.waits('baton_admission_waiting{engine="a"}', 44)
            assert tenants.shown('baton_admission_running{engine="a"}') == places
            took = tenants.ask("/v1/completions", coded(SHORT))
            assert tenants.shown('baton_admission_running{engine="a"}') == places
    compare(f"engine, {places} places", baseline, took)


def test_long_lists_of_prompts(tmp_path: Path) -> None:
    """A request takes a place however many prompts it brings."""
    many = STREAM | {"prompt": ["one two"] * 500}
    with serving(tmp_path, slow_engine(), admission={"engine_requests": 4}) as tenants:
        baseline = tenants.ask("/v1/completions", coded(SHORT))
        with tenants.flood(12, "/v1/completions", coded(many), JSON):
            assert tenants.waits('baton_admission_waiting{engine="a"}', 8)
            took = tenants.ask("/v1/completions", coded(SHORT))
    compare("prompt lists", baseline, took)


def test_slow_requests_through_a_plugin(tmp_path: Path) -> None:
    """With the default settings: eight run, each with more prompts than may be in the engine, and 56 wait."""
    slow = coded({"model": "geo", "data": {"numbers": [3600.0] * 40}})
    fast = coded({"model": "geo", "data": {"numbers": [0.01]}})
    engine = FakeEngine("geo", pooling=True, plugin=plugin(Current()))
    with serving(tmp_path, engine) as tenants:
        baseline = tenants.ask("/pooling", fast)
        with tenants.flood(72, "/pooling", slow, JSON):
            assert until(lambda: engine.active == 8 * 16, 20)
            took = tenants.ask("/pooling", fast)
            assert tenants.shown('baton_queue_waiting{engine="geo",queue="plugin"}') == 56
            assert tenants.shown('baton_queue_running{engine="geo",queue="plugin"}') == 8
    compare("plugin", baseline, took)


def test_a_plugins_threads(tmp_path: Path) -> None:
    """Its synchronous code blocks, in as many threads as it has."""
    released = threading.Event()

    class Blocks(Current):
        blocked = 0

        def parse_data(self, data: Any) -> dict[str, Any]:
            if data.get("greedy"):
                self.blocked += 1
                released.wait(60)
            return super().parse_data(data)

    instance = Blocks()
    slow = coded({"model": "geo", "data": {"numbers": [0.01], "greedy": True}})
    fast = coded({"model": "geo", "data": {"numbers": [0.01]}})
    engine = FakeEngine("geo", pooling=True, plugin=plugin(instance))
    with serving(tmp_path, engine, pooling={"requests": 16, "threads": 2}) as tenants:
        baseline = tenants.ask("/pooling", fast)
        with tenants.flood(16, "/pooling", slow, JSON):
            try:
                assert until(lambda: instance.blocked == 2)
                took = tenants.ask("/pooling", fast)
            finally:
                released.set()
    compare("plugin threads", baseline, took)


def test_uploads_that_do_not_go_on(tmp_path: Path) -> None:
    """With the default settings: 72 files on their way in."""
    spool = tmp_path / "spool"
    spool.mkdir()
    tiff = {"content-type": "image/tiff"}
    engine = FakeEngine("geo", pooling=True, plugin=plugin(Files(tmp_path)))
    with serving(tmp_path, engine, pooling={"spool_dir": spool}) as tenants:
        baseline = tenants.ask("/pooling?model=geo", b"\1\2\3\4", tiff)
        with tenants.flood(72, "/pooling?model=geo", b"abc", tiff, more=997):
            assert until(lambda: len(list(spool.iterdir())) == 72, 20)
            took = tenants.ask("/pooling?model=geo", b"\1\2\3\4", tiff)
    compare("uploads", baseline, took)


def test_images_that_take_long_to_read(tmp_path: Path) -> None:
    """With the default settings: two threads read, and neither comes back."""
    engine = FakeEngine("a", images=LOOKS)
    with serving(tmp_path, engine) as tenants:
        baseline = tenants.ask("/v1/chat/completions", chat(SMALL))
        with (
            held_up(reader, "decode_image", GREEDY) as calls,
            tenants.flood(20, "/v1/chat/completions", chat(GREEDY, 3), JSON),
        ):
            assert until(lambda: len(calls) == 2)
            took = tenants.ask("/v1/chat/completions", chat(SMALL))
            assert tenants.waits('baton_queue_waiting{engine="",queue="image_reads"}', 58)
    compare("image reading", baseline, took)


def test_images_that_take_long_to_fetch(tmp_path: Path) -> None:
    """From a host that does not answer; with the default number of fetches."""
    released = threading.Event()

    def hanging(handler: Handler) -> None:
        released.wait(60)

    with hosting() as host:
        host.pages = {"/a.png": page(SMALL), "/slow.png": hanging}
        images = {"allowed_hosts": (f"127.0.0.1:{host.port}",), "allow_http": True, "fetch_s": 60}

        def naming(path: str) -> bytes:
            part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{host.port}{path}"}}
            return coded({"model": "a", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1})

        with serving(tmp_path, FakeEngine("a", images=LOOKS), images=images) as tenants:
            baseline = tenants.ask("/v1/chat/completions", naming("/a.png"))
            with tenants.flood(20, "/v1/chat/completions", naming("/slow.png"), JSON):
                try:
                    assert until(lambda: host.connects == 17)
                    took = tenants.ask("/v1/chat/completions", naming("/a.png"))
                finally:
                    released.set()
    compare("image fetching", baseline, took)


def test_large_bodies(tmp_path: Path) -> None:
    """All threads that parse bodies are busy with one tenant's."""
    large = {"model": "a", "max_tokens": 1}
    greedy, modest = (coded(large | {"prompt": word + " " * 70_000}) for word in ("greedy", "modest"))
    with serving(tmp_path, FakeEngine("a")) as tenants:
        baseline = tenants.ask("/v1/completions", modest)
        with (
            held_up(request_body, "parse_object", greedy) as calls,
            tenants.flood(40, "/v1/completions", greedy, JSON),
        ):
            assert until(lambda: len(calls) >= 4)
            took = tenants.ask("/v1/completions", modest)
            assert tenants.waits('baton_queue_waiting{engine="",queue="bodies"}', 36)
    compare("large bodies", baseline, took)


def test_look_ups_in_a_store_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GET` of a handoff holds a thread as long as the store takes, and places at engines bound none of them."""
    go, find = threading.Event(), Here.find

    def slow(storage: Here, handoff_id: str, tenant: str) -> Handoff | None:
        if tenant == "greedy":
            go.wait(60)
        return find(storage, handoff_id, tenant)

    monkeypatch.setattr(Here, "find", slow)
    relay = FakeEngine("a", supports_handoffs=True)
    with serving(tmp_path, relay, handoffs={"store": f"file:{tmp_path}/kv"}) as tenants:
        body = json.dumps({"model": "a", "prompt": "one two"}).encode()
        made = httpx.post(
            f"{tenants.gateway.url}/v1/handoffs",
            content=body,
            headers={"authorization": f"Bearer {tenants.modest}", **JSON},
            timeout=PATIENCE_S,
        ).json()["id"]
        again = json.dumps(SHORT | {"handoff": {"from": made}}).encode()
        baseline = tenants.ask("/v1/completions", again)
        flood = json.dumps(SHORT | {"handoff": {"from": "A" * 32}}).encode()
        with tenants.flood(120, "/v1/completions", flood, JSON):
            assert tenants.waits('baton_queue_running{engine="",queue="handoffs"}', THREADS)
            took = tenants.ask("/v1/completions", again)
            go.set()
    compare("stored handoffs", baseline, took)
