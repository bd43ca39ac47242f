"""Blend the scores of overlapping tiles, and write class mask and probabilities as Cloud Optimized GeoTIFFs.

Rows are written to a plain tiled file first; GDAL's COG driver then adds overviews and puts everything into
the order of the layout (https://github.com/cogeotiff/cog-spec).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rasterio
from rasterio._err import CPLE_BaseError
from rasterio.errors import RasterioError
from rasterio.shutil import copy
from rasterio.windows import Window

from baton_geo.card import Card, MapValue
from baton_geo.errors import DecoderBusy
from baton_geo.raster.messages import (
    MASK,
    PROBABILITIES,
    VALUE,
    ClassCount,
    SceneRequest,
    Tally,
    ValueSummary,
)
from baton_geo.raster.pixels.grid import Bytes, Floats, Grid, weights
from baton_geo.raster.pixels.values import Valid
from baton_geo.raster.reading.rows import Georeference, Sample

BLOCK = 512
CERTAIN = 250  # stands for a probability of 1: a byte per class keeps files small, and steps of 0.4 % suffice
NO_PROBABILITY = 255
LEVEL = 3  # of DEFLATE: four times as fast as 6, files a tenth larger
AT_ONCE = 64  # rows whose classes are found together
Classes = npt.NDArray[np.uint8]


def softmax(scores: Floats) -> Floats:
    """Return probabilities over the first axis: float32, same shape."""
    shifted = scores - scores.max(axis=0)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=0)
    return np.asarray(shifted, np.float32)


class Mosaic:
    """The blended scene: takes tiles in any order and gives finished rows from top to bottom.

    Scores are blended as probabilities (those that come as bytes, 255 being 1, as they are), values
    (`scores` False) as they are.

    In memory are the rows from the first unfinished row of tiles to the last added tile: about two rows of
    tiles if tiles are added nearly in order.
    """

    def __init__(self, grid: Grid, classes: int, *, scores: bool = True) -> None:
        self._grid, self._classes, self._scores = grid, classes, scores
        self._across = weights(grid.width, grid.tile, grid.overlap)
        self._down = weights(grid.height, grid.tile, grid.overlap)
        self._left = [len(grid.xs)] * len(grid.ys)  # tiles to come, for each row of tiles
        self._row = 0  # first row of tiles with tiles to come
        self._top = 0  # scene row of _sums[0]
        self._sums = np.zeros((0, classes, grid.width), np.float32)

    def add(self, tile: int, scores: Floats | Bytes) -> None:
        """Blend in one tile."""
        row, column = self._grid.place(tile)
        down, across = self._down[row], self._across[column]
        inner = scores[:, : len(down), : len(across)]
        shares = down[:, None] * across
        if inner.dtype == np.uint8:
            probabilities = np.multiply(inner, shares / np.float32(255), dtype=np.float32)
        else:
            floats = np.asarray(inner, np.float32)
            probabilities = (softmax(floats) if self._scores else floats) * shares
        y, x = self._grid.ys[row] - self._top, self._grid.xs[column]
        self._make_room(y + len(down))
        self._sums[y : y + len(down), :, x : x + len(across)] += probabilities.transpose(1, 0, 2)
        self._left[row] -= 1

    def skip(self, tile: int) -> None:
        """Count a tile whose pixels are all nodata as done."""
        row, _ = self._grid.place(tile)
        self._left[row] -= 1
        self._make_room(self._grid.ys[row] - self._top + len(self._down[row]))

    def finished(self) -> Iterator[tuple[int, Floats]]:
        """Yield rows that no later tile changes: (first row, probabilities of shape (rows, classes, width)).

        The array is overwritten by the next call.
        """
        while self._row < len(self._left) and not self._left[self._row]:
            self._row += 1
            ends = self._row == len(self._left)
            stop = self._grid.height if ends else self._grid.ys[self._row]
            rows = stop - self._top
            yield self._top, self._sums[:rows]
            self._drop(rows)

    def _make_room(self, rows: int) -> None:
        have = len(self._sums)
        if rows > have:
            grown = np.zeros((rows, self._classes, self._grid.width), np.float32)
            grown[:have] = self._sums
            self._sums = grown

    def _drop(self, rows: int) -> None:
        """Move the remaining rows to the front, a few at a time, to avoid a copy of them all."""
        keep = len(self._sums) - rows
        for row in range(0, keep, rows):
            stop = min(row + rows, keep)
            self._sums[row:stop] = self._sums[row + rows : stop + rows]
        self._sums[keep:] = 0
        self._top += rows


def most_likely(probabilities: Floats) -> Classes:
    """Return the class of the highest probability, the first one on a tie.

    Returns:
        shape (rows, columns). (`argmax` over a middle axis is several times slower.)
    """
    best = probabilities[:, 0].copy()
    classes = np.zeros(best.shape, np.uint8)
    for number in range(1, probabilities.shape[1]):
        better = probabilities[:, number] > best
        np.copyto(classes, np.uint8(number), where=better)
        np.maximum(best, probabilities[:, number], out=best)
    return classes


class CloudOptimized:
    """One output file, written from top to bottom.

    Args:
        profile: `width`, `height`, `count`, `nodata`; `dtype` if not bytes.
    """

    def __init__(self, path: Path, place: Georeference, **profile: Any) -> None:
        self._path, self._draft = path, path.with_suffix(".draft.tif")
        self.dataset = rasterio.open(
            self._draft,
            "w",
            driver="GTiff",
            tiled=True,
            blockxsize=BLOCK,
            blockysize=BLOCK,
            interleave="band",
            bigtiff="IF_SAFER",
            **(place.native or {}),
            **({"dtype": "uint8"} | profile),
        )

    def write(self, top: int, rows: npt.NDArray[Any]) -> None:
        """Write rows from `top` on: shape (bands, rows, width)."""
        window = Window(0, top, rows.shape[2], rows.shape[1])
        with write_errors():
            self.dataset.write(rows, window=window)

    def finish(self, resampling: str) -> None:
        """Write the final file with overviews made by `resampling`."""
        options = {"compress": "DEFLATE", "level": LEVEL, "blocksize": BLOCK, "bigtiff": "IF_SAFER"}
        with write_errors():
            self.dataset.close()
            copy(self._draft, self._path, driver="COG", overview_resampling=resampling, **options)
            self._draft.unlink()


class ProductWriter:
    """Takes finished rows of probabilities; keeps the counts and the files."""

    def __init__(
        self, folder: Path, request: SceneRequest, place: Georeference, size: tuple[int, int], sample: Sample
    ) -> None:
        card = request.card
        self._card, self._place, self._sample = card, place, sample
        self._width, self._height = size
        profile = {"width": self._width, "height": self._height}
        self._mask: CloudOptimized | None = None
        if request.mask or request.polygons or request.geopackage:
            self._mask = CloudOptimized(folder / MASK, place, count=1, nodata=card.mask_nodata, **profile)
            _describe_mask(self._mask.dataset, card)
        self._probabilities: CloudOptimized | None = None
        if request.probabilities:
            profile |= {"count": len(card.classes), "nodata": NO_PROBABILITY}
            self._probabilities = CloudOptimized(folder / PROBABILITIES, place, **profile)
            _describe_probabilities(self._probabilities.dataset, card)
        self._pixels = np.zeros(len(card.classes), np.int64)
        self._hectares = np.zeros(len(card.classes))
        self.thumbnail: Classes = np.full(sample.shape, card.mask_nodata, np.uint8)

    def write(self, top: int, probabilities: Floats, valid: Valid) -> None:
        """Write rows from `top` on."""
        for row in range(0, len(probabilities), AT_ONCE):
            part = slice(row, row + AT_ONCE)
            self._write(top + row, probabilities[part], valid[part])

    def _write(self, top: int, probabilities: Floats, valid: Valid) -> None:
        classes = most_likely(probabilities)
        np.copyto(classes, np.uint8(self._card.mask_nodata), where=~valid)
        if self._mask is not None:
            self._mask.write(top, classes[None])
        if self._probabilities is not None:
            steps = (probabilities * CERTAIN + 0.5).astype(np.uint8).transpose(1, 0, 2)
            self._probabilities.write(top, np.where(valid, steps, np.uint8(NO_PROBABILITY)))
        self._count(top, classes)
        place, rows = self._sample.among(top, len(classes))
        self.thumbnail[place] = classes[np.ix_(rows, self._sample.columns)]

    def finish(self, notes: Sequence[str] = ()) -> Tally:
        """Write the files, the mask with the notes; count the classes' areas and the nodata pixels."""
        if self._mask is not None:
            self._mask.dataset.update_tags(**_numbered(notes))
            self._mask.finish("MODE")
        if self._probabilities is not None:
            self._probabilities.finish("AVERAGE")
        seen = int(self._pixels.sum())
        known = self._place.pixel_area is not None
        areas = tuple(
            ClassCount(
                name=label.name,
                pixels=int(pixels),
                share=int(pixels) / seen if seen else 0.0,
                hectares=round(float(hectares), 4) if known else None,
            )
            for label, pixels, hectares in zip(self._card.classes, self._pixels, self._hectares, strict=True)
        )
        return Tally(areas=areas, nodata_pixels=self._width * self._height - seen)

    def _count(self, top: int, classes: Classes) -> None:
        area = self._place.pixel_area
        by_row = None if area is None else np.array([area.row(top + row) for row in range(len(classes))])
        for number in range(len(self._card.classes)):
            pixels = np.count_nonzero(classes == number, axis=1)
            self._pixels[number] += pixels.sum()
            if by_row is not None:
                self._hectares[number] += pixels @ by_row


