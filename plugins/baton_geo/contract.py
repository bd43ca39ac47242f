"""Define `data` of a /pooling request, the options of an upload's query, and `data` of the response.

The fields are those of the published plugins, so that their clients work here unmodified:

- vLLM's reference plugin (`tests/plugins/prithvi_io_processor_plugin/prithvi_io_processor/types.py`).
  Request: `data`, `data_format` (b64_json, bytes, url or path), `image_format` (any
  text), `out_data_format` (b64_json or url), all required. Response: `type` (path or b64_json), `format`
  ("tiff"), `data`; the classic ones `request_id` too.
- TerraTorch (`terratorch/vllm/plugins/segmentation/types.py`). Request: `data`, `data_format` (b64_json,
  path or url; later without b64_json), `out_data_format` (b64_json or path), `indices` (optional, counted
  from 0); later `out_path`. `image_format` is sent and ignored ("tiff", "geoTiff", ""). Response:
  `data_format` (b64_json or path), `data`, `request_id`.
- vLLM's example client (`examples/pooling/plugin/prithvi_geospatial_mae_online.py`, before that in
  `examples/online_serving/`). Sends `data`, `data_format` "url", `image_format` "tiff" and
  `out_data_format` "b64_json"; reads `data` alone, as the base64 of a GeoTIFF.

Needs the standard library and pydantic only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from baton_geo.card import OFFSET_LIMIT, SCALE_LIMITS, ReadOnlyModel
from baton_geo.errors import RequestInvalid

URL_CHARACTERS = 2048
PATH_CHARACTERS = 4096
INDICES = 256
FRAMES = 64
ASSETS = 128
ASSET_NAME = 128

DataFormat = Literal["b64_json", "bytes", "url", "path"]
OutDataFormat = Literal["b64_json", "path", "url"]
Output = Literal[
    "mask",
    "probabilities",
    "preview",
    "scene",
    "classes",
    "polygons",
    "geopackage",
    "style",
    "item",
    "value",
    "embeddings",
]
Outputs = Annotated[tuple[Output, ...], Field(min_length=1, max_length=11, fail_fast=True)]
LASTING: tuple[Output, ...] = ("mask", "probabilities", "preview", "polygons", "geopackage", "style", "item")
LASTING_VALUES: tuple[Output, ...] = ("value", "preview")
LASTING_VECTORS: tuple[Output, ...] = ("embeddings",)
"""Outputs of a request without `outputs` whose files last; see `GeoProcessor.for_files`."""
Index = Annotated[int, Field(strict=True, ge=0, le=4095)]
Pixel = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Numbers = Annotated[tuple[Number, ...], Field(min_length=1, max_length=INDICES, fail_fast=True)]
Indices = Annotated[tuple[Index, ...], Field(min_length=1, max_length=INDICES, fail_fast=True)]
BY_TYPE: dict[str, tuple[str, ...]] = {
    "image/tiff": ("mask",),
    "image/png": ("preview",),
    "application/zip": ("mask", "preview"),
    "application/geo+json": ("polygons",),
    "application/geopackage+sqlite3": ("geopackage",),
}
"""Outputs by accepted media type, for a request without `outputs`."""


def quoted(text: str, most: int = 120) -> str:
    """Quote a client's text for a message: one line of ASCII, cut after `most` characters."""
    cut = text[:most]
    return ascii(cut) + ("..." if len(text) > most else "")


def _day(value: object) -> object:
    """Refuse all but `YYYY-MM-DD`: pydantic would also take numbers, times and other spellings."""
    if isinstance(value, str):
        if len(value) != 10 or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII):
            raise ValueError("must be a day, written YYYY-MM-DD")
    elif type(value) is not date:
        raise ValueError("must be a day, written YYYY-MM-DD")
    return value


Day = Annotated[date, BeforeValidator(_day)]
Days = Annotated[tuple[Day, ...], Field(min_length=1, max_length=FRAMES, fail_fast=True)]


def _kind_of_numbers(value: object) -> str:
    """Return which of the two kinds of `OneOrEach` a value is: an error then speaks of that one alone."""
    return "each" if isinstance(value, list | tuple) else "one"


OneOrEach = (
    Annotated[
        Annotated[Number, Tag("one")] | Annotated[Numbers, Tag("each")], Discriminator(_kind_of_numbers)
    ]
    | None
)


def _each(value: float | tuple[float, ...] | None) -> tuple[float, ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)


class Location(ReadOnlyModel):
    """The place of a scene on WGS 84, for models with location embeddings."""

    latitude: float = Field(ge=-90, le=90, allow_inf_nan=False, description="Degrees north.")
    longitude: float = Field(ge=-180, le=180, allow_inf_nan=False, description="Degrees east.")


