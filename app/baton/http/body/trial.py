"""Ask the compile server to compile a request's constraints before an engine does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from baton.admission.fair_queue import QueueLimits, watched_queue
from baton.admission.fair_threads import in_own_thread
from baton.config.groups import LimitSettings
from baton.errors import GatewayOverloaded, InvalidRequest
from baton.http.body.schemas import Constraint, doubtful_grammars
from baton.telemetry.metrics import QueueMetrics

COMPILED = b"c"
"""What a child sends when it has compiled; see `engines/process/compile_server.py`."""
REMEMBERED = 4096
"""Most results that are remembered."""
PLACES = max(1, min(4, (os.cpu_count() or 1) // 2))
WAITING = 256
WAIT_S = 30.0
STARVED = 60
"""A child is given up when its processor time takes this many times longer on the clock."""
REFUSED_FOR_S = 300.0
"""Seconds until a constraint that did not compile in time is tried again: the machine may have been busy."""

log = structlog.get_logger("baton.schemas")


@dataclass(frozen=True)
class _CompileServer:
    """A compile server: its process, and the socket on which it takes jobs."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    @staticmethod
    def start() -> _CompileServer:
        """Start a compile server."""
        control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "baton.engines.process.compile_server", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # compilers quote what clients send
                process_group=0,  # only the gateway handles a terminal's interrupt
            )
        return _CompileServer(process, control)

    def stop(self) -> None:
        """Kill the server; its children end when their sockets close."""
        self.control.close()
        self.process.kill()
        self.process.wait()


class TrialCompiler:
    """Compiles constraints on trial, a few at a time and each tenant in turn, and remembers the results.

    Args:
        limits: with the processor time that one constraint may take.
    """

    def __init__(self, limits: LimitSettings, metrics: QueueMetrics) -> None:
        self._verdicts: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self.limit(limits)
        self._under_way: dict[bytes, asyncio.Lock] = {}
        places = QueueLimits(PLACES, waiting=WAITING, wait_s=WAIT_S)
        self._queue = watched_queue(places, lambda _: _busy(), metrics, "schemas")
        self._starting = asyncio.Lock()
        self._server: _CompileServer | None = None

    def limit(self, limits: LimitSettings) -> None:
        """Set the limits, also of a compiler in use: what was tried within others is tried again."""
        installed = importlib.util.find_spec("xgrammar") is not None  # not beside servers elsewhere alone
        self._seconds = limits.schema_s if installed else 0.0
        self._verdicts.clear()

    def close(self) -> None:
        """Stop the compile server and its children."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    async def require(self, constraints: Sequence[Constraint], tenant: str) -> None:
        """Refuse constraints that do not compile in time.

        Raises:
            InvalidRequest: a constraint takes too long; `param` names its field.
            GatewayOverloaded: too many constraints are being compiled.
        """
        if not self._seconds:
            return
        for constraint in constraints:
            if not await self._compiles(constraint, tenant):
                raise InvalidRequest(
                    f"The constraint in '{constraint.param}' takes more than {self._seconds:g} s of "
                    "processor time to compile (setting limits.schema_s); make it simpler: fewer "
                    "optional properties, shorter patterns and length limits.",
                    param=constraint.param,
                )

    async def require_made(self, grammar: Mapping[str, Any], *, param: str, tenant: str) -> None:
        """Refuse the grammar that an engine made of a request, as `require` does the client's own.

        Args:
            grammar: it, as `structured_outputs` holds one.
        """
        await self.require(doubtful_grammars(grammar, param), tenant)

    async def fits(self, text: str, syntax: str, definition: str, *, tenant: str) -> bool:
        """Return whether a text is of a grammar; False also where that takes too long to tell.

        Args:
            syntax: of the grammar: `lark` or `regex`.

        Raises:
            GatewayOverloaded: too many constraints are being compiled.
        """
        asked = {"text": text, "syntax": syntax, "definition": definition}
        return not self._seconds or await self._compiles(Constraint("", "fit", json.dumps(asked), 0), tenant)

    async def _compiles(self, constraint: Constraint, tenant: str) -> bool:
        key = hashlib.sha256(f"{constraint.kind}\0{constraint.text}".encode()).digest()
        known = self._known(key)
        if known is not None:
            return known
        async with self._alone(key):
            known = self._known(key)  # another request may have tried it meanwhile
            if known is None:
                async with self._queue.place(tenant):
                    known = await self._try(constraint)
                self._remember(key, known)
        return known

    @contextlib.asynccontextmanager
    async def _alone(self, key: bytes) -> AsyncIterator[None]:
        """Try a constraint once: other requests with the same one wait for the result.

        Raises:
            GatewayOverloaded: the result took too long.
        """
        lock = self._under_way.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(WAIT_S):
                await lock.acquire()
        except TimeoutError:
            raise _busy() from None
        try:
            yield
        finally:
            lock.release()
            self._under_way.pop(key, None)  # waiting requests hold it; later ones find the result

    def _known(self, key: bytes) -> bool | None:
        verdict, until = self._verdicts.get(key, (None, 0.0))
        if verdict is None or until < time.monotonic():
            return None
        self._verdicts.move_to_end(key)
        return verdict

    def _remember(self, key: bytes, verdict: bool) -> None:
        self._verdicts[key] = (verdict, math.inf if verdict else time.monotonic() + REFUSED_FOR_S)
        while len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)

    async def _try(self, constraint: Constraint) -> bool:
        """Compile a constraint, with a second try if the compile server died.

        Raises:
            GatewayOverloaded: no process could be started, or it got too little processor time.
        """
        asked = {"kind": constraint.kind, "text": constraint.text, "seconds": self._seconds}
        for _ in range(2):
            server = await self._running()
            said = await self._asked(server, json.dumps(asked).encode() + b"\n")
            if said:
                return said.endswith(COMPILED)
            await self._replace(server)  # the server died, and the constraint was not tried
        raise _busy()

    async def _asked(self, server: _CompileServer, job: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with _job_at(server) as ours:
            try:
                async with asyncio.timeout(STARVED * self._seconds):
                    await loop.sock_sendall(ours, job)
                    said = b""
                    while part := await loop.sock_recv(ours, 1):
                        said += part
                    return said
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise _busy() from None
                return b""

    async def _running(self) -> _CompileServer:
        async with self._starting:
            if self._server is None:
                try:
                    self._server = await in_own_thread(_CompileServer.start)
                except OSError as error:  # the system has no resources for another process
                    log.warning("compile_server_not_started", reason=error.strerror)
                    raise _busy() from None
            return self._server

    async def _replace(self, server: _CompileServer) -> None:
        async with self._starting:
            if self._server is server:
                self._server = None
                await in_own_thread(server.stop)
                log.warning("compile_server_ended", code=server.process.returncode)


@contextlib.contextmanager
def _job_at(server: _CompileServer) -> Iterator[socket.socket]:
    """Return a socket to a new child, which ends when the socket closes."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, contextlib.suppress(OSError):  # the socket also closes if the server has died
            socket.send_fds(server.control, [b"j"], [theirs.fileno()])
        ours.setblocking(False)
        yield ours


def _busy() -> GatewayOverloaded:
    return GatewayOverloaded("Too many schemas are being compiled already; try again shortly.")
