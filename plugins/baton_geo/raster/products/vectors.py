"""Write a finished mask as polygons (GeoJSON, GeoPackage), its style for QGIS, and a STAC item of all files.

A polygon is the pixels of one class that touch by their sides. Its area is that of these pixels, each as the
mask counts it, so that the areas of all polygons of a class are the class's. GeoJSON is in longitude and
latitude (RFC 7946), cut where a scene crosses the antimeridian; the GeoPackage is in the scene's own CRS.
Formats: RFC 7946; OGC GeoPackage 1.3; QGIS 3; STAC 1.1.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

import numpy as np
import numpy.typing as npt
import rasterio
from rasterio.crs import CRS
from rasterio.features import shapes, sieve
from rasterio.warp import transform as reproject

from baton_geo.card import Card
from baton_geo.errors import DecoderBusy, RasterTooLarge
from baton_geo.raster.messages import (
    FILES,
    GEOJSON,
    GEOPACKAGE,
    ITEM,
    MASK,
    STYLE,
    SceneRequest,
    Tally,
    note,
)
from baton_geo.raster.reading.geotiff import BROKEN
from baton_geo.raster.reading.rows import Georeference

POLYGONS_LIMIT = 500_000
VERTICES_AT_ONCE = 100_000
LAYER = "mask"
OTHER_SRS = 100_000  # of a CRS without an EPSG code
SIDE = 1000  # added to the classes beyond the antimeridian
STEPS = 33  # points along each side of a scene
ROLES = {
    "mask": "data",
    "probabilities": "data",
    "preview": "thumbnail",
    "scene": "overview",
    "item": "metadata",
}
Points = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Polygon:
    """The pixels of one class that touch.

    Attributes:
        value: the class.
        beyond: whether it lies beyond the antimeridian.
        rings: the outer one, then the holes: columns and rows of corners, (corners, 2).
        pixels: number.
        hectares: None if the size of a pixel is unknown.
    """

    value: int
    beyond: bool
    rings: tuple[Points, ...]
    pixels: int
    hectares: float | None


class Ground:
    """The place of a scene's pixels, in its CRS and on WGS 84.

    Attributes:
        meridian: the antimeridian that the scene crosses, degrees in the scene's own turn of longitudes;
            None: it crosses none, or it is not known where it lies.
    """

    def __init__(self, place: Georeference, width: int, height: int) -> None:
        self._place, self._size = place, (width, height)
        # Not made when this module is loaded: the fork server would open PROJ's tables for its children.
        self._wgs84 = CRS.from_epsg(4326)
        self.crs = None if place.crs is None or place.transform is None else CRS.from_string(place.crs)
        self._turn: float | None = None
        self.meridian: float | None = None
        if self.crs is None:
            return
        (middle,), _ = self._lonlat(np.array([[width / 2, height / 2]]))
        if not math.isfinite(middle):
            self.crs = None
            return
        self._turn = float(middle)
        east = self.unwrapped(self.border())[:, 0]
        low, high = math.floor((east.min() + 180) / 360), math.floor((east.max() - 1e-9 + 180) / 360)
        if low != high and math.isfinite(east.sum()):
            self.meridian = high * 360 - 180.0

    def border(self) -> Points:
        """Return columns and rows along the scene's border, from its first corner around to it again."""
        width, height = self._size
        steps = np.linspace(0, 1, STEPS)
        ends = np.zeros(STEPS), np.ones(STEPS)
        columns = np.concatenate([steps, ends[1], steps[::-1], ends[0]]) * width
        rows = np.concatenate([ends[0], steps, ends[1], steps[::-1]]) * height
        return np.stack([columns, rows], axis=1)

    def of_crs(self, points: Points) -> Points:
        """Return x and y of columns and rows; without a geotransform these themselves."""
        if self._place.transform is None:
            return points
        a, b, c, d, e, f = self._place.transform
        columns, rows = points[:, 0], points[:, 1]
        return np.stack([a * columns + b * rows + c, d * columns + e * rows + f], axis=1)

    def _lonlat(self, points: Points) -> tuple[Points, Points]:
        assert self.crs is not None
        xy = self.of_crs(points)
        if self.crs == self._wgs84:
            return xy[:, 0], xy[:, 1]
        try:
            east, north = reproject(self.crs, self._wgs84, xy[:, 0].tolist(), xy[:, 1].tolist())[:2]
        except BROKEN:
            east = north = [math.inf] * len(xy)
        return np.array(east), np.array(north)

    def unwrapped(self, points: Points) -> Points:
        """Return longitudes and latitudes, the former within half a turn of the scene's centre."""
        assert self._turn is not None
        east, north = self._lonlat(points)
        return np.stack([east + 360 * np.round((self._turn - east) / 360), north], axis=1)

    def on_earth(self, points: Points, beyond: npt.NDArray[np.bool_]) -> Points:
        """Return longitudes from -180 to 180 and latitudes; of a scene without a CRS x and y.

        Args:
            beyond: of each point, whether its polygon lies beyond the antimeridian.
        """
        if self.crs is None:
            return self.of_crs(points)
        found = self.unwrapped(points)
        east = found[:, 0]
        if self.meridian is not None:
            near = np.minimum(east, self.meridian) - (self.meridian - 180)
            found[:, 0] = np.where(beyond, np.maximum(east, self.meridian) - (self.meridian + 180), near)
        else:
            assert self._turn is not None
            found[:, 0] = east - 360 * round(self._turn / 360)
        return found

    def beyond(self) -> npt.NDArray[np.bool_]:
        """Find the pixels whose centres lie beyond the antimeridian, (height, width)."""
        width, height = self._size
        rows = np.arange(height) + 0.5

        def is_beyond(columns: Points) -> npt.NDArray[np.bool_]:
            points = np.stack([columns + 0.5, rows], axis=1)
            return np.asarray(self.unwrapped(points)[:, 0] >= (self.meridian or 0.0))

        first, last = is_beyond(np.zeros(height)), is_beyond(np.full(height, width - 1.0))
        low, high = np.zeros(height), np.full(height, width - 1.0)  # the change lies between them
        while (high - low > 1).any():
            middle = np.floor((low + high) / 2)
            same = is_beyond(middle) == first
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        columns = np.arange(width)[None, :]
        after = np.where((first == last)[:, None], False, columns >= high[:, None])
        return np.asarray(first[:, None] ^ after)


