"""What an opened raster is to the rest, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from baton_geo.raster.areas import PixelArea
from baton_geo.raster.calibration import Stated
from baton_geo.raster.values import Pixels, Valid


@dataclass(frozen=True)
class Georeference:
    """Where a raster lies.

    Attributes:
        crs: `EPSG:...` or WKT; None: none is known.
        transform: a, b, c, d, e, f; None: none is known.
        latitude: of the centre, degrees on WGS 84, if known.
        longitude: as latitude.
        pixel_area: if the scale is known.
        native: the library's own objects, for the mask to be written with: keywords of `rasterio.open`.
    """

    crs: str | None = None
    transform: tuple[float, float, float, float, float, float] | None = None
    latitude: float | None = None
    longitude: float | None = None
    pixel_area: PixelArea | None = None
    native: dict[str, Any] | None = None


class Source(Protocol):
    """A raster that gives rows.

    Attributes:
        width: pixels.
        height: pixels.
        dtype: of the pixels.
        names: of the bands that are pictures, not masks.
        nodata: the file's, None if it says none.
        stated: what the file says of scales and offsets.
        block_height: rows that are decoded together.
        first_look: bytes to decode before a single pixel is seen.
        place: where it lies.
        acquired: ISO 8601, if known.
        notes: what the client should know.
    """

    width: int
    height: int
    dtype: np.dtype[Any]
    names: tuple[str | None, ...]
    nodata: float | None
    stated: Stated
    block_height: int
    first_look: int
    place: Georeference
    acquired: str | None
    notes: list[str]

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """Fill `out`, of shape (bands, rows, columns), from the row `top` and column `left` on.

        Raises:
            RasterBroken: these rows cannot be decoded.
        """

    def hidden(self, top: int, left: int, rows: int, columns: int) -> Valid | None:
        """Where the file's own mask or alpha band says "nothing": shape (rows, columns); None: it has none.

        Raises:
            RasterBroken: these rows cannot be decoded.
        """

    def close(self) -> None: ...
