"""Define the messages between the gateway and a raster child, and send them over its socket.

A frame is `<II` with the lengths of header and body, the header (a JSON object), and the body (raw array
bytes).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field

from baton_geo.card import Card, ReadOnlyModel
from baton_geo.settings import GeoLimits

NoteCode = Literal[
    "areas_scaled", "areas_unknown", "band_wavelength", "bands_in_order", "bands_marked",
    "control_points", "fill_hidden", "first_image", "no_crs", "no_dates", "no_geotransform",
    "no_location", "nodata_of_card", "nodata_of_one_band", "nodata_zero_kept", "off_earth",
    "offset_removed", "offset_suspected", "polygons_left_out", "rotated", "rpcs", "scale_of_file",
    "scale_of_request", "scale_unused", "values_dark", "values_negative", "values_of_landsat",
]  # fmt: skip
"""The kinds of notes; the README says what each means."""
MASK, PROBABILITIES, PREVIEW = "mask.tif", "probabilities.tif", "preview.png"  # in the request's folder
SCENE, CLASSES, VALUE = "scene.png", "classes.png", "value.tif"
GEOJSON, GEOPACKAGE, STYLE, ITEM = "mask.geojson", "mask.gpkg", "mask.qml", "item.json"
TABLE, EMBEDDINGS = "embeddings.parquet", "embeddings.tif"
PARQUET = "application/vnd.apache.parquet"
Carried = Literal["uint8", "int8", "uint16", "int16", "float32"]
CARRIED: tuple[Carried, ...] = get_args(Carried)
"""The types of numbers in which tiles reach the model: a file's own integers, or normalised floats."""
STRIP = 8
"""Most tiles of a prompt; of floats half as many, so that they take no more memory."""
FILES = {
    "mask": (MASK, "image/tiff"),
    "probabilities": (PROBABILITIES, "image/tiff"),
    "preview": (PREVIEW, "image/png"),
    "scene": (SCENE, "image/png"),
    "classes": (CLASSES, "image/png"),
    "polygons": (GEOJSON, "application/geo+json"),
    "geopackage": (GEOPACKAGE, "application/geopackage+sqlite3"),
    "style": (STYLE, "application/x-qgis-layer-settings"),
    "item": (ITEM, "application/json"),
    "value": (VALUE, "image/tiff"),
    "embeddings": (EMBEDDINGS, "image/tiff"),  # and a table of them
}
"""File name and media type of each output."""
LENGTHS = struct.Struct("<II")
STATUS = struct.Struct("<i")  # the wait status of an ended child, which the fork server sends
HEADER_LIMIT = 8 * 1024 * 1024
PAGE = 4096
"""Bytes of the pages in which files at addresses are fetched."""
Buffer = bytes | bytearray | memoryview


