"""What a client asks and what it is answered: `data` of a /pooling request, and of its response.

The fields are those of the published plugins, so that their clients work here unmodified:

- vLLM's reference plugin (`tests/plugins/prithvi_io_processor_plugin/prithvi_io_processor/types.py`).
  Request: `data`, `data_format` (b64_json, bytes, url or path), `image_format` (any
  text), `out_data_format` (b64_json or url), all required. Answer: `type` (path or b64_json), `format`
  ("tiff"), `data`; the classic ones `request_id` too.
- TerraTorch (`terratorch/vllm/plugins/segmentation/types.py`). Request: `data`, `data_format` (b64_json,
  path or url; later without b64_json), `out_data_format` (b64_json or path), `indices` (optional, counted
  from 0); later `out_path`. `image_format` is sent and ignored ("tiff", "geoTiff", ""). Answer:
  `data_format` (b64_json or path), `data`, `request_id`.
- vLLM's example client (`examples/pooling/plugin/prithvi_geospatial_mae_online.py`, before that in
  `examples/online_serving/`). Sends `data`, `data_format` "url", `image_format` "tiff" and
  `out_data_format` "b64_json"; reads `data` alone, as the base64 of a GeoTIFF.

Needs the standard library and pydantic only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from baton_geo.card import OFFSET_LIMIT, SCALE_LIMITS, Frozen
from baton_geo.errors import RequestInvalid

URL_CHARACTERS = 2048
PATH_CHARACTERS = 4096
INDICES = 256
FRAMES = 64

DataFormat = Literal["b64_json", "bytes", "url", "path"]
OutDataFormat = Literal["b64_json", "path", "url"]
Output = Literal["mask", "probabilities", "preview"]
Outputs = Annotated[tuple[Output, ...], Field(min_length=1, max_length=3, fail_fast=True)]
Index = Annotated[int, Field(strict=True, ge=0, le=4095)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Indices = Annotated[tuple[Index, ...], Field(min_length=1, max_length=INDICES, fail_fast=True)]


def quoted(text: str, most: int = 120) -> str:
    """A client's text as a message may hold it: one line of ASCII in quotes, at most about `most` long."""
    cut = text[:most]
    return ascii(cut) + ("..." if len(text) > most else "")


def _day(value: object) -> object:
    """`YYYY-MM-DD` alone: pydantic would also take numbers, times and other spellings."""
    if isinstance(value, str):
        if len(value) != 10 or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII):
            raise ValueError("not a day written as YYYY-MM-DD")
    elif type(value) is not date:
        raise ValueError("not a day written as YYYY-MM-DD")
    return value


Day = Annotated[date, BeforeValidator(_day)]
Days = Annotated[tuple[Day, ...], Field(min_length=1, max_length=FRAMES, fail_fast=True)]


class Location(Frozen):
    """Where a scene is, for models with location embeddings; WGS 84."""

    latitude: float = Field(ge=-90, le=90, allow_inf_nan=False, description="Degrees north.")
    longitude: float = Field(ge=-180, le=180, allow_inf_nan=False, description="Degrees east.")


