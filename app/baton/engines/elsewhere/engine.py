"""The `Engine` port on a server elsewhere: requests are sent on whole, answers passed on as they come.

The server has the weights, the tokenizer, the KV and the plugins, so everything that needs one of these here
is refused. The gateway's own limits, queues and checks hold before a request is sent on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry

from baton.admission.breaker import Breaker
from baton.admission.fair_threads import in_own_thread
from baton.config.groups import EngineSettings
from baton.config.settings import Settings, is_loopback
from baton.engines.configured import ConfiguredEngine
from baton.engines.elsewhere.client import RemoteClient
from baton.engines.elsewhere.keys import RemoteKeys
from baton.engines.elsewhere.server import Look, RemoteServer, look
from baton.engines.kv_transfer import TransferChooser, TransferRequest
from baton.engines.port import (
    EngineState,
    Forwarding,
    ImageInput,
    Json,
    Operation,
    Plugin,
    Reply,
    Report,
)
from baton.errors import BatonError, EngineUnavailable, OperationUnsupported
from baton.images.client_image import ClientImage
from baton.images.placed_image import PlacedImage
from baton.telemetry.ids import RequestContext
from baton.telemetry.metrics import RemoteMetrics

# Build the engines of the settings that are servers elsewhere.


def build_remote_engines(settings: Settings, *, tenants: bool) -> list[RemoteEngine]:
    """Build the engines that are servers elsewhere, without asking them.

    Args:
        settings: the settings.
        tenants: whether several tenants' requests are sent on.

    Raises:
        SettingsError: a key or certificates cannot be read.
    """
    remote = [engine for engine in settings.engines if not engine.own]
    for engine in remote:
        _warn_of_open_key(engine)
    return [RemoteEngine(engine, tenants=tenants) for engine in remote]


def _warn_of_open_key(engine: EngineSettings) -> None:
    """Log that a key crosses the network in clear."""
    parts = urlsplit(engine.url or "")
    keyed = engine.remote.key_file is not None or engine.remote.keys_dir is not None
    if keyed and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        structlog.get_logger("baton.engine").warning(
            "remote_key_in_clear", engine=engine.name, url=engine.url, reason="use https://"
        )


log = structlog.get_logger("baton.engine")

ALL_IMAGES = 1_000_000
"""The server's own limit of images is not known here; `images.count` holds."""
RETRY_S = 1.0
"""Seconds between two looks at a server that cannot be reached."""
PAUSE_S = 0.05
"""Seconds between two looks at least, however many requests fail meanwhile."""