class GeoOptions(ReadOnlyModel):
    """The options of a request: all its fields but the raster.

    Attributes:
        image_format: ignored: the file's bytes decide.
        out_data_format: must be `b64_json`. `path` and `url` of the published contract would write to the
            server's disk and are refused.
        indices: indices of the file's bands for the model, from 0, in the model's order; None: chosen by the
            bands' names, or by their order.
        outputs: the first becomes `data` of the answer, the others its `files`.
        sieve: pixels; of the polygons smaller ones become part of their largest neighbour. 0, 1: none do.
        dates: one per time step, for models with temporal embeddings; None: of the raster.
        location: of the scene, for models with location embeddings; None: of the raster.
        scale: a pixel's value is number * scale + offset, in the unit of the model's integer files or of its
            float files; one number for all bands, or one a band. None: 1; if `offset` is None too, what the
            file states.
        offset: see `scale`. None: 0; if `scale` is None too, what the file states.
        window: column, row, width and height of the part of the scene that is wanted, pixels; None: all.
        bbox: west, south, east and north of the part that is wanted, in `bbox_crs`; x first, whatever the
            CRS says of its axes. None: all.
        bbox_crs: authority and code, as `EPSG:32633`; longitude and latitude on WGS 84 by default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    image_format: str = Field("", max_length=64)
    out_data_format: OutDataFormat = "b64_json"
    indices: Indices | None = None
    outputs: Outputs = ("mask",)
    sieve: int = Field(0, strict=True, ge=0, le=10_000_000)
    dates: Days | None = None
    location: Location | None = None
    scale: OneOrEach = None
    offset: OneOrEach = None
    window: tuple[Pixel, Pixel, Pixel, Pixel] | None = None
    bbox: tuple[Number, Number, Number, Number] | None = None
    bbox_crs: str = Field("EPSG:4326", pattern=r"^[A-Za-z]{2,12}:[A-Za-z0-9_]{1,12}$")

    @property
    def partial(self) -> bool:
        """Whether a part of the scene is wanted."""
        return self.window is not None or self.bbox is not None

    @model_validator(mode="after")
    def _has_one_part(self) -> Self:
        if self.window is not None and self.bbox is not None:
            raise ValueError("bbox: a window is given too; give one of them")
        if self.window is not None and not (self.window[2] and self.window[3]):
            raise ValueError("window: column, row, width, height; it has no pixels")
        if self.bbox is not None and self.bbox[1] >= self.bbox[3]:
            raise ValueError("bbox: west, south, east, north; its south is not below its north")
        return self

    @field_validator("scale")
    @classmethod
    def _is_a_scale(cls, value: OneOrEach) -> OneOrEach:
        least, greatest = SCALE_LIMITS
        for number in _each(value):
            if not least <= number <= greatest:
                raise ValueError(
                    f"is {number:g}; must be a number from {least:g} to {greatest:g}, e.g. 0.0001"
                )
        return value

    @field_validator("offset")
    @classmethod
    def _is_an_offset(cls, value: OneOrEach) -> OneOrEach:
        for number in _each(value):
            if abs(number) > OFFSET_LIMIT:
                raise ValueError(
                    f"is {number:g}; must be a number from -{OFFSET_LIMIT:g} to {OFFSET_LIMIT:g}, e.g. -1000"
                )
        return value

    @field_validator("out_data_format")
    @classmethod
    def _is_given_inline(cls, value: OutDataFormat) -> OutDataFormat:
        if value != "b64_json":
            raise ValueError("this server writes no files for clients; ask for b64_json")
        return value

    @field_validator("outputs")
    @classmethod
    def _are_different(cls, value: tuple[Output, ...]) -> tuple[Output, ...]:
        if len(set(value)) < len(value):
            raise ValueError("an output is named twice; name each once")
        return value


class Asset(ReadOnlyModel):
    """One file.

    Attributes:
        data: the raster as base64, address, path or bytes; `data_format` says which.
        data_format: kind of `data`; `bytes` is only for callers in Python.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    data: str | bytes = Field(repr=False)
    data_format: DataFormat

    @model_validator(mode="after")
    def _data_is_what_its_format_says(self) -> Self:
        if self.data_format == "bytes" and isinstance(self.data, str):
            raise ValueError("data: JSON has no bytes; send base64 as b64_json, or upload the file")
        if self.data_format != "bytes" and isinstance(self.data, bytes):
            raise ValueError(f"data: bytes, but data_format is {self.data_format}")
        most = {"url": URL_CHARACTERS, "path": PATH_CHARACTERS}.get(self.data_format)
        if most is not None and len(self.data) > most:
            raise ValueError(f"data: {len(self.data)} characters; a {self.data_format} has at most {most}")
        return self


class GeoRequest(Asset, GeoOptions):
    """`data` of a /pooling request of one file."""


AssetName = Annotated[str, Field(min_length=1, max_length=ASSET_NAME)]


