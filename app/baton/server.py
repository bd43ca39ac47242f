"""The composition root: joins settings, engines and routes into an app, and runs it to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from math import ceil
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from baton import __version__
from baton.admission.api_keys import Keyring, keyring_for
from baton.admission.body_budget import BodyBudget, BodyRooms
from baton.admission.tenants import Admission
from baton.config.settings import Settings
from baton.engines.fleet import Fleet, FleetReport
from baton.errors import FleetLost, OperatorError, SettingsError, StartError
from baton.handoffs.image_files import ImageFiles
from baton.handoffs.planner import Planner
from baton.handoffs.repository import RecordFiles
from baton.handoffs.service import Handoffs
from baton.handoffs.session import Sessions
from baton.handoffs.storage import HandoffStorage
from baton.http import openapi
from baton.http.middleware.admission import AdmissionMiddleware
from baton.http.middleware.auth import AuthMiddleware
from baton.http.middleware.body_limit import BodyLimitMiddleware
from baton.http.middleware.drain import LAST_WORDS_S, Drain, DrainMiddleware
from baton.http.middleware.errors import FaultsMiddleware, http_exception, invalid_parameters
from baton.http.middleware.origins import OriginMiddleware
from baton.http.middleware.request_context import ObserveMiddleware
from baton.http.middleware.request_head import HeadMiddleware
from baton.http.protocol import protocol_for
from baton.http.request_body import body_threads
from baton.http.routes import docs, forwarded, handoffs, health, metrics, models, plugins, pooling
from baton.http.state import Gateway
from baton.http.validation.trial_compile import TrialCompiler
from baton.images.fetching import fetcher_of
from baton.images.reader import ImageReader
from baton.pooling.service import Pooling
from baton.telemetry.ids import LOCAL_TENANT, NO_TENANT
from baton.telemetry.lag import watch_lag
from baton.telemetry.memory import MemoryReader, MemoryWatch
from baton.telemetry.metrics import HandoffMetrics
from baton_kv.stores.base import StoreError
from baton_kv.stores.factory import open_store
from baton_kv.stores.file import IMAGES, RECORDS
from baton_kv.stores.memory import MemoryStore

ROUTERS = (forwarded, pooling, handoffs, models, plugins, health, docs)


def handoffs_of(settings: Settings, metrics: HandoffMetrics) -> Handoffs:
    """The handoffs there are: those of an earlier run too, where an engine hands over.

    Raises:
        SettingsError: the store cannot be used.
    """
    if not any(engine.handoff for engine in settings.engines):
        nowhere = HandoffStorage(MemoryStore(), RecordFiles(None), ImageFiles(None))
        return Handoffs(settings.handoffs, nowhere, metrics)
    try:
        store = open_store(settings.handoff_store, budget=int(settings.handoffs.budget))
        folder = Path(settings.handoff_store.removeprefix("file:"))
        storage = HandoffStorage(store, RecordFiles(folder / RECORDS), ImageFiles(folder / IMAGES))
    except StoreError as error:
        raise SettingsError(f"handoffs.store: {error}") from None
    except OSError as error:
        raise SettingsError(f"handoffs.store: {settings.handoff_store}: {error.strerror}") from None
    return Handoffs(settings.handoffs, storage, metrics)


def create_app(
    settings: Settings,
    fleet: Fleet,
    *,
    metrics_listener: socket.socket | None = None,
    report: FleetReport = lambda _name, _phase: None,
    memory_reader: MemoryReader | None = None,
) -> FastAPI:
    """The gateway's app. Its lifespan starts the fleet in the background and stops it at the end.

    Args:
        settings: the settings.
        fleet: the engines; tests hand in fakes.
        metrics_listener: where `/metrics` answers; None: on the gateway's own port, unless others use it.
        report: told the phase each engine's start is in.
        memory_reader: reads how much memory there is; None: where Linux says it.
    """
    counted = fleet.metrics
    reserve = int(settings.admission.memory_reserve)
    reader = memory_reader or MemoryReader()
    memory = MemoryWatch(reader, reserve, counted.memory)
    keyring = keyring_for(settings)
    handoffs = handoffs_of(settings, counted.handoffs)
    gateway = Gateway(
        settings,
        fleet,
        counted,
        handoffs,
        Sessions(handoffs, Planner(), counted.handoffs, settings.handoffs),
        Pooling(settings.pooling, counted.pooling, counted.queues),
        Drain(),
        Admission(settings.admission, fleet.names, counted.admission),
        ImageReader(
            settings.images,
            counted.images,
            fetcher_of(settings.images),
            queues=counted.queues,
            wait_s=settings.admission.wait_s,
        ),
        body_threads(counted.queues, settings.admission.wait_s),
        TrialCompiler(settings.limits, counted.queues),
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with (
            contextlib.closing(gateway.pooling),
            contextlib.closing(gateway.images),
            contextlib.closing(gateway.body_threads),
            contextlib.closing(gateway.compiler),
        ):
            async with (
                gateway.handoffs.running(),
                _beside(watch_lag(counted.loop_lag), memory.run()),
                _metrics_port(gateway, metrics_listener),
                _running(app, fleet, report),
                gateway.handoffs.settling(),
            ):
                yield

    app = FastAPI(
        title="Baton",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own pages load their scripts from elsewhere
        redoc_url=None,
    )
    app.state.gateway = gateway
    for module in ROUTERS:
        app.include_router(module.router)
    if metrics_listener is None and not settings.shared(keyed=keyring is not None):
        app.include_router(metrics.router)
    openapi.install(app)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(RequestValidationError, invalid_parameters)
    _add_layers(app, gateway, keyring, memory, reader.available())
    return app


def _add_layers(
    app: FastAPI, gateway: Gateway, keyring: Keyring | None, memory: MemoryWatch, available: int | None
) -> None:
    """What stands between the socket and the routes. The last one added is the outermost."""
    settings, held = gateway.settings, gateway.metrics.bodies
    rooms = BodyRooms.of(settings, available=available, one_tenant=keyring is None)
    app.add_middleware(AdmissionMiddleware, memory=memory)
    app.add_middleware(
        BodyLimitMiddleware,
        bodies=BodyBudget(rooms.memory, held.labels("memory"), short=lambda: memory.short),
        uploads=BodyBudget(rooms.disk, held.labels("disk")),
        edge=settings.edge,
    )
    app.add_middleware(AuthMiddleware, keyring=keyring)
    app.add_middleware(OriginMiddleware, settings=settings, keyless=keyring is None)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(FaultsMiddleware, metrics=gateway.metrics)
    app.add_middleware(DrainMiddleware, drain=gateway.drain)
    nobody = LOCAL_TENANT if keyring is None else NO_TENANT
    app.add_middleware(ObserveMiddleware, metrics=gateway.metrics, routes=app.routes, unidentified=nobody)


@contextlib.asynccontextmanager
async def _beside(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Lets what only watches run meanwhile."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _running(app: FastAPI, fleet: Fleet, report: FleetReport) -> AsyncIterator[None]:
    """Engines start while the port already answers `/livez`; who wants to wait awaits `started`."""
    started = asyncio.create_task(fleet.start(report), name="fleet-start")
    app.state.started = started
    try:
        yield
    finally:
        started.cancel()
        await fleet.stop()
        await asyncio.gather(started, return_exceptions=True)


@contextlib.asynccontextmanager
async def _metrics_port(gateway: Gateway, listener: socket.socket | None) -> AsyncIterator[None]:
    """`/metrics` on a port of its own when others than the operator can reach the gateway's."""
    if listener is None:
        yield
        return
    server = _MetricsServer(_uvicorn_config(metrics.app_of(gateway), gateway))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="metrics-port")
    try:
        yield
    finally:
        server.should_exit = True
        await task


