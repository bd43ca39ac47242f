"""Build the gateway's app from settings, engines, middleware and routes, and define its lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from baton import __version__
from baton.admission.api_keys import Keyring, keyring_for
from baton.admission.body_budget import BodyBudget, BodyRooms
from baton.admission.tenants import Admission
from baton.admission.usage import Usage, open_usage
from baton.batches.lines import Reader
from baton.batches.service import Batches, batch_threads
from baton.config.settings import Settings
from baton.engines.fleet import Fleet, FleetReport
from baton.errors import SettingsError
from baton.http import openapi
from baton.http.body.json import parse_object
from baton.http.body.trial import TrialCompiler
from baton.http.middleware.frame import (
    DrainMiddleware,
    ErrorMiddleware,
    RequestContextMiddleware,
    http_exception,
    invalid_parameters,
)
from baton.http.middleware.gate import (
    AuthMiddleware,
    OriginMiddleware,
    RequestHeadMiddleware,
    RootPathMiddleware,
    cors_options,
)
from baton.http.middleware.weight import BodyLimitMiddleware, MemoryShortageMiddleware
from baton.http.request import Drain, Gateway, body_threads
from baton.http.routes import ROUTERS, metrics, page
from baton.http.routes.batches import LineAsker, refusal_of
from baton.http.uvicorn_server import MetricsServer
from baton.images.reader import ImageReader, fetcher_of
from baton.library.here.images import ImageStore
from baton.library.here.records import RecordFolder
from baton.library.holdings import HandoffThreads
from baton.library.library import Library
from baton.library.tiers import Here, Tier, nowhere
from baton.pooling.jobs import SceneJobs
from baton.pooling.run import Pooling
from baton.relay.door import open_relay
from baton.reload import Reloads
from baton.responses.service import StoredResponses, response_threads
from baton.responses.store import ResponseStore
from baton.telemetry.events import Events
from baton.telemetry.ids import LOCAL_TENANT, NO_TENANT
from baton.telemetry.lag import watch_lag
from baton.telemetry.logs import AuditLog
from baton.telemetry.memory import MemoryReader, MemoryWatch
from baton.telemetry.metrics import GatewayMetrics
from baton_kv.folders import make_folder
from baton_kv.stores.base import StoreError
from baton_kv.stores.factory import open_store
from baton_kv.stores.file import IMAGES, RECORDS


def handoffs_of(settings: Settings, metrics: GatewayMetrics, events: Events | None = None) -> Library:
    """Open the store and return its handoffs; without an engine that supports handoffs, nothing is stored.

    Raises:
        SettingsError: the store cannot be used.
    """
    threads = HandoffThreads(settings.admission.wait_s, metrics.queues)
    if not any(engine.handoff for engine in settings.engines):
        return Library(settings.handoffs, nowhere(), metrics.handoffs, threads=threads, events=events)
    try:
        store = open_store(settings.handoff_store, budget=int(settings.handoffs.budget))
        folder = Path(settings.handoff_store.removeprefix("file:"))
        if settings.handoffs.shared is not None:
            from baton.library.valkey.pool import open_pool  # valkey, which others do without

            pool = open_pool(settings.handoffs, folder, metrics.shared_store)
            tier: Tier = Here(store, pool.records, pool.images, pool, int(settings.handoffs.budget))
        else:
            tier = Here(store, RecordFolder(folder / RECORDS), ImageStore(folder / IMAGES))
        if settings.handoffs.archive is not None:
            from baton.library.archive.tier import open_archived  # obstore, which others do without

            tier = open_archived(settings.handoffs, tier.here, folder, metrics.archive)
    except StoreError as error:
        raise SettingsError(f"handoffs.store: {error}") from None
    except OSError as error:
        raise SettingsError(f"handoffs.store: {settings.handoff_store}: {error.strerror}") from None
    automatic = any((engine.auto or settings.handoffs.auto) != "off" for engine in settings.own_engines)
    return Library(
        settings.handoffs, tier, metrics.handoffs, automatic=automatic, threads=threads, events=events
    )


def responses_of(settings: Settings) -> ResponseStore | None:
    """Open the store of responses; None: none are stored, or no engine generates any.

    Raises:
        SettingsError: the store cannot be used.
    """
    budget = int(settings.responses.budget)
    if not budget or not any(engine.runner == "generate" for engine in settings.engines):
        return None
    folder = settings.responses_folder
    try:
        if settings.responses.folder is None:
            make_folder(folder.parent)
        return ResponseStore(folder, budget, durable=settings.handoffs.fsync)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"responses.folder: {folder}: {reason}") from None


def create_app(
    settings: Settings,
    fleet: Fleet,
    *,
    metrics_listener: socket.socket | None = None,
    report: FleetReport = lambda _name, _phase: None,
    memory_reader: MemoryReader | None = None,
    reread: Callable[[], Settings] | None = None,
) -> FastAPI:
    """Return the gateway's app. Its lifespan starts the engines in the background and stops them at the end.

    Args:
        fleet: the engines; tests pass fakes.
        metrics_listener: the socket that serves `/metrics`; None: the gateway's port serves it, unless
            tenants reach that port.
        report: called with each engine's name and the phase that its start is in.
        memory_reader: reads how much memory is available; None: from Linux.
        reread: reads the settings again, as they were read at the start; None: they stay as they are.
    """
    reader = memory_reader or MemoryReader()
    memory = MemoryWatch(reader, int(settings.admission.memory_reserve), fleet.metrics.memory)
    keyring = keyring_for(settings)
    available = reader.available()
    rooms = BodyRooms.of(settings, available=available, one_tenant=keyring is None)
    gateway = _build_gateway(settings, fleet, keyring)
    lines = BodyBudget(rooms.lines, fleet.metrics.bodies.labels("lines"), short=lambda: memory.short)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            gateway.usage.running(),
            _services(gateway, memory, metrics_listener),
            _running(app, fleet, report),
            gateway.relay.running(),
            gateway.batches.running(LineAsker(app, gateway, keyring, lines)),
        ):
            yield

    app = FastAPI(
        title="Baton",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # FastAPI would write the document anew for every request
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.gateway = gateway
    for router in ROUTERS:
        app.include_router(router)
    files = page.page_files() if settings.ui.enabled else {}
    if settings.ui.enabled:
        app.include_router(page.router_of(files))
    if metrics_listener is None and not settings.shared(keyed=keyring is not None):
        app.include_router(metrics.router)
    openapi.install(app, settings.root_path)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(RequestValidationError, invalid_parameters)
    bodies = BodyBudget(rooms.memory, gateway.metrics.bodies.labels("memory"), short=lambda: memory.short)
    uploads = BodyBudget(rooms.disk, gateway.metrics.bodies.labels("disk"))
    of_batches = BodyBudget(rooms.files, gateway.metrics.bodies.labels("files"))
    _add_middleware(app, gateway, keyring, memory, (bodies, uploads, of_batches), files)
    if reread is not None:
        gateway.reload = Reloads(
            gateway,
            keyring,
            reread,
            bodies=bodies,
            uploads=uploads,
            lines=lines,
            memory=memory,
            available=available,
        )
    return app


def _build_gateway(settings: Settings, fleet: Fleet, keyring: Keyring | None) -> Gateway:
    """Create the services that the routes use."""
    metrics = fleet.metrics
    library = handoffs_of(settings, metrics, fleet.events)
    share = keyring.share if keyring is not None else None
    admission = Admission(
        settings.admission, fleet.names, metrics.admission, batches=settings.batches, share=share
    )
    bodies = body_threads(metrics.queues, settings.admission.wait_s)
    batches = Batches(
        settings.batches,
        settings.batches_folder,
        Reader(parse_object, settings.limits, settings.batches.file_lines),
        batch_threads(metrics.queues, settings.admission.wait_s),
        metrics.batches,
        fleet.events,
        serves=partial(refusal_of, fleet),
    )

    def drain() -> None:
        fleet.events.close()
        batches.drain()

    return Gateway(
        settings,
        fleet,
        metrics,
        library,
        open_relay(settings, fleet, library, admission, metrics),
        StoredResponses(
            settings.responses,
            responses_of(settings),
            response_threads(metrics.queues, settings.admission.wait_s),
            bodies,
            metrics.responses,
        ),
        batches,
        Pooling(settings.pooling, metrics.pooling, metrics.queues, settings.batches),
        Drain(drain),
        admission,
        ImageReader(
            settings.images,
            metrics.images,
            fetcher_of(settings.images),
            queues=metrics.queues,
            wait_s=settings.admission.wait_s,
        ),
        bodies,
        TrialCompiler(settings.limits, metrics.queues),
        Usage(open_usage(settings), metrics.usage, keep_days=settings.usage.keep_days),
        AuditLog(settings.auth.audit_file, metrics.usage.unaudited.inc),
        SceneJobs(settings.scenes, settings.scenes_folder, metrics.queues),
    )


def _add_middleware(
    app: FastAPI,
    gateway: Gateway,
    keyring: Keyring | None,
    memory: MemoryWatch,
    budgets: tuple[BodyBudget, BodyBudget, BodyBudget],
    files: Collection[str],
) -> None:
    """Add the middleware. The last one added is the outermost, so the order is that of a response.

    Args:
        budgets: of bodies in memory, of uploads, and of files for batches.
        files: of the page.
    """
    settings = gateway.settings
    bodies, uploads, of_batches = budgets
    app.add_middleware(MemoryShortageMiddleware, memory=memory)
    app.add_middleware(
        BodyLimitMiddleware, bodies=bodies, uploads=uploads, files=of_batches, edge=settings.edge
    )
    app.add_middleware(
        AuthMiddleware,
        keyring=keyring,
        admission=gateway.admission,
        # Behind a proxy of this machine everybody comes from it.
        open_to_all=not settings.loopback or bool(settings.root_path or settings.edge.allowed_hosts),
        files=files,
    )
    app.add_middleware(OriginMiddleware, settings=settings, keyless=keyring is None)
    if (options := cors_options(settings, keyless=keyring is None)) is not None:
        app.add_middleware(ErrorMiddleware, metrics=gateway.metrics)
        app.add_middleware(CORSMiddleware, **options)  # outside of what answers errors: pages read them too
    app.add_middleware(RequestHeadMiddleware)
    app.add_middleware(ErrorMiddleware, metrics=gateway.metrics)
    app.add_middleware(DrainMiddleware, drain=gateway.drain)
    unidentified = LOCAL_TENANT if keyring is None else NO_TENANT
    app.add_middleware(
        RequestContextMiddleware,
        metrics=gateway.metrics,
        usage=gateway.usage,
        audit=gateway.audit,
        routes=app.routes,
        unidentified=unidentified,
    )
    if settings.root_path:
        app.add_middleware(RootPathMiddleware, root=settings.root_path)


@contextlib.asynccontextmanager
async def _services(
    gateway: Gateway, memory: MemoryWatch, metrics_listener: socket.socket | None
) -> AsyncIterator[None]:
    """Run what the gateway needs beside its engines, and close it at the end."""
    with (
        contextlib.closing(gateway.responses),
        contextlib.closing(gateway.batches),
        contextlib.closing(gateway.pooling),
        contextlib.closing(gateway.images),
        contextlib.closing(gateway.body_threads),
        contextlib.closing(gateway.compiler),
    ):
        async with (
            gateway.library.running(),
            _watching(watch_lag(gateway.metrics.loop_lag, lambda: gateway.fleet.ready), memory.run()),
            _metrics_port(gateway, metrics_listener),
            contextlib.aclosing(gateway.scenes),
        ):
            yield


@contextlib.asynccontextmanager
async def _watching(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run background watches while inside."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _running(app: FastAPI, fleet: Fleet, report: FleetReport) -> AsyncIterator[None]:
    """Start the engines in the background; `app.state.started` ends when all have started."""
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
    """Serve `/metrics` on a port of its own, if there is a socket for it."""
    if listener is None:
        yield
        return
    server = MetricsServer(metrics.app_of(gateway), gateway.settings.edge, gateway.metrics)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="metrics-port")
    try:
        yield
    finally:
        server.should_exit = True
        await task
