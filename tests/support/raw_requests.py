"""Talking to a gateway byte for byte, and what it costs the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from baton.engines.fake.engine import FakeEngine
from support.gateways import FakeGateway, run_fake

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")
TEXT = {"model": "a", "prompt": "one two three", "max_tokens": 4}


def address(url: str) -> tuple[str, int]:
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    return where.hostname, where.port


def request(body: dict[str, Any] | None = None, path: str = "/v1/completions", extra: str = "") -> bytes:
    """A whole request, as bytes."""
    content = json.dumps(TEXT | (body or {})).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n{extra}\r\n".encode() + content


def connect(gateway: FakeGateway, timeout: float = 30) -> socket.socket:
    return socket.create_connection(address(gateway.url), timeout=timeout)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection, by whatever means."""
    answer = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while part := connection.recv(65536):
            answer += part
    return answer


def answer_on(connection: socket.socket) -> bytes:
    """The next answer, whole; its head and its body may come one after the other, and the connection stays."""
    answer = b""
    while not (length := LENGTH.search(answer)) or len(answer.partition(b"\r\n\r\n")[2]) < int(length[1]):
        part = connection.recv(65536)
        assert part, f"the connection was ended after {answer!r}"
        answer += part
    return answer


def answer_to(gateway: FakeGateway, sent: bytes, timeout: float = 30) -> bytes:
    """Send, read to the end."""
    with connect(gateway, timeout) as connection:
        # It may be refused while it is still being sent.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(sent)
        return rest_of(connection)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in STATUS.findall(answer)]


def error_of(answer: bytes) -> dict[str, Any]:
    """The error of the one answer there is, in the one shape there is."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    lines = head.lower().split(b"\r\n")
    assert f"x-request-id: {error['request_id']}".encode() in lines
    assert b"connection: close" in lines
    return error


def wait_for(condition: Callable[[], object], why: str, seconds: float = 20) -> float:
    """Seconds until it holds; where it never does, no busy machine is taken for the reason."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, why
        time.sleep(0.005)
    return time.monotonic() - began


def open_connections(gateway: FakeGateway) -> int:
    return len(gateway.server.server_state.connections)


def rss() -> float:
    """MiB of this process, the gateway's own."""
    return psutil.Process().memory_info().rss / 2**20


@contextlib.contextmanager
def peak_rss() -> Iterator[Callable[[], float]]:
    """How far memory rises above where it was, at any moment."""
    before, peak, over = rss(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.01):
            peak = max(peak, rss() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield lambda: peak
    finally:
        over.set()
        watching.join()


class Traffic:
    """How long each of many answers took, in ms."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    @property
    def p99(self) -> float:
        """The 99th percentile, to be told: of few answers it is the slowest, which is the machine's doing."""
        return statistics.quantiles(self.taken, n=100)[98] if len(self.taken) > 1 else 0.0

    @property
    def usual(self) -> float:
        """To be judged: half of the time was spent on answers that took at most this long."""
        spent, half = 0.0, sum(self.taken) / 2
        for took in sorted(self.taken):
            spent += took
            if spent >= half:
                return took
        return 0.0

    def assert_like(self, idle: Traffic) -> None:
        """Judge by an idle gateway that was asked all the while: what stalls the machine delays both alike."""
        assert self.usual < 400 + 6 * idle.usual, (self.taken, idle.taken)


@contextlib.contextmanager
def good_traffic(gateway: FakeGateway) -> Iterator[Traffic]:
    """Someone who asks all the while, on new connections.

    Within `traffic_beside`, not around it: then nothing delays this one alone but its gateway.
    """
    traffic, over = Traffic(), threading.Event()

    def ask() -> None:
        began = time.perf_counter()  # with the pause: a stall within it counts as well
        while not over.wait(0.01):
            with gateway.client() as client:
                assert client.post("/v1/completions", json=TEXT).status_code == 200
            answered = time.perf_counter()
            traffic.taken.append((answered - began) * 1000)
            began = answered

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield traffic
    finally:
        over.set()
        asking.join()


@contextlib.contextmanager
def traffic_beside() -> Iterator[Traffic]:
    """The same on another gateway of this process, which has nothing else to do: what the machine costs."""
    with run_fake(FakeEngine("a")) as idle, good_traffic(idle) as traffic:
        yield traffic


def metric(gateway: FakeGateway, series: str) -> float:
    page = httpx.get(f"{gateway.metrics_url}/metrics", timeout=30).text
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def talk(gateway: FakeGateway, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of an asyncio test, with its first bytes out."""
    reader, writer = await asyncio.open_connection(*address(gateway.url), limit=2**20)
    writer.write(sent)
    return reader, writer


def slow_reader(gateway: FakeGateway, body: dict[str, object]) -> socket.socket:
    """A client with hardly any room for what comes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(address(gateway.url))
    connection.sendall(request(body))
    return connection


def small_buffers(gateway: FakeGateway) -> None:
    """Sockets inherit it from the listener; the kernel's own would take megabytes before anyone waits."""
    gateway.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
