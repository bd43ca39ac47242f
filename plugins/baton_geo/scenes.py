"""The scenes under way, and the serial numbers by which engine outputs find their way back to them.

vLLM hands a plugin a request before the engine and its outputs after it, and links the two by nothing a
plugin can rely on: offline there is no request id at all. So a prompt is one token, a serial number that
this process never gives twice while it is in use, and every output comes back with its prompt. Concurrent
requests cannot be mixed up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton_geo.contract import GeoOptions

SERIALS = 2**31 - 2
"""A token id is an int32; 0 stays out."""


class Closeable(Protocol):
    def close(self) -> None: ...


@dataclass(eq=False)
class Running:
    """One request's scene on its way through the engine.

    Attributes:
        scene: its raster process.
        options: what was asked.
        request_id: of the server that runs the plugin; None offline.
        raster: the file it is read from.
        began: by the monotonic clock, seconds.
        serials: given out and not yet come back.
    """

    scene: Any
    options: GeoOptions
    request_id: str | None
    raster: Closeable
    began: float = field(default_factory=time.monotonic)
    serials: set[int] = field(default_factory=set)

    def close(self) -> None:
        """End its process and remove its files; a second call does nothing."""
        self.scene.close()
        self.raster.close()


class Scenes:
    """All scenes of one plugin. Safe to use from several threads.

    Args:
        seconds: after which a scene that nobody came back for is dropped.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running: set[Running] = set()
        self._tiles: dict[int, tuple[Running, int]] = {}
        self._next = 0

    def add(self, running: Running) -> None:
        """Keep a scene until `drop`; those long overdue go."""
        with self._lock:
            late = [old for old in self._running if time.monotonic() - old.began > self._seconds]
            self._running.add(running)
        for old in late:
            self.drop(old)

    def serial(self, running: Running, tile: int) -> int:
        """A number for one tile of a scene."""
        with self._lock:
            while (serial := self._next % SERIALS + 1) in self._tiles:
                self._next += 1
            self._next += 1
            self._tiles[serial] = (running, tile)
            running.serials.add(serial)
            return serial

    def take(self, serial: int) -> tuple[Running, int]:
        """The scene and the tile of a number; it is free again.

        Raises:
            LookupError: nobody waits for it (any more).
        """
        with self._lock:
            running, tile = self._tiles.pop(serial)
            running.serials.discard(serial)
            return running, tile

    def drop(self, running: Running) -> None:
        """Forget a scene and close it; a second call does nothing."""
        with self._lock:
            self._running.discard(running)
            for serial in running.serials:
                self._tiles.pop(serial, None)
            running.serials.clear()
        running.close()

    def close(self) -> None:
        """Drop them all."""
        for running in list(self._running):
            self.drop(running)

    def of_request(self, request_id: str) -> Iterator[Running]:
        """The scenes of a server's request."""
        with self._lock:
            found = [running for running in self._running if running.request_id == request_id]
        yield from found

    def __len__(self) -> int:
        return len(self._running)