class ValueWriter:
    """Takes finished rows of a regression's values; keeps their range and the file."""

    def __init__(
        self, folder: Path, request: SceneRequest, place: Georeference, size: tuple[int, int], sample: Sample
    ) -> None:
        value = request.card.value or MapValue()
        self._value, self._sample, self._pixels = value, sample, size[0] * size[1]
        self._file: CloudOptimized | None = None
        if request.value:
            profile = {"width": size[0], "height": size[1], "count": 1, "dtype": "float32", "nodata": np.nan}
            self._file = CloudOptimized(folder / VALUE, place, **profile)
            self._file.dataset.set_band_description(1, value.name)
            if value.unit is not None:
                self._file.dataset.units = (value.unit,)
        self._seen, self._sum, self._least, self._most = 0, 0.0, np.inf, -np.inf
        self.thumbnail: Floats = np.full(sample.shape, np.nan, np.float32)

    def write(self, top: int, outputs: Floats, valid: Valid) -> None:
        """Write rows from `top` on."""
        values = outputs[:, 0] * np.float32(self._value.scale) + np.float32(self._value.offset)
        known = values[valid]
        if known.size:
            self._seen += known.size
            self._sum += float(known.sum(dtype=np.float64))
            self._least, self._most = min(self._least, known.min()), max(self._most, known.max())
        values = np.where(valid, values, np.float32(np.nan))
        if self._file is not None:
            self._file.write(top, values[None])
        place, rows = self._sample.among(top, len(values))
        self.thumbnail[place] = values[np.ix_(rows, self._sample.columns)]

    def finish(self, notes: Sequence[str] = ()) -> Tally:
        """Write the file with the notes, and sum the values up."""
        if self._file is not None:
            self._file.dataset.update_tags(**_numbered(notes))
            self._file.finish("AVERAGE")
        summary = ValueSummary(
            minimum=float(self._least), mean=self._sum / self._seen, maximum=float(self._most)
        )
        return Tally(nodata_pixels=self._pixels - self._seen, values=summary)


def _numbered(notes: Sequence[str]) -> dict[str, str]:
    return {f"NOTE_{number}": text for number, text in enumerate(notes)}


@contextmanager
def write_errors() -> Iterator[None]:
    """Translate errors of writing: they are not the raster's fault."""
    try:
        yield
    except (RasterioError, CPLE_BaseError, OSError):
        raise DecoderBusy("the result could not be written: the server is short of disk or memory") from None


def _describe_mask(dataset: Any, card: Card) -> None:
    colours = {number: (*label.colour, 255) for number, label in enumerate(card.classes)}
    dataset.write_colormap(1, colours | {card.mask_nodata: (0, 0, 0, 0)})
    dataset.set_band_description(1, "class")
    dataset.update_tags(1, **{f"CLASS_{number}": label.name for number, label in enumerate(card.classes)})


def _describe_probabilities(dataset: Any, card: Card) -> None:
    dataset.scales = (1 / CERTAIN,) * len(card.classes)
    dataset.descriptions = [label.name for label in card.classes]
