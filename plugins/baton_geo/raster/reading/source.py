"""Define the interface of an opened raster, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from baton_geo.raster.pixels.areas import PixelArea
from baton_geo.raster.pixels.bands import FileBands
from baton_geo.raster.pixels.calibration import Stated
from baton_geo.raster.pixels.values import Pixels, Valid


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
    """

    crs: str | None = None
    transform: tuple[float, float, float, float, float, float] | None = None
    latitude: float | None = None
    longitude: float | None = None
    pixel_area: PixelArea | None = None
    native: dict[str, Any] | None = None


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
        place: georeference.
        acquired: date or date and time, ISO 8601; None: unknown.
        notes: assumptions and missing information.
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

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """Fill `out`, shape (bands, rows, columns), with pixels from row `top` and column `left` on.

        Raises:
            RasterBroken: the rows cannot be decoded.
        """

    def hidden(self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]) -> Valid | None:
        """Return the pixels that the file's mask or alpha band hides, (rows, columns); None: it has neither.

        An alpha band that is among the bands in use hides nothing.

        Raises:
            RasterBroken: the rows cannot be decoded.
        """

    def close(self) -> None: ...
