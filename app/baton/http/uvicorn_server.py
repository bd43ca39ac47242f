"""Run an app under uvicorn: TLS, signals, drain, the exit code, and a second server for `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from baton.config.groups import EdgeSettings, TlsSettings
from baton.config.settings import Settings
from baton.errors import FleetLost, OperatorError, SettingsError, SettingsRefused, StartError
from baton.http.middleware.frame import ERROR_WITHIN_S
from baton.http.protocol import protocol_for
from baton.http.request import LEAVE_WITHIN_S, Gateway
from baton.telemetry.metrics import GatewayMetrics

STARTUP_FAILURE = 3
"""uvicorn's exit code of an app that did not start."""
DATE_EVERY_S = 1.0
LOOK_EVERY_S = 0.01
"""Seconds between two looks whether the last requests have finished, during a stop."""


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket; of a Unix socket one whose host means nothing."""
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


# Speak TLS, with the certificate that the files hold now.


CLIENT_CERTS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
Version = tuple[tuple[int, int, int] | None, ...]


class Certificate:
    """The TLS context of a certificate's files, made anew once they have changed.

    Each handshake looks at the files, so that a renewed certificate is used by the next client and nothing
    runs in between. While they are wrong, such as half written, the last good ones are used.

    Raises:
        SettingsError: a file cannot be read, or is no certificate, no key, or not its key.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        named = {name: getattr(settings, name) for name in ("cert_file", "key_file", "ca_file")}
        self._files = {f"tls.{name}": file.expanduser() for name, file in named.items() if file is not None}
        self._log = structlog.get_logger("baton.server")
        self._read_at = self._version()
        self._now = self.context = self._read()
        self.context.sni_callback = self._handshake

    def _version(self) -> Version:
        return tuple(map(_version_of, self._files.values()))

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        where, read = "tls.cert_file", self._files.get
        try:
            for where, file in self._files.items():  # noqa: B007  # it names the file of an error
                file.open("rb").close()
            where = "tls.cert_file"
            context.load_cert_chain(self._files[where], read("tls.key_file"), password=_no_password)
            if (authorities := read("tls.ca_file")) is not None:
                where = "tls.ca_file"
                context.load_verify_locations(authorities)
            if self._settings.ciphers is not None:
                where = "tls.ciphers"
                context.set_ciphers(self._settings.ciphers)
        except (OSError, ValueError) as error:
            given = read(where, self._settings.ciphers)
            raise SettingsError(f"{where}: {given}: {_why_not_read(where, error)}") from None
        context.verify_mode = CLIENT_CERTS[self._settings.client_certs]
        return context

    def _handshake(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a new connection the certificate of now; OpenSSL calls this once it has read its greeting."""
        version = self._version()
        if version != self._read_at:
            self._read_at = version
            try:
                self._now = self._read()
                self._log.info("certificate_read", file=str(self._settings.cert_file))
            except SettingsError as error:
                self._log.warning("certificate_not_read", reason=error.message)
        connection.context = self._now


def _version_of(file: Path) -> tuple[int, int, int] | None:
    """Return the marks that change when a file does; None: it is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _why_not_read(where: str, error: OSError | ValueError) -> str:
    if not isinstance(error, ssl.SSLError):
        return getattr(error, "strerror", None) or str(error)
    if where == "tls.ciphers":
        return "OpenSSL knows none of them"
    if error.reason == "KEY_VALUES_MISMATCH":
        return "`tls.key_file` is the key of another certificate"
    return f"no certificate and key as PEM ({error.reason or error})"


def _no_password() -> str:
    """Keep OpenSSL from asking the terminal for the password of an encrypted key."""
    raise ValueError("the key is encrypted: give it without a password, in a file that others cannot read")


def certificate_of(settings: Settings) -> Certificate | None:
    """Read the gateway's certificate; None: it has none, and speaks plain HTTP.

    Raises:
        SettingsError: it cannot be read.
    """
    return None if settings.tls.cert_file is None else Certificate(settings.tls)


def _uvicorn_config(
    app: Any,
    edge: EdgeSettings,
    metrics: GatewayMetrics,
    certificate: Certificate | None = None,
    **options: Any,
) -> uvicorn.Config:
    if certificate is not None:
        options["ssl_context_factory"] = lambda _config, _default: certificate.context
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

    def __init__(self, config: uvicorn.Config, edge: EdgeSettings) -> None:
        self._exit = asyncio.Event()
        self._edge = edge
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app and listen; with TLS as uvicorn does, but for a limit on every handshake."""
        if self.config.ssl is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        connection = partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = [
            await loop.create_server(
                connection,
                sock=listener,
                ssl=self.config.ssl,
                ssl_handshake_timeout=self._edge.header_s,
                ssl_shutdown_timeout=self._edge.send_s,
                backlog=self.config.backlog,
            )
            for listener in sockets or []
        ]
        self.started = True

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
    """Serves `/metrics` on a second port. Signals are handled by the first server."""

    def __init__(self, app: Any, edge: EdgeSettings, metrics: GatewayMetrics) -> None:
        super().__init__(_uvicorn_config(app, edge, metrics), edge)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer(_Server):
    """Serves the gateway: reports when it is ready, drains on signals, and knows why it failed.

    Args:
        app: from `create_app`.
        on_ready: called with the URL once every engine has started.
        certificate: for HTTPS; None: plain HTTP.

    Attributes:
        failure: why the engines failed, if they did.
        handle_signals: stop on SIGINT and SIGTERM; off where another part of the process handles them.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        on_ready: Callable[[str], None],
        certificate: Certificate | None = None,
    ) -> None:
        super().__init__(
            _uvicorn_config(
                app,
                settings.edge,
                app.state.gateway.metrics,
                certificate,
                lifespan="on",
                timeout_graceful_shutdown=_graceful_s(settings),
            ),
            settings.edge,
        )
        self._app = app
        self._terminal = _has_terminal()
        self._reloading: asyncio.Task[None] | None = None
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
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        try:
            yield
        finally:
            for number in (*signals, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _hang_up(self) -> None:
        """Read the settings again; where the gateway's terminal was closed, end as by SIGTERM."""
        if self._terminal and not _has_terminal():
            self.handle_exit(signal.SIGTERM, None)
        else:
            self._reloading = asyncio.create_task(self._reload(), name="settings-reload")

    async def _reload(self) -> None:
        gateway = self._gateway
        outcome, code = "done", None
        try:
            if gateway.reload is not None:
                await gateway.reload()
            else:
                outcome = "refused"
                self._log.error("settings_not_reloaded", cause="this gateway cannot while it runs")
        except SettingsRefused as error:  # logged
            outcome, code = "refused", error.code
        except Exception as error:  # noqa: BLE001  # the border of a background task
            self._log.error("settings_reload_failed", exc_info=error)
            outcome = "failed"
        gateway.audit.write("settings.reload", what="SIGHUP", outcome=outcome, code=code)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain at the first signal; end running requests at the second."""
        drain, loop = self._gateway.drain, asyncio.get_running_loop()
        if drain.begun:
            self.should_exit = True
            drain.cut()
            return
        drain.begin()
        settings = self._gateway.settings  # as they are now
        delay = settings.drain_delay_s if sig == signal.SIGTERM and self._gateway.fleet.ready else 0.0
        self._log.info("draining", delay_s=delay, timeout_s=settings.drain_timeout_s)
        self.config.timeout_graceful_shutdown = _graceful_s(settings)
        loop.call_later(delay, setattr, self, "should_exit", True)
        loop.call_later(delay + settings.drain_timeout_s, drain.cut)

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
        scheme = "http" if self.config.ssl is None else "https"
        return url_of(self.servers[0].sockets[0], scheme)

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


def _graceful_s(settings: Settings) -> int:
    """Return the seconds after which connections are closed whose requests have not ended."""
    return settings.drain_timeout_s + ceil(LEAVE_WITHIN_S + ERROR_WITHIN_S) + 1


def _has_terminal() -> bool:
    """Return whether there is a terminal that may send signals to this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _unexpected_failure() -> StartError:
    return StartError("The engines could not start; the log line above says where it went wrong.")