def _asset(value: object) -> object:
    """Take a text for an address."""
    return {"data": value, "data_format": "url"} if isinstance(value, str) else value


class AssetsRequest(GeoOptions):
    """`data` of a /pooling request of several files on one ground.

    Attributes:
        assets: files by the names of their bands, in the words of a file's own: `B02`, `blue`; a text is an
            address.
    """

    assets: dict[AssetName, Annotated[Asset, BeforeValidator(_asset)]] = Field(
        min_length=1, max_length=ASSETS, repr=False
    )


class ItemRequest(GeoOptions):
    """`data` of a /pooling request of a STAC item.

    Attributes:
        item: the item, or its address; the model's bands are found among its assets.
    """

    item: dict[str, Any] | Annotated[str, Field(max_length=URL_CHARACTERS)] = Field(repr=False)

    @model_validator(mode="after")
    def _has_no_indices(self) -> Self:
        if self.indices is not None:
            raise ValueError("indices: an item's bands are found by their names; name files with assets")
        return self


@dataclass(frozen=True)
class UploadRequest:
    """A request whose body is the raster file, with the options of its query."""

    file: Path
    options: GeoOptions


class ClassArea(ReadOnlyModel):
    """The area of one class in a scene.

    Attributes:
        pixels: number of pixels of the class.
        share: of the pixels that are not nodata; 0 to 1.
        hectares: area on the ground; None if the size of a pixel is unknown.
    """

    value: int
    name: str
    pixels: int
    share: float
    hectares: float | None


class ValueRange(ReadOnlyModel):
    """The values of a regression, over the pixels that are not nodata.

    Attributes:
        name: e.g. `above-ground biomass`.
        unit: e.g. `Mg/ha`; None: unknown.
    """

    name: str
    unit: str | None
    minimum: float
    mean: float
    maximum: float


class GeoFile(ReadOnlyModel):
    """An output after the first.

    Attributes:
        name: file name without a folder, e.g. `preview.png`.
        media_type: e.g. `image/png`.
        data: the file in base64.
    """

    name: str
    media_type: str
    data: str = Field(repr=False)


class Fetched(ReadOnlyModel):
    """The bytes and requests that files at addresses cost.

    Attributes:
        bytes: fetched.
        of: bytes that the files have.
        requests: to their hosts.
    """

    bytes: int
    of: int
    requests: int


class GeoAnswer(ReadOnlyModel):
    """`data` of the response.

    Attributes:
        type: always `b64_json`, as in vLLM's reference plugin.
        data_format: always `b64_json`, as in TerraTorch.
        format: of `data`: `tiff`, or what it is called of others, as `png` of a preview and `parquet` of a
            table of embeddings.
        data: the first requested output, base64.
        request_id: of the server; None offline.
        crs: of the raster, `EPSG:32630` or WKT; None: the raster has none.
        transform: from pixel (column, row) to CRS units, `(a, b, c, d, e, f)` with
            x = a * column + b * row + c and y = d * column + e * row + f; None: the raster has none.
        width: pixels.
        height: pixels.
        classes: areas, in the order of the classes' values; none of a regression.
        value: of a regression; None: the model gives classes.
        nodata_pixels: number of pixels without data.
        notes: assumptions and missing information: a code, a colon, a sentence.
        files: the other outputs.
        window: column, row, width and height of the part that was asked for; None: the whole scene was.
        fetched: what was fetched of files whose parts were asked for; None: of none.
    """

    type: Literal["b64_json"] = "b64_json"
    data_format: Literal["b64_json"] = "b64_json"
    format: Literal["tiff", "png", "geojson", "gpkg", "qml", "json", "parquet"] = "tiff"
    data: str = Field(repr=False)
    request_id: str | None = None
    crs: str | None
    transform: tuple[float, float, float, float, float, float] | None
    width: int
    height: int
    classes: tuple[ClassArea, ...]
    value: ValueRange | None = None
    nodata_pixels: int
    notes: tuple[str, ...] = ()
    files: tuple[GeoFile, ...] = ()
    window: tuple[int, int, int, int] | None = None
    fetched: Fetched | None = None


AnyGeoRequest = GeoRequest | AssetsRequest | ItemRequest
Options = TypeVar("Options", bound=GeoOptions)


def geo_request(data: object) -> AnyGeoRequest:
    """Parse `data` of a /pooling request.

    Raises:
        RequestInvalid: a field is unknown, missing or wrong; `param` names it.
    """
    if isinstance(data, str):
        raise RequestInvalid(
            "data: is a text; must be an object with the raster's fields, e.g. "
            '{"data": {"data": ..., "data_format": ...}}',
            param="data",
        )
    if isinstance(data, AssetsRequest) or (isinstance(data, Mapping) and "assets" in data):
        return _validated(AssetsRequest, data)
    if isinstance(data, ItemRequest) or (isinstance(data, Mapping) and "item" in data):
        return _validated(ItemRequest, data)
    return _validated(GeoRequest, data)


