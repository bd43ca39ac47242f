"""What a model says of the rasters it takes and gives: the `baton_geo` table of its config.json."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCALE_LIMITS = (1e-9, 1e9)
"""Least and greatest scale that a request or a file may say."""
OFFSET_LIMIT = 1e9
"""Largest offset that a request or a file may say, whatever its sign."""


class Frozen(BaseModel):
    """Read-only, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Band(Frozen):
    """One input band.

    Attributes:
        name: as the model's papers call it, e.g. `GREEN`.
        aliases: other names a file's band description may carry, e.g. `B03`; compared without case.
        mean: of the band after scaling; subtracted before the model sees it.
        std: of the band after scaling; divided by.
    """

    name: str
    aliases: tuple[str, ...] = ()
    mean: float
    std: float = Field(gt=0)


class ClassLabel(Frozen):
    """One class of the mask: its value is its place in the list."""

    name: str
    colour: tuple[int, int, int] = Field(description="Red, green, blue; 0-255.")


class Card(Frozen):
    """The rasters of one model.

    Attributes:
        bands: in the order the model takes them.
        classes: in the order of the model's output channels.
        frames: time steps; a file then holds all bands of the first step, then of the second, ...
        tile: height and width of the tiles the model is given, pixels.
        overlap: pixels two neighbouring tiles share; blended.
        scale: what one unit of an integer file is worth, in the units of `mean`.
        float_scale: the same for files of floats.
        offset: added after scaling.
        valid_range: after scaling; a scene with more than 1 % of its pixels outside is refused.
        nodata: the value that means "nothing here" in files that do not say; None: every value counts.
        mask_nodata: the mask's value where nothing is known.
    """

    bands: tuple[Band, ...] = Field(min_length=1)
    classes: tuple[ClassLabel, ...] = Field(min_length=2, max_length=250)
    frames: int = Field(1, ge=1, le=64)
    tile: int = Field(ge=16, le=2048)
    overlap: int = Field(ge=0)
    scale: float = 1.0
    float_scale: float = 1.0
    offset: float = 0.0
    valid_range: tuple[float, float] | None = None
    nodata: float | None = None
    mask_nodata: int = Field(255, ge=0, le=255)

    @model_validator(mode="after")
    def _is_consistent(self) -> Card:
        if self.overlap * 2 > self.tile:
            raise ValueError("overlap: at most half of a tile")
        if self.mask_nodata < len(self.classes):
            raise ValueError("mask_nodata: a class has this value")
        return self
