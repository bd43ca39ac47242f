"""Make one scene of several files on one ground, and of a part of a scene a scene of its own.

Of several files the finest pixels among the bands that the card marks are the scene's grid. The others are
brought onto it as GDAL's warper does it: by the pixel that a centre lies in, or bilinearly, over twice the
width of a pixel of the scene where theirs are finer. A pixel is unknown where the one that its centre lies in
is; unknown ones have no weight in others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rasterio.crs import CRS
from rasterio.warp import transform as reproject

from baton_geo.card import Card
from baton_geo.errors import RasterUnusable
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.pixels.bands import UNCLEAR, FileBands
from baton_geo.raster.pixels.calibration import Stated
from baton_geo.raster.pixels.values import Pixels, Valid
from baton_geo.raster.reading.geotiff import BROKEN
from baton_geo.raster.reading.headers import Ranges, RasterFile, want
from baton_geo.raster.reading.rows import BandNumbers, Georeference, Source, Window

OFF_LIMIT = 0.01  # pixels of the scene that files may lie apart
AT_ONCE = 128  # rows that are resampled together
EDGE_POINTS = 33  # of each side of a box, which are projected
EDGE_SLACK = 1e-6  # pixels that a box may reach into one that it does not want
AROUND = 360.0


class PartOfScene:
    """A part of a source as a `Source`."""

    def __init__(self, source: Source, window: Window) -> None:
        self._source, self._window = source, window
        self.window = window.left, window.top, window.width, window.height
        self.width, self.height = window.width, window.height
        self.dtype, self.nodata, self.numbers = source.dtype, source.nodata, source.numbers
        self.bands, self.stated, self.acquired = source.bands, source.stated, source.acquired
        self.block_height, self.first_look = source.block_height, source.first_look
        self.notes = source.notes
        self.place = source.placed(window)

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """See `Source`."""
        self._source.read(top + self._window.top, left + self._window.left, bands, out)

    def wanted(
        self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]
    ) -> list[tuple[RasterFile, Ranges]]:
        """See `Source`."""
        return self._source.wanted(top + self._window.top, left + self._window.left, rows, columns, bands)

    def hidden(self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]) -> Valid | None:
        """See `Source`."""
        window = self._window
        return self._source.hidden(top + window.top, left + window.left, rows, columns, bands)

    def placed(self, window: Window) -> Georeference:
        """See `Source`."""
        mine = self._window
        moved = Window(window.left + mine.left, window.top + mine.top, window.width, window.height)
        return self._source.placed(moved)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def wanted_window(source: Source, request: SceneRequest) -> Window:
    """Find the part of a scene that a request wants.

    Raises:
        RasterUnusable: it lies outside of the scene, or the scene is nowhere on Earth.
    """
    if request.window is not None:
        left, top, width, height = request.window
        if left + width > source.width or top + height > source.height:
            raise RasterUnusable(
                f"window: columns {left} to {left + width} and rows {top} to {top + height}; the scene has "
                f"{source.width} columns and {source.height} rows",
                param="window",
            )
        return Window(left, top, width, height)
    if source.place.crs is None or source.place.transform is None:
        raise RasterUnusable("bbox: the file does not say where it lies; give window", param="bbox")
    columns, rows = _box_on_grid(request, source.place, source.width)
    left, right = _clipped_span(columns, source.width)
    top, bottom = _clipped_span(rows, source.height)
    if right <= left or bottom <= top:
        raise RasterUnusable("bbox: the box and the scene have no pixel in common", param="bbox")
    return Window(left, top, right - left, bottom - top)


def _clipped_span(numbers: npt.NDArray[np.float64], length: int) -> tuple[int, int]:
    first, last = float(numbers.min()) + EDGE_SLACK, float(numbers.max()) - EDGE_SLACK
    return max(0, math.floor(first)), min(length, math.ceil(last))


def _box_on_grid(
    request: SceneRequest, place: Georeference, width: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return columns and rows of points along the sides of a request's box."""
    assert request.bbox is not None
    assert place.crs is not None
    assert place.transform is not None
    x1, y1, x2, y2 = request.bbox
    try:
        asked, own = CRS.from_string(request.bbox_crs), CRS.from_string(place.crs)
    except BROKEN:
        raise RasterUnusable(
            f"bbox_crs: {request.bbox_crs} is not known here; EPSG:4326 is", param="bbox_crs"
        ) from None
    if x1 > x2 and not asked.is_geographic:
        raise RasterUnusable("bbox: its first x is greater than its second", param="bbox")
    x2 += AROUND if x1 > x2 else 0.0
    steps = np.linspace(0.0, 1.0, EDGE_POINTS)
    xs = np.concatenate([x1 + (x2 - x1) * steps] * 2 + [np.full(EDGE_POINTS, x) for x in (x1, x2)])
    ys = np.concatenate([np.full(EDGE_POINTS, y) for y in (y1, y2)] + [y1 + (y2 - y1) * steps] * 2)
    if asked.is_geographic and not own.is_geographic:
        xs = (xs + AROUND / 2) % AROUND - AROUND / 2
    if asked != own:
        try:
            points = reproject(asked, own, xs.tolist(), ys.tolist())
        except BROKEN:
            points = [[math.inf], [math.inf]]
        finite = np.isfinite(points[0]) & np.isfinite(points[1])
        if not finite.any():
            raise RasterUnusable("bbox: nothing of the box is on the map of the scene", param="bbox")
        xs, ys = (np.array(numbers)[finite] for numbers in points[:2])
    grid = np.linalg.inv(_matrix(place.transform))
    turns: tuple[float, ...] = (0.0,)
    if own.is_geographic:
        xs = np.unwrap(xs, period=AROUND) if asked != own else xs
        turns = (0.0, AROUND, -AROUND)
    there = [grid @ np.stack([xs + turn, ys, np.ones_like(xs)]) for turn in turns]
    columns, rows, _ = min(there, key=lambda found: abs(float(found[0].mean()) - width / 2))
    return columns, rows


