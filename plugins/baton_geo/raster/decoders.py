"""Open rasters, each in a child process of its own, and limit how many are open at a time.

The children are made by the fork server, which is started here and replaced when it has died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from baton_geo.errors import DecoderBusy
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.open_scene import REAP_SECONDS, ChildHandle, ForkServerLost, OpenScene, RangeFetch
from baton_geo.raster.sandbox import QUIET_LIBRARIES
from baton_spool import Naming, make

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # usually half a second; longer on a loaded machine
SCENES = Naming("baton-geo-scene-", folders=True)
ATTEMPTS = 2  # a fork server that died is replaced once per request


class Decoders:
    """Opens scenes, at most `count` at a time; owns the fork server. Safe to use from several threads.

    Args:
        count: most scenes open at the same time.
        wait_s: how long `open` waits until one of them is closed, seconds.
        folder: for the scenes' files; None: the system's folder for temporary files.
    """

    def __init__(self, count: int, wait_s: float, folder: Path | None = None) -> None:
        self._places = threading.BoundedSemaphore(count)
        self._wait_s, self._folder = wait_s, folder
        self._fork_server = ForkServerProcess()

    def open(
        self, file: Path | Sequence[Path], request: SceneRequest, fetch: RangeFetch | None = None
    ) -> OpenScene:
        """Open a raster in a child process.

        Args:
            file: path, or of several files paths, chosen by the server, never by a client; may be unlinked
                once this returns.
            fetch: fetches what the child asks for of files that are not all there.

        Returns:
            The scene, a context manager that ends the child on exit.

        Raises:
            DecoderBusy: `count` scenes are open, and none was closed within `wait_s`.
            GeoError: the raster is refused; see `baton_geo.errors`.
            OSError: the file cannot be opened.
        """
        if not self._places.acquire(timeout=self._wait_s):
            raise DecoderBusy("every decoder is at work; try again in a moment")
        try:
            return self._open((file,) if isinstance(file, Path) else file, request, fetch)
        except BaseException:
            self._places.release()
            raise

    def close(self) -> None:
        """End every child. Scenes still open fail at their next call."""
        self._fork_server.close()

    def _open(self, files: Sequence[Path], request: SceneRequest, fetch: RangeFetch | None) -> OpenScene:
        for _ in range(ATTEMPTS):
            folder = make(self._folder, SCENES)
            try:
                child = self._start_child(files)
                scene = OpenScene(child, folder, request, self._places.release, fetch)
            except ForkServerLost:
                folder.remove()
                continue
            except BaseException:
                folder.remove()
                raise
            try:
                scene.begin()
            except ForkServerLost:
                scene.abandon()
                continue
            except BaseException:
                scene.abandon()
                raise
            return scene
        raise DecoderBusy("the decoders are being restarted; try again in a moment")

    def _start_child(self, files: Sequence[Path]) -> ChildHandle:
        rasters: list[int] = []
        try:
            for file in files:
                rasters.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            return self._fork_server.start_child(rasters)
        finally:
            for raster in rasters:
                os.close(raster)


class ForkServerProcess:
    """A fork server that is restarted when it has died. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._server = _Server()
        self._finalizer = weakref.finalize(self, _Server.stop, self._server)

    def start_child(self, rasters: Sequence[int]) -> ChildHandle:
        """Start a child on the open files of a raster, whose descriptors the caller closes.

        Raises:
            ForkServerLost: the fork server died, and its replacement too.
            RuntimeError: this object was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the decoders are closed")
            try:
                return self._server.start_child(rasters)
            except (OSError, EOFError):
                self._renew()
            try:
                return self._server.start_child(rasters)
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

    def start_child(self, rasters: Sequence[int]) -> ChildHandle:
        """Start a child on the open files of a raster.

        Raises:
            EOFError, OSError: the fork server died.
            TimeoutError: the fork server did not start in time.
        """
        self._wait_until_ready()
        ours, theirs = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        with theirs, their_lifeline:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno(), their_lifeline.fileno(), *rasters])
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
