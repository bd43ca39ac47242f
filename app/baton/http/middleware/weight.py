"""Bound bodies in size, in time and all together; refuse new work while memory is short."""

from __future__ import annotations

import asyncio

from pydantic import ByteSize
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.admission.body_budget import BodyBudget, BodyLease
from baton.config.groups import EdgeSettings
from baton.errors import BatonError, BodyTooLarge, GatewayOverloaded, RequestTimeout, UnsupportedMediaType
from baton.http.request import FORM, UPLOAD_TYPES, media_type_of, state_of
from baton.telemetry.memory import MemoryWatch

# Refuse new requests while memory is short.


ALWAYS_ANSWERED = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods that are answered even if memory is short: they only read, or free something."""
MEMORY_RETRY_AFTER_S = 5


class MemoryShortageMiddleware:
    """Refuses new requests while memory is short."""

    def __init__(self, app: ASGIApp, *, memory: MemoryWatch) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] not in ALWAYS_ANSWERED
        if asks and self._memory.short:
            raise GatewayOverloaded(retry_after_s=MEMORY_RETRY_AFTER_S)
        await self._app(scope, receive, send)


# Limit the size of a request's body, the time it may take to arrive, and the memory of all bodies.


UPLOAD_PATHS, FILES_PATH = ("/pooling", "/v1/scenes"), "/v1/files"


class BodyLimitMiddleware:
    """Refuses bodies that are too large, by their announced length or as they arrive, or too slow.

    Args:
        bodies: budget of the bodies that are held in memory.
        uploads: budget of the files that are written to disk as they arrive.
        files: budget of the forms with files that are kept, which are written to disk too.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        bodies: BodyBudget,
        uploads: BodyBudget,
        files: BodyBudget,
        edge: EdgeSettings,
    ) -> None:
        self._app = app
        self._bodies = bodies
        self._uploads = uploads
        self._files = files
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        budget = self._bodies
        if scope["path"] in UPLOAD_PATHS and media_type_of(Request(scope)) in UPLOAD_TYPES:
            budget = self._uploads
        elif scope["path"] == FILES_PATH and media_type_of(Request(scope)) == FORM:
            budget = self._files
        limit = ByteSize(budget.room.each)
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise _too_large(limit)
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedMediaType(
                    "The request body must not be compressed: send it without 'Content-Encoding'."
                )
        with budget.lease(state_of(scope).context.tenant) as lease:
            state_of(scope).context.take_memory = lease.take
            await self._app(scope, Body(receive, limit, self._edge, lease).receive, send)


class Body:
    """A body that is arriving, with its size and the time spent waiting for it.

    Only waiting counts: a client is not slow while the application is busy.
    """

    def __init__(self, receive: Receive, limit: ByteSize, edge: EdgeSettings, lease: BodyLease) -> None:
        self._receive = receive
        self._lease = lease
        self._limit = limit
        self._edge = edge
        self._seen = 0
        self._waited = 0.0
        self._whole = False

    async def receive(self) -> Message:
        """Receive the next part of the body; after the last one, wait until the client disconnects.

        Raises:
            BodyTooLarge: the body is larger than its limit.
            RequestTimeout: the body comes too slowly.
            RateLimited: the bodies of its tenant take their share of memory already.
            GatewayOverloaded: all bodies take their budget already, or memory is short.
        """
        if self._whole:
            return await self._receive()
        event = await self._in_time()
        self._seen += len(event.get("body", b""))
        self._whole = event["type"] != "http.request" or not event.get("more_body", False)
        if self._seen > self._limit:
            raise _too_large(self._limit)
        self._count(event)
        return event

    def _count(self, event: Message) -> None:
        try:
            self._lease.take(len(event.get("body", b"")))
        except BatonError as error:
            error.ends_connection = not self._whole
            raise

    async def _in_time(self) -> Message:
        now = asyncio.get_running_loop().time
        began = now()
        left = self._edge.body_s + self._seen / self._edge.body_bytes_per_s - self._waited
        try:
            async with asyncio.timeout_at(began + left):
                return await self._receive()
        except TimeoutError:
            raise RequestTimeout(
                f"The request body came too slowly: it may take {self._edge.body_s:g} s, and longer only at "
                f"{self._edge.body_bytes_per_s.human_readable()} per second or more. Send it again, faster."
            ) from None
        finally:
            self._waited += now() - began


def _too_large(limit: ByteSize) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is too large: at most {limit.human_readable()} are allowed.")
