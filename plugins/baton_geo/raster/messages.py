"""Define the JSON messages between the gateway and a raster child."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from baton_geo.card import Card, ReadOnlyModel
from baton_geo.settings import GeoLimits

NoteCode = Literal[
    "areas_scaled", "areas_unknown", "band_wavelength", "bands_in_order", "bands_marked", "control_points",
    "fill_hidden", "first_image", "no_crs", "no_geotransform", "nodata_of_card", "nodata_of_one_band",
    "nodata_zero_kept", "off_earth", "offset_removed", "offset_suspected", "rotated", "rpcs", "scale_of_file",
    "scale_of_request", "scale_unused", "values_dark", "values_negative", "values_of_landsat",
]  # fmt: skip
"""The kinds of notes; the README says what each means."""
MASK, PROBABILITIES, PREVIEW = "mask.tif", "probabilities.tif", "preview.png"  # in the request's folder


def note(code: NoteCode, text: str) -> str:
    """Make a note: a code for programs, then a sentence for people."""
    return f"{code}: {text}"


class Message(ReadOnlyModel):
    """A message; a nodata of NaN survives the JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class SceneRequest(Message):
    """A request to open one raster.

    Attributes:
        card: of the model.
        limits: of the request.
        indices: indices of the bands to use, from 0 in file order; None: by name, else by order.
        scale: a pixel's value is number * scale + offset; one for all bands or one a band, in the model's
            order; None and `offset` None: as the file states.
        offset: see `scale`.
        mask: whether to write the class mask.
        probabilities: whether to write the class probabilities.
        preview: whether to write the preview.
    """

    card: Card
    limits: GeoLimits = GeoLimits()
    indices: tuple[int, ...] | None = None
    scale: float | tuple[float, ...] | None = None
    offset: float | tuple[float, ...] | None = None
    mask: bool = True
    probabilities: bool = False
    preview: bool = False


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
        tiles: number of tiles.
        latitude: of the centre, degrees north on WGS 84; None without a CRS.
        longitude: of the centre, degrees east.
        acquired: date or date and time of acquisition, ISO 8601; None: the file has none.
        notes: assumptions and missing information; see `note`.
    """

    width: int
    height: int
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


class ClassCount(Message):
    """The pixels and area of one class.

    Attributes:
        name: of the class.
        pixels: number of the mask's pixels of the class.
        share: of the pixels that are not nodata, 0 to 1.
        hectares: area on the ground; None if the size of a pixel is unknown.
    """

    name: str
    pixels: int
    share: float
    hectares: float | None = None


class Tally(Message):
    """The counts of a finished mask, and notes that take all of its pixels."""

    notes: tuple[str, ...] = ()
    areas: tuple[ClassCount, ...]
    nodata_pixels: int = Field(ge=0)


class Products(Tally):
    """The counts and files of a finished scene; a path is None if the output was not requested.

    Attributes:
        mask: GeoTIFF with one band of bytes: each pixel's class, or the card's `mask_nodata`.
        probabilities: GeoTIFF with a band of bytes per class: 0 to 250 with a scale of 1/250; 255 is nodata.
        preview: PNG.
    """

    mask: Path | None = None
    probabilities: Path | None = None
    preview: Path | None = None