def tile_bytes(bands: int, side: int, carried: Carried) -> tuple[int, int]:
    """Count the bytes of a tile: those of its numbers, and after them, of integers, of its nodata.

    The latter are a bit a pixel, rounded up so that many tiles can be seen as numbers of any type.

    Args:
        bands: of all time steps.
    """
    numbers = bands * side**2 * int(np.dtype(carried).itemsize)
    return numbers, 0 if carried == "float32" else -(-(side**2) // 64) * 8


def note(code: NoteCode, text: str) -> str:
    """Make a note: a code for programs, then a sentence for people."""
    return f"{code}: {text}"


class Message(ReadOnlyModel):
    """A message; a nodata of NaN survives the JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class FileSpec(Message):
    """A request's words about one of its files, for a scene of several or of one that is read by ranges.

    Attributes:
        name: of the file's band, or of its bands; None: the file's own names are used.
        tags: as the file's own, beside them.
        band_tags: of its bands, in the file's order, beside the file's own; fewer: the others have none.
        nodata: for a file that states none.
        fetched: bytes of its beginning that are there; the others are asked for. None: all are.
    """

    name: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    band_tags: tuple[dict[str, str], ...] = ()
    nodata: float | None = None
    fetched: int | None = None


class SceneRequest(Message):
    """A request to open a raster.

    Attributes:
        files: of each file, in order; empty: there is one, which is all there.
        window: column, row, width and height of what is wanted, pixels of the scene's grid; None: all.
        bbox: least x, least y, greatest x and greatest y of what is wanted, in `bbox_crs`; of longitudes the
            first may be the greater one, across the antimeridian. None: all.
        bbox_crs: as `EPSG:4326`; x is always the longitude or easting.
        indices: indices of the bands to use, from 0 in file order; None: by name, else by order.
        scale: a pixel's value is number * scale + offset; one for all bands or one a band, in the model's
            order; None and `offset` None: as the file states.
        offset: see `scale`.
        mask: whether to write the class mask.
        probabilities: whether to write the class probabilities.
        preview: whether to write the preview.
        scene: whether to write a picture of the scene alone.
        classes: whether to write a picture of the classes alone.
        value: whether to write the values of a regression.
        polygons: whether to write the mask's polygons as GeoJSON.
        geopackage: whether to write them as a GeoPackage.
        if_few: whether the polygons are left out where there are too many, instead of a refusal.
        style: whether to write the mask's style for QGIS.
        item: whether to write a STAC item of the files.
        sieve: pixels; of the polygons smaller ones become part of their largest neighbour.
        name: of the item.
        embeddings: whether to write the embeddings of an encoder alone.
        date: of the request, ISO 8601; None: the file's.
    """

    card: Card
    limits: GeoLimits = GeoLimits()
    files: tuple[FileSpec, ...] = ()
    window: tuple[int, int, int, int] | None = None
    bbox: tuple[float, float, float, float] | None = None
    bbox_crs: str = "EPSG:4326"
    indices: tuple[int, ...] | None = None
    scale: float | tuple[float, ...] | None = None
    offset: float | tuple[float, ...] | None = None
    mask: bool = True
    probabilities: bool = False
    preview: bool = False
    scene: bool = False
    classes: bool = False
    value: bool = False
    polygons: bool = False
    geopackage: bool = False
    if_few: bool = False
    style: bool = False
    item: bool = False
    sieve: int = 0
    name: str | None = None
    embeddings: bool = False
    date: str | None = None


class SceneInfo(Message):
    """A raster's size, bands, place and time.

    Attributes:
        width: pixels.
        height: pixels.
        count: number of the file's bands.
        dtype: numpy's name of the pixels' type.
        crs: `EPSG:...` or WKT; None: the file has none.
        transform: a, b, c, d, e, f of x = a * column + b * row + c, y = d * column + e * row + f; None: the
            file has none.
        nodata: the nodata value of the file, else of the card.
        names: of the file's bands.
        bands: indices from 0 of the bands used, in the order of the model.
        latitude: of the centre, degrees north on WGS 84; None without a CRS.
        longitude: of the centre, degrees east.
        acquired: date or date and time of acquisition, ISO 8601; None: the file has none.
        notes: assumptions and missing information; see `note`.
        window: column, row, width and height of the scene in the file's grid; None: it is all of it.
        carried: type of the tiles' numbers; integers are the file's own, floats are normalised.
        scaling: of integers, for every band and time step of the model: all factors, then all summands, then
            what the model is given for nodata.
    """

    width: int
    height: int
    window: tuple[int, int, int, int] | None = None
    count: int
    dtype: str
    crs: str | None = None
    transform: tuple[float, float, float, float, float, float] | None = None
    nodata: float | None = None
    names: tuple[str | None, ...] = ()
    bands: tuple[int, ...] = ()
    tiles: int
    latitude: float | None = None
    longitude: float | None = None
    acquired: str | None = None
    notes: tuple[str, ...] = ()
    carried: Carried = "float32"
    scaling: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()

    @property
    def strip(self) -> int:
        """Most tiles of a prompt."""
        return STRIP // 2 if self.carried == "float32" else STRIP


class ClassCount(Message):
    """The pixels and area of one class.

    Attributes:
        pixels: number of the mask's pixels of the class.
        share: of the pixels that are not nodata, 0 to 1.
        hectares: area on the ground; None if the size of a pixel is unknown.
    """

    name: str
    pixels: int
    share: float
    hectares: float | None = None


class ValueSummary(Message):
    """The values of a finished regression, over the pixels that are not nodata."""

    minimum: float
    mean: float
    maximum: float


class Tally(Message):
    """The counts of a finished map, and notes that take all of its pixels; `values` is a regression's.

    Attributes:
        left_out: the note why, by output that was not made though it was wanted.
    """

    notes: tuple[str, ...] = ()
    left_out: dict[Literal["polygons", "geopackage"], str] = Field(default_factory=dict)
    areas: tuple[ClassCount, ...] = ()
    nodata_pixels: int = Field(ge=0)
    values: ValueSummary | None = None


class Products(Tally):
    """The counts and files of a finished scene; a path is None if the output was not requested.

    Attributes:
        mask: GeoTIFF with one band of bytes: each pixel's class, or the card's `mask_nodata`.
        probabilities: GeoTIFF with a band of bytes per class: 0 to 250 with a scale of 1/250; 255 is nodata.
        preview: PNG.
        scene: PNG of the scene without the classes.
        classes: PNG of the classes without the scene, of the same size.
        value: GeoTIFF with one band of float32, the value of each pixel; NaN is nodata.
        polygons: GeoJSON of the mask's polygons.
        geopackage: GeoPackage of them.
        style: QGIS style of the mask.
        item: STAC item of the files.
        table: GeoParquet, a row a tile.
        embeddings: GeoTIFF of a pixel per patch, a band of int8 per number of its vector; -128 is nodata.
    """

    mask: Path | None = None
    value: Path | None = None
    table: Path | None = None
    embeddings: Path | None = None
    probabilities: Path | None = None
    preview: Path | None = None
    scene: Path | None = None
    classes: Path | None = None
    polygons: Path | None = None
    geopackage: Path | None = None
    style: Path | None = None
    item: Path | None = None


def _arm(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def send(
    sock: socket.socket, header: dict[str, Any], body: Buffer = b"", deadline: float | None = None
) -> None:
    """Send one frame.

    Args:
        deadline: seconds on the monotonic clock; None: no limit.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the other side has closed the socket.
    """
    text = json.dumps(header).encode()
    _arm(sock, deadline)
    sock.sendall(LENGTHS.pack(len(text), memoryview(body).nbytes) + text)
    if body:
        _arm(sock, deadline)
        sock.sendall(body)


def receive_into(sock: socket.socket, target: memoryview, deadline: float | None = None) -> None:
    """Receive exactly the bytes that fill `target`.

    Raises:
        EOFError: the other side has closed the socket.
        TimeoutError: the deadline has passed.
    """
    filled = 0
    while filled < len(target):
        _arm(sock, deadline)
        got = sock.recv_into(target[filled:])
        if not got:
            raise EOFError
        filled += got


def receive(
    sock: socket.socket, room: Callable[[int], memoryview], deadline: float | None = None
) -> tuple[dict[str, Any], int]:
    """Receive a frame: return its header and the length of its body, which is in the buffer that `room` gave.

    Args:
        room: returns the buffer for a body of a length; raises ValueError for an unexpected length.
        deadline: as in `send`.

    Raises:
        EOFError: the other side has closed the socket.
        TimeoutError: the deadline has passed.
        ValueError: the frame is malformed or its body unexpected.
    """
    lengths = bytearray(LENGTHS.size)
    receive_into(sock, memoryview(lengths), deadline)
    header_length, body_length = LENGTHS.unpack(lengths)
    if header_length > HEADER_LIMIT:
        raise ValueError("header too long")
    text = bytearray(header_length)
    receive_into(sock, memoryview(text), deadline)
    if body_length:
        receive_into(sock, room(body_length), deadline)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("header is no object")
    return header, body_length
