"""What crosses between the gateway and a raster child, as JSON."""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict, Field

from baton_geo.card import Card, Frozen
from baton_geo.settings import GeoLimits

MASK, PROBABILITIES, PREVIEW = "mask.tif", "probabilities.tif", "preview.png"  # in a request's own folder


class Message(Frozen):
    """Crosses as JSON; a nodata of NaN has to survive."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class SceneAsk(Message):
    """What is wanted of one raster.

    Attributes:
        card: what the model takes and gives.
        limits: what the raster may cost.
        indices: numbers of the bands to use, from 0 in file order; None: by name, else by order.
        scale: number * scale + offset is a pixel's value; None with `offset` None: as the file states it.
        offset: see `scale`.
        mask: write the class mask.
        probabilities: write the class probabilities.
        preview: write the picture.
    """

    card: Card
    limits: GeoLimits = GeoLimits()
    indices: tuple[int, ...] | None = None
    scale: float | None = None
    offset: float | None = None
    mask: bool = True
    probabilities: bool = False
    preview: bool = False


class SceneInfo(Message):
    """What the raster is.

    Attributes:
        width: pixels.
        height: pixels.
        count: bands of the file, its alpha band left out.
        dtype: of its pixels, as numpy calls it.
        crs: `EPSG:...` or WKT; None: the file says none.
        transform: a, b, c, d, e, f of x = a * column + b * row + c, y = d * column + e * row + f; None: the
            file says none.
        nodata: the value that counts as nodata: the file's, else the card's.
        names: of the file's bands.
        bands: numbers from 0 of those used, in the order of the model.
        tiles: how many the model is given.
        latitude: of the centre, degrees north on WGS 84; None without a CRS.
        longitude: of the centre, degrees east.
        acquired: date or date and time, ISO 8601, if the file says.
        notes: what the client should know, a sentence each.
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


class ClassArea(Message):
    """How much of the scene one class covers.

    Attributes:
        name: of the class.
        pixels: of the mask.
        share: of the pixels that are not nodata, 0 to 1.
        hectares: None where the scale of the grid is not known.
    """

    name: str
    pixels: int
    share: float
    hectares: float | None = None


class Tally(Message):
    """What the child counted over the finished mask."""

    areas: tuple[ClassArea, ...]
    nodata_pixels: int = Field(ge=0)


class Products(Tally):
    """What came out.

    Attributes:
        mask: GeoTIFF of one band of bytes: the class of each pixel, the card's `mask_nodata` where unknown.
        probabilities: GeoTIFF with a band of bytes for each class: 0 to 250, which its scale of 1/250
            makes 0 to 1; 255 is nodata.
        preview: PNG.
    """

    mask: Path | None = None
    probabilities: Path | None = None
    preview: Path | None = None
