"""Let running requests finish at shutdown, and end late ones with an error that clients can read.

A request that is ended without an answer gets a 503; a stream gets a last `error` event.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import ShuttingDown
from baton.http.error_body import error_event, error_response
from baton.http.request_state import Drain

ERROR_WITHIN_S = 1.0
"""Seconds to send the error to a client whose request is ended."""

log = structlog.get_logger("baton.server")


class DrainMiddleware:
    """Answers requests that the drain ends."""

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        answer = _Response(send, self._drain)
        with self._drain.watching(task):
            try:
                await self._app(scope, receive, answer.send)
            except asyncio.CancelledError:
                if not self._drain.was_cut(task):
                    raise
                task.uncancel()
                await answer.send_error(scope, receive)


class _Response:
    """A response, with how much of it was sent."""

    def __init__(self, send: Send, drain: Drain) -> None:
        self._send = send
        self._drain = drain
        self._begun = False
        self._streams = False
        self._over = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            self._streams = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            if self._drain.begun:  # so that clients open their next connection elsewhere
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def send_error(self, scope: Scope, receive: Receive) -> None:
        """Send the error, unless the client does not read it in time."""
        log.info("request_cut_off", path=scope["path"])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_WITHIN_S):
                if not self._begun:
                    await error_response(ShuttingDown(), scope)(scope, receive, self.send)
                elif self._streams and not self._over:
                    event = error_event(ShuttingDown(), scope).encode()
                    await self._send({"type": "http.response.body", "body": event, "more_body": False})
