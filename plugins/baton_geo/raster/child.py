"""Answer the gateway's questions about one scene, in the child process."""

from __future__ import annotations

import socket
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from baton_geo.errors import GeoError, RasterBroken, RasterTooLarge
from baton_geo.raster import sandbox, wire
from baton_geo.raster.job import SceneJob
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.pixels.grid import Floats

BYTES_EACH = 4  # per pixel and class, generously: a product has one


class Child:
    """The child's side of the socket.

    Args:
        sock: socket to the gateway.
        raster: descriptor of the file.
    """

    def __init__(self, sock: socket.socket, raster: int) -> None:
        self._sock, self._raster = sock, raster
        self._failure: GeoError | None = None  # of a write; sent as the answer to the next question
        self._scores: Floats = np.empty(0, np.float32)

    def serve(self) -> None:
        """Answer until the gateway closes the socket."""
        warnings.simplefilter("ignore")
        try:
            job = self._open()
            while job is not None:
                header, _ = wire.receive(self._sock, self._room)
                self._answer(job, header)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return

    def _open(self) -> SceneJob | None:
        header, _ = wire.receive(self._sock, self._room)
        request = SceneRequest.model_validate_json(header["request"])
        card = request.card
        self._scores = np.empty((len(card.classes), card.tile, card.tile), np.float32)
        folder = Path(header["folder"])
        try:
            sandbox.limit_resources(request.limits)
            sandbox.limit_writing(request.limits.pixels, len(card.classes) * BYTES_EACH)
            sandbox.confine_files(self._raster, folder)
            with sandbox.limit_opening(request.limits.open_seconds):
                job = SceneJob(self._raster, folder, request)
        except Exception as error:  # noqa: BLE001  # the process's border: any error that a hostile file provokes is sent
            self._refuse(error)
            return None
        wire.send(self._sock, {"info": job.info.model_dump_json()})
        return job

    def _answer(self, job: SceneJob, header: dict[str, Any]) -> None:
        try:
            match header["do"]:
                case "write":
                    self._write(job, header["tile"])
                case "read":
                    self._raise_failure()
                    tile = job.read(header["tile"])
                    wire.send(self._sock, {}, b"" if tile is None else tile.data.cast("B"))
                case "finish":
                    self._raise_failure()
                    wire.send(self._sock, {"tally": job.finish().model_dump_json()})
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001  # as above
            self._refuse(error)

    def _write(self, job: SceneJob, tile: int) -> None:
        """Blend a tile's scores; sends no answer, so that the gateway need not wait."""
        try:
            job.write(tile, self._scores)
        except Exception as error:  # noqa: BLE001  # as above
            self._failure = self._failure or _as_refusal(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refuse(self, error: Exception) -> None:
        refusal = _as_refusal(error)
        detail = "" if refusal is error else "".join(traceback.format_exception(error))[-8000:]
        answer = {"code": refusal.code, "message": refusal.message, "param": refusal.param, "detail": detail}
        wire.send(self._sock, {"error": answer})

    def _room(self, length: int) -> memoryview:
        if length != self._scores.nbytes:
            raise ValueError("unexpected body")
        return self._scores.data.cast("B")


def _as_refusal(error: Exception) -> GeoError:
    if isinstance(error, GeoError):
        return error
    if isinstance(error, MemoryError):
        return RasterTooLarge("the raster could not be decoded within the memory allowed")
    return RasterBroken("the raster could not be decoded")
