"""Clients that stall in their request's head or in its body; and too many of them."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.gateways import FakeGateway, run_fake
from support.raw_requests import (
    TEXT,
    address,
    answer_on,
    answer_to,
    connect,
    error_of,
    good_traffic,
    metric,
    open_connections,
    request,
    rest_of,
    rss,
    statuses,
    traffic_beside,
    wait_for,
)

from baton.config.groups import EdgeSettings
from baton.engines.fake.engine import FakeEngine
from baton.http.protocol import connections_allowed

HOLD = Path(__file__).parents[1] / "support" / "hold_connections.py"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def drip(gateway: FakeGateway, sent: bytes, pause: float = 0.05) -> tuple[bytes, float]:
    """Send a byte now and then until the gateway has enough of it: its answer, and after how long."""
    began = time.monotonic()
    with connect(gateway) as connection:
        connection.settimeout(pause)
        for byte in sent:
            try:
                connection.sendall(bytes([byte]))
                part = connection.recv(65536)
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                part = b""
            connection.settimeout(30)
            return part + rest_of(connection), time.monotonic() - began
    raise AssertionError("it was let finish")


def dribble(connection: socket.socket, seconds: float) -> None:
    """Send a byte now and then until the gateway has ended the connection, or the time is over."""
    until = time.monotonic() + seconds
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while time.monotonic() < until:
            connection.sendall(b"x")
            time.sleep(0.05)


def test_the_shipped_deadlines_are_the_promised_ones() -> None:
    edge = EdgeSettings()
    assert (edge.header_s, edge.body_s, edge.send_s, edge.connections) == (10, 30, 30, 10_000)
    assert edge.body_bytes_per_s == 64 * 1024


@pytest.mark.fault("E5")
def test_thousands_of_idle_connections_leave_room_for_others() -> None:
    wanted = 9_900
    connections_allowed(wanted)  # of descriptors; as much as this machine gives
    wanted = min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
    with run_fake(FakeEngine("a"), edge={"header_s": 120}) as gateway:
        before = rss()
        command = [sys.executable, str(HOLD), *map(str, address(gateway.url)), str(wanted)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout is not None
            assert clients.stdout.readline() == f"{wanted}\n"
            wait_for(lambda: open_connections(gateway) == wanted, "not all got in", seconds=30)
            each = (rss() - before) * 1024 / wanted
            with traffic_beside() as idle, good_traffic(gateway) as good:
                wait_for(lambda: min(len(good.taken), len(idle.taken)) >= 50, "hardly anyone is answered")
            clients.communicate("\n")
        wait_for(lambda: open_connections(gateway) == 0, "some stay", seconds=20)
        print(f"E5: {wanted} idle or half-sent connections, {each:.0f} KiB each, ", end="")
        print(f"new request's p99 {good.p99:.0f} ms ({idle.p99:.0f} idle)")
        assert each < 60
        good.assert_like(idle)


@pytest.mark.fault("E4")
def test_slow_headers_are_closed_with_408() -> None:
    with run_fake(FakeEngine("a"), edge={"header_s": 0.5}) as gateway:
        answer, seconds = drip(gateway, HEAD * 20)
        assert statuses(answer) == [408]
        assert error_of(answer)["code"] == "request_timeout"
        assert 0.4 < seconds < 20  # of eighty that it would take
        assert metric(gateway, 'baton_rejections_total{reason="request_timeout"}') == 1
        print(f"E4: slow head closed after {seconds:.2f} s of 0.5")


@pytest.mark.chaos
@pytest.mark.fault("E4")
def test_the_default_deadline_of_a_request_head_holds() -> None:
    with run_fake(FakeEngine("a")) as gateway, connect(gateway, timeout=20) as connection:
        began = time.monotonic()
        connection.sendall(HEAD)
        answer = rest_of(connection)
        seconds = time.monotonic() - began
    assert statuses(answer) == [408]
    assert 9 < seconds < 13
    print(f"E4: shipped deadline, a head that stops: closed after {seconds:.1f} s")


@pytest.mark.fault("E4")
def test_a_connection_that_says_nothing_is_closed_silently() -> None:
    with run_fake(FakeEngine("a"), edge={"header_s": 0.3}) as gateway, connect(gateway) as connection:
        began = time.monotonic()
        assert rest_of(connection) == b""
        assert time.monotonic() - began < 20
        wait_for(lambda: open_connections(gateway) == 0, "it is still there")


@pytest.mark.fault("E4")
def test_the_second_request_head_on_a_connection_has_a_deadline_too() -> None:
    with run_fake(FakeEngine("a"), edge={"header_s": 0.5}) as gateway, connect(gateway) as connection:
        for _ in range(3):
            connection.sendall(request())
            assert statuses(answer_on(connection)) == [200]
        began = time.monotonic()
        connection.sendall(b"P")
        answer = rest_of(connection)
        assert statuses(answer) == [408]
        assert time.monotonic() - began < 20


@pytest.mark.fault("E4")
def test_a_request_within_its_deadlines_outlives_them() -> None:
    engine = FakeEngine("a")
    engine.behaviour.token_seconds = 0.4
    edge = {"header_s": 0.3, "body_s": 0.3, "send_s": 0.3}
    with run_fake(engine, edge=edge) as gateway, gateway.client() as client:
        whole, streamed = TEXT | {"max_tokens": 1}, TEXT | {"max_tokens": 2, "stream": True}
        assert client.post("/v1/completions", json=whole).status_code == 200
        assert client.post("/v1/completions", json=streamed).text.endswith("[DONE]\n\n")


@pytest.mark.parametrize("head", [b"Content-Length: 4000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
@pytest.mark.fault("E4")
def test_slow_bodies_are_closed_with_408(head: bytes) -> None:
    edge = {"body_s": 0.8, "body_bytes_per_s": 1000}
    with run_fake(FakeEngine("a"), edge=edge) as gateway, connect(gateway) as connection:
        began = time.monotonic()
        connection.sendall(HEAD + head)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(3):
                time.sleep(0.1)
                connection.sendall(b"1\r\n{\r\n" if b"chunked" in head else b"{")
        answer = rest_of(connection)
        assert statuses(answer) == [408]
        assert error_of(answer)["code"] == "request_timeout"
        assert 0.7 < time.monotonic() - began < 20
        assert gateway.engine("a").bodies == []


@pytest.mark.fault("E4")
def test_a_large_body_that_keeps_its_pace_has_the_time_it_takes() -> None:
    """8 KB in a second take longer than `body_s`, and may: they have eight seconds more."""
    body = json.dumps(TEXT | {"user": "u" * 8000}).encode()
    edge = {"body_s": 0.4, "body_bytes_per_s": 1000}
    with run_fake(FakeEngine("a"), edge=edge) as gateway, connect(gateway) as connection:
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        began = time.monotonic()
        for start in range(0, len(body), 800):
            connection.sendall(body[start : start + 800])
            time.sleep(0.1)
        assert time.monotonic() - began > 0.8
        assert statuses(rest_of(connection)) == [200]


@pytest.mark.fault("E4")
def test_the_rest_of_a_refused_body_is_not_awaited_for_ever() -> None:
    """A refusal is out before the body is in: what dribbles in after it must not hold the connection."""
    with run_fake(FakeEngine("a"), edge={"header_s": 0.5}) as gateway:
        sent = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        with connect(gateway) as connection:
            connection.sendall(sent)
            assert statuses(answer_on(connection)) == [404]
            began = time.monotonic()
            dribble(connection, 60)
            assert time.monotonic() - began < 20


@pytest.mark.fault("E4")
def test_a_thousand_slow_clients_are_gone_at_the_deadline() -> None:
    """Where the machine needs a good part of the deadline to let them all in, a longer one is tried."""
    for deadline_s in (2, 8):
        if meet_slow_clients(deadline_s) < deadline_s / 2:
            break


def meet_slow_clients(deadline_s: float) -> float:
    """The seconds until all had said something."""
    with run_fake(FakeEngine("a"), edge={"header_s": deadline_s, "body_s": deadline_s}) as gateway:
        connecting = time.monotonic()
        slow = [connect(gateway) for _ in range(1000)]
        try:
            with traffic_beside() as idle, good_traffic(gateway) as good:
                began = time.monotonic()
                for number, connection in enumerate(slow):
                    body = b"Content-Length: 1000\r\n\r\n{" if number % 2 else b""
                    connection.sendall(HEAD + body)
                said_s = time.monotonic() - connecting
                wait_for(lambda: open_connections(gateway) < 10, "slow clients stay", seconds=40)
                seconds = time.monotonic() - began
            answers = [statuses(rest_of(connection)) for connection in slow]
        finally:
            for connection in slow:
                connection.close()
        if said_s < deadline_s / 2 or deadline_s == 8:
            assert answers == [[408]] * 1000
        print(f"E4: 1000 slow clients, all 408 and gone after {seconds:.1f} s of {deadline_s}, ", end="")
        print(f"open then {open_connections(gateway)}, ", end="")
        print(f"good traffic's p99 {good.p99:.0f} ms ({idle.p99:.0f} idle)")
        good.assert_like(idle)
    return said_s


@pytest.mark.fault("E5")
def test_connections_above_the_limit_get_a_503_and_others_go_on() -> None:
    with run_fake(FakeEngine("a"), edge={"connections": 20, "header_s": 60}) as gateway:
        with connect(gateway) as kept:
            kept.sendall(request())
            assert statuses(answer_on(kept)) == [200]
            idle = [connect(gateway) for _ in range(19)]
            wait_for(lambda: open_connections(gateway) == 20, "not all got in")
            began = time.monotonic()
            refused = [answer_to(gateway, b"") for _ in range(30)]
            each = (time.monotonic() - began) / len(refused)
            for answer in refused:
                assert statuses(answer) == [503]
                assert error_of(answer)["code"] == "too_many_connections"
                assert b"\r\nretry-after: 1\r\n" in answer
            kept.sendall(request())
            assert statuses(answer_on(kept)) == [200]
            for connection in idle:
                connection.close()
        wait_for(lambda: open_connections(gateway) == 0, "some stay")
        assert metric(gateway, 'baton_rejections_total{reason="too_many_connections"}') == 30
        with gateway.client() as client:
            assert client.post("/v1/completions", json=TEXT).status_code == 200
        print(f"E5: above the limit 503 after {each * 1000:.1f} ms")


@pytest.mark.fault("E5")
def test_fewer_descriptors_than_connections_mean_fewer_connections() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}));"
        "from baton.http.protocol import connections_allowed;"
        "print(connections_allowed(2000), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )

    def room(soft: int, hard: int) -> list[str]:
        command = [sys.executable, "-c", script.format(soft=soft, hard=hard)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return printed.splitlines()[-1].split()

    assert room(256, 4000) == ["2000", "2256", "4000"]
    assert room(256, 1000) == ["744", "1000", "1000"]
    assert room(100, 100) == ["50", "100", "100"]


@pytest.mark.fault("E4")
def test_the_metrics_port_has_the_same_deadlines() -> None:
    auth = {"allow_unauthenticated": True}
    metrics = {"port": 0}
    options = {"host": "0.0.0.0", "auth": auth, "metrics": metrics, "edge": {"header_s": 0.3}}
    with (
        run_fake(FakeEngine("a"), **options) as gateway,
        socket.create_connection(address(gateway.metrics_url), timeout=30) as connection,
    ):
        connection.sendall(b"GET /metrics HT")
        assert statuses(rest_of(connection)) == [408]
