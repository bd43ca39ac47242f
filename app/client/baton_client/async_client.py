"""The async client, on asyncio."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from baton_client import routes
from baton_client.async_driver import AsyncDriver
from baton_client.call import Report
from baton_client.client import BASE_URL, MAX_ANSWER_BYTES, TIMEOUT_S
from baton_client.conversation import AsyncConversation
from baton_client.handoffs import AsyncHandoffs
from baton_client.retries import Retries
from baton_client.routes import Messages, Parameter, Start, Starts
from baton_client.scripts import exchange
from baton_client.turns import first_turns
from baton_client.values import Answer, SceneAnswer
from baton_client.wire import client_options


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

    async def chat(
        self,
        model: str,
        messages: Messages,
        *,
        start: Starts | None = None,
        join: str | None = None,
        order: str | None = None,
        translate: bool | None = None,
        save: bool = False,
        label: str | None = None,
        pin: bool = False,
        ttl_s: int | None = None,
        latent_steps: int = 0,
        **fields: Any,
    ) -> Answer:
        """Ask a model, from a handoff or from the beginning; see `Baton.chat`."""
        starting = {"join": join, "order": order, "translate": translate}
        saving = {"label": label, "pin": pin, "ttl_s": ttl_s, "latent_steps": latent_steps}
        call = routes.chat(
            model, messages, start=start, starting=starting, save=save, saving=saving, fields=fields
        )
        return await self._driver.run(exchange(call, self._driver.retries))

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

    async def scene(
        self,
        model: str,
        scene: str | Path | bytes,
        *,
        accept: str = "image/tiff",
        target: str | Path | None = None,
        progress: Report | None = None,
        media_type: str | None = None,
        **parameters: Parameter,
    ) -> SceneAnswer:
        """Send a scene to a model's plugin, as a file; see `Baton.scene`."""
        call = routes.scene(
            model,
            scene,
            accept=accept,
            media_type=media_type,
            target=target,
            report=progress,
            parameters=parameters,
        )
        return await self._driver.run(exchange(call, self._driver.retries))