class GeoOptions(Frozen):
    """What a request says beside its raster.

    Attributes:
        image_format: what the client calls its file; the bytes decide, not this.
        out_data_format: `b64_json` is the one answer given. `path` and `url` are in the published
            contract, write to the server's disk, and are refused.
        indices: which bands of the file the model gets, counted from 0, in the model's order;
            None: by the names in the file, or as they come.
        outputs: the first is the answer's `data`, the others stand in `files`.
        dates: of the time steps, one each; for models with temporal embeddings.
        location: of the scene; None: from the raster.
        scale: number * scale + offset is a pixel's value, which has to be in one of the units that the model
            takes in integer or in float files. None: 1, or with `offset` None too, what the file states.
        offset: see `scale`; None: 0, or with `scale` None too, what the file states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    image_format: str = Field("", max_length=64)
    out_data_format: OutDataFormat = "b64_json"
    indices: Indices | None = None
    outputs: Outputs = ("mask",)
    dates: Days | None = None
    location: Location | None = None
    scale: Number | None = None
    offset: Number | None = None

    @field_validator("scale")
    @classmethod
    def _is_a_scale(cls, value: float | None) -> float | None:
        least, greatest = SCALE_LIMITS
        if value is not None and not least <= value <= greatest:
            raise ValueError(
                f"{value:g} is not a scale; a number from {least:g} to {greatest:g} is, as 0.0001"
            )
        return value

    @field_validator("offset")
    @classmethod
    def _is_an_offset(cls, value: float | None) -> float | None:
        if value is not None and abs(value) > OFFSET_LIMIT:
            raise ValueError(f"{value:g} is not an offset; a number up to {OFFSET_LIMIT:g} is, as -1000")
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
            raise ValueError("one of them is named twice")
        return value


class GeoRequest(GeoOptions):
    """`data` of a /pooling request.

    Attributes:
        data: the raster: base64, an address, a path, or bytes, as `data_format` says.
        data_format: `bytes` is for callers in Python; JSON has no bytes, and an upload needs no request.
    """

    data: str | bytes = Field(repr=False)
    data_format: DataFormat

    @model_validator(mode="after")
    def _data_is_what_its_format_says(self) -> GeoRequest:
        if self.data_format == "bytes" and isinstance(self.data, str):
            raise ValueError("data: JSON has no bytes; send base64 as b64_json, or upload the file")
        if self.data_format != "bytes" and isinstance(self.data, bytes):
            raise ValueError(f"data: bytes, but data_format is {self.data_format}")
        most = {"url": URL_CHARACTERS, "path": PATH_CHARACTERS}.get(self.data_format)
        if most is not None and len(self.data) > most:
            raise ValueError(f"data: {len(self.data)} characters; a {self.data_format} has at most {most}")
        return self


class ClassArea(Frozen):
    """How much of a scene one class covers.

    Attributes:
        value: in the mask.
        pixels: of that value.
        share: of the pixels that are not nodata; 0-1.
        hectares: None where the raster does not say how large a pixel is.
    """

    value: int
    name: str
    pixels: int
    share: float
    hectares: float | None


class GeoFile(Frozen):
    """A further output.

    Attributes:
        name: a file name without a folder, e.g. `preview.png`.
        data: base64.
    """

    name: str
    media_type: str
    data: str = Field(repr=False)


class GeoAnswer(Frozen):
    """`data` of the response.

    Attributes:
        type: always `b64_json`, as vLLM's reference plugin says it.
        data_format: the same, as TerraTorch says it.
        format: of `data`: `tiff`, or `png` for a preview.
        data: the first of the outputs asked for, base64.
        request_id: the engine's, where there is one.
        crs: of the raster, `EPSG:32630` or WKT; None: it has none.
        transform: from pixel (column, row) to CRS units, `(a, b, c, d, e, f)` with
            x = a * column + b * row + c and y = d * column + e * row + f; None: it has none.
        width: pixels.
        height: pixels.
        classes: in the order of their values.
        nodata_pixels: where nothing is known.
        notes: what was assumed or missing, one sentence each.
        files: the other outputs.
    """

    type: Literal["b64_json"] = "b64_json"
    data_format: Literal["b64_json"] = "b64_json"
    format: Literal["tiff", "png"] = "tiff"
    data: str = Field(repr=False)
    request_id: str | None = None
    crs: str | None
    transform: tuple[float, float, float, float, float, float] | None
    width: int
    height: int
    classes: tuple[ClassArea, ...]
    nodata_pixels: int
    notes: tuple[str, ...] = ()
    files: tuple[GeoFile, ...] = ()


Wish = TypeVar("Wish", bound=GeoOptions)


def geo_request(data: object) -> GeoRequest:
    """The request in `data` of a /pooling request.

    Raises:
        RequestInvalid: a key nobody knows, a missing one, or a wrong value; `param` names it.
    """
    if isinstance(data, str):
        raise RequestInvalid(
            "data: a text; the raster's fields stand one level deeper, as "
            '{"data": {"data": ..., "data_format": ...}}',
            param="data",
        )
    return _validated(GeoRequest, data)


def geo_options(fields: object) -> GeoOptions:
    """What an upload says beside its body.

    Raises:
        RequestInvalid: as `geo_request`.
    """
    return _validated(GeoOptions, fields)


def _validated(kind: type[Wish], data: object) -> Wish:
    if isinstance(data, kind):
        return data
    if not isinstance(data, Mapping):
        raise RequestInvalid("data: not an object with a raster's fields", param="data")
    for key in data:
        if key not in kind.model_fields:
            _refuse_key(key, list(kind.model_fields))
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # Out of the clause, so that pydantic's error, which holds the raster, is not kept as the context.
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
        raise RequestInvalid("data: a key that is not a text", param="data")
    near = difflib.get_close_matches(key[:64], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(known)
    raise RequestInvalid(f"data.{quoted(key, 64)}: not a field of this plugin; {hint}", param="data")


def _refusal(error: ValidationError) -> RequestInvalid:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(["data", *(str(part) for part in first["loc"])])
    said = first["msg"].removeprefix("Value error, ")
    if not first["loc"] and ": " in said:
        field, said = said.split(": ", 1)
        where = f"data.{field}"
    if first["type"] == "missing":
        said = "missing"
        if where == "data.data_format":
            said = "missing; one of b64_json, url, path"
    return RequestInvalid(f"{where}: {said}", param=where)