def _matrix(transform: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.array([transform[:3], transform[3:6], (0.0, 0.0, 1.0)])


@dataclass(frozen=True)
class _Layer:
    """A file of a scene.

    Attributes:
        ratio: width of its pixels in those of the scene; below 1 of finer ones.
        first: number of its first band among those of all files.
        nodata: the card's number for nodata, of a file that states none.
    """

    source: Source
    ratio: float
    first: int
    nodata: float | None


class Stack:
    """Several files of one ground as a `Source`.

    Args:
        bands: the bands in use, by their numbers among those of all files.

    Raises:
        RasterUnusable: they are not of one CRS and extent, or their pixels' sizes are no multiples.
    """

    def __init__(
        self, sources: Sequence[Source], names: Sequence[str], bands: tuple[int, ...], card: Card
    ) -> None:
        counts = [len(source.bands.bands) for source in sources]
        of_band = [number for number, count in enumerate(counts) for _ in range(count)]
        firsts = np.cumsum([0, *counts]).tolist()
        used = list(dict.fromkeys(of_band[band] for band in bands))
        marked = [
            of_band[band] for place, band in enumerate(bands) if card.bands[place % len(card.bands)].grid
        ]
        on = max(marked or used, key=lambda number: sources[number].width * sources[number].height)
        ground = sources[on]
        self._layers = {
            number: _Layer(
                sources[number],
                _ratio(ground, sources[number], names[on], names[number]),
                firsts[number],
                card.nodata,
            )
            for number in used
        }
        self._of_band, self._sources, self._ground = of_band, sources, ground
        self._nearest = {
            band
            for place, band in enumerate(bands)
            if card.bands[place % len(card.bands)].resampling == "nearest"
        }
        layers = list(self._layers.values())
        self.width, self.height = ground.width, ground.height
        self.dtype: np.dtype[Any] = np.result_type(*(layer.source.dtype for layer in layers))
        self.bands = bands_of(sources)
        self.nodata = ground.nodata
        self.numbers: tuple[BandNumbers, ...] | None = tuple(
            BandNumbers(sources[number].dtype, sources[number].nodata) for number in of_band
        )
        self.stated = _stated(sources, self._layers)
        self.block_height = max(math.ceil(layer.source.block_height * layer.ratio) for layer in layers)
        self.first_look = sum(layer.source.first_look for layer in layers)
        self.place = ground.place
        self.acquired = next((s.acquired for s in (ground, *sources) if s.acquired), None)
        self.notes = list(dict.fromkeys(text for layer in layers for text in layer.source.notes))

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """See `Source`."""
        want(self.wanted(top, left, out.shape[1], out.shape[2], bands))
        for number, layer in self._layers.items():
            places = [place for place, band in enumerate(bands) if self._of_band[band] == number]
            if not places:
                continue
            own = tuple(bands[place] - layer.first for place in places)
            for row in range(0, out.shape[1], AT_ONCE):
                rows = min(AT_ONCE, out.shape[1] - row)
                nearest = [bands[place] in self._nearest for place in places]
                part = _on_grid(layer, top + row, left, rows, out.shape[2], own, nearest)
                out[places, row : row + rows] = part

    def wanted(
        self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]
    ) -> list[tuple[RasterFile, Ranges]]:
        """See `Source`."""
        found: list[tuple[RasterFile, Ranges]] = []
        for number, layer in self._layers.items():
            own = tuple(band - layer.first for band in bands if self._of_band[band] == number)
            y, down = _reach(top, rows, layer.ratio, layer.source.height)
            x, across = _reach(left, columns, layer.ratio, layer.source.width)
            found += layer.source.wanted(y, x, down, across, own)
        return found

    def hidden(self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]) -> Valid | None:
        """See `Source`."""
        found: Valid | None = None
        for number, layer in self._layers.items():
            own = tuple(band - layer.first for band in bands if self._of_band[band] == number)
            ys, xs = (
                _nearest(begin, length, layer.ratio, most)
                for begin, length, most in (
                    (top, rows, layer.source.height),
                    (left, columns, layer.source.width),
                )
            )
            first_y, first_x = int(ys[0]), int(xs[0])
            part = layer.source.hidden(
                first_y, first_x, int(ys[-1]) - first_y + 1, int(xs[-1]) - first_x + 1, own
            )
            if part is not None:
                here = part[np.ix_(ys - first_y, xs - first_x)]
                found = here if found is None else found | here
        return found

    def placed(self, window: Window) -> Georeference:
        """See `Source`."""
        return self._ground.placed(window)

    def close(self) -> None:
        """Close the files."""
        for source in self._sources:
            source.close()


