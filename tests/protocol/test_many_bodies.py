"""Many bodies at once: bounded all together, and no tenant takes the room of all."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gateways import FakeGateway, run_fake
from support.raw_requests import TEXT, connect, error_of, peak_rss, rest_of, wait_for

from baton.admission.api_keys import create_key
from baton.engines.fake.engine import FakeEngine

MIB = 2**20
EACH = 4 * MIB
TOGETHER = 24 * MIB
EDGE = {"header_s": 1}
"""After an answer the gateway reads so long what is left of a body."""
TENANTS = ("acme", "globex")


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, str]:
    return {tenant: create_key(keys_file, tenant) for tenant in (*TENANTS, "initech")}


@pytest.fixture(scope="module")
def gateway(keys_file: Path, keys: dict[str, str]) -> Iterator[FakeGateway]:
    limits = {"body_bytes": EACH, "bodies_bytes": TOGETHER}
    with run_fake(FakeEngine("a"), auth={"keys_file": keys_file}, limits=limits, edge=EDGE) as running:
        yield running


def begin_body(gateway: FakeGateway, key: str) -> socket.socket:
    """Send all of a large body but its last byte; the gateway waits for it, or has refused the rest."""
    connection = connect(gateway, timeout=20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {EACH}\r\n\r\n"
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(head.encode())
        for _ in range(EACH // MIB - 1):
            connection.sendall(b" " * MIB)
        connection.sendall(b" " * (MIB - 1))
    return connection


def held(gateway: FakeGateway) -> float:
    value = gateway.server.config.app.state.gateway.metrics.registry.get_sample_value(  # type: ignore[union-attr]
        "baton_bodies_bytes", {"place": "memory"}
    )
    assert value is not None
    return float(value)


@pytest.mark.fault("E15")
def test_twenty_slow_bodies_of_two_tenants_take_what_bodies_may_take_together(
    gateway: FakeGateway, keys: dict[str, str]
) -> None:
    with peak_rss() as peak, contextlib.ExitStack() as open_:
        slow = [
            open_.enter_context(begin_body(gateway, keys[tenant])) for _ in range(10) for tenant in TENANTS
        ]
        wait_for(lambda: held(gateway) > TOGETHER // 2, "no body came")
        with gateway.client(headers={"Authorization": f"Bearer {keys['initech']}"}) as third:
            assert third.post("/v1/completions", json=TEXT).status_code == 200
        refused = [connection for connection in slow if answered(connection)]
        kept = len(slow) - len(refused)
        assert EACH * kept <= TOGETHER
        assert kept >= len(TENANTS), "each tenant has room for one body at least"
        told = [error_of(rest_of(connection)) for connection in refused]
        assert {error["code"] for error in told} <= {"rate_limited", "gateway_overloaded"}
    assert peak() < 2 * TOGETHER / MIB
    wait_for(lambda: held(gateway) == 0, "what bodies held was not given back")
    with gateway.client(headers={"Authorization": f"Bearer {keys['acme']}"}) as client:
        assert client.post("/v1/completions", json=TEXT).status_code == 200


def answered(connection: socket.socket) -> bool:
    """Whether the gateway has answered already; it has not where it waits for the body's last byte."""
    connection.settimeout(0.2)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        connection.settimeout(10)
