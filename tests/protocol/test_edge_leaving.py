"""Clients that go away: the engine stops working for them at once, and the log has one quiet line each."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import random
import socket
import statistics
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest
import structlog
from support.gateways import FakeGateway, run_fake
from support.raw_requests import TEXT, connect, metric, open_connections, request, rss, talk, wait_for

from baton.engines.adapters import Adapter
from baton.engines.backend import Json, Operation, Reply, StreamReply
from baton.engines.fake.engine import FakeBehaviour, FakeEngine
from baton.engines.transfers import TransferChooser, TransferRequest
from baton.telemetry.ids import RequestContext

CLIENTS = 1000
AT_ONCE = 100
LIMIT_MS = 5000
"""Half a second is promised; an engine that is not told goes on for half a minute and more."""
ENDLESS = {"max_tokens": 2000}


@pytest.fixture
def log() -> Iterator[Callable[[], list[dict[str, object]]]]:
    """The lines that gateways of this process log from now on, of their clients' requests.

    A loop that a busy machine holds up is told in the log as well, whoever leaves.
    """
    written, before = io.StringIO(), structlog.get_config()
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(written),
    )
    yield lambda: [
        line
        for line in map(json.loads, written.getvalue().splitlines())
        if line["event"] not in ("engine_ready", "event_loop_stalled")
    ]
    structlog.configure(**before)


class NotingEngine(FakeEngine):
    """Notes when the work for each client ended, by the `user` of its request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ended: dict[str, float] = {}

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
        chooser: TransferChooser | None = None,
        adapter: Adapter | None = None,
    ) -> Reply:
        reply = await super().call(operation, body, context, transfer, chooser, adapter)
        assert isinstance(reply, StreamReply)
        return replace(reply, events=self._noted(reply.events, body["user"]))

    async def _noted(self, events: AsyncIterator[str], user: str) -> AsyncIterator[str]:
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]  # the fake's are generators
            self.ended[user] = time.monotonic()


async def leave_midway(gateway: FakeGateway, users: list[str]) -> dict[str, float]:
    """Each client reads some tokens of a stream, then closes: when each did."""
    chance, at_once = random.Random(len(users)), asyncio.Semaphore(AT_ONCE)
    left: dict[str, float] = {}

    async def one(user: str, tokens: int) -> None:
        async with at_once:
            reader, writer = await talk(gateway, request(ENDLESS | {"stream": True, "user": user}))
            for _ in range(tokens):
                await reader.readuntil(b"\n\n")
            left[user] = time.monotonic()
            writer.close()

    await asyncio.gather(*(one(user, chance.randrange(1, 12)) for user in users))
    return left


def quiet(lines: list[dict[str, object]], caplog: pytest.LogCaptureFixture) -> bool:
    return all(line["level"] == "info" and "exception" not in line for line in lines) and not caplog.records


