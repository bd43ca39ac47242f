"""Run one gateway as a replica of a Ray Serve deployment.

Ray Serve has the sockets, the signals and the process's output; the gateway brings its app, its engines and
the orphan reaper, which kills the engines' processes when the replica's process is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import structlog
from fastapi import FastAPI
from prometheus_client.metrics_core import Metric
from ray import serve
from starlette.types import Message, Receive, Scope, Send

from baton.admission.api_keys import keyring_for
from baton.admission.fair_threads import in_own_thread
from baton.config.settings import Settings, load_settings
from baton.engines.fleet import Fleet
from baton.engines.process.orphan_reaper import OrphanReaper
from baton.errors import SettingsError
from baton.http.request import Drain
from baton.http.routes.metrics import app_of_page
from baton.http.uvicorn_server import MetricsServer
from baton.prepare import prepare_fleet, refuse_conflicts
from baton.ray.autoscaling import LOAD
from baton.serve import listen
from baton.server import create_app
from baton.telemetry.logs import configure_logs
from baton.telemetry.metrics import GatewayMetrics
from baton.telemetry.page import labelled, page_of
from baton.telemetry.progress import PhaseProgress

# Notice that Ray Serve drains this replica, and end its last requests with an error that clients can read.
#
# Ray Serve calls no hook when it begins to drain: it waits for running requests, and kills the replica with
# those that take too long. But it answers the health checks of its HAProxy with `DRAINING` from then on, at
# the replica's own address, so that is what is asked here.


HEALTH_PATH = "/-/healthz"
DRAINING = "DRAINING"
"""What Ray Serve's health check of a replica answers while it is drained, with 503."""
ASK_EVERY_S = 1.0
ANSWER_WITHIN_S = 10.0
"""A replica with much to do, or a slow machine, answers late; without the answer its streams end torn."""
log = structlog.get_logger("baton.ray")


class DrainWatch:
    """Begins the gateway's drain when Ray Serve drains the replica.

    Args:
        cut_after_s: seconds after which requests that still run are ended.
    """

    def __init__(self, drain: Drain, cut_after_s: float) -> None:
        self._drain = drain
        self._cut_after_s = cut_after_s
        self._task: asyncio.Task[None] | None = None

    def see(self, scope: Scope) -> None:
        """Learn the replica's own address from a request; without requests there is nothing to end."""
        server = scope.get("server")
        if self._task is None and server is not None and server[1]:
            host = f"[{server[0]}]" if ":" in server[0] else server[0]
            self._task = asyncio.create_task(self._run(f"http://{host}:{server[1]}{HEALTH_PATH}"))

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, address: str) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S, trust_env=False) as client:
            while not await _draining(client, address):  # noqa: ASYNC110  # it is not in this process's hands
                await asyncio.sleep(ASK_EVERY_S)
        self._drain.begin()
        log.info("draining", timeout_s=self._cut_after_s)
        await asyncio.sleep(self._cut_after_s)
        if ended := self._drain.cut():
            log.warning("requests_ended", count=ended)


async def _draining(client: httpx.AsyncClient, address: str) -> bool:
    try:
        answer = await client.get(address)
    except httpx.TransportError:
        return False
    return answer.status_code == 503 and answer.text == DRAINING