def write_vectors(
    folder: Path, request: SceneRequest, place: Georeference, size: tuple[int, int]
) -> dict[Literal["polygons", "geopackage"], str]:
    """Write the polygons and the style that a request wants, from the mask in `folder`.

    Returns:
        the note why, by output that was left out.

    Raises:
        RasterTooLarge: there are too many polygons, and the request does not leave them out then.
        DecoderBusy: a file could not be written.
    """
    card, ground = request.card, Ground(place, *size)
    if request.style:
        (folder / STYLE).write_text(style_of(card), encoding="utf-8")
    if not (request.polygons or request.geopackage):
        return {}
    try:
        geojson = GeoJson(folder / GEOJSON, card, ground) if request.polygons else None
        package = GeoPackage(folder / GEOPACKAGE, card, ground) if request.geopackage else None
        for batch in _batches(polygons(folder / MASK, card, place, ground, request.sieve)):
            for writer in (geojson, package):
                if writer is not None:
                    writer.write(batch)
        for writer in (geojson, package):
            if writer is not None:
                writer.finish()
    except RasterTooLarge as error:
        if not request.if_few:
            raise
        for name in (GEOJSON, GEOPACKAGE):
            (folder / name).unlink(missing_ok=True)
        why = note("polygons_left_out", error.message)
        return {"polygons": why, "geopackage": why}
    except (OSError, sqlite3.Error):
        raise DecoderBusy("the result could not be written: the server is short of disk or memory") from None
    return {}


