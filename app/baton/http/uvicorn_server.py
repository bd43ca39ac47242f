"""Run an app under uvicorn: signals, drain, the exit code, and a second server for `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from baton.config.groups import EdgeSettings
from baton.config.settings import Settings
from baton.errors import FleetLost, OperatorError, StartError
from baton.http.middleware.frame import ERROR_WITHIN_S
from baton.http.protocol import protocol_for
from baton.http.request import Gateway
from baton.telemetry.metrics import GatewayMetrics

DATE_EVERY_S = 1.0
LOOK_EVERY_S = 0.01
"""Seconds between two looks whether the last requests have finished, during a stop."""


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _uvicorn_config(app: Any, edge: EdgeSettings, metrics: GatewayMetrics, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_for(edge, metrics),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here uses the client's address
        **options,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, which ends as soon as it may: uvicorn itself only looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._exit = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """End after the requests that run. To be set on the server's own loop."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()
        else:
            self._exit.clear()

    async def main_loop(self) -> None:
        """Renew the `date` header once a second, until the server shall end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), DATE_EVERY_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, let requests finish, and end the app."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110  # without an event
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            for task in list(state.tasks):
                task.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()


class MetricsServer(_Server):
    """Serves `/metrics` on a second port. Signals are handled by the first server.

    Args:
        app: the app that answers `/metrics`.
    """

    def __init__(self, app: Any, edge: EdgeSettings, metrics: GatewayMetrics) -> None:
        super().__init__(_uvicorn_config(app, edge, metrics))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer(_Server):
    """Serves the gateway: reports when it is ready, drains on signals, and knows why it failed.

    Args:
        app: from `create_app`.
        on_ready: called with the URL once every engine has started.

    Attributes:
        failure: why the engines failed, if they did.
        handle_signals: stop on SIGINT and SIGTERM; off where another part of the process handles them.
    """

    def __init__(self, app: FastAPI, settings: Settings, on_ready: Callable[[str], None]) -> None:
        super().__init__(
            _uvicorn_config(
                app,
                settings.edge,
                app.state.gateway.metrics,
                lifespan="on",
                timeout_graceful_shutdown=settings.drain_timeout_s + ceil(ERROR_WITHIN_S) + 1,
            )
        )
        self._app = app
        self._settings = settings
        self._on_ready = on_ready
        self.handle_signals = True
        self.failure: OperatorError | None = None
        self._watch: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("baton.server")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but let a requested stop end the process with exit code 0."""
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
        """Drain at the first signal; end running requests at the second."""
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
        self.failure = FleetLost("Every engine has failed too often; the log lines above say why.")
        self._log.error("fleet_lost")
        self._gateway.drain.begin()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._gateway.drain.begin()  # also where no signal asked for it
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
            gc.freeze()  # objects of the start live as long as the process; collections skip them
            self._on_ready(self.url)
            return
        self.failure = error if isinstance(error, OperatorError) else _unexpected_failure()
        if error is not self.failure:
            self._log.error("start_failed", cause=str(error), exc_info=error)
        self.should_exit = True


def _unexpected_failure() -> StartError:
    return StartError("The engines could not start; the log line above says where it went wrong.")
