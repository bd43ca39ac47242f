"""A raster opened in a child process: read its tiles, write the model's scores, get the products.

Nothing here imports a raster library, and no call waits without a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton_geo.errors import DecoderBusy, GeoError, RasterBroken, RasterTooLarge
from baton_geo.raster.messages import (
    FILES,
    STATUS,
    TABLE,
    Products,
    SceneInfo,
    SceneRequest,
    Tally,
    receive,
    send,
    tile_bytes,
)
from baton_spool import Made

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply", SceneInfo, Tally)
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
UNREAD, READ, DONE = 0, 1, 2  # states of a tile
REAP_SECONDS = 10.0
OPENING_FACTOR = 10  # seconds of wall time for one second of processor time that opening may take
TOO_SLOW = (signal.SIGXCPU, signal.SIGALRM)
OUT_OF_MEMORY = (signal.SIGKILL, signal.SIGABRT)  # by the kernel, and by C++ when an allocation fails


class ForkServerLost(Exception):
    """The fork server died, and its children with it."""


@dataclass(frozen=True)
class ChildHandle:
    """A child, as the gateway controls it.

    Attributes:
        sock: carries questions and answers; see `messages`.
        lifeline: kills the child when it is closed; receives the child's wait status.
    """

    sock: socket.socket
    lifeline: socket.socket

    def status(self, seconds: float = REAP_SECONDS) -> int | None:
        """Wait `seconds` for the child to end, and return its wait status; None if the fork server died."""
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


class RangeFetch(Protocol):
    """Fetches parts of a scene's files that are at addresses.

    Attributes:
        opening_seconds: time that all fetches of one opening may take together.
    """

    @property
    def opening_seconds(self) -> float: ...

    def fetch(self, need: object, deadline: float) -> None:
        """Write pages of files; blocks until they are there.

        Args:
            need: [number of the file, [[first, number of pages], ...]] each, as a child asked for them, which
                a raster may have taken over.
            deadline: seconds on the monotonic clock.

        Raises:
            GeoError: they could not be fetched.
            ValueError, TypeError: there are no such files or pages.
            FetchStopped: the scene was closed.
        """

    def stop(self) -> None:
        """End a running `fetch`; later ones raise at once."""


class FetchStopped(Exception):
    """The scene was closed while something was fetched for it."""


class SceneClosed(Exception):
    """The scene was closed, perhaps by another thread."""


class OpenScene:
    """One raster, opened in one child process. Close it, or use it in a `with`; closing removes its files.

    Safe to use from several threads; calls run one at a time. `close` may be called from any thread at any
    time and ends a running call, which then raises `SceneClosed`.

    Attributes:
        card: of the model.
        info: size, bands and place of the raster.
    """

    info: SceneInfo

    def __init__(
        self,
        handle: ChildHandle,
        made: Made,
        request: SceneRequest,
        release: Callable[[], None],
        fetch: RangeFetch | None = None,
    ) -> None:
        self._child, self._made, self._folder, self._request = handle, made, made.path, request
        self.card = request.card
        self._release: Callable[[], None] | None = release
        self._fetch = fetch
        self._lock = threading.Lock()  # one question at a time
        self._closing = threading.Lock()
        self._closed = self._ended = False
        self._started = time.monotonic()
        self._deadline = self._started + request.limits.seconds
        self._tiles = bytearray()

    def __enter__(self) -> OpenScene:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Have the child open the raster; `Decoders.open` calls this.

        Raises:
            GeoError: the raster is refused.
            ForkServerLost: the fork server died.
        """
        limits = self._request.limits
        deadline = min(self._started + OPENING_FACTOR * limits.open_seconds, self._deadline)
        question = {"request": self._request.model_dump_json(), "folder": str(self._folder)}
        with self._lock, self._translated(self._too_slow_to_open):
            send(self._child.sock, question, deadline=deadline)
            seconds = math.inf if self._fetch is None else self._fetch.opening_seconds
            self.info = self._parsed(SceneInfo, "info", self._receive(deadline, fetching=seconds))
        card = self.card
        if len(self.info.scaling) != 3 * len(card.bands) * card.frames:  # of a child that was taken over
            raise RasterBroken("the raster could not be decoded")
        if self.info.tiles > limits.tiles:
            raise RasterTooLarge(f"the scene has {self.info.tiles} tiles; at most {limits.tiles} are allowed")
        self._tiles = bytearray(self.info.tiles)

    def read(self, tile: int, count: int = 1) -> tuple[tuple[int, ...], Bytes]:
        """Read tiles from `tile` on; one that is all nodata is left out and not written.

        Tiles are numbered row by row. Read them roughly in order: rows stay in memory until their tiles are
        read.

        Args:
            tile: 0 to `info.tiles` - 1; each once.
            count: tiles to read; fewer are there at the scene's end.

        Returns:
            The numbers of the tiles, and their bytes, shape (tiles, bytes of each); see `tile_bytes`.

        Raises:
            GeoError: the raster is broken, too large or unusable.
            SceneClosed: the scene was closed.
            ValueError: the tile was read before.
        """
        self._expect(tile, UNREAD)
        tiles = range(tile, min(tile + count, self.info.tiles))
        card = self.card
        each = sum(tile_bytes(len(card.bands) * card.frames, card.tile, self.info.carried))
        strip = np.empty((len(tiles), each), np.uint8)
        read: list[int] = []
        for number in tiles:
            with self._lock, self._translated():
                self._expect(number, UNREAD)
                send(self._child.sock, {"do": "read", "tile": number}, deadline=self._deadline)
                body = self._receive(self._deadline, strip[len(read)].data)["body"]
                self._tiles[number] = READ if body else DONE
                read += [number] if body else []
        return tuple(read), strip[: len(read)]

    def write(self, tile: int, scores: Floats) -> None:
        """Write the model's output for a tile that was read, in any order, each tile once.

        Tiles far ahead of the first missing one cost memory in the child. An error there is raised by the
        next `read` or `finish`.

        Args:
            tile: as in `read`.

        Raises:
            GeoError: as in `read`.
            SceneClosed: the scene was closed.
            ValueError: the tile was not read or was written before, or the scores have the wrong shape or
                type.
            RuntimeError: a score is infinite or NaN.
        """
        card = self._request.card
        known = (np.float32, np.uint8) if card.classes else (np.float32,)
        if scores.shape != card.output or scores.dtype not in known:
            raise ValueError(f"scores of shape {scores.shape} and type {scores.dtype}")
        sound = np.isfinite(scores) if scores.dtype == np.float32 else scores.any(axis=0)
        if not sound.all():
            raise RuntimeError("the model's scores are not finite")
        body = np.ascontiguousarray(scores).data.cast("B")
        with self._lock, self._translated():
            self._expect(tile, READ)
            send(self._child.sock, {"do": "write", "tile": tile}, body, deadline=self._deadline)
            self._tiles[tile] = DONE

    @property
    def tiles_done(self) -> int:
        """Number of tiles that are written, or hold no data."""
        return self._tiles.count(DONE)

    def finish(self) -> Products:
        """Write the files, once every tile is done; `close` removes them.

        Raises:
            GeoError: as in `read`, or every pixel is nodata.
            SceneClosed: the scene was closed.
            ValueError: tiles are missing.
        """
        with self._lock, self._translated():
            missing = len(self._tiles) - self._tiles.count(DONE)
            if missing:
                raise ValueError(f"{missing} of {len(self._tiles)} tiles are not done")
            send(self._child.sock, {"do": "finish"}, deadline=self._deadline)
            tally = self._parsed(Tally, "tally", self._receive(self._deadline))
            left_out = {
                output: reason
                for output, reason in tally.left_out.items()
                if self._request.if_few and getattr(self._request, output)
            }
            wanted = {
                output: self._product(name)
                for output, (name, _) in FILES.items()
                if getattr(self._request, output) and output not in left_out
            }
            return Products(
                table=self._product(TABLE) if self._request.embeddings else None,
                **wanted,
                areas=tally.areas,
                nodata_pixels=tally.nodata_pixels,
                values=tally.values,
                notes=tally.notes,
                left_out=left_out,
            )

    def close(self) -> None:
        """Kill the child, wait until it is reaped, and remove the files. May be called again."""
        self._closed = True
        if self._fetch is not None:
            self._fetch.stop()
        self.abandon()
        self.release_place()

    def release_place(self) -> None:
        """Stop counting among the open scenes of `Decoders`; the child stays until `close`."""
        with self._closing:
            release, self._release = self._release, None
        if release is not None:
            release()

    def end_child(self) -> None:
        """Kill the child and release the place; the files that `finish` returned stay until `close`."""
        self._end_child()
        self.release_place()

    def abandon(self) -> None:
        """Close the scene, but keep its place among the open scenes."""
        self._closed = True
        self._end_child()
        self._made.remove()

    def _end_child(self) -> None:
        self._child.kill()
        with self._lock:
            if not self._ended:
                self._ended = True
                self._child.close()

    def _expect(self, tile: int, state: int) -> None:
        if not 0 <= tile < len(self._tiles) or self._tiles[tile] != state:
            raise ValueError(f"tile {tile}: not one of {len(self._tiles)}, or not in turn")

    def _parsed(self, kind: type[Reply], name: str, answer: dict[str, Any]) -> Reply:
        try:
            return kind.model_validate_json(answer[name])
        except (ValueError, KeyError):  # as in _receive
            raise RasterBroken("the raster could not be decoded") from None

    def _product(self, name: str) -> Path:
        """Find a file that the child wrote.

        A child that a raster has taken over may have made a link instead: that is refused.
        """
        path = self._folder / name
        if path.is_symlink() or not path.is_file():
            raise RasterBroken("the raster could not be decoded")
        return path

    def _receive(
        self, deadline: float, body: memoryview | None = None, *, fetching: float = math.inf
    ) -> dict[str, Any]:
        """Receive the child's answer, and its body into `body`; key `body` says whether it had one.

        Args:
            deadline: as if fetching took no time.
            fetching: seconds that all that is fetched may take together.
        """

        def room(length: int) -> memoryview:
            if body is None or length != len(body):
                raise ValueError("unexpected body")
            return body

        try:
            answer, length = receive(self._child.sock, room, deadline)
            while "need" in answer and self._fetch is not None:
                began = time.monotonic()
                self._fetch.fetch(answer["need"], min(began + fetching, self._deadline))
                spent = time.monotonic() - began
                fetching -= spent
                deadline = min(deadline + spent, self._deadline)
                send(self._child.sock, {}, deadline=deadline)
                answer, length = receive(self._child.sock, room, deadline)
            refusal = _refusal(answer["error"]) if "error" in answer else None
        except GeoError:  # of a fetch, which the child still waits for
            self._child.kill()
            raise
        except (ValueError, KeyError, TypeError):  # a child that a raster has taken over may say anything
            self._child.kill()
            raise RasterBroken("the raster could not be decoded") from None
        if refusal is not None:
            raise refusal
        return answer | {"body": length > 0}

    @contextmanager
    def _translated(self, late: Callable[[], GeoError] | None = None) -> Iterator[None]:
        """Translate errors of the socket into what they mean for the request.

        Args:
            late: makes the error of a deadline that has passed; None: the request took too long.
        """
        if self._closed or self._ended:
            raise SceneClosed
        try:
            yield
        except FetchStopped:
            raise SceneClosed from None
        except TimeoutError:
            self._child.kill()
            raise (late or self._too_slow)() from None
        except (EOFError, OSError):
            raise self._why_it_ended() from None

    def _too_slow(self) -> RasterTooLarge:
        seconds = self._request.limits.seconds
        return RasterTooLarge(f"the raster took longer than the {seconds:g} s allowed")

    def _too_slow_to_open(self) -> RasterBroken:
        seconds = self._request.limits.open_seconds
        return RasterBroken(f"the raster's header could not be read within {seconds:g} s")

    def _why_it_ended(self) -> Exception:
        """Find out by its wait status why the child ended, and return the error for it."""
        if self._closed:
            return SceneClosed()
        with contextlib.suppress(OSError):
            self._child.sock.close()
        status = self._child.status()
        if status is None:
            return (
                ForkServerLost() if not self._tiles else DecoderBusy("the decoder was restarted; try again")
            )
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return self._too_slow_to_open()
        logger.warning("a raster child ended with wait status %d", status)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in TOO_SLOW:
            return self._too_slow()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in OUT_OF_MEMORY:
            return RasterTooLarge("the raster could not be decoded within the memory allowed")
        return RasterBroken("the raster could not be decoded: it is damaged in a way that stops the decoder")


def _refusal(error: dict[str, Any]) -> GeoError:
    """Make of a refusal that the child sent the exception that it was in the child."""
    if error["detail"]:
        logger.warning("a raster child failed: %s", error["detail"])
    kinds = {kind.code: kind for kind in GeoError.__subclasses__()}
    kind = kinds.get(error["code"], RasterBroken)
    return kind(str(error["message"]), param=error["param"])
