"""Track running scenes, and match engine outputs to them by a serial number in the prompt.

vLLM gives a plugin a request before the engine and its outputs after it, without a reliable link between the
two: offline there is no request id at all. So a prompt is one token, a serial number that is unique among the
prompts in use, and every output comes back with its prompt. Concurrent requests cannot be mixed up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton_geo.contract import GeoOptions

SERIALS = 2**31 - 2
"""Number of serial numbers: token ids are int32, and 0 is not used."""


class Closeable(Protocol):
    def close(self) -> None: ...


@dataclass(eq=False)
class RunningScene:
    """One request's scene while the engine works on it.

    Attributes:
        scene: the raster, opened in its process.
        options: of the request.
        request_id: of the server that runs the plugin; None offline.
        raster: the raster's file.
        began: start, seconds on the monotonic clock.
        serials: serial numbers of prompts whose output has not come back.
    """

    scene: Any
    options: GeoOptions
    request_id: str | None
    raster: Closeable
    began: float = field(default_factory=time.monotonic)
    serials: set[int] = field(default_factory=set)

    def close(self) -> None:
        """End the raster process and remove the files; a second call does nothing."""
        self.scene.close()
        self.raster.close()


class RunningScenes:
    """The running scenes of one plugin. Safe to use from several threads.

    Args:
        seconds: age at which an abandoned scene is dropped.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running: set[RunningScene] = set()
        self._tiles: dict[int, tuple[RunningScene, int]] = {}
        self._next = 0

    def add(self, running: RunningScene) -> None:
        """Keep a scene until `drop`, and drop scenes that are too old."""
        with self._lock:
            late = [old for old in self._running if time.monotonic() - old.began > self._seconds]
            self._running.add(running)
        for old in late:
            self.drop(old)

    def serial(self, running: RunningScene, tile: int) -> int:
        """Return a new serial number for one tile of a scene."""
        with self._lock:
            while (serial := self._next % SERIALS + 1) in self._tiles:
                self._next += 1
            self._next += 1
            self._tiles[serial] = (running, tile)
            running.serials.add(serial)
            return serial

    def take(self, serial: int) -> tuple[RunningScene, int]:
        """Return the scene and the tile of a serial number, and free the number.

        Raises:
            LookupError: no running scene has this number.
        """
        with self._lock:
            running, tile = self._tiles.pop(serial)
            running.serials.discard(serial)
            return running, tile

    def drop(self, running: RunningScene) -> None:
        """Remove a scene and close it; a second call does nothing."""
        with self._lock:
            self._running.discard(running)
            for serial in running.serials:
                self._tiles.pop(serial, None)
            running.serials.clear()
        running.close()

    def close(self) -> None:
        """Drop every scene."""
        for running in list(self._running):
            self.drop(running)

    def of_request(self, request_id: str) -> Iterator[RunningScene]:
        """Yield the scenes of a server's request."""
        with self._lock:
            found = [running for running in self._running if running.request_id == request_id]
        yield from found

    def __len__(self) -> int:
        return len(self._running)
