"""One scene, from the file to the products: what a child does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from baton_geo.card import Card
from baton_geo.errors import RasterUnusable
from baton_geo.raster.ask import PREVIEW, SceneAsk, SceneInfo, Tally
from baton_geo.raster.bands import choose_bands
from baton_geo.raster.calibration import Conversion, conversion
from baton_geo.raster.geotiff import GeoTiff
from baton_geo.raster.grid import Floats, Grid
from baton_geo.raster.headers import check_file, check_memory
from baton_geo.raster.magic import LOOKED_AT, recognise
from baton_geo.raster.mosaic import Mosaic
from baton_geo.raster.picture import Picture
from baton_geo.raster.preview import LONGEST, draw_preview, picture_bands
from baton_geo.raster.products import ProductWriter
from baton_geo.raster.rows import Rows, Sample, Thumbnail
from baton_geo.raster.source import Source
from baton_geo.raster.values import RangeCheck, Scaling, find_valid

SMALL = 2_000_000  # numbers of a scene that is looked at whole before it is accepted
NAME_LENGTH = 200  # letters of a band's name that are told
GLANCES = 4  # along each axis of a larger scene
GLANCE = 64  # side of one, pixels
COSTLY_LOOK = 8 * 1024 * 1024  # bytes to decode for one; then it is left to the reading
GLANCE_SECONDS = 0.4
GLANCE_SHARE = 0.5  # of what was glanced at; the exact rule is applied while the scene is read


def open_source(fd: int, ask: SceneAsk) -> Source:
    """The raster in a file.

    Raises:
        NotARaster: it is something else.
        RasterTooLarge: beyond the limit on files.
        RasterBroken, RasterTooLarge, RasterUnusable: see `GeoTiff` and `Picture`.
    """
    check_file(os.fstat(fd).st_size, ask)
    kind = recognise(os.pread(fd, LOOKED_AT, 0))
    return GeoTiff(fd, ask) if kind == "TIFF" else Picture(fd, kind, ask)


class Job:
    """Reads tiles, blends scores, writes products.

    Args:
        fd: the raster.
        folder: the products go here.
        ask: what is wanted.

    Attributes:
        info: what the raster is.

    Raises:
        GeoError: the raster is refused.
    """

    def __init__(self, fd: int, folder: Path, ask: SceneAsk) -> None:
        card = ask.card
        self._ask, self._folder = ask, folder
        self._source = source = open_source(fd, ask)
        choice = choose_bands(source.names, card, ask.indices)
        source.notes.extend(choice.notes)
        itemsize = source.dtype.itemsize
        check_memory(source.width, source.height, source.block_height, itemsize, len(choice.bands), ask)
        nodata = card.nodata if source.nodata is None else source.nodata
        said = {"scale": ask.scale, "offset": ask.offset}
        line = conversion(card, source.dtype, choice.bands, source.stated, **said)
        source.notes.extend(line.notes)
        self._glance(choice.bands, nodata, line)
        self._check = RangeCheck(card, source.dtype, line)
        self._scaling = Scaling(card, line)
        self._grid = Grid(source.width, source.height, card.tile, card.overlap)
        sample = Sample(source.width, source.height, LONGEST)
        self._thumbnail = Thumbnail(sample, picture_bands(card) if ask.preview else (), source.dtype)
        self._rows = Rows(source, choice.bands, nodata, self._check, self._thumbnail)
        self._unread = [len(self._grid.xs)] * len(self._grid.ys)
        self._mosaic = Mosaic(self._grid, len(card.classes))
        size = source.width, source.height
        self._products = ProductWriter(folder, ask, source.place, size, sample)
        self.info = self._describe(choice.bands, nodata)

    def read(self, tile: int) -> Floats | None:
        """The model's input for a tile; None: all of it is nodata, and it counts as done.

        Returns:
            shape (bands, frames, tile, tile), float32.

        Raises:
            RasterBroken: it cannot be decoded.
            RasterUnusable: too many values are out of range.
        """
        row, column = self._grid.place(tile)
        keep = next(y for y, left in zip(self._grid.ys, self._unread, strict=True) if left)
        y, x, side = self._grid.ys[row], self._grid.xs[column], self._grid.tile
        raw, valid = self._rows.tile(y, x, side, keep)
        self._unread[row] -= 1
        if valid.any():
            return self._scaling.tile(raw, valid, side)
        self._mosaic.skip(tile)
        self._flush()
        return None

    def write(self, tile: int, scores: Floats) -> None:
        """Blend in the model's output: logits of shape (classes, tile, tile)."""
        self._mosaic.add(tile, scores)
        self._flush()

    def finish(self) -> Tally:
        """Write the products, once all tiles are done.

        Raises:
            RasterUnusable: every pixel is nodata.
        """
        if not self._check.valid:
            raise RasterUnusable(_nothing_there(self._ask.card))
        del self._rows, self._mosaic  # their memory is of use to what follows
        areas, nodata_pixels = self._products.finish()
        if self._ask.preview:
            picture = draw_preview(self._ask.card, self._thumbnail, self._products.thumbnail, areas)
            picture.save(self._folder / PREVIEW, optimize=True)
        self._source.close()
        return Tally(areas=areas, nodata_pixels=nodata_pixels)

    def _flush(self) -> None:
        for top, chances in self._mosaic.finished():
            self._products.write(top, chances, self._rows.valid(top, len(chances)))

    def _glance(self, bands: tuple[int, ...], nodata: float | None, line: Conversion) -> None:
        """Refuse at once what is plainly unusable: small scenes are looked at whole, others in spots."""
        source = self._source
        check = RangeCheck(self._ask.card, source.dtype, line)
        whole = source.width * source.height * len(bands) <= SMALL
        if source.first_look > COSTLY_LOOK and not whole:
            return
        until = time.monotonic() + GLANCE_SECONDS
        for top, left, rows, columns in _spots(source.width, source.height, whole):
            raw = np.empty((rows, len(bands), columns), source.dtype)
            source.read(top, left, bands, raw.transpose(1, 0, 2))
            valid = find_valid(raw, nodata)
            hidden = source.hidden(top, left, rows, columns)
            check.count(raw, valid if hidden is None else valid & ~hidden)
            if time.monotonic() > until and not whole:
                break
        if whole and not check.valid:
            raise RasterUnusable(_nothing_there(self._ask.card))
        if whole:
            check.judge(check.valid)
        elif check.valid:
            check.judge(check.valid, GLANCE_SHARE)

    def _describe(self, bands: tuple[int, ...], nodata: float | None) -> SceneInfo:
        source = self._source
        return SceneInfo(
            width=source.width,
            height=source.height,
            count=len(source.names),
            dtype=str(source.dtype),
            crs=source.place.crs,
            transform=source.place.transform,
            nodata=nodata,
            names=tuple(name and name[:NAME_LENGTH] for name in source.names),
            bands=bands,
            tiles=len(self._grid),
            latitude=source.place.latitude,
            longitude=source.place.longitude,
            acquired=source.acquired,
            notes=tuple(source.notes),
        )


def _spots(width: int, height: int, whole: bool) -> list[tuple[int, int, int, int]]:
    """Top, left, rows and columns of what is glanced at."""
    if whole:
        return [(0, 0, height, width)]
    rows, columns = min(GLANCE, height), min(GLANCE, width)
    shares = [(2 * number + 1) / (2 * GLANCES) for number in range(GLANCES)]
    return [
        (int((height - rows) * down), int((width - columns) * across), rows, columns)
        for down in shares
        for across in shares
    ]


def _nothing_there(card: Card) -> str:
    said = (
        f" (the model takes {card.nodata:g} as nodata where a file does not say)"
        if card.nodata is not None
        else ""
    )
    return f"every pixel is nodata in at least one of the bands used, so there is nothing to classify{said}"
