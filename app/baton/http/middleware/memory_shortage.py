"""Refuse new requests while memory is short."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import GatewayOverloaded
from baton.telemetry.memory import MemoryWatch

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
