"""Read a raster with one of GDAL's drivers only: pixels, place, and the tags about its numbers and bands.

`GdalRaster` is what formats share; `GeoTiff` is here, JPEG 2000 in `jpeg2000.py`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import rasterio
from rasterio import Affine, windows
from rasterio._err import CPLE_BaseError, CPLE_OutOfMemoryError
from rasterio.control import GroundControlPoint
from rasterio.crs import CRS
from rasterio.enums import MaskFlags
from rasterio.errors import RasterioError
from rasterio.warp import transform as reproject

from baton_geo.errors import GeoError, RasterBroken, RasterTooLarge
from baton_geo.raster.messages import FileSpec, SceneRequest, note
from baton_geo.raster.pixels.areas import EllipsoidArea, PixelArea, PlaneArea, ellipsoid, ground_area
from baton_geo.raster.pixels.bands import UNCLEAR, FileBand, FileBands, wavelength
from baton_geo.raster.pixels.calibration import ProductUnit, ScaleOffset, Stated
from baton_geo.raster.pixels.values import Pixels, Valid
from baton_geo.raster.reading.headers import (
    UNCOMPRESSED,
    PlainTexts,
    Ranges,
    RasterFile,
    TiffHeader,
    check_tiff,
    want,
)
from baton_geo.raster.reading.rows import BandNumbers, Georeference, Window

# Not TIFFTAG_DATETIME, which is when the file was written.
DATE_TAGS = (
    "ACQUISITION_DATE", "ACQUISITIONDATE", "ACQUISITION_DATETIME", "ACQUISITIONDATETIME", "DATE_ACQUIRED",
    "SENSING_TIME", "PRODUCT_START_TIME", "DATATAKE_SENSING_START",
)  # fmt: skip
DATE = re.compile(r"(\d{4})[:-](\d\d)[:-](\d\d)(?:[T ](\d\d):(\d\d):(\d\d))?")
COLOURS = (
    "red",
    "green",
    "blue",
    "coastal",
    "rededge",
    "nir",
    "swir",
    "pan",
    "lwir",
)  # that say what a band is
AREA_TOLERANCE = 0.01  # the plane of a projection may be this share off the ground without a word
LEAST_FACTOR = 1e-4  # of ground to plane: nearer to the pole of a Mercator grid there are no scenes
BROKEN = (RasterioError, CPLE_BaseError, ValueError, OSError)  # rasterio's errors for damaged files
OFF_EARTH = note("off_earth", "the centre of the scene is nowhere on Earth by its CRS and geotransform")
Tags = Mapping[str, str]
VALUE_CHARACTERS = 4096  # characters of a tag's value
# Since baseline 04.00 (January 2022) Sentinel-2's numbers are reflectance x 10000 + 1000; ESA calls the
# offset RADIO_ADD_OFFSET (level 1C) and BOA_ADD_OFFSET (level 2A) in a product's own metadata.
SHIFTED_SINCE = 4.0
SENTINEL = re.compile(r"S2[A-D]_MSIL(1C|2A)_\d{8}T\d{6}_N(\d\d)(\d\d)_", re.ASCII)
DATATAKE = re.compile(r"GS2[A-D]_\d{8}T\d{6}_\d{6}_N(\d\d\.\d\d)", re.ASCII)
BASELINE = re.compile(r"\s*(\d{1,2}\.\d{1,2})\s*", re.ASCII)
LANDSAT = re.compile(r"L([COTEM])0([4-9])_L(\d)([A-Z]{2})_\d{6}_\d{8}_\d{8}_(\d\d)_", re.ASCII)
HLS = re.compile(r"HLS[._-]?([SL])30(?!\d)", re.ASCII)
SENTINEL_2 = re.compile(r"sentinel[-_ ]?0?2", re.IGNORECASE | re.ASCII)
PLATFORM_TAGS = (
    "platform", "spacecraft", "satellite", "mission", "constellation", "sensor", "instrument", "collection"
)  # fmt: skip
# What says Landsat in lower-case platforms and names, and what one generation alone has. `SR_B4`, `sr_band4`
# are Landsat's, but Earth Engine calls Sentinel-2 `S2_SR`.
START = r"(?<![a-z0-9])"
SR, ST = (rf"{START}(?<!s2[\W_]){kind}[\W_]?b(?:and)?[\W_]?0*" for kind in ("sr", "(?:st|bt)"))
LANDSATS = re.compile(
    rf"{START}(?:(?:landsat[-_ ]?|l[cote](?=0?[4-9]))0?([4-9])?|lm0?[1-5]|mss(?![a-z]))", re.ASCII
)
LANDSAT_NUMBER = re.compile(rf"{SR}\d|{ST}\d", re.ASCII)
ONLY = {
    "Landsat 8-9": re.compile(
        rf"{SR}6(?!\d)|{ST}1[01](?!\d)|{START}(?:sr_(?:qa_)?aerosol|oli(?![a-z]))", re.ASCII
    ),
    "Landsat 4-7": re.compile(
        rf"{ST}6(?!\d)|{START}(?:b0?6_vcid|sr_(?:atmos_opacity|cloud_qa)|e?tm(?![a-z]))", re.ASCII
    ),
}
PREFIXED = re.compile(r"(\w+)=(.*)", re.DOTALL)
SENTINEL_OFFSETS = ("boa_add_offset", "radio_add_offset")
APPLIED = ("true", "1", "yes")
NAME_CHARACTERS = 200
ONE_NAME = "scene.tif"
LEADER = 4  # bytes that a Cloud Optimized GeoTIFF repeats before and after each of its tiles
# Ends of names of tags, without spaces and underscores.
NAME_TAGS = ("bandname", "commonname")
WAVELENGTH_TAGS = ("wavelength", "wavelengthum", "wavelengthnm")
MICROMETRES_BELOW = 100.0  # no satellite band is at 100 nm, none used here at 100 micrometres


def _iso(*parts: str | None) -> str | None:
    """Join year to second as ISO 8601; None if there is no such day or hour, as in `0000:00:00`."""
    numbers = [part for part in parts if part is not None]
    text = "-".join(numbers[:3]) + ("T" + ":".join(numbers[3:]) if numbers[3:] else "")
    try:
        datetime.fromisoformat(text)
        return text
    except ValueError:
        return None


@dataclass(frozen=True)
class CheckedHeader:
    """Size, bands and type by the checked header of a file, for messages and to compare with GDAL's.

    Attributes:
        kind: of the file, as messages name it.
        count: bands.
        images: full-size images in the file.
    """

    kind: str
    width: int
    height: int
    count: int
    dtype: np.dtype[Any]
    images: int = 1


class GdalRaster(ABC):
    """A file whose header was checked, read by one of GDAL's drivers as a `Source`.

    Args:
        driver: GDAL's name of it.
        header: what was checked; GDAL has to agree with it.
        opener: opens the file for GDAL; None: GDAL reads the descriptor.
        options: of the driver.

    Raises:
        RasterBroken: the file is damaged or truncated, or GDAL reads another raster than was checked.
    """

    def __init__(
        self,
        file: RasterFile,
        spec: FileSpec,
        driver: str,
        header: CheckedHeader,
        opener: Callable[..., PlainTexts] | None = None,
        **options: str,
    ) -> None:
        self._file, self._spec = file, spec
        self.width, self.height, self.dtype = header.width, header.height, header.dtype
        name = f"/proc/self/fd/{file.fd}" if opener is None else ONE_NAME
        try:
            self._dataset = rasterio.open(name, driver=driver, sharing=False, opener=opener, **options)
        except BROKEN as error:
            raise _refusal(error, f"the {header.kind} structure is damaged: it could not be opened") from None
        self._check_agreement(header)
        self.numbers: tuple[BandNumbers, ...] | None = None
        self.notes: list[str] = []
        if header.images > 1:
            text = f"the file holds {header.images} images; the first is used"
            self.notes.append(note("first_image", text))
        try:
            self._read_tags(header)
        except GeoError:
            raise
        except BROKEN as error:
            raise _refusal(error, "the tags that say what it shows and where it lies are damaged") from None

    def _read_tags(self, header: CheckedHeader) -> None:
        self._alpha = self._find_alpha()
        self.bands = self._file_bands(header.images)
        own: float | None = self._dataset.nodata
        self.nodata = self._spec.nodata if own is None else own
        self.block_height, self.first_look = self._block()
        self.place = self.placed(Window(0, 0, self.width, self.height))
        self.acquired = self._date()
        self.stated = self._stated()

    def read(self, top: int, left: int, bands: tuple[int, ...], out: Pixels) -> None:
        """See `Source`."""
        window = windows.Window(left, top, out.shape[2], out.shape[1])
        want(self.wanted(top, left, out.shape[1], out.shape[2], bands))
        try:
            self._dataset.read([band + 1 for band in bands], window=window, out=out)
        except BROKEN as error:
            raise _refusal(error, _undecodable(top, out.shape[1])) from None

    def hidden(self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]) -> Valid | None:
        """See `Source`."""
        window = windows.Window(left, top, columns, rows)
        try:
            if self._alpha is not None and self._alpha - 1 in bands:
                return None
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

    def wanted(
        self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]
    ) -> list[tuple[RasterFile, Ranges]]:
        """See `Source`."""
        return []

    @abstractmethod
    def _block(self) -> tuple[int, int]:
        """Return `block_height` and `first_look` of `Source`."""

    def _check_agreement(self, header: CheckedHeader) -> None:
        """Refuse a file that GDAL reads differently from the header that was checked."""
        data = self._dataset
        agreed = (header.width, header.height, header.count) == (data.width, data.height, data.count)
        if not agreed or set(data.dtypes) != {str(self.dtype)}:
            raise RasterBroken(
                f"the {header.kind} header contradicts itself, or its colours are stored in a rare way"
            )

    def _find_alpha(self) -> int | None:
        """Find the alpha band's number from 1; None if there is none, or no other band."""
        found = [n for n, kind in enumerate(self._dataset.colorinterp, 1) if kind.name == "alpha"]
        return found[0] if found and self._dataset.count > 1 else None

    def _file_bands(self, images: int) -> FileBands:
        """Read what the file says of its bands; GDAL calls 8-bit files of three or four pictures."""
        data = self._dataset
        names = data.descriptions
        picture = self.dtype.itemsize == 1 and data.count in (3, 4) and any(names)
        bands = []
        for number, (name, kind) in enumerate(zip(names, data.colorinterp, strict=True), 1):
            colour = kind.name if kind.name in COLOURS and not picture else None
            tags = self._band_tags(number) | data.tags(number, ns="IMAGERY")
            band = read_band(name or None, tags, colour, alpha=number == self._alpha)
            if self._spec.name is not None and data.count == 1:
                own = (band.name,) if band.name else ()
                band = replace(band, name=self._spec.name, tags=own + band.tags)
            bands.append(band)
        texts = [text for band in bands for text in (band.name, *band.tags) if text]
        return FileBands(tuple(bands), read_product(self._tags(), texts), images - 1)

    def _tags(self) -> dict[str, str]:
        own: dict[str, str] = self._dataset.tags()
        return own | self._spec.tags

    def _band_tags(self, number: int) -> dict[str, str]:
        more = self._spec.band_tags[number - 1 : number]
        own: dict[str, str] = self._dataset.tags(number)
        return own | (more[0] if more else {})

    def _stated(self) -> Stated:
        data = self._dataset
        lines = [ScaleOffset(scale, offset) for scale, offset in zip(data.scales, data.offsets, strict=True)]
        band_tags = [self._band_tags(band) for band in data.indexes]
        return read_stated(lines, self._tags(), band_tags, integers=self.dtype.kind in "iu")

    def _date(self) -> str | None:
        tags = {str(key).upper(): str(value) for key, value in self._tags().items()}
        for name in DATE_TAGS:
            found = DATE.search(tags.get(name, ""))
            if found and (text := _iso(*found.groups())) is not None:
                return text
        return None

    def placed(self, window: Window) -> Georeference:
        """See `Source`."""
        crs: CRS | None = self._dataset.crs or None
        whole = self._dataset.transform
        if not all(math.isfinite(number) for number in whole[:6]) or not whole.determinant:
            raise RasterBroken(
                "the geotransform holds numbers that are infinite or NaN, or pixels without size"
            )
        notes: list[str] = []
        affine = whole if whole.is_identity else _shifted(whole, window)
        native, points_crs = self._native(crs, affine, window, notes)
        if crs is None and points_crs is None:
            text = "the file has no CRS; the mask has none either, and areas are in pixels only"
            notes.append(note("no_crs", text))
        transform = (
            None if whole.is_identity else (affine.a, affine.b, affine.c, affine.d, affine.e, affine.f)
        )
        if crs is None or transform is None:
            return Georeference(_crs_text(crs), transform, native=native, notes=tuple(notes))
        latitude, longitude = self._centre(crs, transform, window, notes)
        area = self._pixel_area(crs, transform, window, notes)
        return Georeference(_crs_text(crs), transform, latitude, longitude, area, native, tuple(notes))

    def _native(
        self, crs: CRS | None, affine: Affine, window: Window, notes: list[str]
    ) -> tuple[dict[str, Any], CRS | None]:
        """Return `Georeference.native`, and the CRS of the control points that are used."""
        native: dict[str, Any] = {"crs": crs, "transform": affine}
        points, points_crs = self._dataset.gcps
        if affine.is_identity:
            native = {"crs": crs}
            points_crs = points_crs or crs
            if points and points_crs is not None:
                moved = [_moved(point, window) for point in points]
                native = {"gcps": moved, "crs": points_crs}
                text = "the file has ground control points only; they are copied, the grid is kept as it is"
                notes.append(note("control_points", text))
            else:
                text = "the file has no geotransform; the mask has none either"
                notes.append(note("no_geotransform", text))
        if (rpcs := self._dataset.rpcs) is not None:
            rpcs.line_off -= window.top
            rpcs.samp_off -= window.left
            native["rpcs"] = rpcs
            text = "the file has rational polynomial coefficients (RPCs); they are copied, the grid is kept"
            notes.append(note("rpcs", text))
        return native, points_crs

    def _centre(
        self, crs: CRS, transform: tuple[float, ...], window: Window, notes: list[str]
    ) -> tuple[float | None, float | None]:
        centre = [(window.width / 2, window.height / 2)]
        (longitude, latitude), *_ = self._on_earth(crs, transform, centre)
        if not (abs(latitude) <= 90 and math.isfinite(longitude)):
            notes.append(OFF_EARTH)
            return None, None
        return latitude, (longitude + 180) % 360 - 180

    def _on_earth(
        self, crs: CRS, transform: tuple[float, ...], points: list[tuple[float, float]]
    ) -> list[tuple[float, float]]:
        """Return longitudes and latitudes on WGS 84 of columns and rows; infinite where PROJ knows none."""
        a, b, c, d, e, f = transform
        xs = [a * column + b * row + c for column, row in points]
        ys = [d * column + e * row + f for column, row in points]
        try:
            longitudes, latitudes = reproject(crs, CRS.from_epsg(4326), xs, ys)[:2]
        except BROKEN:
            return [(math.inf, math.inf)] * len(points)
        return list(zip(longitudes, latitudes, strict=True))

    def _pixel_area(
        self, crs: CRS, transform: tuple[float, ...], window: Window, notes: list[str]
    ) -> PixelArea | None:
        if crs.is_geographic:
            return _ellipsoid_area(crs, transform, notes)
        if not crs.is_projected:
            notes.append(_no_areas("the CRS is local, its unit on the ground unknown"))
            return None
        if transform[1] or transform[3]:
            notes.append(note("rotated", "the grid is rotated; it is kept as it is"))
        try:
            area = PlaneArea(transform, crs.linear_units_factor[1])
        except BROKEN:
            return None
        column, row = window.width / 2, window.height / 2
        neighbours = [(column - 1, row), (column + 1, row), (column, row - 1), (column, row + 1)]
        around = self._on_earth(crs, transform, neighbours)
        if not all(math.isfinite(degrees) for point in around for degrees in point):
            return area
        factor = ground_area(around) / area.row(0)
        if factor < LEAST_FACTOR:
            notes.append(OFF_EARTH)
            return area
        if abs(factor - 1) <= AREA_TOLERANCE:
            return area
        text = (
            f"a pixel of this projection is {area.row(0):.4g} ha on its plane and {factor * area.row(0):.4g} "
            "ha on the ground, at the centre of the scene; areas are computed with the latter"
        )
        notes.append(note("areas_scaled", text))
        return PlaneArea(transform, crs.linear_units_factor[1], factor)


