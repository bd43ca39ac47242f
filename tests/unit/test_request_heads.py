from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.config.groups import EdgeSettings
from baton.errors import BatonError, HeadersTooLarge, MalformedRequest, TooManyConnections, UriTooLong
from baton.http.middleware.gate import MAX_HEAD_BYTES, MAX_HEADERS, MAX_TARGET_BYTES, refuse_bad_head
from baton.http.protocol import EdgeProtocol, Parser, answer_to, protocol_for
from baton.telemetry.metrics import GatewayMetrics

Headers = list[tuple[bytes, bytes]]


def head(headers: Headers, target: bytes = b"/", version: str = "1.1") -> dict[str, Any]:
    path, _, query = target.partition(b"?")
    return {"raw_path": path, "query_string": query, "headers": headers, "http_version": version}


HOSTS = (
    b"localhost:8000",
    b"127.0.0.1",
    b"[::1]:8000",
    b"my_service.internal",
    b"xn--bcher-kva.example",
    b"",
)


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_that_people_have_pass(host: bytes) -> None:
    refuse_bad_head(head([(b"host", host), (b"content-length", b"2")]))


@pytest.mark.parametrize(
    ("scope", "error"),
    [
        (head([(b"host", b"a b")]), MalformedRequest),
        (head([(b"host", b"user@host")]), MalformedRequest),
        (head([(b"host", b"host/path")]), MalformedRequest),
        (head([(b"host", b"\xff")]), MalformedRequest),
        (head([(b"content-length", b"2"), (b"transfer-encoding", b"chunked")]), MalformedRequest),
        (head([], version="2.0"), MalformedRequest),
        (head([(b"x", b"")] * (MAX_HEADERS + 1)), HeadersTooLarge),
        (head([(b"x", b"v" * MAX_HEAD_BYTES)]), HeadersTooLarge),
        (head([], b"/" + b"a" * MAX_TARGET_BYTES), UriTooLong),
        (head([], b"/?" + b"a" * MAX_TARGET_BYTES), UriTooLong),
    ],
)
def test_heads_that_are_too_long_or_mean_two_things_are_refused(
    scope: dict[str, Any], error: type[BatonError]
) -> None:
    with pytest.raises(error):
        refuse_bad_head(scope)


def test_heads_at_the_limits_pass() -> None:
    refuse_bad_head(head([(b"x", b"")] * MAX_HEADERS, b"/" + b"a" * (MAX_TARGET_BYTES - 1)))
    refuse_bad_head(head([(b"x", b"v" * (MAX_HEAD_BYTES - 1))], version="1.0"))


OVERRIDDEN = (
    "connection_made",
    "connection_lost",
    "data_received",
    "send_400_response",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "timeout_keep_alive_handler",
    "_should_upgrade",
)


def test_what_the_connection_overrides_is_uvicorn_s() -> None:
    """A method that uvicorn has renamed would never be called, and nobody would be told."""
    for name in OVERRIDDEN:
        assert name in vars(EdgeProtocol)
        assert name in vars(H11Protocol), name


def test_a_refusal_is_a_whole_answer_that_says_when_to_come_back() -> None:
    sent, _, body = answer_to(TooManyConnections()).partition(b"\r\n\r\n")
    lines = sent.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 503 Service Unavailable"
    assert f"content-length: {len(body)}".encode() in lines
    assert {b"connection: close", b"retry-after: 1"} <= set(lines)


def test_the_head_of_an_answer_is_written_with_what_follows_it() -> None:
    asked: list[None] = []
    parser = Parser(lambda: asked.append(None))
    parser.receive_data(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    parser.next_event()
    assert parser.send(h11.Response(status_code=200, headers=[("content-length", "2")])) == b""
    assert (len(asked), parser.waiting[:15]) == (1, b"HTTP/1.1 200 \r\n")
    whole = parser.send(h11.Data(data=b"ok"))
    assert whole == b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nok"
    assert parser.send(h11.EndOfMessage()) == b""
    assert parser.waiting == b""


async def test_a_head_that_nothing_follows_is_written_all_the_same() -> None:
    """A file system or an engine may take its time after an answer has begun."""
    goes_on = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    protocol = protocol_for(EdgeSettings(), GatewayMetrics())
    config = uvicorn.Config(app, port=0, http=protocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    config.load()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 2" in head
        goes_on.set()
        assert await reader.readexactly(2) == b"ok"
        writer.close()
        server.should_exit = True
        await serving
