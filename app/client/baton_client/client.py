"""The sync client, and its twin on asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from baton_client import routes
from baton_client.call import Report
from baton_client.conversation import AsyncConversation, Conversation
from baton_client.driver import AsyncDriver, Driver, awaiting, blocking
from baton_client.handoffs import AsyncHandoffs, Handoffs
from baton_client.retries import Retries
from baton_client.routes import Parameter, Start
from baton_client.scripts import keep_scene
from baton_client.turns import first_turns
from baton_client.values import KeptScene
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
    models = blocking(routes.models)
    scene = blocking(routes.scene)
    engines = blocking(routes.list_engines)
    get_scene = blocking(routes.get_scene)
    delete_scene = blocking(routes.delete_scene)

    def keep_scene(
        self,
        model: str,
        scene: str | Path | bytes | Mapping[str, Any],
        folder: str | Path | None = None,
        *,
        progress: Report | None = None,
        key: str | None = None,
        media_type: str | None = None,
        **parameters: Parameter,
    ) -> KeptScene:
        """Send a scene as a job, follow it until it is done, and write its files to a folder.

        Args:
            scene: path of the file, or its bytes; or `data` of a JSON request, as with `assets` or `item`.
            folder: that its files are written to; None: they stay at the gateway, under their names.
            progress: called with a `Progress` for each piece sent or received, and for tiles meanwhile.
            key: with which the same scene is begun once alone, however often it is sent; None: a new one.
            media_type: of the scene; None: by the file's name, of bytes `image/tiff`.
            parameters: the plugin's own, such as `bbox=[14.1, 45.0, 14.3, 45.2]`.

        Raises:
            SceneFailed: the gateway refused it, or failed.
            FileNotFoundError: there is no such file or folder.
        """
        retries = self._driver.retries
        return self._driver.run(
            keep_scene(retries, model, scene, folder, progress, key, media_type, parameters)
        )

    def conversation(
        self,
        model: str,
        system: str | None = None,
        *,
        start: Start | None = None,
        label: str | None = None,
        keep: bool = False,
        save: bool = True,
    ) -> Conversation:
        """Begin a conversation of which each turn sends the new message alone; nothing is sent yet.

        Args:
            system: the system message, before the first turn's.
            start: the handoff that it goes on from; it is never deleted.
            label: given to what it saves; its last handoff is kept, and `handoffs.find` returns it.
            keep: whether all that it saves is kept.
            save: whether it saves handoffs; False, for models without them: each turn sends all messages.
        """
        turns = first_turns(model, self._driver.retries, system, start, label, keep, save)
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
    models = awaiting(routes.models)
    scene = awaiting(routes.scene)
    engines = awaiting(routes.list_engines)
    get_scene = awaiting(routes.get_scene)
    delete_scene = awaiting(routes.delete_scene)

    async def keep_scene(
        self,
        model: str,
        scene: str | Path | bytes | Mapping[str, Any],
        folder: str | Path | None = None,
        *,
        progress: Report | None = None,
        key: str | None = None,
        media_type: str | None = None,
        **parameters: Parameter,
    ) -> KeptScene:
        """Send a scene as a job, follow it until it is done, and write its files to a folder.

        Args:
            scene: path of the file, or its bytes; or `data` of a JSON request, as with `assets` or `item`.
            folder: that its files are written to; None: they stay at the gateway, under their names.
            progress: called with a `Progress` for each piece sent or received, and for tiles meanwhile.
            key: with which the same scene is begun once alone, however often it is sent; None: a new one.
            media_type: of the scene; None: by the file's name, of bytes `image/tiff`.
            parameters: the plugin's own, such as `bbox=[14.1, 45.0, 14.3, 45.2]`.

        Raises:
            SceneFailed: the gateway refused it, or failed.
            FileNotFoundError: there is no such file or folder.
        """
        retries = self._driver.retries
        return await self._driver.run(
            keep_scene(retries, model, scene, folder, progress, key, media_type, parameters)
        )

    def conversation(
        self,
        model: str,
        system: str | None = None,
        *,
        start: Start | None = None,
        label: str | None = None,
        keep: bool = False,
        save: bool = True,
    ) -> AsyncConversation:
        """Begin a conversation of which each turn sends the new message alone; see `Baton.conversation`."""
        turns = first_turns(model, self._driver.retries, system, start, label, keep, save)
        return AsyncConversation(self._driver, turns)
