"""Refuse new requests while memory is short, and release a request's places when it has been answered."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import GatewayOverloaded
from baton.http.request_state import state_of
from baton.telemetry.memory import MemoryWatch

ALWAYS_ANSWERED = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods that are answered even if memory is short: they only read, or free something."""
MEMORY_RETRY_AFTER_S = 5


class MemoryShortageMiddleware:
    """Refuses new requests while memory is short, and releases their places in the queues at the end."""

    def __init__(self, app: ASGIApp, *, memory: MemoryWatch) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._memory.short and scope["method"] not in ALWAYS_ANSWERED:
            raise GatewayOverloaded(retry_after_s=MEMORY_RETRY_AFTER_S)
        try:
            await self._app(scope, receive, send)
        finally:
            state_of(scope).ticket.answered()
