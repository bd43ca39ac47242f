"""Gateways that tests talk to over real sockets: in this process with fake engines, or `baton serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import psutil
from fastapi import FastAPI

from baton.admission.api_keys import keyring_for
from baton.config.groups import EngineSettings
from baton.config.settings import Settings, load_settings
from baton.engines.engine import Engine
from baton.engines.fake.engine import FakeEngine
from baton.engines.fleet import Build, Fleet
from baton.engines.on_demand import OnDemand, on_demand_of
from baton.engines.process.processes import segments_of, wait_until_gone
from baton.http.uvicorn_server import GatewayServer, certificate_of, url_of
from baton.serve import listen_for_clients, listen_for_metrics
from baton.server import create_app
from baton.telemetry.memory import MemoryReader
from support import fake_serve
from support.forks import ForkedCommand

READY_WITHIN_S = 240
BATON = str(Path(sys.executable).parent / "baton")


@dataclass
class FakeGateway:
    """A running gateway with fake engines."""

    url: str
    settings: Settings
    fleet: Fleet
    app: FastAPI
    server: GatewayServer
    metrics_url: str

    def engine(self, name: str) -> FakeEngine:
        engine = next(engine for engine in self.fleet.engines if engine.name == name)
        assert isinstance(engine, FakeEngine)
        return engine

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)


class Held:
    """The clock of a fake engine that stands still: what takes a second or more there takes until `release`."""

    def __init__(self) -> None:
        self._released = threading.Event()

    async def __call__(self, seconds: float) -> None:
        if seconds < 1:
            await asyncio.sleep(seconds)
            return
        while not self._released.is_set():  # noqa: ASYNC110  # the test's thread releases it
            await asyncio.sleep(0.005)

    def release(self) -> None:
        self._released.set()


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def raw_status(url: str, method: str, target: str, headers: dict[str, str] | None = None) -> int:
    """The status of a request whose target goes out byte for byte; HTTP libraries tidy it up."""
    where = urlsplit(url)
    lines = [f"{method} {target} HTTP/1.1", f"Host: {where.netloc}", "Connection: close", "Content-Length: 0"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer.split()[1])


@contextmanager
def run_fake(
    *engines: Engine,
    wait: bool = True,
    memory_reader: MemoryReader | None = None,
    reread: Callable[[], Settings] | None = None,
    build: Build | None = None,
    **overrides: Any,
) -> Iterator[FakeGateway]:
    """A gateway in a thread, on a free port of 127.0.0.1.

    `reread` reads its settings again, and `build` makes further engines of them.

    Args:
        overrides: settings; `told`: of engines, by their names.
    """
    told = overrides.pop("told", {})
    served = tuple(
        EngineSettings(name=each.name, model="fake", **told.get(each.name, {})) for each in engines
    )
    # Of this machine's user.
    nothing = {"responses": {"budget": 0}, "usage": {"keep_days": 0}, "scenes": {"budget": 0}}
    settings = load_settings(**({"port": 0, "engines": served, "metrics": {"port": 0}} | nothing | overrides))

    def budget(settings: Settings) -> OnDemand | None:
        return on_demand_of(settings, {}, lambda _: 0, 2**40)

    fleet = Fleet(engines, build=build, on_demand=budget(settings), budget=budget, settings=settings.engines)
    ready = threading.Event()
    with (
        # A busy machine may take longer to save what tests then look at.
        patch("baton.relay.run.SETTLE_WITHIN_S", 20.0),
        listen_for_clients(settings) as listener,
        listen_for_metrics(settings, keyed=keyring_for(settings) is not None) as metrics_listener,
    ):
        certificate = certificate_of(settings)
        url = url_of(listener, "http" if certificate is None else "https")
        metrics_url = url_of(metrics_listener) if metrics_listener else url
        app = create_app(
            settings, fleet, metrics_listener=metrics_listener, memory_reader=memory_reader, reread=reread
        )
        server = GatewayServer(app, settings, lambda _url: ready.set(), certificate)
        server.handle_signals = False
        runner = asyncio.Runner(loop_factory=server.config.get_loop_factory())  # of the loop of `baton serve`
        thread = threading.Thread(target=_run, args=(runner, server, listener))
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        if wait:
            assert ready.wait(20), "the fake engines did not start"
        try:
            yield FakeGateway(url, settings, fleet, app, server, metrics_url)
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                runner.get_loop().call_soon_threadsafe(setattr, server, "should_exit", True)
            thread.join(30)


def _run(runner: asyncio.Runner, server: GatewayServer, listener: socket.socket) -> None:
    with runner:
        runner.run(server.serve(sockets=[listener]))


class Leftovers:
    """What a gateway's engines hold outside it, to be looked for once it has ended.

    Args:
        pid: of the gateway, which still runs.
    """

    def __init__(self, pid: int) -> None:
        self._processes = psutil.Process(pid).children(recursive=True)
        words = [_words(child) for child in self._processes]
        self._paths = [Path(said[-1]) for said in words if "orphan_reaper.py" in " ".join(said)]
        self._paths += segments_of(self._processes)

    def assert_none(self) -> None:
        """Processes must be gone or just killed; Python's resource tracker ends by itself a moment later."""
        trackers = [child for child in self._processes if "resource_tracker" in " ".join(_words(child))]
        others = [child for child in self._processes if child not in trackers]
        assert wait_until_gone(others, within_s=20) == []
        assert wait_until_gone(trackers, within_s=20) == []
        assert [path for path in self._paths if path.exists()] == []


