"""Answer the gateway's questions about one scene, in the child: read tiles, blend scores, write products."""

from __future__ import annotations

import socket
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from baton_geo.card import Card
from baton_geo.errors import GeoError, RasterBroken, RasterTooLarge, RasterUnusable
from baton_geo.raster import sandbox
from baton_geo.raster.messages import (
    CLASSES,
    PREVIEW,
    SCENE,
    FileSpec,
    SceneInfo,
    SceneRequest,
    Tally,
    receive,
    send,
)
from baton_geo.raster.pixels.bands import BandChoice, choose_bands
from baton_geo.raster.pixels.calibration import Conversion, conversion
from baton_geo.raster.pixels.grid import Bytes, Floats, Grid
from baton_geo.raster.pixels.values import PixelCheck, Scaling
from baton_geo.raster.products.embeddings import EmbeddingWriter
from baton_geo.raster.products.output_files import Mosaic, ProductWriter, ValueWriter
from baton_geo.raster.products.preview import (
    LONGEST,
    binned,
    draw_classes,
    draw_preview,
    draw_scene,
    rgb_bands,
)
from baton_geo.raster.products.vectors import write_item, write_vectors
from baton_geo.raster.reading.geotiff import GeoTiff
from baton_geo.raster.reading.headers import (
    HEAD_BYTES,
    RangedFile,
    RasterFile,
    check_bands,
    check_file,
    check_memory,
    check_size,
    recognise,
    want,
)
from baton_geo.raster.reading.image import ImageSource
from baton_geo.raster.reading.jpeg2000 import Jpeg2000
from baton_geo.raster.reading.parts import PartOfScene, Stack, bands_of, wanted_window
from baton_geo.raster.reading.rows import Rows, Sample, Source, Thumbnail

BYTES_EACH = 4  # per pixel and class, generously: a product has one
SMALL = 2_000_000  # pixels times bands; a scene up to this size is checked whole before it is accepted
NAME_LENGTH = 200  # characters of a band's name that are reported
SPOTS = 4  # sampled along each axis of a larger scene
SPOT = 64  # side of a sampled spot, pixels
COSTLY_BYTES = 8 * 1024 * 1024  # to decode for one pixel; such a file is only checked while it is read
SAMPLING_SECONDS = 0.4
SAMPLED_SHARE = 0.5  # of the sampled pixels; the exact rule is applied while the scene is read