def bands_of(sources: Iterable[Source]) -> FileBands:
    """Describe the bands of several files, one file after the other."""
    found = [source.bands for source in sources]
    products = {bands.product for bands in found} - {None}
    product = products.pop() if len(products) == 1 else UNCLEAR if products else None
    every = tuple(band for bands in found for band in bands.bands)
    return FileBands(every, product, sum(bands.pages for bands in found))


def _stated(sources: Sequence[Source], used: Iterable[int]) -> Stated:
    found = [source.stated for source in sources]
    in_use = [found[number] for number in used]
    conflicts = (stated.conflicts or ("",) * len(stated.bands) for stated in found)
    return Stated(
        tuple(line for stated in found for line in stated.bands),
        next((stated.product for stated in in_use if stated.product is not None), None),
        tuple(text for texts in conflicts for text in texts),
        tuple(dict.fromkeys(text for stated in in_use for text in stated.notes)),
    )


def _ratio(ground: Source, other: Source, on: str, name: str) -> float:
    """Return the width of another file's pixels in those of the ground, a whole number or 1 / one.

    Raises:
        RasterUnusable: the files are not of one CRS and extent, or the ratio is another.
    """
    if ground.place.crs != other.place.crs:
        mine, theirs = (source.place.crs or "no CRS" for source in (ground, other))
        raise RasterUnusable(
            f"assets: '{on}' is in {mine}, '{name}' in {theirs}; all have to be in one", param="assets"
        )
    of_ground, of_other = (
        _matrix(
            source.place.transform or (ground.width / source.width, 0, 0, 0, ground.height / source.height, 0)
        )
        for source in (ground, other)
    )
    (a, b, c), (d, e, f), _ = np.linalg.inv(of_ground) @ of_other
    apart = max(
        abs(c), abs(f), abs(b) * other.height, abs(d) * other.width,
        abs(a * other.width - ground.width), abs(e * other.height - ground.height),
    )  # fmt: skip
    if apart > OFF_LIMIT:
        raise RasterUnusable(
            f"assets: '{on}' and '{name}' do not cover the same ground: their corners are {apart:g} pixels "
            f"apart; cut them to one extent",
            param="assets",
        )
    across, down = ground.width / other.width, ground.height / other.height
    ratio = float(round(across)) if across >= 1 else 1 / round(1 / across)
    if across != down or abs(ratio - across) > 1e-9:
        raise RasterUnusable(
            f"assets: a pixel of '{name}' is {across:g} x {down:g} pixels of '{on}'; it has to be a whole "
            "number of them, or a whole part of one",
            param="assets",
        )
    return ratio


