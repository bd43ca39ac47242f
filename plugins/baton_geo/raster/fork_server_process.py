"""Start the fork server from the gateway, request children from it, and restart it when it has died."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from baton_geo.raster.sandbox import QUIET_LIBRARIES

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # usually half a second; longer on a loaded machine
REAP_SECONDS = 10.0
STATUS = struct.Struct("<i")


class ForkServerLost(Exception):
    """The fork server died, and its children with it."""


@dataclass(frozen=True)
class ChildHandle:
    """A child, as the gateway controls it.

    Attributes:
        sock: carries questions and answers; see `wire`.
        lifeline: kills the child when it is closed; receives the child's wait status.
    """

    sock: socket.socket
    lifeline: socket.socket

    def status(self, seconds: float = REAP_SECONDS) -> int | None:
        """Return the child's wait status once it has ended; None if the fork server died.

        Args:
            seconds: how long to wait for it.
        """
        self.lifeline.settimeout(seconds)
        try:
            data = self.lifeline.recv(STATUS.size)
        except OSError:
            return None
        return int(STATUS.unpack(data)[0]) if len(data) == STATUS.size else None

    def kill(self) -> None:
        """Kill the child and wake a thread that waits for its answer. May be called again.

        Sockets are shut down, not only closed: a process forked from the gateway may hold copies.
        """
        for sock in (self.sock, self.lifeline):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR if sock is self.sock else socket.SHUT_WR)

    def close(self) -> None:
        """Wait until the child is reaped, and free the sockets."""
        self.kill()
        self.status()
        self.sock.close()
        self.lifeline.close()


class ForkServerProcess:
    """A fork server that is restarted when it has died. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._server = _Server()
        self._finalizer = weakref.finalize(self, _Server.stop, self._server)

    def start_child(self, raster: int) -> ChildHandle:
        """Start a child on a file.

        Args:
            raster: descriptor, open for reading; the caller closes it.

        Raises:
            ForkServerLost: the fork server died, and its replacement too.
            RuntimeError: this object was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the decoders are closed")
            try:
                return self._server.start_child(raster)
            except (OSError, EOFError):
                self._renew()
            try:
                return self._server.start_child(raster)
            except (OSError, EOFError):
                raise ForkServerLost from None

    def close(self) -> None:
        """End the fork server and its children."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def _renew(self) -> None:
        self._finalizer()
        logger.warning(
            "the raster fork server ended with code %s; starting another", self._server.process.returncode
        )
        self._server = _Server()
        self._finalizer = weakref.finalize(self, _Server.stop, self._server)


class _Server:
    """One fork server process; starting it does not wait until it is ready."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            package_root = str(Path(__file__).resolve().parents[2])
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "baton_geo.raster.fork_server", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**QUIET_LIBRARIES, "PYTHONPATH": package_root, "LC_ALL": "C.UTF-8"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Only the gateway acts on a terminal's interrupt. No session of its own: the kernel divides
                # time between sessions (autogroup, sched(7)), and an engine in another one starved children.
                process_group=0,
            )
        self._ready = False
        self._owner = os.getpid()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        self._control.settimeout(START_SECONDS)
        if not self._control.recv(1):
            raise EOFError
        self._control.settimeout(None)
        self._ready = True

    def start_child(self, raster: int) -> ChildHandle:
        """Start a child on an open raster.

        Raises:
            EOFError, OSError: the fork server died.
            TimeoutError: the fork server did not start in time.
        """
        self._wait_until_ready()
        ours, theirs = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        with theirs, their_lifeline:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno(), raster, their_lifeline.fileno()])
            except OSError:
                ours.close()
                lifeline.close()
                raise
        return ChildHandle(ours, lifeline)

    def stop(self) -> None:
        """End the process; does nothing in a process forked from the gateway, which is not its parent."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