class Child:
    """The child's side of the socket to the gateway; `rasters` are the descriptors of the scene's files."""

    def __init__(self, sock: socket.socket, rasters: list[int]) -> None:
        self._sock, self._rasters = sock, rasters
        self._failure: GeoError | None = None  # of a write; sent as the answer to the next question
        self._scores: Floats = np.empty(0, np.float32)  # as floats, and the same memory as bytes
        self._chances: Bytes = np.empty(0, np.uint8)

    def serve(self) -> None:
        """Answer until the gateway closes the socket."""
        warnings.simplefilter("ignore")
        try:
            job = self._open()
            while job is not None:
                header, length = receive(self._sock, self._room)
                self._answer(job, header, length)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return

    def _open(self) -> SceneJob | None:
        header, _ = receive(self._sock, self._room)
        request = SceneRequest.model_validate_json(header["request"])
        card = request.card
        self._scores = np.empty(card.output, np.float32)
        room = self._scores.reshape(-1).view(np.uint8)[: self._scores.size]
        self._chances = room.reshape(self._scores.shape)
        folder = Path(header["folder"])
        try:
            sandbox.limit_resources(request.limits, len(self._rasters))
            sandbox.limit_writing(request.limits.pixels, card.channels * BYTES_EACH)
            sandbox.confine_files(self._rasters, folder)
            with sandbox.limit_opening(request.limits.open_seconds):
                job = SceneJob(self._files(request), folder, request)
        except Exception as error:  # noqa: BLE001  # the process's border: any error that a hostile file provokes is sent
            self._refuse(error)
            return None
        send(self._sock, {"info": job.info.model_dump_json()})
        return job

    def _files(self, request: SceneRequest) -> list[RasterFile]:
        files: list[RasterFile] = []
        specs = request.files or (FileSpec(),)
        for number, (fd, spec) in enumerate(zip(self._rasters, specs, strict=True)):
            if spec.fetched is None:
                files.append(RasterFile(fd))
            else:
                files.append(RangedFile(fd, number, spec.fetched, self._ask))
        return files

    def _ask(self, wanted: list[Any]) -> None:
        """Have the gateway fetch pages of files; see `RangedFile`."""
        send(self._sock, {"need": wanted})
        receive(self._sock, self._room)

    def _answer(self, job: SceneJob, header: dict[str, Any], length: int) -> None:
        try:
            match header["do"]:
                case "write":
                    whole = length == self._scores.nbytes
                    self._write(job, header["tile"], self._scores if whole else self._chances)
                case "read":
                    self._raise_failure()
                    tile = job.read(header["tile"])
                    send(self._sock, {}, b"" if tile is None else tile.data)
                case "finish":
                    self._raise_failure()
                    send(self._sock, {"tally": job.finish().model_dump_json()})
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001  # as above
            self._refuse(error)

    def _write(self, job: SceneJob, tile: int, scores: Floats | Bytes) -> None:
        """Blend a tile's scores; sends no answer, so that the gateway need not wait."""
        try:
            job.write(tile, scores)
        except Exception as error:  # noqa: BLE001  # as above
            self._failure = self._failure or _as_refusal(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refuse(self, error: Exception) -> None:
        refusal = _as_refusal(error)
        detail = "" if refusal is error else "".join(traceback.format_exception(error))[-8000:]
        answer = {"code": refusal.code, "message": refusal.message, "param": refusal.param, "detail": detail}
        send(self._sock, {"error": answer})

    def _room(self, length: int) -> memoryview:
        for buffer in (self._scores, self._chances):
            if length == buffer.nbytes:
                return buffer.data.cast("B")
        raise ValueError("unexpected body")


def _as_refusal(error: Exception) -> GeoError:
    if isinstance(error, GeoError):
        return error
    if isinstance(error, MemoryError):
        return RasterTooLarge("the raster could not be decoded within the memory allowed")
    return RasterBroken("the raster could not be decoded")


def open_file(file: RasterFile, spec: FileSpec, request: SceneRequest) -> Source:
    """Open the raster in a file.

    Raises:
        NotARaster: the file is no GeoTIFF, JPEG 2000, PNG or JPEG.
        RasterTooLarge: the file is larger than `limits.file_bytes`.
        RasterBroken, RasterTooLarge, RasterUnusable: see `GeoTiff`, `Jpeg2000` and `ImageSource`.
    """
    kind = recognise(file.pread(HEAD_BYTES, 0))
    if kind == "TIFF" and file.by_ranges:  # what of it is fetched is limited
        return GeoTiff(file, request, spec)
    check_file(file.size, request)
    if kind == "TIFF":
        return GeoTiff(file, request, spec)
    if kind == "JPEG 2000":
        return Jpeg2000(file, request, spec)
    want([(file, [(0, file.size)])])
    return ImageSource(file.fd, kind, request)


def open_scene(files: list[RasterFile], request: SceneRequest) -> tuple[Source, BandChoice]:
    """Open a scene's files as one source, and choose its bands.

    Raises:
        GeoError: see `open_file`, `choose_bands`, `Stack` and `wanted_window`.
    """
    specs = request.files or (FileSpec(),)
    if len(files) == 1:
        source = open_file(files[0], specs[0], request)
        choice = choose_bands(source.bands, request.card, request.indices)
    else:
        names = [spec.name or f"file {number}" for number, spec in enumerate(specs, 1)]
        opened = []
        for file, spec, name in zip(files, specs, names, strict=True):
            try:
                opened.append(open_file(file, spec, request))
            except GeoError as error:
                raise type(error)(f"assets: '{name}': {error.message}", param="assets") from None
        choice = choose_bands(bands_of(opened), request.card, request.indices)
        source = Stack(opened, names, choice.bands, request.card)
    if request.window is not None or request.bbox is not None:
        size = sum(file.size for file in files)
        source = PartOfScene(source, wanted_window(source, request))
        check_size(source.width, source.height, size, request)
    return source, choice


class SceneJob:
    """Reads tiles, blends scores, writes products.

    Attributes:
        info: size, bands and place of the raster.

    Raises:
        GeoError: the raster is refused.
    """

    def __init__(self, files: list[RasterFile], folder: Path, request: SceneRequest) -> None:
        card = request.card
        self._request, self._folder = request, folder
        self._source, choice = source, _ = open_scene(files, request)
        source.notes.extend(source.place.notes)
        check_bands(len(choice.bands), request)
        source.notes.extend(choice.notes)
        itemsize = source.dtype.itemsize
        check_memory(source.width, source.height, source.block_height, itemsize, len(choice.bands), request)
        line = _conversion(request, source, choice.bands)
        source.notes.extend((*line.notes, *source.stated.notes))
        self._offset_said = request.offset is not None or (
            request.scale is None and any(source.stated.bands[band].offset for band in choice.bands)
        )
        self._check_sample(choice.bands, line)
        self._check = self._new_check(choice.bands, line)
        self._scaling = Scaling(card, line, source.dtype)
        alone = card.embedding is not None
        self._grid = Grid(source.width, source.height, card.tile, card.overlap, side_by_side=alone)
        sample = Sample(source.width, source.height, LONGEST)
        self._thumbnail = Thumbnail(
            sample, rgb_bands(card) if request.preview or request.scene else (), source.dtype
        )
        self._rows = Rows(source, choice.bands, self._check, self._thumbnail)
        self._unread = [len(self._grid.xs)] * len(self._grid.ys)
        self._mosaic = Mosaic(self._grid, 0 if alone else card.channels, scores=card.value is None)
        size = source.width, source.height
        self._embeddings = (
            EmbeddingWriter(folder, request, source.place, self._grid, source.acquired) if alone else None
        )
        self._products: ProductWriter | ValueWriter = (
            ProductWriter(folder, request, source.place, size, sample)
            if card.value is None
            else ValueWriter(folder, request, source.place, size, sample)
        )
        self.info = self._describe(choice.bands)

    def read(self, tile: int) -> Bytes | None:
        """Read the bytes of a tile; None if all of it is nodata: the tile then counts as done.

        Raises:
            RasterBroken: the raster cannot be decoded.
            RasterUnusable: too many values are out of range.
        """
        row, column = self._grid.place(tile)
        keep = next(y for y, left in zip(self._grid.ys, self._unread, strict=True) if left)
        y, x, side = self._grid.ys[row], self._grid.xs[column], self._grid.tile
        raw, valid = self._rows.tile(y, x, side, keep)
        self._unread[row] -= 1
        if valid.any():
            if self._embeddings is not None:
                self._embeddings.expect(tile, valid)
            return self._scaling.tile(raw, valid, side)
        self._mosaic.skip(tile)
        self._flush()
        return None

    def write(self, tile: int, scores: Floats | Bytes) -> None:
        """Blend in the model's output, shape (classes, tile, tile): logits, or probabilities as bytes."""
        if self._embeddings is not None:
            self._embeddings.write(tile, np.asarray(scores, np.float32))
            self._mosaic.skip(tile)
        else:
            self._mosaic.add(tile, scores)
        self._flush()

    def finish(self) -> Tally:
        """Write the products, once all tiles are done.

        Raises:
            RasterUnusable: every pixel is nodata, or the numbers are too small.
        """
        if not self._check.valid:
            raise RasterUnusable(_all_nodata(self._request.card, self._check))
        scale_said = self._request.scale is not None
        self._check.judge_unit(scale_said=scale_said)
        notes = self._check.notes(scale_said=scale_said, offset_said=self._offset_said)
        del self._rows, self._mosaic  # frees their memory for the rest
        every = (*self._source.notes, *notes)
        tally = self._products.finish(every) if self._embeddings is None else self._embeddings.finish(every)
        card, areas = self._request.card, tally.areas
        if card.value is not None:
            card, classes, areas = binned(card, self._products.thumbnail)
        else:
            classes = np.asarray(self._products.thumbnail, np.uint8)
        if self._request.preview:
            draw_preview(card, self._thumbnail, classes, areas).save(self._folder / PREVIEW, optimize=True)
        if self._request.scene:
            draw_scene(self._thumbnail).save(self._folder / SCENE)
        if self._request.classes:
            draw_classes(card, classes).save(self._folder / CLASSES)
        tally = self._write_vectors(tally.model_copy(update={"notes": tuple(notes)}))
        self._source.close()
        return tally

    def _write_vectors(self, tally: Tally) -> Tally:
        """Write polygons, style and item; return the tally with what of it was left out."""
        request, source = self._request, self._source
        size = source.width, source.height
        if request.polygons or request.geopackage or request.style:
            left_out = write_vectors(self._folder, request, source.place, size)
            request = request.model_copy(update=dict.fromkeys(left_out, False))
            notes = (*tally.notes, *dict.fromkeys(left_out.values()))
            tally = tally.model_copy(update={"notes": notes, "left_out": left_out})
        if request.item:
            notes = (*source.notes, *tally.notes)
            write_item(
                self._folder, request, source.place, size, request.date or source.acquired, tally, notes
            )
        return tally

    def _flush(self) -> None:
        for top, probabilities in self._mosaic.finished():
            valid = self._rows.valid(top, len(probabilities))
            if self._embeddings is None:
                self._products.write(top, probabilities, valid)
            else:
                self._embeddings.nodata_pixels += int(valid.size - np.count_nonzero(valid))

    def _new_check(self, bands: tuple[int, ...], line: Conversion) -> PixelCheck:
        source, card = self._source, self._request.card
        pixels = source.width * source.height
        nodata: float | tuple[float | None, ...] | None = source.nodata
        of_card = nodata is None
        if source.numbers is not None:
            stated = [source.numbers[band].nodata for band in bands]
            of_card = None in stated and card.nodata is not None
            nodata = tuple(card.nodata if own is None else own for own in stated)
        elif of_card:
            nodata = card.nodata
        return PixelCheck(card, source.dtype, line, nodata, nodata_of_card=of_card, pixels=pixels)

    def _check_sample(self, bands: tuple[int, ...], line: Conversion) -> None:
        """Refuse an unusable scene at once: small scenes are checked whole, others in spots."""
        source = self._source
        check = self._new_check(bands, line)
        whole = source.width * source.height * len(bands) <= SMALL
        by_ranges = any(spec.fetched is not None for spec in self._request.files)
        if (by_ranges or source.first_look > COSTLY_BYTES) and not whole:  # spots cost a request each
            return
        until = time.monotonic() + SAMPLING_SECONDS
        for top, left, rows, columns in _spots(source.width, source.height, whole):
            raw = np.empty((rows, len(bands), columns), source.dtype)
            source.read(top, left, bands, raw.transpose(1, 0, 2))
            valid = check.find(raw)
            hidden = source.hidden(top, left, rows, columns, bands)
            check.count(raw, valid if hidden is None else valid & ~hidden)
            if time.monotonic() > until and not whole:
                break
        if whole and not check.valid:
            raise RasterUnusable(_all_nodata(self._request.card, check))
        if whole:
            check.judge(check.valid)
            check.judge_unit(scale_said=self._request.scale is not None)
        elif check.valid:
            check.judge(check.valid, SAMPLED_SHARE)

    def _describe(self, bands: tuple[int, ...]) -> SceneInfo:
        source = self._source
        names = [band.name for band in source.bands.bands]
        return SceneInfo(
            width=source.width,
            height=source.height,
            count=len(names),
            dtype=str(source.dtype),
            crs=source.place.crs,
            transform=source.place.transform,
            nodata=self._request.card.nodata if source.nodata is None else source.nodata,
            names=tuple(name and name[:NAME_LENGTH] for name in names),
            bands=bands,
            tiles=len(self._grid),
            latitude=source.place.latitude,
            longitude=source.place.longitude,
            acquired=source.acquired,
            carried=self._scaling.carried,
            scaling=self._scaling.numbers,
            window=source.window if isinstance(source, PartOfScene) else None,
            notes=tuple(source.notes),
        )


def _conversion(request: SceneRequest, source: Source, bands: tuple[int, ...]) -> Conversion:
    """Find the conversion of the bands in use, each by the type of its own file."""
    given = {"scale": request.scale, "offset": request.offset}
    if source.numbers is None:
        return conversion(request.card, source.dtype, bands, source.stated, **given)
    types = [source.numbers[band].dtype for band in bands]
    found = {kind: conversion(request.card, kind, bands, source.stated, **given) for kind in set(types)}
    times, plus = (
        np.array([getattr(found[kind], name)[place] for place, kind in enumerate(types)])
        for name in ("times", "plus")
    )
    notes = dict.fromkeys(text for kind in found.values() for text in kind.notes)
    return Conversion(times, plus, tuple(notes))


def _spots(width: int, height: int, whole: bool) -> list[tuple[int, int, int, int]]:
    """List top, left, rows and columns of the spots to check."""
    if whole:
        return [(0, 0, height, width)]
    rows, columns = min(SPOT, height), min(SPOT, width)
    shares = [(2 * number + 1) / (2 * SPOTS) for number in range(SPOTS)]
    return [
        (int((height - rows) * down), int((width - columns) * across), rows, columns)
        for down in shares
        for across in shares
    ]


def _all_nodata(card: Card, check: PixelCheck) -> str:
    rule = (
        f" (the model takes {card.nodata:g} as nodata where a file states none)"
        if card.nodata is not None
        else ""
    )
    if check.fill:
        rule += f"; numbers like {check.fill} are taken for fill values: is the unit another?"
    return f"every pixel is nodata in at least one of the bands used, so there is nothing to classify{rule}"