class GeoTiff(GdalRaster):
    """A GeoTIFF as a `Source`.

    Raises:
        RasterBroken: the file is damaged or truncated.
        RasterTooLarge: the raster is beyond the limits.
        RasterUnusable: the type or storage of the pixels is not supported.
    """

    def __init__(self, file: RasterFile, request: SceneRequest, spec: FileSpec) -> None:
        self._header = header = TiffHeader(file)
        dtype = np.dtype(check_tiff(header, file, request))
        texts = header.foreign_texts()
        checked = CheckedHeader("TIFF", header.width, header.height, header.samples, dtype, header.images)
        opener = partial(_one_file, file, texts) if texts or file.by_ranges else None
        super().__init__(file, spec, "GTiff", checked, opener)

    def wanted(
        self, top: int, left: int, rows: int, columns: int, bands: tuple[int, ...]
    ) -> list[tuple[RasterFile, Ranges]]:
        """See `Source`."""
        if not self._file.by_ranges:
            return []
        header = self._header
        across, down = header.block
        offsets, counts = header.blocks()
        in_row, in_column = -(-self.width // across), -(-self.height // down)
        down_to, right_to = -(-(top + rows) // down), -(-(left + columns) // across)
        planes = bands if header.planar else (0,)
        wanted = [
            (plane * in_column + row) * in_row + column
            for plane in planes
            for row in range(top // down, down_to)
            for column in range(left // across, right_to)
        ]
        spans = [(int(offsets[block]), int(offsets[block]) + int(counts[block])) for block in wanted]
        if header.compression == UNCOMPRESSED and not header.tiled:
            line = self.width * self.dtype.itemsize * (1 if header.planar else header.samples)
            firsts = [row * down for _ in planes for row in range(top // down, down_to)]
            spans = [
                (begin + max(top - first, 0) * line, begin + min(top + rows - first, down) * line)
                for (begin, _), first in zip(spans, firsts, strict=True)
            ]
        return [(self._file, [(begin - LEADER, end + LEADER) for begin, end in spans if end > begin])]

    def _block(self) -> tuple[int, int]:
        """Return `block_height` and `first_look` of `Source`.

        GDAL reports one compressed strip of the whole image as many strips of one row, and decodes it again
        from its top for each change of band.
        """
        header = self._header
        rows, columns = self._dataset.block_shapes[0]
        if header.compression != UNCOMPRESSED:
            columns, rows = header.block
        return int(rows), int(rows) * int(columns) * self.dtype.itemsize * header.samples


def _ellipsoid_area(crs: CRS, transform: tuple[float, ...], notes: list[str]) -> PixelArea | None:
    axes = ellipsoid(crs.to_wkt())
    if axes is None:
        notes.append(_no_areas("the CRS names no ellipsoid"))
        return None
    if transform[1] or transform[3]:
        notes.append(_no_areas("the grid is rotated against the parallels"))
        return None
    return EllipsoidArea(transform, crs.units_factor[1], *axes)


def _no_areas(reason: str) -> str:
    return note("areas_unknown", f"{reason}; areas are in pixels only")


def _one_file(file: RasterFile, texts: dict[int, bytes], path: str, *_: object, **__: object) -> PlainTexts:
    """Open a file for GDAL, which asks for its name; there are no others beside it."""
    if path != ONE_NAME:
        raise FileNotFoundError(path)
    return PlainTexts(file, texts)


def _shifted(whole: Affine, window: Window) -> Affine:
    """Return the geotransform of a part."""
    a, b, c, d, e, f = whole[:6]
    return Affine(a, b, a * window.left + b * window.top + c, d, e, d * window.left + e * window.top + f)


def _moved(point: GroundControlPoint, window: Window) -> GroundControlPoint:
    """Return a control point of the file as one of a part."""
    return GroundControlPoint(
        point.row - window.top, point.col - window.left, point.x, point.y, point.z, point.id, point.info
    )


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


def read_band(name: str | None, tags: Tags, colour: str | None, *, alpha: bool) -> FileBand:
    """Read what a file says of one band."""
    known = {re.sub(r"[\s_:]+", "", key): value for key, value in _plain(tags).items()}
    name = name and name[:NAME_CHARACTERS]
    names = tuple(
        value[:NAME_CHARACTERS] for key, value in known.items() if key.endswith(NAME_TAGS) and value.strip()
    )
    stated = (
        _nanometres(value[:NAME_CHARACTERS]) for key, value in known.items() if key.endswith(WAVELENGTH_TAGS)
    )
    said = (wavelength(text) for text in (name, *names) if text)
    return FileBand(name, names, next((nm for nm in (*stated, *said) if nm), None), colour, alpha)


def _nanometres(text: str) -> float | None:
    """Read a wavelength with or without its unit: micrometres are small numbers."""
    if (nm := wavelength(text)) is not None:
        return nm
    number = _number({"": text}, "")
    if number is None or number <= 0:
        return None
    return number * 1000 if number < MICROMETRES_BELOW else number


def read_product(tags: Tags, names: Sequence[str]) -> str | None:
    """Find which of `bands.PRODUCTS` numbered the bands, by the file's tags and the bands' names.

    `UNCLEAR` if it is a Landsat that they do not tell, or they say two.
    """
    plain = _plain(tags)
    text = "\n".join((*plain.values(), *names))
    if (hls := HLS.search(text)) is not None:
        return "Sentinel-2" if hls[1] == "S" else "Landsat 8-9"
    platforms = [value for name, value in plain.items() if any(part in name for part in PLATFORM_TAGS)]
    ids = (found[0] for found in LANDSAT.finditer(text))
    said = "\n".join((*platforms, *ids, *names)).casefold()
    products = {_landsat(number) for number in LANDSATS.findall(said)}
    products |= {product for product, pattern in ONLY.items() if pattern.search(said)}
    if SENTINEL.search(text) or DATATAKE.search(text) or any(map(SENTINEL_2.search, platforms)):
        products.add("Sentinel-2")
    elif not products and LANDSAT_NUMBER.search(said):
        return UNCLEAR
    sure = products - {UNCLEAR}
    return sure.pop() if len(sure) == 1 else UNCLEAR if products else None


def _landsat(number: str) -> str:
    return ("Landsat 8-9" if number in "89" else "Landsat 4-7") if number else UNCLEAR


def read_stated(
    lines: Sequence[ScaleOffset], tags: Tags, band_tags: Sequence[Tags], *, integers: bool
) -> Stated:
    """Read the scales and offsets that a file states.

    They are a band's scale and offset as GDAL knows them; the tags `scale_factor` and `add_offset`, of the
    band or of the file; and of integers Sentinel-2's `BOA_ADD_OFFSET` and `RADIO_ADD_OFFSET`, which are in
    the file's numbers, unless the file says that they are taken off. Two that differ are a conflict.

    Args:
        lines: scale and offset of each band, as GDAL knows them.
    """
    whole = _plain(tags)
    each = [whole | _plain(own) for own in band_tags]
    read = [_of_band(line, known, integers) for line, known in zip(lines, each, strict=True)]
    removed = next((by for known in (whole, *each) if (by := _removed_by(known))), None)
    shifted = integers and not removed
    offsets = ("add_offset", *(SENTINEL_OFFSETS if shifted else ()))
    without = any(_number(known, name) == 0 for known in each for name in offsets)  # a stated 0 is deliberate
    left = next(
        (name for known in each for name in SENTINEL_OFFSETS if removed and _number(known, name)), None
    )
    text = (
        f"the file has {(left or '').upper()}, and says ({removed}) that the offset is taken off; none is "
        "taken off"
    )
    return Stated(
        tuple(line for line, _ in read),
        None if without or removed else _product(whole, integers=integers),
        tuple(conflict for _, conflict in read),
        (note("offset_removed", text),) if left else (),
    )


def _plain(tags: Tags) -> dict[str, str]:
    """Return tags by lower-case names without prefix: GDAL writes `s2:a=b` as tag `s2` with value `a=b`."""
    plain = {}
    for name, value in tags.items():
        prefixed = PREFIXED.fullmatch(str(value)[:VALUE_CHARACTERS])
        own, text = prefixed.groups() if prefixed else (str(name), str(value)[:VALUE_CHARACTERS])
        plain[own.casefold().rpartition(":")[2]] = text
    return plain


def _of_band(line: ScaleOffset, tags: Tags, integers: bool) -> tuple[ScaleOffset, str]:
    """Return a band's scale and offset, and what contradicts itself in them."""
    removed = _removed_by(tags)
    scales = {"GDAL": line.scale if line.scale != 1 else None, "scale_factor": _number(tags, "scale_factor")}
    scale, conflict = _agreed("scale", scales)
    scale = 1.0 if scale is None else scale
    offsets = {"GDAL": line.offset or None, "add_offset": _number(tags, "add_offset")}
    if integers and not removed:
        offsets |= {name.upper(): _scaled(_number(tags, name), scale) for name in SENTINEL_OFFSETS}
    offset, other = _agreed("offset", offsets)
    if removed and offset:
        other = f"the file states an offset of {offset:g}, and says ({removed}) that it is taken off already"
    return ScaleOffset(scale, offset or 0.0), conflict or other


def _scaled(number: float | None, scale: float) -> float | None:
    return None if number is None else number * scale


def _agreed(what: str, stated: Mapping[str, float | None]) -> tuple[float | None, str]:
    """Return the first number that is stated, and a sentence if another one differs."""
    known = {origin: number for origin, number in stated.items() if number is not None}
    if not known:
        return None, ""
    (origin, first), *others = known.items()
    for other, number in others:
        if not math.isclose(first, number, rel_tol=1e-6):
            return first, f"the file states two {what}s: {first:g} ({origin}) and {number:g} ({other})"
    return first, ""


def _number(tags: Tags, name: str) -> float | None:
    try:
        number = float(tags[name])
    except (KeyError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _removed_by(tags: Tags) -> str | None:
    """Return the tag by which a provider, or HLS, says that Sentinel-2's offset is removed."""
    if "hls_processing_time" in tags:
        return "HLS_PROCESSING_TIME"
    for name, value in tags.items():
        if name.endswith("boa_offset_applied") and value.strip().casefold() in APPLIED:
            return f"boa_offset_applied={value.strip()[:8]}"
    return None


def _product(tags: Tags, *, integers: bool) -> ProductUnit | None:
    """Return the product that the tags name, if its numbers are not reflectance x 10000."""
    text = "\n".join(tags.values())
    if HLS.search(text):
        return None
    landsat = LANDSAT.search(text)
    if landsat is not None and integers:
        return _landsat_product(landsat)
    for product, baseline in _baselines(tags, text):
        if float(baseline) >= SHIFTED_SINCE:
            name = f"{product} of processing baseline {baseline}"
            return ProductUnit(name, "reflectance x 10000 + 1000", None, -0.1)
    return None


def _landsat_product(found: re.Match[str]) -> ProductUnit | None:
    """Return the unit of collection 2's numbers; the name of collection 1's does not say its level."""
    _, number, level, kind, collection = found.groups()
    if collection == "01":
        return None
    name = f"Landsat {number} level {level} ({kind}) of collection {int(collection)}"
    if level == "2":
        return ProductUnit(name, "(reflectance + 0.2) / 0.0000275", 2.75e-5, -0.2)
    return ProductUnit(name, "counts, by default (reflectance + 0.1) / 0.00002 (its MTL says)", 2e-5, -0.1)


def _baselines(tags: Tags, text: str) -> Iterator[tuple[str, str]]:
    """Yield every product and processing baseline that the tags name."""
    for level, major, minor in SENTINEL.findall(text):
        yield f"Sentinel-2 L{level}", f"{major}.{minor}"
    for baseline in DATATAKE.findall(text):
        yield "Sentinel-2", baseline
    for name, value in tags.items():
        if name.endswith("processing_baseline") and (own := BASELINE.fullmatch(value)) is not None:
            yield "Sentinel-2", own[1]