def polygons(mask: Path, card: Card, place: Georeference, ground: Ground, least: int) -> Iterator[Polygon]:
    """Yield the polygons of a mask.

    Args:
        least: pixels; smaller polygons become part of their largest neighbour.

    Raises:
        RasterTooLarge: there are too many.
    """
    with rasterio.open(mask, driver="GTiff") as file:
        classes: npt.NDArray[Any] = file.read(1)
    known = classes != card.mask_nodata
    if least > 1:
        classes = np.where(known, sieve(classes, least, mask=known, connectivity=4), classes)
    if ground.meridian is not None:
        classes = classes.astype(np.int16) + np.int16(SIDE) * ground.beyond()
    area = place.pixel_area
    heights = np.arange(classes.shape[0] + 1, dtype=np.float64)
    hectares = None
    if area is not None:
        each = [area.row(row) for row in range(classes.shape[0])]
        hectares = np.concatenate([[0.0], np.cumsum(each)])
    for number, (shape, value) in enumerate(shapes(classes, mask=known, connectivity=4)):
        if number >= POLYGONS_LIMIT:
            raise RasterTooLarge(
                f"the mask has more than {POLYGONS_LIMIT} polygons; with sieve=9 those of fewer pixels join "
                "their largest neighbour"
            )
        rings = tuple(np.array(ring) for ring in shape["coordinates"])
        yield Polygon(
            int(value) % SIDE,
            int(value) >= SIDE,
            rings,
            round(_sum(rings, heights)),
            None if hectares is None else _sum(rings, hectares),
        )


def _sum(rings: Sequence[Points], upto: Points) -> float:
    """Sum what the pixels inside of a polygon have, of which all of a row have the same.

    Args:
        upto: of the rows above each row, one column of them.
    """
    sums = []
    for ring in rings:
        rows = ring[:, 1].astype(np.intp)
        sums.append(abs(float(((upto[rows[1:]] - upto[rows[:-1]]) * ring[1:, 0]).sum())))
    return sums[0] - sum(sums[1:])


def _batches(found: Iterable[Polygon]) -> Iterator[list[Polygon]]:
    batch: list[Polygon] = []
    vertices = 0
    for polygon in found:
        batch.append(polygon)
        vertices += sum(map(len, polygon.rings))
        if vertices >= VERTICES_AT_ONCE:
            yield batch
            batch, vertices = [], 0
    yield batch


def _placed(
    batch: Sequence[Polygon], place: Callable[[Points, npt.NDArray[np.bool_]], Points]
) -> Iterator[list[Points]]:
    """Yield the rings of each polygon in another system, the outer one counterclockwise, holes clockwise."""
    if not batch:
        return
    corners = np.concatenate([ring for polygon in batch for ring in polygon.rings])
    beyond = np.concatenate([np.full(sum(map(len, polygon.rings)), polygon.beyond) for polygon in batch])
    placed, at = place(corners, beyond), 0
    for polygon in batch:
        rings = []
        for number, ring in enumerate(polygon.rings):
            moved = placed[at : at + len(ring)]
            at += len(ring)
            x, y = moved[:, 0] - moved[0, 0], moved[:, 1] - moved[0, 1]
            turns_left = (x[:-1] * y[1:] - x[1:] * y[:-1]).sum() > 0
            rings.append(moved if turns_left == (number == 0) else moved[::-1])
        yield rings


