"""Define the card: a model's bands, classes, tile size and units, from `baton_geo` in its config.json."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCALE_LIMITS = (1e-9, 1e9)
"""Least and greatest scale of a request or a file."""
OFFSET_LIMIT = 1e9
"""Largest absolute offset of a request or a file."""

REFLECTANCE_ONE = 10_000
"""Integer files of most satellite products hold 10000 for a reflectance of 1."""
BYTE_MAX = 255


class ReadOnlyModel(BaseModel):
    """A read-only model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Band(ReadOnlyModel):
    """One input band.

    Attributes:
        name: as in the model's papers, e.g. `GREEN`.
        aliases: other names that files use for the band, e.g. `B03`; compared without case.
        mean: mean of the scaled values; subtracted from them.
        std: standard deviation of the scaled values; they are divided by it.
        scale: factor from a file's numbers, of integers or floats, to the unit of `mean`, for a band of
            another unit than the card's, such as radar in decibels beside reflectances; None: the card's.
        valid_range: lowest and highest scaled value of a band with a `scale` of its own.
        grid: of a scene of several files: whether this band's pixels may be the mask's, if they are the
            finest of those that may. If no band says so, all may.
        resampling: how it is brought onto that grid where its own pixels are of another size.
    """

    name: str
    aliases: tuple[str, ...] = ()
    mean: float
    std: float = Field(gt=0)
    scale: float | None = Field(None, gt=0)
    valid_range: tuple[float, float] | None = None
    grid: bool = False
    resampling: Literal["bilinear", "nearest"] = "bilinear"


class ClassLabel(ReadOnlyModel):
    """One class of the mask; its value is its position in the list."""

    name: str
    colour: tuple[int, int, int] = Field(description="Red, green, blue; 0-255.")


class MapValue(ReadOnlyModel):
    """The value that a regression model gives each pixel: output * scale + offset.

    Attributes:
        name: e.g. `above-ground biomass`.
        unit: e.g. `Mg/ha`; None: unknown.
    """

    name: str = "value"
    unit: str | None = None
    scale: float = 1.0
    offset: float = 0.0


class Embedding(ReadOnlyModel):
    """The output of an encoder alone: a vector for each patch.

    Attributes:
        patch: side of a patch, pixels.
        width: numbers of a vector.
        model: fingerprint of configuration and weights; empty until the plugin has started.
    """

    patch: int = Field(ge=1)
    width: int = Field(ge=1)
    model: str = ""


class Card(ReadOnlyModel):
    """The rasters that one model takes and the masks or values it gives.

    Attributes:
        bands: in the order the model takes them.
        classes: in the order of the model's output channels; none for a regression or an encoder alone.
        value: what a regression model gives; None: it is none.
        embedding: what an encoder alone gives, told by the model's configuration; None: it has a decoder.
        frames: time steps; a file then holds all bands of the first step, then of the second, ...
        tile: height and width of the model's tiles, pixels.
        overlap: pixels that two neighbouring tiles share; they are blended.
        scale: factor from the numbers of an integer file to the units of `mean`.
        float_scale: the same factor for float files.
        offset: added after scaling.
        valid_range: lowest and highest scaled value; a scene with more than 1 % of its pixels outside is
            refused.
        nodata: nodata value of files that state none; None: every value is data.
        nodata_replace: number of an integer file that the model is given for nodata; None: the bands' means.
        mask_nodata: the mask's value of unknown pixels.
    """

    bands: tuple[Band, ...] = Field(min_length=1)
    classes: tuple[ClassLabel, ...] = Field((), max_length=250)
    value: MapValue | None = None
    embedding: Embedding | None = None
    frames: int = Field(1, ge=1, le=64)
    tile: int = Field(ge=16, le=2048)
    overlap: int = Field(ge=0)
    scale: float = 1.0
    float_scale: float = 1.0
    offset: float = 0.0
    valid_range: tuple[float, float] | None = None
    nodata: float | None = None
    nodata_replace: float | None = None
    mask_nodata: int = Field(255, ge=0, le=255)

    @property
    def output(self) -> tuple[int, int, int]:
        """The shape of the model's output for a tile: a score per class, one value, or a vector per patch."""
        if self.embedding is not None:
            side = self.tile // self.embedding.patch
            return self.embedding.width, side, side
        return len(self.classes) or 1, self.tile, self.tile

    @property
    def channels(self) -> int:
        """The number of the model's output channels."""
        return self.output[0]

    @property
    def own_units(self) -> tuple[bool, ...]:
        """For each band, whether it has a unit of its own."""
        return tuple(band.scale is not None for band in self.bands)

    @property
    def reflectance(self) -> float | None:
        """The value of reflectance 1 in the units of `mean`, if integer files hold reflectance x 10000; else
        None.

        Such a card is recognised by its numbers: a byte's 255 is less than any band's deviation, and the
        bands' means and deviations are those of reflectance.
        """
        bands = [band for band in self.bands if band.scale is None]
        if not bands:
            return None
        one = REFLECTANCE_ONE * self.scale
        bright = max(band.mean + band.std for band in bands)
        fine = BYTE_MAX * self.scale < min(band.std for band in bands)
        return one if fine and 0.02 * one <= bright <= 1.5 * one else None

    @model_validator(mode="after")
    def _is_consistent(self) -> Card:
        if self.overlap * 2 > self.tile:
            raise ValueError("overlap: at most half of a tile")
        if len(self.classes) == 1:
            raise ValueError("classes: at least 2")
        if self.classes and self.value is not None:
            raise ValueError("value: a model of classes has none")
        if self.embedding is not None and (self.tile % self.embedding.patch or self.overlap):
            raise ValueError("tile: must be a multiple of the patch, and overlap 0, for an encoder alone")
        if any(band.valid_range is not None and band.scale is None for band in self.bands):
            raise ValueError("bands: a `valid_range` of a band needs a `scale` of its own")
        if self.mask_nodata < len(self.classes):
            raise ValueError("mask_nodata: a class has this value")
        return self
