"""The `Backend` port on a server elsewhere: requests are sent on whole, answers passed on as they come.

The server has the weights, the tokenizer, the KV and the plugins. The gateway's own limits, queues and checks
hold before a request is sent on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry

from baton.admission.breaker import Breaker
from baton.admission.fair_threads import in_own_thread
from baton.config.groups import EngineSettings
from baton.config.settings import Settings, is_loopback
from baton.engines.adapters import Adapter
from baton.engines.backend import EngineState, ImageInput, Json, Report
from baton.engines.elsewhere.client import RemoteClient
from baton.engines.elsewhere.keys import RemoteKeys
from baton.engines.elsewhere.server import Look, RemoteServer, look
from baton.errors import BatonError, EngineUnavailable
from baton.telemetry.metrics import RemoteMetrics

log = structlog.get_logger("baton.engine")

ALL_IMAGES = 1_000_000
"""The server's own limit of images is not known here; `images.count` holds."""
RETRY_S = 1.0
"""Seconds between two looks at a server that cannot be reached."""
PAUSE_S = 0.05
"""Seconds between two looks at least, however many requests fail meanwhile."""


def build_remote_engines(
    settings: Settings, *, tenants: bool, names: Collection[str] | None = None
) -> list[RemoteEngine]:
    """Build the engines of the settings that are servers elsewhere, without asking them.

    Args:
        names: of those that are built; None: all.
        tenants: whether several tenants' requests are sent on.

    Raises:
        SettingsError: a key or certificates cannot be read.
    """
    remote = [each for each in settings.engines if not each.own and (names is None or each.name in names)]
    for engine in remote:
        parts = urlsplit(engine.url or "")
        keyed = engine.remote.key_file is not None or engine.remote.keys_dir is not None
        if keyed and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            log.warning("remote_key_in_clear", engine=engine.name, url=engine.url, reason="use https://")
    return [RemoteEngine(engine, tenants=tenants) for engine in remote]


class RemoteEngine:
    """An engine whose requests another server answers.

    Args:
        settings: of the engine; `url` is set.
        tenants: whether the gateway has several tenants, whose requests must stay apart on the server.

    Raises:
        SettingsError: a key or the certificates cannot be read.
    """

    def __init__(self, settings: EngineSettings, *, tenants: bool) -> None:
        self._settings = settings
        self.name, self.aliases, self.default = settings.name, settings.aliases, settings.default
        self.base = settings.name
        self.adapters: Mapping[str, Adapter] = {}
        self.generates, self.supports_handoffs = settings.runner == "generate", settings.handoff
        self.images = ImageInput(limit=ALL_IMAGES if settings.remote.images else 0)
        self.memory_bytes = None
        self.registry = CollectorRegistry()
        self._keys = RemoteKeys(settings)
        self._breaker = Breaker(settings.remote.failures)
        self._client = RemoteClient(settings)
        metrics = RemoteMetrics(self.registry, settings.name)
        self._doubt = asyncio.Event()
        self.forwarding = RemoteServer(
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

    def rename(self, aliases: tuple[str, ...], *, default: bool) -> None:
        self.aliases, self.default = aliases, default

    async def start(self, report: Report) -> None:
        """Look at the server; one that cannot be reached is looked at again until it can."""
        self._state = EngineState.STARTING
        report(f"asking {self._settings.url}")
        try:
            found = await self._look()
            found.require_usable(self.name, str(self._settings.url), self._settings.model)
        except BatonError as error:
            if not isinstance(error, EngineUnavailable):
                self._state = EngineState.FAILED
                await self._client.close()
                raise
            self._breaker.trip()
            self._log.warning("remote_unreachable", reason=_cause(error))
        self._state = EngineState.READY
        self._watch = asyncio.create_task(self._look_again(), name=f"remote-{self.name}")

    async def stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        await self._client.close()
        self._state = EngineState.STOPPED

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
        """Look at the server once."""
        await in_own_thread(self._keys.refresh)
        try:
            found = await look(self._client, self._settings.remote, self._keys.of_looks, self._settings.model)
            card = found.card or {}
            afresh = self._state is EngineState.STARTING or self._breaker.open
            await self.forwarding.learn(is_vllm=card.get("owned_by") == "vllm", afresh=afresh)
        except BatonError as error:
            raise EngineUnavailable() from error
        if found.key_refused and not self._key_refused:
            self._log.error("remote_key_refused")
        self._key_refused = found.key_refused
        self._card = found.card or self._card
        if self._breaker.succeeded():
            self._log.info("remote_reachable")
        return found

    @property
    def active(self) -> int:
        return self.forwarding.active

    def cards(self) -> list[Json]:
        can = {"generate": self.generates, "pooling": not self.generates, "handoffs": self.supports_handoffs}
        told = {
            "object": "model",
            "created": int(time.time()),
            "owned_by": "baton",
            "capabilities": [word for word, able in can.items() if able],
        } | self._card
        return [{"id": name} | told for name in (self.name, *self.aliases) if "*" not in name]


def _cause(error: BaseException) -> str:
    """Return the innermost cause of an error, for the log."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:300]
