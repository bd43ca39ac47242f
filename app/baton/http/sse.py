"""Stream server-sent events to a client, with keep-alive comments."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from baton.errors import BatonError, GenerationFailed
from baton.http.error_body import error_event
from baton.telemetry.metrics import GatewayMetrics

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that stop proxies from buffering events."""
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment: clients skip it (HTML standard, section 9.2.6), and proxies do not time out."""


async def event_stream(
    events: AsyncIterator[str],
    scope: Scope,
    metrics: GatewayMetrics,
    headers: Mapping[str, str],
    *,
    keep_alive_s: float,
) -> EventStream:
    """Wait for the first event, so that a failure before it is answered with its own status; then stream.

    After `keep_alive_s` without an event the response begins with a comment, and a failure is its last event.

    Args:
        events: the events; they are closed if no response begins.
        scope: of the request.
        metrics: where clients that disconnect are counted.
        headers: of the response.
        keep_alive_s: seconds of silence before each comment; 0: no comments.

    Raises:
        BatonError: the engine failed before the first event.
    """
    first = asyncio.ensure_future(_first_of(events))
    try:
        await asyncio.wait({first}, timeout=keep_alive_s or None)
        if first.done():
            first.result()
    except BaseException:
        await _end(first, events)
        raise
    return EventStream(first, events, scope, metrics, headers=headers, keep_alive_s=keep_alive_s)


async def _first_of(events: AsyncIterator[str]) -> str:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise GenerationFailed() from None


async def _end(first: asyncio.Future[str], events: AsyncIterator[str]) -> None:
    """Cancel the work that makes the events."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


class EventStream(StreamingResponse):
    """The response to a streaming request.

    Args:
        first: the first event, which may not have come yet.
        rest: the events after it.
        scope: of the request.
        metrics: where clients that disconnect are counted.
        headers: of the response.
        keep_alive_s: seconds of silence before each comment; 0: no comments.
    """

    def __init__(
        self,
        first: asyncio.Future[str],
        rest: AsyncIterator[str],
        scope: Scope,
        metrics: GatewayMetrics,
        *,
        headers: Mapping[str, str],
        keep_alive_s: float,
    ) -> None:
        self._first = first
        self._rest = rest
        self._keep_alive_s = keep_alive_s
        self._events = _events(first, rest, scope, metrics)
        super().__init__(self._events, media_type="text/event-stream", headers=HEADERS | dict(headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await _end(self._first, self._rest)

    async def stream_response(self, send: Send) -> None:
        if not self._keep_alive_s:
            await super().stream_response(send)
            return
        with contextlib.closing(KeptAlive(send, self._keep_alive_s)) as kept:
            await super().stream_response(kept.send)


async def _events(
    first: asyncio.Future[str], rest: AsyncIterator[str], scope: Scope, metrics: GatewayMetrics
) -> AsyncGenerator[str, None]:
    try:
        if not first.done():
            yield KEEP_ALIVE
        yield await first
        async for event in rest:
            yield event
    except BatonError as error:
        yield error_event(error, scope)
    except (asyncio.CancelledError, GeneratorExit):
        metrics.disconnects.labels("stream").inc()
        raise


class KeptAlive:
    """Sends a response, with a comment whenever nothing was sent for a while.

    Args:
        send: sends the response's ASGI messages.
        seconds: of silence before a comment.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._now = asyncio.get_running_loop().time
        self._sent_at = 0.0
        self._comments: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Send a message of the response; comments are sent only between the first and the last one."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.close()
        await self._send(message)
        self._sent_at = self._now()
        if message["type"] == "http.response.start":
            self._comments = asyncio.create_task(self._comment())

    def close(self) -> None:
        """Stop sending comments."""
        if self._comments is not None:
            self._comments.cancel()

    async def _comment(self) -> None:
        message = {"type": "http.response.body", "body": KEEP_ALIVE.encode(), "more_body": True}
        while True:
            await asyncio.sleep(self._sent_at + self._seconds - self._now())
            if self._now() - self._sent_at >= self._seconds:
                await self._send(message)
                self._sent_at = self._now()
