"""Run one gateway as a replica of a Ray Serve deployment.

Ray Serve has the sockets, the signals and the process's output; the gateway brings its app, its engines and
the orphan reaper, which kills the engines' processes when the replica's process is killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import structlog
from ray import serve
from starlette.types import Message, Receive, Scope, Send

from baton.admission.api_keys import keyring_for
from baton.admission.fair_threads import in_own_thread
from baton.config.settings import Settings, load_settings
from baton.engines.fleet import Fleet
from baton.engines.process.orphan_reaper import OrphanReaper
from baton.prepare import prepare_fleet, refuse_conflicts
from baton.ray.autoscaling import LOAD
from baton.ray.draining import DrainWatch
from baton.ray.metrics import send_metrics
from baton.ray.running_app import RunningApp
from baton.server import create_app
from baton.telemetry.logs import configure_logs
from baton.telemetry.progress import PhaseProgress

EVERY_ADDRESS = "0.0.0.0"  # nothing is opened here: see `settings_of_node`


def settings_of_node(config: Path | None) -> Settings:
    """Read the settings of this node's gateway.

    Ray Serve's HAProxy and its replicas listen on every address, whatever `host` says: so API keys are
    required, and `/metrics` is not on the clients' port.
    """
    return load_settings(config).model_copy(update={"host": EVERY_ADDRESS})


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
