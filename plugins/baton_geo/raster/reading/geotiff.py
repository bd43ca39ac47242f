"""Read a GeoTIFF from a file descriptor, with GDAL's GTiff driver only."""

from __future__ import annotations

import math
import os
import re
from datetime import datetime
from typing import Any

import numpy as np
import rasterio
from rasterio._err import CPLE_BaseError, CPLE_OutOfMemoryError
from rasterio.crs import CRS
from rasterio.enums import MaskFlags
from rasterio.errors import RasterioError
from rasterio.warp import transform as reproject
from rasterio.windows import Window

from baton_geo.errors import GeoError, RasterBroken, RasterTooLarge
from baton_geo.raster.messages import SceneRequest
from baton_geo.raster.pixels.areas import EllipsoidArea, PixelArea, PlaneArea, ellipsoid
from baton_geo.raster.pixels.calibration import ScaleOffset, Stated
from baton_geo.raster.pixels.values import Pixels, Valid
from baton_geo.raster.reading.headers import UNCOMPRESSED, check_tiff
from baton_geo.raster.reading.source import Georeference
from baton_geo.raster.reading.stated import read_stated
from baton_geo.raster.reading.tiff import TiffHeader

# Not TIFFTAG_DATETIME, which is when the file was written.
DATE_TAGS = (
    "ACQUISITION_DATE", "ACQUISITIONDATE", "ACQUISITION_DATETIME", "ACQUISITIONDATETIME", "DATE_ACQUIRED",
    "SENSING_TIME", "PRODUCT_START_TIME", "DATATAKE_SENSING_START",
)  # fmt: skip
DATE = re.compile(r"(\d{4})[:-](\d\d)[:-](\d\d)(?:[T ](\d\d):(\d\d):(\d\d))?")
BROKEN = (RasterioError, CPLE_BaseError, ValueError, OSError)  # rasterio's errors for damaged files


def _iso(*parts: str | None) -> str | None:
    """Join year to second as ISO 8601; None if there is no such day or hour, as in `0000:00:00`."""
    numbers = [part for part in parts if part is not None]
    text = "-".join(numbers[:3]) + ("T" + ":".join(numbers[3:]) if numbers[3:] else "")
    try:
        datetime.fromisoformat(text)
        return text
    except ValueError:
        return None


