"""Define an opened raster, and decode its rows once each, from top to bottom, with few in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton_geo.raster.pixels.areas import PixelArea
from baton_geo.raster.pixels.bands import FileBands
from baton_geo.raster.pixels.calibration import Stated
from baton_geo.raster.pixels.values import PixelCheck, Pixels, Valid
from baton_geo.raster.reading.headers import Ranges, RasterFile

AT_ONCE = 64  # rows whose nodata and range are checked together


@dataclass(frozen=True)
class Georeference:
    """The georeference of a raster; None where it is not known.

    Attributes:
        crs: `EPSG:...` or WKT.
        transform: a, b, c, d, e, f.
        latitude: of the centre, degrees north on WGS 84.
        longitude: of the centre, degrees east on WGS 84.
        pixel_area: area of pixels on the ground.
        native: keywords of `rasterio.open` that give the mask the same georeference.
        notes: assumptions and missing information.
    """

    crs: str | None = None
    transform: tuple[float, float, float, float, float, float] | None = None
    latitude: float | None = None
    longitude: float | None = None
    pixel_area: PixelArea | None = None
    native: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Window:
    """A part of a raster, pixels of its grid."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class BandNumbers:
    """The type and nodata of one band's numbers, of a scene whose files may differ in them."""

    dtype: np.dtype[Any]
    nodata: float | None


class Source(Protocol):
    """An opened raster.

    Attributes:
        width: pixels.
        height: pixels.
        dtype: of the pixels.
        bands: what the file says of its bands.
        nodata: value stated by the file; None: it states none.
        stated: scales and offsets stated by the file.
        block_height: rows that are decoded together.
        first_look: bytes to decode for a single pixel.
        acquired: date or date and time, ISO 8601; None: unknown.
        notes: assumptions and missing information, without those of `place`.
        numbers: of each band, where the bands are of several files; None: all have `dtype` and `nodata`.
    """

    width: int
    height: int
    dtype: np.dtype[Any]
    bands: FileBands
    nodata: float | None
    stated: Stated
    block_height: int
    first_look: int
    place: Georeference
    acquired: str | None
    notes: list[str]
    numbers: tuple[BandNumbers, ...] | None

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """Fill `out`, shape (bands, rows, columns), with pixels from row `top` and column `left` on.

        Raises:
            RasterBroken: the rows cannot be decoded.
        """

    def wanted(
        self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]
    ) -> list[tuple[RasterFile, Ranges]]:
        """List the ranges of files that `read` needs and that may have to be fetched."""

    def hidden(self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]) -> Valid | None:
        """Return the pixels that the file's mask or alpha band hides, (rows, columns); None: it has neither.

        An alpha band that is among the bands in use hides nothing.

        Raises:
            RasterBroken: the rows cannot be decoded.
        """

    def placed(self, window: Window) -> Georeference:
        """Return the georeference of a part."""

    def close(self) -> None: ...


class Sample:
    """The pixels of a scene that make its thumbnail.

    Attributes:
        shape: height and width of the thumbnail.
        columns: the scene's column for each column of the thumbnail.
    """

    def __init__(self, width: int, height: int, longest: int) -> None:
        share = min(1.0, longest / max(width, height))
        self.shape = max(1, round(height * share)), max(1, round(width * share))
        self._rows = np.arange(self.shape[0]) * height // self.shape[0]
        self.columns = np.arange(self.shape[1]) * width // self.shape[1]

    def among(self, top: int, rows: int) -> tuple[slice, npt.NDArray[np.int64]]:
        """Return the thumbnail's rows among the scene's rows from `top` on, and their indices there."""
        first, last = np.searchsorted(self._rows, (top, top + rows))
        return slice(int(first), int(last)), self._rows[first:last] - top