@pytest.mark.fault("E1")
def test_a_thousand_disconnects_midway_free_the_engine_at_once(
    log: Callable[[], list[dict[str, object]]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = NotingEngine("a", behaviour=FakeBehaviour(token_seconds=0.02))
    with run_fake(engine) as gateway:
        early = [f"early-{number}" for number in range(AT_ONCE)]
        asyncio.run(leave_midway(gateway, early))  # allocators find their size
        wait_for(lambda: engine.aborted == len(log()) == AT_ONCE, "the first are not gone")
        before, lines = rss(), len(log())
        engine.aborted = 0
        left = asyncio.run(leave_midway(gateway, [str(number) for number in range(CLIENTS)]))
        wait_for(lambda: engine.ended.keys() >= left.keys(), "an engine request is not ended")
        waits = [(engine.ended[user] - left[user]) * 1000 for user in left]
        wait_for(lambda: engine.active == 0, "an engine request is left")
        wait_for(lambda: open_connections(gateway) == 0, "a connection is left")
        wait_for(lambda: len(log()) - lines >= CLIENTS, "a line is missing")
        p99 = statistics.quantiles(waits, n=100)[98]
        each = (len(log()) - lines) / CLIENTS
        counted = metric(gateway, 'baton_client_disconnects_total{phase="stream"}')
        print(
            f"E1: {CLIENTS} clients left midway: engine free after {statistics.median(waits):.0f} ms ", end=""
        )
        print(f"(p99 {p99:.0f}, worst {max(waits):.0f}), ", end="")
        print(f"{each:.2f} log lines each, RSS {rss() - before:+.1f} MiB, left active {engine.active}")
    assert engine.aborted == CLIENTS
    assert counted == CLIENTS + AT_ONCE
    assert statistics.median(waits) < LIMIT_MS
    assert each == 1
    assert quiet(log(), caplog)


EARLY = {
    "in a request that is not streamed": {"stream": False},
    "before the first token": {"stream": True},
}


@pytest.mark.parametrize("when", EARLY)
@pytest.mark.fault("E2")
def test_disconnects_before_the_first_token_free_the_engine_at_once(
    when: str, log: Callable[[], list[dict[str, object]]], caplog: pytest.LogCaptureFixture
) -> None:
    clients = 100
    slow = FakeBehaviour(token_seconds=60)
    with run_fake(FakeEngine("a", behaviour=slow)) as gateway:
        engine = gateway.engine("a")
        connections = [connect(gateway) for _ in range(clients)]
        for connection in connections:
            connection.sendall(request(ENDLESS | EARLY[when]))
        wait_for(lambda: engine.active == clients, "not all are under way")
        began = time.monotonic()
        for connection in connections:
            connection.close()
        wait_for(lambda: engine.active == 0, "an engine request is left")
        milliseconds = (time.monotonic() - began) * 1000
        wait_for(lambda: len(log()) >= clients, "a line is missing")
        print(f"E2: {clients} clients left {when}: engine free after {milliseconds:.0f} ms, ", end="")
        print(f"{len(log()) / clients:.2f} log lines each")
        assert metric(gateway, 'baton_client_disconnects_total{phase="request"}') == clients
    assert engine.aborted == clients
    assert milliseconds < 3 * LIMIT_MS
    assert len(log()) == clients
    assert quiet(log(), caplog)


@pytest.mark.fault("E2")
def test_disconnects_within_the_request_never_reach_the_engine(
    log: Callable[[], list[dict[str, object]]], caplog: pytest.LogCaptureFixture
) -> None:
    whole = request()
    with run_fake(FakeEngine("a")) as gateway:
        for length in range(1, len(whole) - 1, 5):
            with connect(gateway) as connection:
                connection.sendall(whole[:length])
        wait_for(lambda: open_connections(gateway) == 0, "a connection is left")
        assert gateway.engine("a").bodies == []
    assert quiet(log(), caplog)


@pytest.mark.fault("E2")
def test_a_client_that_sent_two_requests_and_left_is_noticed(
    log: Callable[[], list[dict[str, object]]], caplog: pytest.LogCaptureFixture
) -> None:
    """The second one waits unread, which must not hide that the client is gone."""
    with run_fake(FakeEngine("a", behaviour=FakeBehaviour(token_seconds=60))) as gateway:
        engine = gateway.engine("a")
        connection = connect(gateway)
        connection.sendall(request(ENDLESS) + request(ENDLESS))
        wait_for(lambda: engine.active == 1, "it is not under way")
        connection.close()
        wait_for(lambda: engine.active == 0, "an engine request is left")
        assert engine.aborted == 1
        wait_for(lambda: open_connections(gateway) == 0, "a connection is left")
    assert quiet(log(), caplog)


@pytest.mark.fault("E1")
def test_a_reset_connection_counts_as_a_disconnect(
    log: Callable[[], list[dict[str, object]]], caplog: pytest.LogCaptureFixture
) -> None:
    """A reset is what a killed client or a broken network leaves behind."""
    with run_fake(FakeEngine("a", behaviour=FakeBehaviour(token_seconds=0.01))) as gateway:
        engine = gateway.engine("a")
        for _ in range(50):
            connection = connect(gateway)
            connection.sendall(request(ENDLESS | {"stream": True}))
            connection.recv(1024)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        wait_for(lambda: engine.active == 0 and engine.aborted == 50, "an engine request is left")
        with contextlib.closing(connect(gateway)) as connection:
            connection.sendall(request(TEXT))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert quiet(log(), caplog)
