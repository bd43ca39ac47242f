"""Limit how large a request's body is, how slowly it may come, and what all bodies hold together."""

from __future__ import annotations

import asyncio

from pydantic import ByteSize
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.admission.body_budget import BodyBudget, BodyLease
from baton.config.groups import EdgeSettings
from baton.errors import BatonError, BodyTooLarge, RequestTimeout, UnsupportedMediaType
from baton.http.media_types import UPLOAD_TYPES, media_type_of
from baton.http.request_state import state_of

UPLOAD_PATH = "/pooling"


class BodyLimitMiddleware:
    """Refuse a body that is too large, by its announced length or once it is, or that comes too slowly.

    Args:
        app: what the bodies are for.
        bodies: room for the bodies that are held in memory.
        uploads: room for the files that are written to disk as they come.
        edge: how long a body may take.
    """

    def __init__(self, app: ASGIApp, *, bodies: BodyBudget, uploads: BodyBudget, edge: EdgeSettings) -> None:
        self._app = app
        self._bodies = bodies
        self._uploads = uploads
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = scope["path"] == UPLOAD_PATH and media_type_of(Request(scope)) in UPLOAD_TYPES
        budget = self._uploads if upload else self._bodies
        limit = ByteSize(budget.room.each)
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise _too_large(limit)
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedMediaType(
                    "Bodies are taken as they are, not compressed: send it without 'Content-Encoding'."
                )
        with budget.lease(state_of(scope).context.tenant) as lease:
            await self._app(scope, Body(receive, limit, self._edge, lease).receive, send)


class Body:
    """One body on its way in: how much of it came, and how long it was waited for.

    Only waiting counts: while the application is busy elsewhere, the client is not the slow one.
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
        """The next piece; once the body is whole, the client's end, for as long as that takes.

        Raises:
            BodyTooLarge: there is more of it than may be.
            RequestTimeout: it comes too slowly.
            RateLimited: its tenant's bodies take their share already.
            GatewayOverloaded: all bodies take what they may together, or memory is short.
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
                f"The body did not arrive within {self._edge.body_s:g} s, nor at "
                f"{self._edge.body_bytes_per_s.human_readable()} per second; send it again, faster."
            ) from None
        finally:
            self._waited += now() - began


def _too_large(limit: ByteSize) -> BodyTooLarge:
    return BodyTooLarge(f"The request body may hold at most {limit.human_readable()}.")