class Thumbnail:
    """A small version of some bands of a scene, filled while its rows are read.

    Attributes:
        pixels: the file's numbers, shape (height, bands, width).
        valid: shape (height, width).
    """

    def __init__(self, sample: Sample, places: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._sample, self._places = sample, np.array(places, np.intp)
        height, width = sample.shape
        self.pixels: Pixels = np.zeros((height, len(places), width), dtype)
        self.valid: Valid = np.zeros((height, width), np.bool_)

    def take(self, top: int, raw: Pixels, valid: Valid) -> None:
        """Take pixels from rows of the scene from `top` on."""
        place, rows = self._sample.among(top, len(raw))
        self.valid[place] = valid[np.ix_(rows, self._sample.columns)]
        self.pixels[place] = raw[np.ix_(rows, self._places, self._sample.columns)]


class Rows:
    """A window of rows that moves down a scene.

    Args:
        bands: indices from 0, in the model's order.
    """

    def __init__(
        self,
        source: Source,
        bands: tuple[int, ...],
        check: PixelCheck,
        thumbnail: Thumbnail,
    ) -> None:
        self._source, self._bands = source, bands
        self._check, self._thumbnail = check, thumbnail
        self._top = self._end = 0  # the rows in _raw
        self._raw: Pixels = np.empty((0, len(bands), source.width), source.dtype)
        self._valid_top = 0
        self._valid: Valid = np.empty((0, source.width), np.bool_)

    def tile(self, y: int, x: int, side: int, keep: int) -> tuple[Pixels, Valid]:
        """Return a tile's pixels (rows, bands, columns) and valid pixels (rows, columns), cut at the edge.

        Args:
            keep: first row that this or a later call needs; rows above it are dropped.

        Raises:
            RasterBroken: rows cannot be decoded.
            RasterUnusable: too many values are out of range.
        """
        stop = min(y + side, self._source.height)
        self._advance(keep, stop)
        raw = self._raw[y - self._top : stop - self._top, :, x : x + side]
        return raw, self._valid[y - self._valid_top : stop - self._valid_top, x : x + side]

    def valid(self, top: int, rows: int) -> Valid:
        """Return the valid pixels (rows, width) from `top` on; rows above it are dropped."""
        self._valid = self._valid[top - self._valid_top :]
        self._valid_top = top
        return self._valid[:rows]

    def _advance(self, top: int, stop: int) -> None:
        """Decode rows up to `stop`, whole blocks at a time, and drop rows above `top`."""
        if stop <= self._end:
            return
        height, block = self._source.height, self._source.block_height
        end = min(-(-stop // block) * block, height)
        self._shift(top, end)
        fresh = self._raw[self._end - self._top : end - self._top]
        self._source.read(self._end, 0, self._bands, fresh.transpose(1, 0, 2))
        valid = np.empty((len(fresh), self._source.width), np.bool_)
        hidden = self._source.hidden(self._end, 0, len(fresh), self._source.width, self._bands)
        for row in range(0, len(fresh), AT_ONCE):
            part = slice(row, row + AT_ONCE)
            valid[part] = self._check.find(fresh[part])
            if hidden is not None:
                valid[part] &= ~hidden[part]
            self._check.count(fresh[part], valid[part])
        self._thumbnail.take(self._end, fresh, valid)
        self._valid = np.concatenate([self._valid, valid])
        self._end = end
        self._judge()

    def _judge(self) -> None:
        pixels = self._source.width * self._source.height
        self._check.judge(self._check.valid if self._end == self._source.height else pixels)

    def _shift(self, top: int, end: int) -> None:
        """Make room for rows `top` to `end`, with the decoded ones at the front."""
        kept = self._raw[top - self._top : self._end - self._top]
        if end - top > len(self._raw):
            grown = np.empty((end - top, *self._raw.shape[1:]), self._raw.dtype)
            grown[: len(kept)] = kept
            self._raw = grown
        else:
            for row in range(0, len(kept), AT_ONCE):  # overlapping: a few rows at a time avoid a copy of all
                self._raw[row : min(row + AT_ONCE, len(kept))] = kept[row : row + AT_ONCE].copy()
        self._top = top
