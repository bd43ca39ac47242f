"""Open rasters, each in a child process of its own, and limit how many are open at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from baton_geo.errors import DecoderBusy
from baton_geo.raster.fork_server_process import ChildHandle, ForkServerLost, ForkServerProcess
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.open_scene import OpenScene
from baton_spool import Naming, make

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

    def open(self, file: Path, request: SceneRequest) -> OpenScene:
        """Open a raster in a child process.

        Args:
            file: path chosen by the server, never by a client; may be unlinked once this returns.
            request: card, limits and outputs.

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
            return self._open(file, request)
        except BaseException:
            self._places.release()
            raise

    def close(self) -> None:
        """End every child. Scenes still open fail at their next call."""
        self._fork_server.close()

    def _open(self, file: Path, request: SceneRequest) -> OpenScene:
        for _ in range(ATTEMPTS):
            folder = make(self._folder, SCENES)
            try:
                scene = OpenScene(self._start_child(file), folder, request, self._places.release)
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

    def _start_child(self, file: Path) -> ChildHandle:
        raster = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._fork_server.start_child(raster)
        finally:
            os.close(raster)
