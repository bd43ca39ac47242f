"""Handle a client's connection: limit how long it may take to send a request head and to read an answer.

uvicorn waits without limit for the rest of a head and for a client that does not read. Requests that fail
before their head is complete never reach the application, so they are answered here. The time for a body is
limited in `middleware/weight.py`, because only the application knows when it waits for one.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import structlog
from h11._writers import ChunkedWriter
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.config.groups import EdgeSettings
from baton.errors import (
    BatonError,
    HeadersTooLarge,
    MalformedRequest,
    RequestTimeout,
    TooManyConnections,
    UriTooLong,
)
from baton.http.middleware.gate import MAX_HEAD_BYTES, host_and_target
from baton.telemetry.ids import new_request_id
from baton.telemetry.metrics import GatewayMetrics

LINGER_S = 2.0
"""Seconds to read what a client still sends: closing with unread bytes resets the connection, and the answer
may be lost."""
LEAST_TAKEN = 48 * 1024
"""Bytes that must leave a full write buffer within `send_s`: the span of asyncio's two water marks."""
SMALL_CHUNKS = 1000
LEAST_CHUNK = 16
"""`SMALL_CHUNKS` chunks of a body may have any size; with more, they average `LEAST_CHUNK` bytes at least."""
EMPTY_LINE = b"\r\n"
"""What some clients send after a body, and so before their next request; one of them is skipped."""
OTHER_FILES = 256
"""File descriptors for models, stores and pipes to engines."""


def protocol_for(edge: EdgeSettings, metrics: GatewayMetrics) -> type[asyncio.Protocol]:
    """Return the protocol class of which uvicorn creates one object for each connection."""
    made = partial(
        EdgeProtocol, edge=edge, metrics=metrics, connections_max=connections_allowed(edge.connections)
    )
    return cast(type[asyncio.Protocol], made)  # uvicorn only ever calls it


def connections_allowed(connections: int) -> int:
    """Raise the process's limit of file descriptors, and return how many connections it allows.

    A process without free descriptors cannot even refuse a connection: its client waits without an answer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = max(soft - OTHER_FILES, soft // 2)
    structlog.get_logger("baton.server").warning("few_descriptors", connections=allowed, wanted=connections)
    return allowed


class Timer:
    """Calls a function after a delay; at most one call is pending."""

    __slots__ = ("_due", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[], None]) -> None:
        self._loop = loop
        self._due = due
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """True if a call is pending."""
        return self._handle is not None

    def start(self, seconds: float) -> None:
        """Call the function in `seconds`, instead of a pending call."""
        self.stop()
        self._handle = self._loop.call_later(seconds, self._fire)

    def stop(self) -> None:
        """Cancel the pending call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._due()


class Parser(h11.Connection):
    """h11's parser, which also takes what RFC 9112 allows before and in a request line (2.2 and 3.2.2).

    Bodies in very small chunks are refused: one of a byte costs as much as a request. The application cannot
    refuse them: it receives joined chunks, and one read of the socket holds many.

    The head of an answer waits for what follows it, so that both are written at once: a call of the system,
    and the client's waking, are a twentieth of a short request's processor time.

    Args:
        later: called once a head waits; must have `waiting` written soon, also if nothing follows.

    Attributes:
        waiting: the bytes of a head that is to be written.
    """

    def __init__(self, later: Callable[[], object]) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.waiting = b""
        self._later = later
        self._chunks = 0
        self._bytes = 0
        self._empty_line = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE and not self._empty_line:
            begins = bytes(self._receive_buffer._data[:2])
            if begins == b"\r":
                return h11.NEED_DATA
            self._empty_line = begins == EMPTY_LINE
            if self._empty_line:
                self._receive_buffer.maybe_extract_at_most(len(EMPTY_LINE))
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS and self._bytes < self._chunks * LEAST_CHUNK:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        elif isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            self._empty_line = False
            return in_origin_form(event)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # its widest overload
        """Return the bytes of an event of ours; a chunk of a stream without h11's state machine.

        Data does not change the state, and of a chunked body the writer keeps no count: a third of an event's
        processor time is saved.
        """
        if (
            type(event) is h11.Data
            and type(self._writer) is ChunkedWriter
            and self.our_state is h11.SEND_BODY
        ):
            written = b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        else:
            written = super().send(event) or b""
        if type(event) is h11.Response:
            self.waiting = written
            self._later()
            return b""
        return self.take() + written if self.waiting else written

    def take(self) -> bytes:
        """Take the head that waits, to be written now."""
        waiting, self.waiting = self.waiting, b""
        return waiting


