"""Stream server-sent events to a client, with keep-alive comments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, GenerationFailed
from baton.http.error_body import error_event
from baton.http.request import state_of
from baton.telemetry.metrics import GatewayMetrics

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that stop proxies from buffering events."""
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment: clients skip it (HTML standard, section 9.2.6), and proxies do not time out."""


async def event_stream(
    events: AsyncIterator[str],
    metrics: GatewayMetrics,
    headers: Mapping[str, str],
    *,
    keep_alive_s: float,
    begun: bool = False,
) -> EventStream:
    """Wait for the first event, so that a failure before it is answered with its own status; then stream.

    After `keep_alive_s` without an event the response begins with a comment, and a failure is its last event.

    Args:
        events: the events; they are closed if no response begins.
        keep_alive_s: seconds of silence before each comment; 0: no comments.
        begun: whether the seconds before the first comment are over already.

    Raises:
        BatonError: the engine failed before the first event.
    """
    first = asyncio.ensure_future(_first_of(events))
    try:
        await asyncio.wait({first}, timeout=0 if begun else keep_alive_s or None)
        if first.done():
            first.result()
    except BaseException:
        await _end(first, events)
        raise
    return EventStream(first, events, metrics, headers=headers, keep_alive_s=keep_alive_s)


async def later_events(answering: asyncio.Future[Response]) -> AsyncIterator[str]:
    """Yield the events of a response that is still being made; it is no longer made where they are closed."""
    try:
        response = await answering
        if not isinstance(response, EventStream):
            raise GenerationFailed()
        async for event in response.events():
            yield event
    finally:
        await give_up(answering)


async def give_up(answering: asyncio.Future[Response]) -> None:
    """End the work on a response that will not be sent, also where it has been made meanwhile."""
    answering.cancel()
    (made,) = await asyncio.gather(answering, return_exceptions=True)
    if isinstance(made, EventStream):
        await made.close()


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


class ClientWatch:
    """Cancels the task that made it when the client of its request disconnects.

    Args:
        receive: receives the request's ASGI messages; its body must have been read before.

    Attributes:
        gone: the client has disconnected, and the task was cancelled for it.
    """

    def __init__(self, receive: Receive) -> None:
        working = asyncio.current_task()
        assert working is not None
        self.gone = False
        self._working = working
        self._task = asyncio.ensure_future(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._working.cancel()

    def take_back(self) -> None:
        """Take back the cancellation, which was ours and is done; vLLM may have swallowed it."""
        self._working.uncancel()

    def stop(self) -> None:
        """Stop watching."""
        self._task.cancel()


class EventStream(Response):
    """The response to a streaming request.

    An event is one call of the server's own `send`: what the middleware does to a response is done at its
    start and at its end.

    Args:
        first: the first event, which may not have come yet.
        keep_alive_s: seconds of silence before each comment; 0: no comments.

    Attributes:
        watch: notices that the client disconnects; whoever makes the response may give it one that runs.
        endless: clients leave it when they like, which is not counted.
    """

    def __init__(
        self,
        first: asyncio.Future[str],
        rest: AsyncIterator[str],
        metrics: GatewayMetrics,
        *,
        headers: Mapping[str, str],
        keep_alive_s: float,
    ) -> None:
        self._first = first
        self._rest = rest
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self.watch: ClientWatch | None = None
        self.endless = False
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers(HEADERS | dict(headers))

    async def events(self) -> AsyncIterator[str]:
        """Yield the events for another response, in the place of this one; `close` it afterwards."""
        yield await self._first
        async for event in self._rest:
            yield event

    async def close(self) -> None:
        """Cancel the work that makes the events."""
        await _end(self._first, self._rest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = self.watch or ClientWatch(receive)
        kept = KeptAlive(state_of(scope).send or send, self._keep_alive_s)
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            kept.start()
            try:
                await self._send_events(kept)
            except BatonError as error:
                await kept.send(error_event(error, scope))
            except asyncio.CancelledError:
                if not self.endless:
                    self._metrics.disconnects.labels("stream").inc()
                raise
            kept.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not watch.gone:
                raise
            watch.take_back()  # there is nobody to answer, and nothing wrong
        finally:
            watch.stop()
            kept.stop()
            await _end(self._first, self._rest)

    async def _send_events(self, kept: KeptAlive) -> None:
        if not self._first.done():
            await kept.send(KEEP_ALIVE)
        await kept.send(await self._first)
        async for event in self._rest:
            await kept.send(event)


class KeptAlive:
    """Sends a response's events, with a comment whenever nothing was sent for a while.

    Args:
        seconds: of silence before a comment; 0: no comments.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._silent: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send comments from now on."""
        self._sent_at = self._loop.time()
        if self._seconds:
            self._silent = self._loop.call_later(self._seconds, self._look)

    def stop(self) -> None:
        """Send no more comments."""
        if self._silent is not None:
            self._silent.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def send(self, event: str) -> None:
        """Send an event or a comment."""
        await self._send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        self._sent_at = self._loop.time()

    def _look(self) -> None:
        left = self._sent_at + self._seconds - self._loop.time()
        if left <= 0 and (self._comment is None or self._comment.done()):
            self._comment = self._loop.create_task(self.send(KEEP_ALIVE))
        self._silent = self._loop.call_later(left if left > 0 else self._seconds, self._look)