def url_of(listener: socket.socket) -> str:
    """The address a listening socket answers on."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _uvicorn_config(app: Any, gateway: Gateway, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_for(gateway.settings.edge, gateway.metrics),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client's address is
        **options,
    )


class _MetricsServer(uvicorn.Server):
    """A second server in the process; signals belong to the first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer(uvicorn.Server):
    """The gateway's server: says when it is ready, and ends with a code that says how it went.

    Args:
        app: from `create_app`.
        settings: its settings.
        on_ready: called with the URL once every engine answers.

    Attributes:
        failure: why the engines could not start, if they could not.
        handle_signals: end on SIGINT and SIGTERM; off where another part of the process owns them.
    """

    def __init__(self, app: FastAPI, settings: Settings, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            _uvicorn_config(
                app,
                app.state.gateway,
                lifespan="on",
                timeout_graceful_shutdown=settings.drain_timeout_s + ceil(LAST_WORDS_S) + 1,
            )
        )
        self._app = app
        self._settings = settings
        self._on_ready = on_ready
        self.handle_signals = True
        self.failure: OperatorError | None = None
        self._log = structlog.get_logger("baton.server")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but a stop that was asked for ends the process with 0, not by the signal."""
        if not self.handle_signals:
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """The first signal lets what runs finish, the second cuts it off."""
        drain, loop = self._gateway.drain, asyncio.get_running_loop()
        if drain.begun:
            self.should_exit = True
            drain.cut()
            return
        drain.begin()
        delay = self._settings.drain_delay_s if sig == signal.SIGTERM and self._gateway.fleet.ready else 0.0
        self._log.info("draining", delay_s=delay, timeout_s=self._settings.drain_timeout_s)
        loop.call_later(delay, setattr, self, "should_exit", True)
        loop.call_later(delay + self._settings.drain_timeout_s, drain.cut)

    @property
    def _gateway(self) -> Gateway:
        gateway: Gateway = self._app.state.gateway
        return gateway

    async def startup(self, *args: Any, **kwargs: Any) -> None:
        await super().startup(*args, **kwargs)
        if not self.should_exit:
            self._app.state.started.add_done_callback(self._fleet_started)
            self._watch = asyncio.create_task(self._until_lost(), name="fleet-lost")

    async def _until_lost(self) -> None:
        await self._gateway.fleet.lost.wait()
        self.failure = FleetLost("Every engine failed too often; the log lines above say how each was lost.")
        self._log.error("fleet_lost")
        self._gateway.drain.begin()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watch.cancel()
        await super().shutdown(sockets)

    @property
    def url(self) -> str:
        return url_of(self.servers[0].sockets[0])

    def _fleet_started(self, started: asyncio.Task[None]) -> None:
        if started.cancelled():
            return
        error = started.exception()
        if error is None:
            gc.collect()
            gc.freeze()  # what a start leaves lives on; no collection need look at it again
            self._on_ready(self.url)
            return
        self.failure = error if isinstance(error, OperatorError) else _unforeseen()
        if error is not self.failure:
            self._log.error("start_failed", cause=str(error), exc_info=error)
        self.should_exit = True


def _unforeseen() -> StartError:
    return StartError("The engines could not start; the log line above says where it went wrong.")