def in_origin_form(request: h11.Request) -> h11.Request:
    """Put the host of an absolute target into the `Host` header, whatever that was."""
    host, target = host_and_target(request.target)
    if host is None:
        return request
    if not host:
        raise h11.RemoteProtocolError("the target names an empty host")
    headers = [(b"host", host), *((name, value) for name, value in request.headers if name != b"host")]
    return h11.Request(
        method=request.method, target=target, headers=headers, http_version=request.http_version
    )


class EdgeProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with a time limit on every wait for the client.

    Args:
        metrics: where refused requests and closed connections are counted.
        connections_max: most connections at once.
    """

    def __init__(
        self, *, edge: EdgeSettings, metrics: GatewayMetrics, connections_max: int, **options: Any
    ) -> None:
        super().__init__(**options)
        self.conn = self._parser = Parser(lambda: self.loop.call_soon(self._write_head))
        self._edge = edge
        self._metrics = metrics
        self._connections_max = connections_max
        self._asking = Timer(self.loop, self._not_asked)
        self._taking = Timer(self.loop, self._not_taken)
        self._untaken = 0
        self._over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        if len(self.connections) < self._connections_max:
            super().connection_made(transport)
            self._asking.start(self._edge.header_s)
            return
        self.transport, self._over = transport, True
        self._count(TooManyConnections())
        transport.write(answer_to(TooManyConnections()))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._asking.stop()
        self._taking.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._over or self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return  # the client announced that it sends no more requests
        super().data_received(data)
        if not self._over:
            self._watch_asking()
            self._listen_for_the_end()

    def _write_head(self) -> None:
        if self._parser.waiting:
            self.transport.write(self._parser.take())

    def _watch_asking(self) -> None:
        """Limit the time for a head that arrives, and for a body that nobody waits for any more."""
        state = self.conn.their_state
        if state is h11.IDLE or (state is h11.SEND_BODY and self.cycle.response_complete):
            if not self._asking.runs:
                self._asking.start(self._edge.header_s)
        else:
            self._asking.stop()

    def _listen_for_the_end(self) -> None:
        """Read on during a request: a client that sent two requests may disconnect meanwhile."""
        if not self.flow.read_paused or self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            return
        if len(self.conn.trailing_data[0]) < MAX_HEAD_BYTES:
            self.flow.resume_reading()

    def _not_asked(self) -> None:
        if self._over:
            self.transport.abort()
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            seconds = f"{self._edge.header_s:g}"
            self._refuse(
                RequestTimeout(f"The request's headers did not arrive within {seconds} s; send them faster.")
            )
        else:
            self.transport.close()
            self._watch_taking()

    def send_400_response(self, msg: str) -> None:
        """Answer what h11 cannot parse. uvicorn calls this from within its `except`."""
        fault = sys.exception()
        too_long = (
            isinstance(fault, h11.RemoteProtocolError)
            and fault.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        )
        in_body = self.cycle is not None and not self.cycle.response_complete
        if in_body or not too_long:
            self._refuse(MalformedRequest())
        elif b"\n" not in self.conn.trailing_data[0]:
            self._refuse(UriTooLong())
        else:
            self._refuse(HeadersTooLarge())

    def _refuse(self, error: BatonError) -> None:
        """Answer in place of the application, unless it has begun to, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._count(error)
            self.transport.write(answer_to(error))
        self._over = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.flow.resume_writing()
        self.flow.resume_reading()
        if not self.transport.can_write_eof():  # TLS: its end reads on by itself, and is limited
            self.transport.close()
            return
        self.transport.write_eof()
        self._asking.start(LINGER_S)

    def _count(self, error: BatonError) -> None:
        self._metrics.rejections.labels(error.reason).inc()

    def _should_upgrade(self) -> bool:
        return False  # there is no protocol to upgrade to; the offer is ignored

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch_asking()
        if self.transport.is_closing():
            self._watch_taking()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_taking()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taking.stop()

    def _watch_taking(self) -> None:
        """Limit the time in which the client must read what is buffered, or what is left when closing."""
        self._untaken = self.transport.get_write_buffer_size()
        if self._untaken:
            self._taking.start(self._edge.send_s)
        else:
            self._taking.stop()

    def _not_taken(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and left > self._untaken - LEAST_TAKEN:
            self._metrics.disconnects.labels("slow_reader").inc()
            self.transport.abort()
        else:
            self._watch_taking()


def answer_to(error: BatonError) -> bytes:
    """Return an error as a complete HTTP response, the last of its connection."""
    request_id = new_request_id()
    body = json.dumps(error.body(request_id)).encode()
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        f"x-request-id: {request_id}",
    ]
    if error.retry_after_s is not None:
        head.append(f"retry-after: {error.retry_after_s}")
    return "\r\n".join([*head, "", ""]).encode() + body