def _words(process: psutil.Process) -> list[str]:
    """The command line of a process; none of one that is gone."""
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


class RealGateway:
    """`baton serve` in a process of its own.

    Args:
        arguments: after `baton serve`; a free port is chosen unless one is given.
        folder: where its output goes.
        environment: on top of this process's.
        forked: whether it is forked from a process that has imported what it imports.
    """

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        environment: dict[str, str] | None = None,
        *,
        forked: bool = False,
    ) -> None:
        self._arguments = arguments
        self._forked = forked
        ours = {"BATON_METRICS__PORT": "0"}
        ours |= {"XDG_STATE_HOME": str(folder), "XDG_DATA_HOME": str(folder / "data")}
        self._environment = os.environ | ours | (environment or {})
        self.output = folder / "baton.log"
        self.keys: dict[str, str] = {}

    def __enter__(self) -> RealGateway:
        self.process: ForkedCommand | subprocess.Popen[bytes]
        if self._forked:
            self.output.write_text("")
            self.process = ForkedCommand(self.command(), self.output, self._environment)
        else:
            with open(self.output, "w") as file:
                self.process = subprocess.Popen(
                    self.command(),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,  # its threads of low priority give way to its own, not to other tests
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop()

    def command(self) -> list[str]:
        port = [] if "--port" in self._arguments else ["--port", "0"]
        return [BATON, "serve", *port, *self._arguments]

    def restart(self, number: int = signal.SIGTERM) -> None:
        """Stop it by a signal and start it anew, with the same settings; its URL may be another then."""
        self.stop(number)
        self.__enter__()
        self.wait_until_ready()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; nothing of it may be left once it has ended."""
        leftovers = Leftovers(self.process.pid)
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        leftovers.assert_none()
        return code

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if found := re.search(r"Baton is ready on (\S+),.*metrics: (\S+)/metrics ", self.log, re.DOTALL):
                self.url, self.metrics_url = found.groups()
                return
            assert self.process.poll() is None, f"the gateway ended:\n{self.log}"
            time.sleep(0.2)
        raise AssertionError(f"not ready within {READY_WITHIN_S} s:\n{self.log}")

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace")

    def client(self, tenant: str | None = None, **options: Any) -> httpx.Client:
        """An HTTP client, with the key of `tenant` if one is named."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        return httpx.Client(base_url=self.url, headers=headers, **({"timeout": 120} | options))


class FakeProcess:
    """`fake_serve.py`: a gateway with fake engines in a forked process, for what a signal does to one.

    Args:
        folder: where it runs, and its log is.
        behaviour: of its engines, fields of `FakeBehaviour`.
        overrides: settings.
    """

    def __init__(self, folder: Path, behaviour: dict[str, Any] | None = None, **overrides: Any) -> None:
        self._words = ["fake_serve.py", json.dumps(overrides), json.dumps(behaviour or {}), str(folder)]
        self._url = folder / "url"
        self.output = folder / "fake.log"

    def __enter__(self) -> FakeProcess:
        self.output.write_text("")
        self._url.write_text("")
        self.process = ForkedCommand(self._words, self.output, dict(os.environ), fake_serve.main)
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._url.read_text() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.url = self._url.read_text()
        if not self.url:
            self.process.kill()
            raise AssertionError(f"no gateway with fake engines:\n{self.log}")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)

    @property
    def log(self) -> str:
        return self.output.read_text()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)