class GeoTiff:
    """A GeoTIFF as a `Source`.

    Args:
        fd: the file, kept open by the caller.
        request: outputs, limits and card of the request.

    Raises:
        RasterBroken: the file is damaged or truncated.
        RasterTooLarge: the raster is beyond the limits.
        RasterUnusable: the type or storage of the pixels is not supported.
    """

    def __init__(self, fd: int, request: SceneRequest) -> None:
        size = os.fstat(fd).st_size
        header = TiffHeader(fd, size)
        self.dtype: np.dtype[Any] = np.dtype(check_tiff(header, size, request))
        try:
            self._dataset = rasterio.open(f"/proc/self/fd/{fd}", driver="GTiff", sharing=False)
        except BROKEN as error:
            raise _refusal(error, "the TIFF structure is damaged: it could not be opened") from None
        self._check_agreement(header)
        self.width, self.height = header.width, header.height
        self.notes: list[str] = []
        if header.images > 1:
            self.notes.append(f"the file holds {header.images} images; the first is used")
        try:
            self._read_tags(header)
        except GeoError:
            raise
        except BROKEN as error:
            raise _refusal(error, "the tags that say what it shows and where it lies are damaged") from None

    def _read_tags(self, header: TiffHeader) -> None:
        self._alpha = self._find_alpha()
        shown = [band for band in self._dataset.indexes if band != self._alpha]
        self._bands = tuple(shown)
        self.names = tuple(self._dataset.descriptions[band - 1] or None for band in shown)
        self.nodata: float | None = self._dataset.nodata
        self.block_height, self.first_look = self._block(header)
        self.place = self._georeference()
        self.acquired = self._date()
        self.stated = self._stated()

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """See `Source`."""
        window = Window(left, top, out.shape[2], out.shape[1])
        try:
            self._dataset.read([self._bands[band] for band in bands], window=window, out=out)
        except BROKEN as error:
            raise _refusal(error, _undecodable(top, out.shape[1])) from None

    def hidden(self, top: int, left: int, rows: int, columns: int) -> Valid | None:
        """See `Source`."""
        window = Window(left, top, columns, rows)
        try:
            if self._alpha is not None:
                alpha: Valid = self._dataset.read(self._alpha, window=window) == 0
                return alpha
            flags = self._dataset.mask_flag_enums[0]
            if MaskFlags.per_dataset in flags:
                mask: Valid = self._dataset.read_masks(1, window=window) == 0
                return mask
        except BROKEN as error:
            raise _refusal(error, _undecodable(top, rows)) from None
        return None

    def close(self) -> None:
        """Close the file."""
        self._dataset.close()

    def _block(self, header: TiffHeader) -> tuple[int, int]:
        """Return `block_height` and `first_look` of `Source`.

        GDAL reports one compressed strip of the whole image as many strips of one row, and decodes it again
        from its top for each change of band.
        """
        rows, columns = self._dataset.block_shapes[0]
        if header.compression != UNCOMPRESSED:
            columns, rows = header.block
        return int(rows), int(rows) * int(columns) * self.dtype.itemsize * header.samples

    def _check_agreement(self, header: TiffHeader) -> None:
        """Refuse a file that GDAL reads differently from the header that was checked."""
        data = self._dataset
        agreed = (header.width, header.height, header.samples) == (data.width, data.height, data.count)
        if not agreed or set(data.dtypes) != {str(self.dtype)}:
            raise RasterBroken("the TIFF header contradicts itself, or its colours are stored in a rare way")

    def _find_alpha(self) -> int | None:
        """Find the alpha band's number from 1; None if there is none, or no other band."""
        found = [n for n, kind in enumerate(self._dataset.colorinterp, 1) if kind.name == "alpha"]
        return found[0] if found and self._dataset.count > 1 else None

    def _stated(self) -> Stated:
        data = self._dataset
        lines = [ScaleOffset(data.scales[band - 1], data.offsets[band - 1]) for band in self._bands]
        band_tags = [data.tags(band) for band in self._bands]
        return read_stated(lines, data.tags(), band_tags, integers=self.dtype.kind in "iu")

    def _date(self) -> str | None:
        tags = {str(key).upper(): str(value) for key, value in self._dataset.tags().items()}
        for name in DATE_TAGS:
            found = DATE.search(tags.get(name, ""))
            if found and (text := _iso(*found.groups())) is not None:
                return text
        return None

    def _georeference(self) -> Georeference:
        crs: CRS | None = self._dataset.crs or None
        affine = self._dataset.transform
        points, points_crs = self._dataset.gcps
        if not all(math.isfinite(number) for number in affine[:6]) or not affine.determinant:
            raise RasterBroken(
                "the geotransform holds numbers that are infinite or NaN, or pixels without size"
            )
        native: dict[str, Any] = {"crs": crs, "transform": affine}
        if affine.is_identity:
            native = {"crs": crs}
            points_crs = points_crs or crs
            if points and points_crs is not None:
                native = {"gcps": points, "crs": points_crs}
                self.notes.append(
                    "the file has ground control points only; they are copied, the grid is kept as it is"
                )
            else:
                self.notes.append("the file has no geotransform; the mask has none either")
        if crs is None and points_crs is None:
            self.notes.append("the file has no CRS; the mask has none either, and areas are in pixels only")
        transform = (
            None if affine.is_identity else (affine.a, affine.b, affine.c, affine.d, affine.e, affine.f)
        )
        if crs is None or transform is None:
            return Georeference(_crs_text(crs), transform, native=native)
        latitude, longitude = self._centre(crs, transform)
        area = self._pixel_area(crs, transform)
        return Georeference(_crs_text(crs), transform, latitude, longitude, area, native)

    def _centre(self, crs: CRS, transform: tuple[float, ...]) -> tuple[float | None, float | None]:
        a, b, c, d, e, f = transform
        x, y = (a * self.width + b * self.height) / 2 + c, (d * self.width + e * self.height) / 2 + f
        try:
            longitudes, latitudes = reproject(crs, CRS.from_epsg(4326), [x], [y])
        except BROKEN:
            return None, None
        longitude, latitude = longitudes[0], latitudes[0]
        if not (abs(latitude) <= 90 and math.isfinite(longitude)):
            self.notes.append("the centre of the scene is nowhere on Earth by its CRS and geotransform")
            return None, None
        return latitude, (longitude + 180) % 360 - 180

    def _pixel_area(self, crs: CRS, transform: tuple[float, ...]) -> PixelArea | None:
        if crs.is_geographic:
            return self._ellipsoid_area(crs, transform)
        if not crs.is_projected:
            self.notes.append("the CRS is local, its unit on the ground unknown; areas are in pixels only")
            return None
        if crs.to_epsg() == 3857:
            self.notes.append(
                "areas in Web Mercator (EPSG:3857) are larger than on the ground away from the equator"
            )
        if transform[1] or transform[3]:
            self.notes.append("the grid is rotated; it is kept as it is")
        try:
            return PlaneArea(transform, crs.linear_units_factor[1])
        except BROKEN:
            return None

    def _ellipsoid_area(self, crs: CRS, transform: tuple[float, ...]) -> PixelArea | None:
        axes = ellipsoid(crs.to_wkt())
        if transform[1] or transform[3] or axes is None:
            self.notes.append("the grid is rotated against the parallels; areas are in pixels only")
            return None
        return EllipsoidArea(transform, crs.units_factor[1], *axes)


def _crs_text(crs: CRS | None) -> str | None:
    return None if crs is None else str(crs.to_string())


def _undecodable(top: int, rows: int) -> str:
    return f"rows {top + 1} to {top + rows} could not be decoded: damaged or truncated data"


def _refusal(error: BaseException, message: str) -> GeoError:
    """Make a refusal with our message: GDAL's messages contain paths of the server."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CPLE_OutOfMemoryError):
            return RasterTooLarge("the raster could not be decoded within the memory allowed")
        cause = cause.__cause__
    return RasterBroken(message)
