"""The gateway's hold on the nursery: starts it, asks it for children, starts it anew when it died."""

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

START_SECONDS = 60.0  # half a second as a rule; a loaded machine may take long
BURIAL_SECONDS = 10.0
STATUS = struct.Struct("<i")


class NurseryLost(Exception):
    """The nursery, or a child of it that was not at fault, is gone."""


@dataclass(frozen=True)
class Line:
    """A child as the gateway holds it.

    Attributes:
        sock: to talk to it.
        leash: let go of, and it is killed; its wait status arrives here.
    """

    sock: socket.socket
    leash: socket.socket

    def status(self, seconds: float = BURIAL_SECONDS) -> int | None:
        """The child's wait status, once it has ended; None: the nursery is gone, and the child with it."""
        self.leash.settimeout(seconds)
        try:
            data = self.leash.recv(STATUS.size)
        except OSError:
            return None
        return int(STATUS.unpack(data)[0]) if len(data) == STATUS.size else None

    def hang_up(self) -> None:
        """End the child, whatever it is doing; wakes a thread that waits for it. May be called again.

        Sockets are shut down, not only closed: a process forked off the gateway may hold copies.
        """
        for sock in (self.sock, self.leash):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR if sock is self.sock else socket.SHUT_WR)

    def close(self) -> None:
        """Wait until the child is reaped, and free the sockets."""
        self.hang_up()
        self.status()
        self.sock.close()
        self.leash.close()


class NurseryProcess:
    """A nursery that is there when it is needed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._running = _Running()
        self._finalizer = weakref.finalize(self, _Running.stop, self._running)

    def child(self, raster: int) -> Line:
        """Start a child on a file.

        Args:
            raster: descriptor, open for reading; stays the caller's.

        Raises:
            NurseryLost: it died, and so did another one.
            RuntimeError: closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the decoders are closed")
            try:
                return self._running.ask(raster)
            except (OSError, EOFError):
                self._renew()
            try:
                return self._running.ask(raster)
            except (OSError, EOFError):
                raise NurseryLost from None

    def close(self) -> None:
        """End the nursery and its children."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def _renew(self) -> None:
        self._finalizer()
        logger.warning(
            "the raster nursery ended with code %s; starting another", self._running.process.returncode
        )
        self._running = _Running()
        self._finalizer = weakref.finalize(self, _Running.stop, self._running)


class _Running:
    """One nursery process, started at once, ready a little later."""

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
                # A terminal's interrupt is the gateway's to act on. No session of its own: the kernel weighs
                # sessions as wholes (autogroup, sched(7)), and an engine in another one starved the children.
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

    def ask(self, raster: int) -> Line:
        """A child; EOFError or OSError if the nursery died, TimeoutError if it takes too long to start."""
        self._wait_until_ready()
        ours, theirs = socket.socketpair()
        leash, their_leash = socket.socketpair()
        with theirs, their_leash:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno(), raster, their_leash.fileno()])
            except OSError:
                ours.close()
                leash.close()
                raise
        return Line(ours, leash)

    def stop(self) -> None:
        """End it; not from a process forked off the gateway, which only seems to own it."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self.process.wait(BURIAL_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
