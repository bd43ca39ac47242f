"""The sync client, and its twin on asyncio."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import httpx

from baton_client import routes
from baton_client.conversation import AsyncConversation, Conversation
from baton_client.driver import AsyncDriver, Driver, awaiting, blocking
from baton_client.handoffs import AsyncHandoffs, Handoffs
from baton_client.retries import Retries
from baton_client.routes import Start
from baton_client.turns import first_turns
from baton_client.wire import client_options

BASE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0
MAX_ANSWER_BYTES = 256 * 1024**2


class Baton:
    """A client of a Baton gateway; use it in a `with` block, or call `close`. Threads may share it.

    Args:
        base_url: of the gateway, with `/v1` at its end or without.
        timeout_s: most seconds to wait for an answer to begin, and for each next piece of it.
        retries: how often a request is sent again at most, where that is harmless or the gateway asks for it.
        transport: what sends requests, such as `httpx.HTTPTransport(proxy=...)`; None: httpx's own.
        max_answer_bytes: most bytes that an answer may have; above them it is a `BadAnswer`. A file that is
            written to `target` may have 64 times as many.

    Attributes:
        handoffs: the routes of `/v1/handoffs`.
    """

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = 2,
        transport: httpx.BaseTransport | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        options = client_options(base_url, api_key, timeout_s)
        self._driver = Driver(options, Retries(retries), transport, max_answer_bytes)
        self.handoffs = Handoffs(self._driver)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._driver.close()

    chat = blocking(routes.chat)
    scene = blocking(routes.scene)
    engines = blocking(routes.list_engines)

    def conversation(
        self,
        model: str,
        system: str | None = None,
        *,
        start: Start | None = None,
        label: str | None = None,
        keep: bool = False,
    ) -> Conversation:
        """Begin a conversation of which each turn sends the new message alone; nothing is sent yet.

        Args:
            system: the system message, before the first turn's.
            start: the handoff that it goes on from; it is never deleted.
            label: given to what it saves; its last handoff is kept, and `handoffs.find` returns it.
            keep: whether all that it saves is kept.
        """
        turns = first_turns(model, self._driver.retries, system, start, label, keep)
        return Conversation(self._driver, turns)


class AsyncBaton:
    """A client of a Baton gateway; use it in an `async with` block, or await `close`. See `Baton`."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        options = client_options(base_url, api_key, timeout_s)
        self._driver = AsyncDriver(options, Retries(retries), transport, max_answer_bytes)
        self.handoffs = AsyncHandoffs(self._driver)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._driver.close()

    chat = awaiting(routes.chat)
    scene = awaiting(routes.scene)
    engines = awaiting(routes.list_engines)

    def conversation(
        self,
        model: str,
        system: str | None = None,
        *,
        start: Start | None = None,
        label: str | None = None,
        keep: bool = False,
    ) -> AsyncConversation:
        """Begin a conversation of which each turn sends the new message alone; see `Baton.conversation`."""
        turns = first_turns(model, self._driver.retries, system, start, label, keep)
        return AsyncConversation(self._driver, turns)
