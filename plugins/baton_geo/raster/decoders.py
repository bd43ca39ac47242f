"""Scenes for the gateway: each in a child process of its own, of which this is the handle.

Nothing here imports a raster library, and no thread waits without a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from baton_geo.errors import DecoderBusy, GeoError, RasterBroken, RasterTooLarge
from baton_geo.raster import wire
from baton_geo.raster.ask import MASK, PREVIEW, PROBABILITIES, Products, SceneAsk, SceneInfo, Tally
from baton_geo.raster.fork_server_process import Line, NurseryLost, NurseryProcess
from baton_spool import Made, Naming, make

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", SceneInfo, Tally)
SCENES = Naming("baton-geo-scene-", folders=True)
Floats = npt.NDArray[np.float32]
ATTEMPTS = 2  # a nursery that died is replaced once a request
UNREAD, READ, DONE = 0, 1, 2  # what became of a tile
PATIENCE = 10  # of the clock's seconds for a second of processor time that opening may take
TOO_SLOW = (signal.SIGXCPU, signal.SIGALRM)
OUT_OF_MEMORY = (signal.SIGKILL, signal.SIGABRT)  # the kernel's, and C++'s when an allocation fails


class SceneClosed(Exception):
    """The scene was closed, here or by another thread."""


class Decoders:
    """Opens scenes, at most `count` at a time. Owns the nursery; safe to use from several threads.

    Args:
        count: scenes open at the same time.
        wait_s: how long `open` waits for one of them to be closed.
        folder: where scenes keep their files; None: the system's folder for such.
    """

    def __init__(self, count: int, wait_s: float, folder: Path | None = None) -> None:
        self._places = threading.BoundedSemaphore(count)
        self._wait_s, self._folder = wait_s, folder
        self._nursery = NurseryProcess()

    def open(self, file: Path, ask: SceneAsk) -> Scene:
        """Look at a raster; a context manager.

        Args:
            file: named by the server, never by a client; may be unlinked once this returns.
            ask: what is wanted of it.

        Raises:
            DecoderBusy: as many scenes as allowed are open, and none was closed in time.
            GeoError: the raster is refused; see `baton_geo.errors`.
            OSError: the file cannot be opened.
        """
        if not self._places.acquire(timeout=self._wait_s):
            raise DecoderBusy("every decoder is at work; try again in a moment")
        try:
            return self._open(file, ask)
        except BaseException:
            self._places.release()
            raise

    def close(self) -> None:
        """End every child. Scenes still open fail at their next call."""
        self._nursery.close()

    def _open(self, file: Path, ask: SceneAsk) -> Scene:
        for _ in range(ATTEMPTS):
            folder = make(self._folder, SCENES)
            try:
                scene = Scene(self._child(file), folder, ask, self._places.release)
            except NurseryLost:
                folder.remove()
                continue
            except BaseException:
                folder.remove()
                raise
            try:
                scene.begin()
            except NurseryLost:
                scene.abandon()
                continue
            except BaseException:
                scene.abandon()
                raise
            return scene
        raise DecoderBusy("the decoders are being restarted; try again in a moment")

    def _child(self, file: Path) -> Line:
        raster = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._nursery.child(raster)
        finally:
            os.close(raster)


class Scene:
    """One raster in one child. Close it, or use it in a `with`; its files go with it.

    Calls may come from several threads; one is served at a time. `close` may come from any thread at any time
    and ends a call under way, which then raises `SceneClosed`.

    Attributes:
        info: what the raster is.
    """

    info: SceneInfo

    def __init__(self, line: Line, made: Made, ask: SceneAsk, release: Callable[[], None]) -> None:
        self._line, self._made, self._folder, self._ask = line, made, made.path, ask
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()  # one question at a time
        self._closing = threading.Lock()
        self._closed = self._ended = False
        self._started = time.monotonic()
        self._deadline = self._started + ask.limits.seconds
        self._tiles = bytearray()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Have the child open the raster; `Decoders.open` calls this."""
        limits = self._ask.limits
        deadline = min(self._started + PATIENCE * limits.open_seconds, self._deadline)
        question = {"ask": self._ask.model_dump_json(), "folder": str(self._folder)}
        with self._lock, self._translated(self._too_slow_to_open()):
            wire.send(self._line.sock, question, deadline=deadline)
            self.info = self._parsed(SceneInfo, "info", self._receive(deadline))
        if self.info.tiles > limits.tiles:
            raise RasterTooLarge(f"{self.info.tiles} tiles; at most {limits.tiles} are taken")
        self._tiles = bytearray(self.info.tiles)

    def read(self, tile: int) -> Floats | None:
        """What the model sees of a tile; None: all of it is nodata, and there is nothing to compute or write.

        Tiles are numbered row by row. Read them about in order: rows stay in memory until their tiles are
        read.

        Args:
            tile: 0 to `info.tiles` - 1; each once.

        Returns:
            shape (bands, frames, tile, tile), float32, normalised, 0.0 at nodata.

        Raises:
            GeoError: the raster turned out broken, too costly or unusable.
            SceneClosed: it was closed.
            ValueError: the tile was read before.
        """
        card = self._ask.card
        with self._lock, self._translated():
            self._expect(tile, UNREAD)
            wire.send(self._line.sock, {"do": "read", "tile": tile}, deadline=self._deadline)
            pixels = np.empty((len(card.bands), card.frames, card.tile, card.tile), np.float32)
            body = self._receive(self._deadline, pixels.data.cast("B"))["body"]
            self._tiles[tile] = READ if body else DONE
            return pixels if body else None

    def write(self, tile: int, scores: Floats) -> None:
        """Give the model's output for a tile that was read, in any order, each once.

        Tiles that are far ahead of the first one missing cost memory in the child. What goes wrong there is
        raised by a later call.

        Args:
            tile: as in `read`.
            scores: logits, shape (classes, tile, tile), float32.

        Raises:
            GeoError: as in `read`.
            SceneClosed: it was closed.
            ValueError: the tile was not read, or written before, or the scores have the wrong shape or type.
            RuntimeError: a score is infinite or NaN.
        """
        card = self._ask.card
        if scores.shape != (len(card.classes), card.tile, card.tile) or scores.dtype != np.float32:
            raise ValueError(f"scores of shape {scores.shape} and type {scores.dtype}")
        if not np.isfinite(scores).all():
            raise RuntimeError("the model's scores are not finite")
        body = np.ascontiguousarray(scores).data.cast("B")
        with self._lock, self._translated():
            self._expect(tile, READ)
            wire.send(self._line.sock, {"do": "write", "tile": tile}, body, deadline=self._deadline)
            self._tiles[tile] = DONE

    def finish(self) -> Products:
        """Write the files, once every tile is done. They are there until the scene is closed.

        Raises:
            GeoError: as in `read`, or every pixel is nodata.
            SceneClosed: it was closed.
            ValueError: tiles are missing.
        """
        with self._lock, self._translated():
            missing = len(self._tiles) - self._tiles.count(DONE)
            if missing:
                raise ValueError(f"{missing} of {len(self._tiles)} tiles are not done")
            wire.send(self._line.sock, {"do": "finish"}, deadline=self._deadline)
            tally = self._parsed(Tally, "tally", self._receive(self._deadline))
            return Products(
                mask=self._product(MASK) if self._ask.mask else None,
                probabilities=self._product(PROBABILITIES) if self._ask.probabilities else None,
                preview=self._product(PREVIEW) if self._ask.preview else None,
                areas=tally.areas,
                nodata_pixels=tally.nodata_pixels,
            )

    def close(self) -> None:
        """End the child, wait until it is gone, and remove the files. May be called more than once."""
        self.abandon()
        self.step_aside()

    def step_aside(self) -> None:
        """Give its place among the open scenes to another; the child stays until `close`."""
        with self._closing:
            release, self._release = self._release, None
        if release is not None:
            release()

    def dismiss(self) -> None:
        """End the child and give up its place; the files that `finish` told of stay until `close`."""
        self._end_child()
        self.step_aside()

    def abandon(self) -> None:
        """As `close`, and keep the place among the open scenes."""
        self._closed = True
        self._end_child()
        self._made.remove()

    def _end_child(self) -> None:
        self._line.hang_up()
        with self._lock:
            if not self._ended:
                self._ended = True
                self._line.close()

    def _expect(self, tile: int, state: int) -> None:
        if not 0 <= tile < len(self._tiles) or self._tiles[tile] != state:
            raise ValueError(f"tile {tile}: not one of {len(self._tiles)}, or not in turn")

    def _parsed(self, kind: type[Answer], name: str, answer: dict[str, Any]) -> Answer:
        try:
            return kind.model_validate_json(answer[name])
        except (ValueError, KeyError):  # as in _receive
            raise RasterBroken("the raster could not be decoded") from None

    def _product(self, name: str) -> Path:
        """A file the child wrote, which is not taken at its word: a link might lead anywhere."""
        path = self._folder / name
        if path.is_symlink() or not path.is_file():
            raise RasterBroken("the raster could not be decoded")
        return path

    def _receive(self, deadline: float, body: memoryview | None = None) -> dict[str, Any]:
        """The child's answer; `body` in it says whether one came."""

        def room(length: int) -> memoryview:
            if body is None or length != len(body):
                raise ValueError("unexpected body")
            return body

        try:
            answer, length = wire.receive(self._line.sock, room, deadline)
            refusal = _refusal(answer["error"]) if "error" in answer else None
        except (ValueError, KeyError, TypeError):  # a child that a raster has taken over may say anything
            self._line.hang_up()
            raise RasterBroken("the raster could not be decoded") from None
        if refusal is not None:
            raise refusal
        return answer | {"body": length > 0}

    @contextmanager
    def _translated(self, late: GeoError | None = None) -> Iterator[None]:
        """What happens to the socket, as what it means for the request."""
        if self._closed or self._ended:
            raise SceneClosed
        try:
            yield
        except TimeoutError:
            self._line.hang_up()
            limit = self._ask.limits.seconds
            raise late or RasterTooLarge(f"the raster took longer than the {limit:g} s allowed") from None
        except (EOFError, OSError):
            raise self._obituary() from None

    def _too_slow_to_open(self) -> RasterBroken:
        seconds = self._ask.limits.open_seconds
        return RasterBroken(f"the raster's header could not be read within {seconds:g} s")

    def _obituary(self) -> Exception:
        """Why the child is gone."""
        if self._closed:
            return SceneClosed()
        with contextlib.suppress(OSError):
            self._line.sock.close()
        status = self._line.status()
        if status is None:
            return NurseryLost() if not self._tiles else DecoderBusy("the decoder was restarted; try again")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return self._too_slow_to_open()
        logger.warning("a raster child ended with wait status %d", status)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in TOO_SLOW:
            return RasterTooLarge(f"the raster took longer than the {self._ask.limits.seconds:g} s allowed")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in OUT_OF_MEMORY:
            return RasterTooLarge("the raster could not be decoded within the memory allowed")
        return RasterBroken("the raster could not be decoded: it is damaged in a way that stops the decoder")


def _refusal(error: dict[str, Any]) -> GeoError:
    """The child's refusal as the exception it was there."""
    if error["detail"]:
        logger.warning("a raster child failed: %s", error["detail"])
    kinds = {kind.code: kind for kind in GeoError.__subclasses__()}
    kind = kinds.get(error["code"], RasterBroken)
    return kind(str(error["message"]), param=error["param"])
