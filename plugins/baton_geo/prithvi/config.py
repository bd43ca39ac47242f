"""Read the configuration of a Prithvi-EO model from a config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from baton_geo.card import ReadOnlyModel
from baton_geo.prithvi.layouts import check_necks, read_layout

Coordinates = Literal["time", "location"]


class DecoderConfig(ReadOnlyModel):
    """The FCN segmentation decoder.

    Attributes:
        num_classes: scores per pixel.
        channels: width after each doubling of the resolution; the published decoder has four equal ones.
        head_channels: widths of the 3 x 3 convolutions before the scores; published as `head_channel_list`.
        skip: whether a convolution over the raw pixels joins the decoder's features before the head, for
            edges sharper than a patch; not in the published models.
        skip_channels: width of that convolution.
    """

    num_classes: int = Field(ge=1, le=1024)
    channels: tuple[int, ...] = Field((256, 256, 256, 256), min_length=1, max_length=8)
    head_channels: tuple[int, ...] = Field((), max_length=8)
    skip: bool = False
    skip_channels: int = Field(32, ge=1, le=4096)

    @field_validator("channels", "head_channels")
    @classmethod
    def _are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(channels < 1 for channels in value):
            raise ValueError("channels must be at least 1")
        return value


class PrithviConfig(ReadOnlyModel):
    """A model of the Prithvi-EO family; keys as in the published `pretrained_cfg`.

    Attributes:
        img_size: height and width of the position table, pixels; other sizes are interpolated.
        num_frames: time steps.
        patch_size: time steps, rows and columns of one patch.
        in_chans: bands.
        embed_dim: width of a token.
        depth: transformer blocks.
        num_heads: attention heads.
        mlp_ratio: width of a block's hidden layer over `embed_dim`.
        coords_encoding: coordinates that the encoder takes beside the pixels.
        coords_scale_learn: whether the weight of those encodings is a parameter.
        norm_eps: of the encoder's layer norms; 1e-5 in all published models.
        bands: names of the bands, in order; empty if not given.
        mean: of each band, subtracted before the model; empty if not given.
        std: of each band, divided by before the model; empty if not given.
        decoder: None for an encoder alone.
    """

    img_size: tuple[int, int]
    num_frames: int = Field(ge=1, le=1024)
    patch_size: tuple[int, int, int]
    in_chans: int = Field(ge=1, le=4096)
    embed_dim: int = Field(ge=16, le=16384)
    depth: int = Field(ge=1, le=1024)
    num_heads: int = Field(ge=1, le=1024)
    mlp_ratio: float = Field(4.0, gt=0, le=64)
    coords_encoding: tuple[Coordinates, ...] = ()
    coords_scale_learn: bool = False
    norm_eps: float = Field(1e-5, gt=0, lt=1)
    bands: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    decoder: DecoderConfig | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> PrithviConfig:
        """Parse a config.json in any of the layouts that `layouts` describes.

        Raises:
            ValueError: a key is missing or wrong, or the model is of another kind; the message names the key.
        """
        try:
            made = cls.model_validate(read_layout(config))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            where = f"config.json: {key}: " if key else "config.json: "
            raise ValueError(where + first["msg"].removeprefix("Value error, ")) from None
        check_necks(config, depth=made.depth, times=made.grid[0])
        return made

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, rows and columns at `num_frames` and `img_size`."""
        time, height, width = self.patch_size
        return self.num_frames // time, self.img_size[0] // height, self.img_size[1] // width

    @property
    def has_time(self) -> bool:
        """Whether the encoder takes dates."""
        return "time" in self.coords_encoding

    @property
    def has_location(self) -> bool:
        """Whether the encoder takes the place."""
        return "location" in self.coords_encoding

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return the patches in time, rows and columns for pixels of a shape (B, C, T, H, W).

        Raises:
            ValueError: the shape has not five dimensions, a wrong number of bands, or a size that is not a
                multiple of the patch size.
        """
        if len(shape) != 5 or shape[1] != self.in_chans:
            wanted = f"(batch, {self.in_chans} bands, time, height, width)"
            raise ValueError(f"pixel_values: shape {tuple(shape)}, must be {wanted}")
        for size, patch, axis in zip(shape[2:], self.patch_size, ("time", "height", "width"), strict=True):
            if size < patch or size % patch:
                raise ValueError(f"pixel_values: {axis} {size} is not a multiple of the patch size {patch}")
        time, height, width = self.patch_size
        return shape[2] // time, shape[3] // height, shape[4] // width

    @model_validator(mode="after")
    def _fits_together(self) -> PrithviConfig:
        if min(self.patch_size) < 1:
            raise ValueError("patch_size: must be at least 1")
        time, *patch = self.patch_size
        if self.num_frames % time:
            raise ValueError(f"num_frames: {self.num_frames} is not a multiple of patch_size {time}")
        if any(size < 1 or size % part for size, part in zip(self.img_size, patch, strict=True)):
            raise ValueError(f"img_size: {self.img_size} is not a multiple of patch_size {tuple(patch)}")
        if self.embed_dim % 16:
            raise ValueError(f"embed_dim: {self.embed_dim} is not a multiple of 16")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} does not divide embed_dim {self.embed_dim}")
        if self.has_time and time != 1:
            raise ValueError("coords_encoding: time needs a patch_size of 1 in time")
        return self._has_bands()

    def _has_bands(self) -> PrithviConfig:
        for key in ("bands", "mean", "std"):
            count = len(getattr(self, key))
            if count not in (0, self.in_chans):
                raise ValueError(f"{key}: {count} values for in_chans {self.in_chans}")
        return self