def _nearest(begin: int, length: int, ratio: float, most: int) -> npt.NDArray[np.int64]:
    """Return the pixels that the centres of some pixels of the scene lie in, along one axis."""
    centres = (np.arange(begin, begin + length) + 0.5) / ratio
    pixels: npt.NDArray[np.int64] = np.floor(centres + 1e-9).astype(np.int64)
    return pixels.clip(max=most - 1)


def _weights(
    begin: int, length: int, ratio: float, most: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return pixels and their weights, both (length, count), for some pixels of the scene along one axis."""
    centres = (np.arange(begin, begin + length) + 0.5) / ratio - 0.5
    reach = max(1.0, 1 / ratio)  # of a triangle around the centre
    first = np.floor(centres - reach + 1e-9).astype(np.int64) + 1
    pixels = first[:, None] + np.arange(math.ceil(2 * reach))
    weights = np.maximum(0.0, 1 - np.abs(pixels - centres[:, None]) / reach)
    weights[(pixels < 0) | (pixels >= most)] = 0.0
    return np.clip(pixels, 0, most - 1), weights


def _reach(begin: int, length: int, ratio: float, most: int) -> tuple[int, int]:
    """Return the first pixel and the number of pixels that some pixels of the scene are made of."""
    if ratio == 1:
        return begin, length
    pixels, _ = _weights(begin, length, ratio, most)
    return int(pixels.min()), int(pixels.max()) - int(pixels.min()) + 1


def _on_grid(
    layer: _Layer, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...], nearest: list[bool]
) -> Pixels:
    """Read some bands of a file on the scene's grid: (bands, rows, columns), in the file's type."""
    source = layer.source
    if layer.ratio == 1:
        out = np.empty((len(bands), rows, columns), source.dtype)
        source.read(top, left, bands, out)
        return out
    down, of_rows = _weights(top, rows, layer.ratio, source.height)
    across, of_columns = _weights(left, columns, layer.ratio, source.width)
    y, x = int(down.min()), int(across.min())
    raw = np.empty((len(bands), int(down.max()) - y + 1, int(across.max()) - x + 1), source.dtype)
    source.read(y, x, bands, raw)
    hidden = source.hidden(y, x, raw.shape[1], raw.shape[2], bands)
    near = np.ix_(
        _nearest(top, rows, layer.ratio, source.height) - y,
        _nearest(left, columns, layer.ratio, source.width) - x,
    )
    out = np.stack([band[near] for band in raw])
    for place, band in enumerate(raw):
        if nearest[place]:
            continue
        known = _known(band, layer.nodata if source.nodata is None else source.nodata)
        known = known if hidden is None else known & ~hidden
        values = _blend(np.where(known, band, 0), down - y, of_rows, across - x, of_columns)
        total = _blend(known, down - y, of_rows, across - x, of_columns)
        sure = known[near] & (total > 1e-6)
        blended = values[sure] / total[sure]
        out[place][sure] = blended if out.dtype.kind == "f" else np.floor(blended + 0.5)
    return out


def _known(band: Pixels, nodata: float | None) -> Valid:
    known: Valid = np.isfinite(band) if band.dtype.kind == "f" else np.ones(band.shape, np.bool_)
    return known if nodata is None or math.isnan(nodata) else known & (band != nodata)


def _blend(
    band: Pixels,
    down: npt.NDArray[np.int64],
    of_rows: npt.NDArray[np.float64],
    across: npt.NDArray[np.int64],
    of_columns: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    lines = np.zeros((len(down), band.shape[1]))
    for tap in range(down.shape[1]):
        lines += of_rows[:, tap, None] * band[down[:, tap]]
    blended = np.zeros((len(down), len(across)))
    for tap in range(across.shape[1]):
        blended += of_columns[:, tap] * lines[:, across[:, tap]]
    return blended