def geo_options(fields: object) -> GeoOptions:
    """Parse the options of an upload.

    Raises:
        RequestInvalid: an option is unknown or wrong; `param` names it.
    """
    return _validated(GeoOptions, fields)


def _validated(kind: type[Options], data: object) -> Options:
    if isinstance(data, kind):
        return data
    if not isinstance(data, Mapping):
        raise RequestInvalid("data: must be an object with the raster's fields", param="data")
    for key in data:
        if key not in kind.model_fields:
            _refuse_key(key, list(kind.model_fields))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # Raised after the clause: pydantic's error holds the raster and must not become the context.
        refused = _refusal(error)
    raise refused


def _refuse_key(key: Any, known: list[str]) -> None:
    if key == "out_path":
        raise RequestInvalid(
            "data.out_path: this server writes no files for clients; leave it out, and ask for "
            "out_data_format b64_json",
            param="data.out_path",
        )
    if not isinstance(key, str):
        raise RequestInvalid("data: every key must be a text", param="data")
    near = difflib.get_close_matches(key[:64], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known fields: " + ", ".join(known)
    raise RequestInvalid(f"data.{quoted(key, 64)}: not a field of this plugin; {hint}", param="data")


def _refusal(error: ValidationError) -> RequestInvalid:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(["data", *(str(part)[:64] for part in first["loc"] if part not in ("one", "each"))])
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"] and ": " in message:
        field, message = message.split(": ", 1)
        where = f"data.{field}"
    if first["type"] == "missing":
        message = "missing"
        if where == "data.data_format":
            message = "missing; one of b64_json, url, path"
    return RequestInvalid(f"{where}: {message}", param=where)


def options_of_query(query: Mapping[str, str], accept: Sequence[str]) -> GeoOptions:
    """Parse a query string: lists with commas, a location as `latitude,longitude`.

    Args:
        query: options by name, e.g. `{"indices": "2,1,0", "location": "45.1,14.2"}`.
        accept: media types the client accepts; they decide the outputs if `query` has none.

    Raises:
        RequestInvalid: an option is unknown or wrong; `param` names it.
    """
    fields: dict[str, Any] = {name: READERS.get(name, str)(value) for name, value in query.items()}
    if "outputs" not in fields:
        named = next((BY_TYPE[kind] for kind in accept if kind in BY_TYPE), None)
        if named is not None:
            fields["outputs"] = named
    try:
        return geo_options(fields)
    except RequestInvalid as error:
        message = error.message.removeprefix("data.")  # the same option of a JSON body is in `data`
        raise RequestInvalid(message, param=(error.param or "").removeprefix("data.")) from None


def _numbers(value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise RequestInvalid(
            "indices: must be band indices from 0, separated by commas, e.g. 0,1,2", param="indices"
        ) from None


def _count(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise RequestInvalid("sieve: must be a number of pixels, e.g. 9", param="sieve") from None


def _words(value: str) -> list[str]:
    return [part.strip() for part in value.split(",")]


def _place(value: str) -> dict[str, float]:
    try:
        latitude, longitude = (float(part) for part in value.split(","))
    except ValueError:
        raise RequestInvalid(
            "location: must be latitude,longitude in degrees, e.g. 45.1,14.2", param="location"
        ) from None
    return {"latitude": latitude, "longitude": longitude}


def _number(name: str) -> Callable[[str], float | list[float]]:
    def read(value: str) -> float | list[float]:
        try:
            numbers = [float(part) for part in value.split(",")]
            return numbers if len(numbers) > 1 else numbers[0]
        except ValueError:
            raise RequestInvalid(
                f"{name}: must be a number, or one a band with commas; a pixel's value is its number times "
                "scale plus offset, e.g. offset=-1000, or scale=0.0001 with offset=-0.1",
                param=name,
            ) from None

    return read


def _four(name: str, kind: type[int] | type[float], example: str) -> Callable[[str], list[float]]:
    def read(value: str) -> list[float]:
        try:
            numbers = [kind(part) for part in value.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 4:
            raise RequestInvalid(f"{name}: must be four numbers with commas: {example}", param=name)
        return numbers

    return read


READERS: dict[str, Callable[[str], Any]] = {
    "indices": _numbers,
    "outputs": _words,
    "dates": _words,
    "location": _place,
    "sieve": _count,
    "scale": _number("scale"),
    "offset": _number("offset"),
    "window": _four("window", int, "column,row,width,height, e.g. 0,0,1024,1024"),
    "bbox": _four("bbox", float, "west,south,east,north, e.g. 14.1,45.0,14.3,45.2"),
}
