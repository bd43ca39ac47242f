"""Gateways with one plugin engine, and what tests ask of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from baton.config.groups import PoolingSettings
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from support.gateways import FakeGateway, run_fake
from support.raw_requests import connect
from support.sample_plugins import plugin


@contextmanager
def served(instance: Any, behaviour: FakeBehaviour | None = None, **pooling: Any) -> Iterator[FakeGateway]:
    engine = FakeEngine("geo", pooling=True, plugin=plugin(instance), behaviour=behaviour or FakeBehaviour())
    with run_fake(engine, FakeEngine("other"), pooling=PoolingSettings(**pooling)) as gateway:
        yield gateway


def notice_blocked_loops_soon(monkeypatch: pytest.MonkeyPatch) -> float:
    """After how many seconds from now on a plugin's loop that blocks is left to the request that blocks it."""
    monkeypatch.setattr("baton.pooling.plugin.HEARTBEAT_S", 0.02)
    monkeypatch.setattr("baton.pooling.plugin.STALLED_S", 0.2)
    return 0.3


def ask(gateway: FakeGateway, **data: Any) -> httpx.Response:
    with gateway.client() as client:
        return client.post("/pooling", json={"model": "geo", "data": {"numbers": [0.03, 0.01, 0.02]} | data})


def ask_and_leave(gateway: FakeGateway, numbers: list[float], begun: Callable[[], object]) -> None:
    """A client that goes away as soon as its request is so far."""
    content = json.dumps({"model": "geo", "data": {"numbers": numbers}}).encode()
    head = f"POST /pooling HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    with connect(gateway) as line:
        line.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        assert until(begun)


def until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def upload(
    gateway: FakeGateway, accept: str | None = None, query: str = "", content: Any = b"\1\2\3\4"
) -> Any:
    headers = {"content-type": "image/tiff"} | ({"accept": accept} if accept else {})
    with gateway.client() as client:
        return client.post(f"/pooling?model=geo{query}", content=content, headers=headers)