class RunningApp:
    """The gateway's app, started and stopped in one task, as its lifespan's cancel scopes must be.

    Args:
        app: from `create_app`.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._begun = asyncio.Event()
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Enter the lifespan, and wait until all engines have started.

        Raises:
            BatonError: an engine cannot run.
        """
        self._task = asyncio.create_task(self._run(), name="gateway")
        begun = asyncio.create_task(self._begun.wait())
        await asyncio.wait({self._task, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._task.done():
            self._task.result()
        try:
            await self.app.state.started
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Leave the lifespan: stop the engines, close everything."""
        self._end.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        async with self.app.router.lifespan_context(self.app):
            self._begun.set()
            await self._end.wait()


# Show the metrics of all replicas on one page, each series with the label `replica`.
#
# The replicas send their series to one small deployment, which serves the page at `metrics.host:metrics.port`
# of the head node, as a gateway does on its machine. No replica opens a port for it.


SEND_EVERY_S = 5.0
FORGET_AFTER_S = 3.5 * SEND_EVERY_S
"""Seconds after which a replica that sent nothing is no longer shown: it has ended."""


class MetricsPage:
    """The deployment that serves the page.

    Args:
        config: the settings file; None: as `load_settings`.
    """

    def __init__(self, config: Path | None) -> None:
        settings = load_settings(config)
        configure_logs(settings.log_level, settings.log_format, sys.stderr, {"replica": "metrics"})
        self._sent: dict[str, tuple[float, list[Metric]]] = {}
        listener = listen(settings.metrics.host, settings.metrics.port, "`metrics.port`")
        server = MetricsServer(app_of_page(settings, self.page), settings.edge, GatewayMetrics())
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))

    async def send(self, replica: str, families: list[Metric]) -> None:
        """Take a replica's series."""
        self._sent[replica] = (time.monotonic(), families)

    def page(self) -> bytes:
        """Return the page of the replicas that sent their series lately."""
        since = time.monotonic() - FORGET_AFTER_S
        self._sent = {name: sent for name, sent in self._sent.items() if sent[0] >= since}
        return page_of(family for _, families in self._sent.values() for family in families)

    async def check_health(self) -> None:
        """Report to Ray Serve that the page is served.

        Raises:
            RuntimeError: it is not.
        """
        if self._serving.done():
            raise RuntimeError("the server of the metrics page has ended")


async def send_metrics(fleet: Fleet, replica: str, page: Any) -> None:
    """Send a replica's series to the page, again and again until cancelled.

    Args:
        page: Ray Serve's handle of `MetricsPage`.
    """
    failed = False
    while True:
        try:
            await page.send.remote(replica, labelled(fleet.merged_metrics().collect(), replica=replica))
            failed = False
        except Exception as error:  # noqa: BLE001  # the page is elsewhere: whatever it has, requests go on
            if not failed:
                log.warning("metrics_not_sent", error=type(error).__name__)
            failed = True
        await asyncio.sleep(SEND_EVERY_S)


EVERY_ADDRESS = "0.0.0.0"  # nothing is opened here: see `settings_of_node`


def settings_of_node(config: Path | None) -> Settings:
    """Read the settings of this node's gateway.

    Ray Serve's HAProxy and its replicas listen on every address, whatever `host` says: so API keys are
    required, and `/metrics` is not on the clients' port.

    Raises:
        SettingsError: they are wrong, or say how a gateway listens that is no replica.
    """
    settings = load_settings(config)
    if settings.uds is not None or settings.tls.cert_file is not None:
        raise SettingsError("uds, tls: leave them out: Ray Serve's HAProxy listens; put TLS before it")
    return settings.model_copy(update={"host": EVERY_ADDRESS})


class GatewayReplica:
    """A gateway in an actor of Ray Serve, which calls the methods.

    Args:
        config: the settings file; None: as `load_settings`.
        page: Ray Serve's handle of the deployment that shows the metrics.
    """

    def __init__(self, config: Path | None, page: Any) -> None:
        self._name: str = serve.get_replica_context().replica_tag
        self._settings = settings = settings_of_node(config)
        configure_logs(settings.log_level, settings.log_format, sys.stderr, {"replica": self._name})
        refuse_conflicts()
        self._page = page
        self._reaper = OrphanReaper()
        self._reaper.__enter__()  # left in `_stop`; a replica that fails before ends its process
        self._fleet = self.build_fleet(self._settings, self._reaper)

    def build_fleet(self, settings: Settings, reaper: OrphanReaper) -> Fleet:
        """Build the engines; tests build fake ones."""
        tenants = keyring_for(settings) is not None
        with PhaseProgress(sys.stderr) as progress:
            return prepare_fleet(
                settings, progress, reaper, tenants=tenants, last_words=lambda: None, opened=None
            )

    async def __serve_build_asgi_app__(self) -> ReplicaApp:  # Ray Serve's name for it
        """Return the app once all engines have started; until then Ray Serve sends no request."""
        self._running = RunningApp(create_app(self._settings, self._fleet))
        await self._running.start()
        structlog.get_logger("baton.ray").info("ready", engines=self._fleet.names)
        self._sending = asyncio.create_task(send_metrics(self._fleet, self._name, self._page))
        gateway = self._running.app.state.gateway
        self._admission = gateway.admission
        self._watch = DrainWatch(gateway.drain, drain_s(self._settings))
        return ReplicaApp(self._running, self._watch, self._stop)

    async def check_health(self) -> None:
        """Report to Ray Serve that the replica may live.

        Raises:
            RuntimeError: every engine has failed too often; the replica is to be replaced.
        """
        if self._fleet.lost.is_set():
            raise RuntimeError("every engine has failed too often; the replica's log says why")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to Ray Serve how full the engines' queues are."""
        return {LOAD: self._admission.load()}

    async def _stop(self) -> None:
        await self._watch.close()
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        await self._running.stop()
        await in_own_thread(self._reaper.__exit__)


def drain_s(settings: Settings) -> float:
    """Return the seconds after which a drained replica ends the requests that still run."""
    return settings.drain_delay_s + settings.drain_timeout_s


class ReplicaApp:
    """The gateway's app as Ray Serve runs it.

    Its lifespan's end stops the gateway, which has started before. Of the two `X-Request-Id` that an answer
    would have, Ray Serve's and the gateway's, Ray Serve's is left: the log has it as `client_request_id`.
    """

    def __init__(self, running: RunningApp, watch: DrainWatch, stop: Any) -> None:
        self._app = running.app
        self._watch = watch
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        self._watch.see(scope)

        async def send_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, send_one_id)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})