class RemoteEngine(ConfiguredEngine):
    """An engine whose requests another server answers.

    Args:
        settings: of the engine; `url` is set.
        tenants: whether the gateway has several tenants, whose requests must stay apart on the server.

    Raises:
        SettingsError: a key or the certificates cannot be read.
    """

    def __init__(self, settings: EngineSettings, *, tenants: bool) -> None:
        super().__init__(settings)
        self._keys = RemoteKeys(settings)
        self._breaker = Breaker(settings.remote.failures)
        self._registry = CollectorRegistry()
        self._client = RemoteClient(settings)
        metrics = RemoteMetrics(self._registry, settings.name)
        self._doubt = asyncio.Event()
        self._server = RemoteServer(
            settings, self._client, self._keys, self._breaker, metrics, self._doubt.set, tenants=tenants
        )
        self._state = EngineState.STOPPED
        self._card: Json = {}
        self._key_refused = False
        self._watch: asyncio.Task[None] | None = None
        self._log = log.bind(engine=settings.name, url=settings.url)

    @property
    def state(self) -> EngineState:
        if self._state is EngineState.READY and self._breaker.open:
            return EngineState.UNREACHABLE
        return self._state

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry

    @property
    def forwarding(self) -> Forwarding:
        return self._server

    async def start(self, report: Report) -> None:
        """Look at the server; one that cannot be reached is looked at again until it can."""
        self._state = EngineState.STARTING
        report(f"asking {self._settings.url}")
        try:
            found = await self._look()
            found.require_usable(self.name, str(self._settings.url), self._settings.model)
        except BatonError as error:
            if not isinstance(error, EngineUnavailable):
                await self._failed_to_start()
                raise
            self._breaker.trip()
            self._log.warning("remote_unreachable", reason=_cause(error))
        self._state = EngineState.READY
        self._watch = asyncio.create_task(self._look_again(), name=f"remote-{self.name}")

    async def _failed_to_start(self) -> None:
        self._state = EngineState.FAILED
        await self._client.close()

    async def stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        await self._client.close()
        self._state = EngineState.STOPPED

    async def kill(self) -> None:
        """Do nothing: there is no process here."""

    async def _look_again(self) -> None:
        """Look at the server every so often, and soon after a request met something strange."""
        while True:
            probe_s = self._settings.remote.probe_s
            wait_s = min(RETRY_S, probe_s) if self._breaker.doubtful else probe_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._doubt.wait()
            await asyncio.sleep(PAUSE_S)
            self._doubt.clear()
            try:
                await self._look()
            except EngineUnavailable as error:
                if self._breaker.failed():
                    self._log.error("remote_unreachable", reason=_cause(error))
            except Exception as error:  # the border of a background task: it must not end silently
                log.error("remote_look_failed", engine=self.name, exc_info=error)

    async def _look(self) -> Look:
        """Look at the server once.

        Raises:
            EngineUnavailable: it cannot be reached.
        """
        await in_own_thread(self._keys.refresh)
        try:
            found = await look(self._client, self._settings.remote, self._keys.of_looks, self._settings.model)
            card = found.card or {}
            afresh = self._state is EngineState.STARTING or self._breaker.open
            await self._server.learn(is_vllm=card.get("owned_by") == "vllm", afresh=afresh)
        except BatonError as error:
            raise EngineUnavailable() from error
        if found.key_refused and not self._key_refused:
            self._log.error("remote_key_refused")
        self._key_refused = found.key_refused
        self._card = found.card or self._card
        if self._breaker.succeeded():
            self._log.info("remote_reachable")
        return found

    def stalled_s(self) -> float:
        return 0.0

    @property
    def active(self) -> int:
        return self._server.active

    @property
    def rounding_nats(self) -> float:
        raise EngineUnavailable(f"The engine '{self.name}' runs elsewhere.")

    def forget_prefixes(self) -> None:
        """Do nothing: the caches are the server's."""

    @property
    def longest_step_s(self) -> float:
        return 0.0

    @property
    def moves_unsupported(self) -> str | None:
        return "it runs elsewhere"

    @property
    def translates(self) -> bool:
        return False

    @property
    def rosetta_pairs(self) -> frozenset[tuple[str, str]]:
        return frozenset()

    @property
    def special_tokens(self) -> frozenset[int]:
        return frozenset()

    @property
    def placeholder(self) -> int | None:
        return None

    @property
    def weights(self) -> str:
        """No identity that an engine here could have, so that none takes it for its equal."""
        return f"elsewhere:{self.name}"

    @property
    def images(self) -> ImageInput:
        return ImageInput(limit=ALL_IMAGES if self._settings.remote.images else 0)

    @property
    def plugin(self) -> Plugin | None:
        return None

    async def encode(
        self, prompt: Any, params: Any, context: RequestContext, *, number: int, priority: int
    ) -> Any:
        raise self._elsewhere()

    async def place(
        self, prompt: list[int], images: Sequence[ClientImage], *, begins: bool
    ) -> tuple[list[int], list[PlacedImage]]:
        raise self._elsewhere()

    async def render(self, body: Json) -> str:
        raise self._elsewhere()

    def cards(self) -> list[Json]:
        told = {"object": "model", "created": int(time.time()), "owned_by": "baton"} | (self._card)
        return [{"id": name} | told for name in (self.name, *self.aliases)]

    async def call(
        self,
        operation: Operation,
        body: Json,
        context: RequestContext,
        transfer: TransferRequest | None = None,
        chooser: TransferChooser | None = None,
    ) -> Reply:
        if transfer is not None:
            raise self._elsewhere()
        return await self._server.send(operation, body, context, automatic=chooser is not None)

    def _elsewhere(self) -> OperationUnsupported:
        return OperationUnsupported(
            f"The engine '{self.name}' is a server elsewhere, which does this only for requests of its own."
        )


def _cause(error: BaseException) -> str:
    """Return the innermost cause of an error, for the log."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:300]
