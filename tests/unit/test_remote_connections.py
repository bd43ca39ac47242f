"""Connections to a server elsewhere are used again, one request each at a time, and none is left open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from baton.config.groups import EngineSettings
from baton.engines.elsewhere import client as connections
from baton.engines.elsewhere.client import RemoteClient


@dataclass
class Server:
    """Answers `/whole` at once, `/late` never, `/stream` with one piece and no end, `/twice` with two answers.

    Attributes:
        open: connections that are open now.
        made: connections so far.
        asked: requests so far.
    """

    url: str = ""
    open: int = 0
    made: int = 0
    asked: int = 0
    later: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open, self.made = self.open + 1, self.made + 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.asked += 1
                path = head.split()[1]
                if path == b"/whole":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                elif path in (b"/twice", b"/later"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    if path == b"/later":
                        await writer.drain()
                        self.later = writer
                    else:
                        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
                elif path == b"/stream":
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def asked() -> AsyncIterator[tuple[RemoteClient, Server]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = RemoteClient(EngineSettings(name="a", url=server.url))
    try:
        yield client, server
    finally:
        await client.close()
        await until(lambda: server.open == 0)
        listening.close()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of the server's own tasks
            await asyncio.sleep(0.005)


async def whole(client: RemoteClient) -> bytes:
    return await (await client.ask("GET", "/whole", {})).read(100)


async def test_requests_after_one_another_share_one_connection() -> None:
    async with asked() as (client, server):
        for _ in range(10):
            assert await whole(client) == b"ok"
        assert (server.made, server.asked) == (1, 10)


@pytest.mark.fault("I13")
async def test_a_second_answer_is_not_the_answer_to_the_next_request() -> None:
    """It was told to whoever asked next, another tenant perhaps."""
    async with asked() as (client, server):
        for _ in range(5):
            assert await (await client.ask("GET", "/twice", {})).read(100) == b"ok"
            assert await whole(client) == b"ok"
        assert server.made >= 5
        assert await (await client.ask("GET", "/later", {})).read(100) == b"ok"
        assert server.later is not None
        server.later.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
        await server.later.drain()
        await asyncio.sleep(0.05)  # it is on its way
        assert await whole(client) == b"ok"


@pytest.mark.fault("I13")
async def test_no_connection_goes_from_one_tenant_to_another() -> None:
    async with asked() as (client, server):
        for tenant in ("a", "b", "a", "b"):
            answer = await client.ask("GET", "/whole", {}, tenant=tenant)
            assert await answer.read(100) == b"ok"
        assert (server.made, server.asked) == (2, 4)


async def test_requests_at_once_have_one_each_and_those_unused_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asked() as (client, server):
        await asyncio.gather(*(whole(client) for _ in range(8)))
        assert 2 <= server.made <= 8
        assert server.open == server.made
        monkeypatch.setattr(connections, "IDLE_S", 0.02)
        await asyncio.sleep(0.05)
        await whole(client)
        await until(lambda: server.open == 1)


async def test_a_request_that_is_cancelled_is_closed() -> None:
    async with asked() as (client, server):
        waiting = asyncio.ensure_future(client.ask("GET", "/late", {}))
        await until(lambda: server.asked == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: server.open == 0)
        assert await whole(client) == b"ok"
        assert not client._connections._used


@pytest.mark.parametrize("pieces", [0, 1])
async def test_an_answer_that_is_not_read_to_its_end_is_closed(pieces: int) -> None:
    async with asked() as (client, server):
        answer = await client.ask("GET", "/stream", {})
        assert [await answer.next() for _ in range(pieces)] == [b"ok"] * pieces
        await answer.close()
        await answer.close()
        await until(lambda: server.open == 0)
        assert await whole(client) == b"ok"
        assert len(client._connections._idle) == 1
        assert not client._connections._used


async def test_an_answer_that_is_closed_twice_does_not_give_away_the_connection_of_the_next() -> None:
    async with asked() as (client, _):
        first = await client.ask("GET", "/whole", {})
        await first.read(100)
        second = await client.ask("GET", "/stream", {})
        await first.close()
        assert client._connections._used == {second._connection}
        assert await whole(client) == b"ok"
        await second.close()


async def test_a_pause_of_an_answer_that_is_cancelled_closes_it_too() -> None:
    async with asked() as (client, server):
        answer = await client.ask("GET", "/stream", {})
        await answer.next()
        waiting = asyncio.ensure_future(answer.next())
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await answer.close()
        await until(lambda: server.open == 0)
        assert await whole(client) == b"ok"


async def test_what_is_open_is_closed_with_the_client() -> None:
    async with asked() as (client, server):
        kept = await client.ask("GET", "/stream", {})
        await whole(client)
        assert server.open == 2
        await client.close()
        await until(lambda: server.open == 0)
        await kept.close()


async def test_connections_may_be_taken_while_old_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = connections.Connections(ssl.create_default_context())
    old, new, taken = pool.take(), pool.take(), list[connections.Connection]()
    await pool.give_back(old)
    monkeypatch.setattr(connections, "IDLE_S", -1.0)  # whatever is idle is old

    async def take_the_last() -> None:
        taken.append(pool.take())

    monkeypatch.setattr(old.transport, "aclose", take_the_last)
    await pool.give_back(new)
    assert taken == [new]
