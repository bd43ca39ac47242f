"""What a request may weigh while it comes in, and what of it never reaches an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

from pydantic import ByteSize
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.body_budget import BodyBudget, BodyLease
from baton.api.body_work import off_the_loop
from baton.api.strict_json import parse_object
from baton.errors import BatonError, BodyTooLarge, RequestTimeout, UnsupportedMediaType
from baton.setting_groups import EdgeSettings, LimitSettings

UPLOAD_TYPES = frozenset(
    {
        "application/octet-stream",
        "image/geotiff",
        "image/jpeg",
        "image/png",
        "image/tiff",
        "image/webp",
    }
)
"""Bodies of `POST /pooling` that are a file as it is, not JSON."""
UPLOAD_PATH = "/pooling"

STEERING_KEYS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "cache_salt",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "priority",
)
"""Fields of vLLM's requests that steer its caches, its scheduler or its image reading past the gateway."""
ARGUMENTS = "vllm_xargs"
"""Arguments for whatever in an engine knows them: a connector, a logits processor, a model."""


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
        with budget.lease(scope["baton"].tenant) as lease:
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


def media_type_of(request: Request) -> str:
    """The body's media type without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, limits: LimitSettings) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        UnsupportedMediaType: it is not sent as JSON.
        InvalidJson: it is no JSON by RFC 8259, or no object.
        InvalidRequest: it holds too much, or is nested too deep.
    """
    media_type = media_type_of(request)
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType()
    body = await request.body()
    return await off_the_loop(request, partial(parse_object, body, limits))


def strip_steering(body: dict[str, Any]) -> list[str]:
    """Drop the fields that would steer the engine, also inside `vllm_xargs`; returns their names."""
    stripped = [key for key in STEERING_KEYS if body.pop(key, None) is not None]
    extra = body.get(ARGUMENTS)
    if isinstance(extra, dict):
        stripped += [key for key in STEERING_KEYS if extra.pop(key, None) is not None]
    return stripped


def strip_arguments(body: dict[str, Any], allowed: Collection[str]) -> int:
    """Drop what clients may not set in `vllm_xargs`; returns how many arguments that were."""
    extra = body.get(ARGUMENTS)
    if not isinstance(extra, dict):
        return 0
    kept = {name: value for name, value in extra.items() if name in allowed}
    if kept:
        body[ARGUMENTS] = kept
    else:
        del body[ARGUMENTS]
    return len(extra) - len(kept)