class GeoJson:
    """A GeoJSON file that is being written."""

    def __init__(self, path: Path, card: Card, ground: Ground) -> None:
        self._names, self._ground = [label.name for label in card.classes], ground
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"type": "FeatureCollection", "features": [')
        self._between = "\n"

    def write(self, batch: Sequence[Polygon]) -> None:
        """Append features."""
        for polygon, rings in zip(batch, _placed(batch, self._ground.on_earth), strict=True):
            feature = {
                "type": "Feature",
                "properties": _properties(polygon, self._names),
                "geometry": {"type": "Polygon", "coordinates": [ring.round(9).tolist() for ring in rings]},
            }
            self._file.write(self._between + json.dumps(feature))
            self._between = ",\n"

    def finish(self) -> None:
        """Close the file."""
        self._file.write("\n]}\n")
        self._file.close()


class GeoPackage:
    """A GeoPackage that is being written, with one layer, `mask`."""

    def __init__(self, path: Path, card: Card, ground: Ground) -> None:
        self._names, self._ground = [label.name for label in card.classes], ground
        self._base = sqlite3.connect(path, isolation_level=None)
        crs = ground.crs
        code = None if crs is None else crs.to_epsg()
        self._srs = -1 if crs is None else code or OTHER_SRS
        self._bounds = [math.inf, math.inf, -math.inf, -math.inf]
        self._base.executescript(SCHEMA)
        if crs is not None and self._srs != 4326:
            row = ("Scene", self._srs, "EPSG" if code else "NONE", self._srs, crs.to_wkt(), None)
            self._base.execute("INSERT INTO gpkg_spatial_ref_sys VALUES (?, ?, ?, ?, ?, ?)", row)
        self._base.execute(
            "INSERT INTO gpkg_geometry_columns VALUES (?, 'geom', 'POLYGON', ?, 0, 0)", (LAYER, self._srs)
        )
        self._base.execute("BEGIN")

    def write(self, batch: Sequence[Polygon]) -> None:
        """Append features."""
        for polygon, rings in zip(
            batch, _placed(batch, lambda points, _: self._ground.of_crs(points)), strict=True
        ):
            said = _properties(polygon, self._names)
            (least_x, least_y), (most_x, most_y) = rings[0].min(axis=0), rings[0].max(axis=0)
            low, high = self._bounds[:2], self._bounds[2:]
            self._bounds = [
                min(low[0], least_x),
                min(low[1], least_y),
                max(high[0], most_x),
                max(high[1], most_y),
            ]
            head = struct.pack("<2sBBi4d", b"GP", 0, 0b11, self._srs, least_x, most_x, least_y, most_y)
            parts = [struct.pack("<BII", 1, 3, len(rings))]
            for ring in rings:
                parts += [struct.pack("<I", len(ring)), np.ascontiguousarray(ring, "<f8").tobytes()]
            self._base.execute(
                f"INSERT INTO {LAYER} (geom, value, class, pixels, hectares) VALUES (?, ?, ?, ?, ?)",
                (head + b"".join(parts), said["value"], said["class"], said["pixels"], said["hectares"]),
            )

    def finish(self) -> None:
        """Close the file."""
        bounds = [number if math.isfinite(number) else None for number in self._bounds]
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self._base.execute(
            "INSERT INTO gpkg_contents VALUES (?, 'features', ?, '', ?, ?, ?, ?, ?, ?)",
            (LAYER, LAYER, when, *bounds, self._srs),
        )
        self._base.execute("COMMIT")
        self._base.close()


SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA application_id = 0x47504B47;
PRAGMA user_version = 10300;
CREATE TABLE gpkg_spatial_ref_sys (
  srs_name TEXT NOT NULL, srs_id INTEGER PRIMARY KEY, organization TEXT NOT NULL,
  organization_coordsys_id INTEGER NOT NULL, definition TEXT NOT NULL, description TEXT);
INSERT INTO gpkg_spatial_ref_sys VALUES
  ('Undefined Cartesian', -1, 'NONE', -1, 'undefined', NULL),
  ('Undefined geographic', 0, 'NONE', 0, 'undefined', NULL),
  ('WGS 84', 4326, 'EPSG', 4326,
    'GEOGCS["WGS 84",DATUM["WGS_1984",SPHEROID["WGS 84",6378137,298.257223563]],
    PRIMEM["Greenwich",0],UNIT["degree",0.0174532925199433],AUTHORITY["EPSG","4326"]]', NULL);
CREATE TABLE gpkg_contents (
  table_name TEXT NOT NULL PRIMARY KEY, data_type TEXT NOT NULL, identifier TEXT UNIQUE,
  description TEXT DEFAULT '', last_change DATETIME NOT NULL,
  min_x DOUBLE, min_y DOUBLE, max_x DOUBLE, max_y DOUBLE,
  srs_id INTEGER REFERENCES gpkg_spatial_ref_sys(srs_id));
CREATE TABLE gpkg_geometry_columns (table_name TEXT NOT NULL, column_name TEXT NOT NULL,
  geometry_type_name TEXT NOT NULL, srs_id INTEGER NOT NULL, z TINYINT NOT NULL, m TINYINT NOT NULL,
  PRIMARY KEY (table_name, column_name));
CREATE TABLE mask (fid INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, geom POLYGON, value INTEGER, class TEXT,
  pixels INTEGER, hectares DOUBLE);
"""


def _properties(polygon: Polygon, names: Sequence[str]) -> dict[str, Any]:
    return {
        "value": polygon.value,
        "class": names[polygon.value],
        "pixels": polygon.pixels,
        "hectares": polygon.hectares,
    }


def style_of(card: Card) -> str:
    """Return the mask's style as QGIS reads it: a file `mask.qml` beside `mask.tif`."""
    entries = "".join(
        f'<paletteEntry value="{value}" color="#{"".join(f"{part:02x}" for part in label.colour)}" '
        f'alpha="255" label={quoteattr(label.name)}/>'
        for value, label in enumerate(card.classes)
    )
    return (
        '<!DOCTYPE qgis PUBLIC "http://mrcc.com/qgis.dtd" "SYSTEM">\n<qgis version="3.0"><pipe>'
        '<rasterrenderer type="paletted" band="1" opacity="1" alphaBand="-1">'
        f"<colorPalette>{entries}</colorPalette></rasterrenderer></pipe></qgis>\n"
    )


def write_item(
    folder: Path,
    request: SceneRequest,
    place: Georeference,
    size: tuple[int, int],
    acquired: str | None,
    tally: Tally,
    notes: Sequence[str],
) -> None:
    """Write the STAC item of a scene's files."""
    ground = Ground(place, *size)
    box, geometry = _footprint(ground)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    item: dict[str, Any] = {
        "type": "Feature",
        "stac_version": "1.1.0",
        "stac_extensions": [],
        "id": request.name or "scene",
        "geometry": geometry,
        "properties": {
            "datetime": now if acquired is None else _moment(acquired),
            "created": now,
            "baton:acquired": acquired,
            "baton:classes": [area.model_dump() | {"value": n} for n, area in enumerate(tally.areas)],
            "baton:nodata_pixels": tally.nodata_pixels,
            "baton:notes": list(notes),
            "proj:code": place.crs,
            "proj:transform": place.transform,
            "proj:shape": [size[1], size[0]],
        },
        "links": [],
        "assets": {
            name: {"href": f"./{file}", "type": kind, "roles": [ROLES.get(name, "data")]}
            for name, (file, kind) in FILES.items()
            if getattr(request, name) and name != "item"
        },
    }
    if box is not None:
        item["bbox"] = box
    (folder / ITEM).write_text(json.dumps(item, indent=1), encoding="utf-8")


def _moment(acquired: str) -> str:
    return acquired + ("Z" if "T" in acquired else "T00:00:00Z")


def _footprint(ground: Ground) -> tuple[list[float] | None, dict[str, Any] | None]:
    """Return box and geometry on WGS 84; None, None where it is not known."""
    if ground.crs is None:
        return None, None
    border = ground.unwrapped(ground.border())
    if not np.isfinite(border).all():
        return None, None
    if ground.meridian is None:
        border = ground.on_earth(ground.border(), np.zeros(len(border), np.bool_))
    west, south, east, north = map(float, (*border.min(axis=0), *border.max(axis=0)))
    if ground.meridian is None:
        return [west, south, east, north], {"type": "Polygon", "coordinates": [_ring(border)]}
    west, east = west - (ground.meridian - 180), east - (ground.meridian + 180)
    sides = [
        [[[a, south], [b, south], [b, north], [a, north], [a, south]]]
        for a, b in ((west, 180.0), (-180.0, east))
    ]
    return [west, south, east, north], {"type": "MultiPolygon", "coordinates": sides}


def _ring(border: Points) -> list[list[float]]:
    x, y = border[:, 0], border[:, 1]
    left = (x[:-1] * y[1:] - x[1:] * y[:-1]).sum() > 0
    closed: list[list[float]] = np.concatenate([border, border[:1]]).tolist()
    return closed if left else closed[::-1]
