"""Read the configuration of a Prithvi-EO model from a config.json, in the layouts that were published.

1. The models' own (1.0 and 2.0): `pretrained_cfg` holds `img_size`, `num_frames`, `patch_size`, `embed_dim`
   and so on. A decoder is given by our table beside them, `pretrained_cfg.segmentation`:
   `{"decoder": "FCNDecoder", "num_classes": 2, "channels": 256, "num_convs": 4, "head_channels": [],
   "skip": false}`. (Not `decoder` at the top: transformers would take that for a text model's configuration.)
2. TerraTorch's fine-tuned models: `pretrained_cfg.model_args`, or `pretrained_cfg.model.init_args.model_args`
   as its vLLM guide has it; see `terratorch.py`.
3. The first release of 1.0 (`Prithvi_100M_config.yaml`): `model_args` holds sizes, with an integer
   `patch_size` and `tubelet_size`; `train_params` holds bands, means and deviations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from baton_geo.card import ReadOnlyModel
from baton_geo.prithvi.terratorch import as_list, channels, read_model

Coordinates = Literal["time", "location"]
ENCODER_KEYS = (
    "img_size", "num_frames", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "coords_encoding", "coords_scale_learn", "norm_eps", "bands", "mean", "std",
)  # fmt: skip
SEGMENTATION_KEYS = frozenset(
    {"decoder", "num_classes", "channels", "num_convs", "head_channels", "dropout", "skip", "skip_channels"}
)


class DecoderConfig(ReadOnlyModel):
    """The layers behind the encoder: necks, decoder and head, in TerraTorch's words.

    Attributes:
        kind: FCN, UPerNet or U-Net.
        task: `segmentation` has a score per class and pixel, `regression` one value per pixel.
        num_classes: scores per pixel; 1 for regression.
        channels: widths. Of the FCN after each doubling of the resolution, of the U-Net after each step, of
            UPerNet one for all.
        head_channels: widths of the 3 x 3 convolutions before the scores; published as `head_channel_list`.
        blocks: the encoder's blocks whose tokens the decoder takes; -1 is the last.
        pyramid: place of the neck `LearnedInterpolateToPyramidal` in the list of necks, which is a part of
            its parameters' names; None: there is none.
        pool_scales: sides of UPerNet's pooled contexts, in pixels.
        align_corners: whether UPerNet's interpolation maps corners to corners.
        scale_modules: whether UPerNet itself makes a pyramid of four features.
        batch_norm: whether the U-Net has batch norm.
        upscale: learned doublings of the resolution before a regression's value.
        final_act: activation after a regression's value, torch's name.
        skip: whether a convolution over the raw pixels joins the decoder's features before the head, for
            edges sharper than a patch; not in the published models.
        skip_channels: width of that convolution.
    """

    kind: Literal["fcn", "upernet", "unet"] = "fcn"
    task: Literal["segmentation", "regression"] = "segmentation"
    num_classes: int = Field(ge=1, le=1024)
    channels: tuple[int, ...] = Field((256, 256, 256, 256), min_length=1, max_length=64)
    head_channels: tuple[int, ...] = Field((), max_length=8)
    blocks: tuple[int, ...] = Field((-1,), min_length=1, max_length=64)
    pyramid: int | None = None
    pool_scales: tuple[int, ...] = Field((1, 2, 3, 6), min_length=1, max_length=16)
    align_corners: bool = True
    scale_modules: bool = False
    batch_norm: bool = True
    upscale: int = Field(0, ge=0, le=8)
    final_act: Literal["Identity", "ReLU", "Sigmoid", "Softplus", "Tanh"] = "Identity"
    skip: bool = False
    skip_channels: int = Field(32, ge=1, le=4096)

    @field_validator("channels", "head_channels", "pool_scales")
    @classmethod
    def _are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(channels < 1 for channels in value):
            raise ValueError("channels must be at least 1")
        return value

    @model_validator(mode="after")
    def _features_fit(self) -> DecoderConfig:
        count = len(self.blocks)
        if self.kind == "unet" and len(self.channels) != count:
            raise ValueError(f"channels: {len(self.channels)} for {count} features; the U-Net takes one each")
        if (self.pyramid is not None and count != 4) or (self.scale_modules and count < 4):
            raise ValueError(f"blocks: {count}; a pyramid is made of 4")
        return self

    def enlarged(self) -> int:
        """Compute how many times larger than the grid of patches the decoder's image is."""
        if self.kind == "fcn":
            return 1 << (len(self.channels) + self.upscale)
        return (4 if self.pyramid is not None or self.scale_modules else 1) << self.upscale


class PrithviConfig(ReadOnlyModel):
    """A model of the Prithvi-EO family; keys as in the published `pretrained_cfg`.

    Attributes:
        img_size: height and width of the position table, pixels; other sizes are interpolated.
        num_frames: time steps.
        patch_size: time steps, rows and columns of one patch.
        embed_dim: width of a token.
        depth: transformer blocks.
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
        """Parse a config.json in any of the layouts above.

        Raises:
            ValueError: a key is missing or wrong, or the model is of another kind; the message names the key.
        """
        try:
            made = cls.model_validate(_read_layout(config))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            where = f"config.json: {key}: " if key else "config.json: "
            raise ValueError(where + first["msg"].removeprefix("Value error, ")) from None
        if tables_of(config)[1].get("rescale", True) is not True and made.decoder is not None:
            made._check_needs_no_rescaling(made.decoder)
        return made

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, rows and columns at `num_frames` and `img_size`."""
        time, height, width = self.patch_size
        return self.num_frames // time, self.img_size[0] // height, self.img_size[1] // width

    @property
    def has_time(self) -> bool:
        """True if the encoder takes dates."""
        return "time" in self.coords_encoding

    @property
    def has_location(self) -> bool:
        """True if the encoder takes the place."""
        return "location" in self.coords_encoding

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Count the patches in time, rows and columns for pixels of a shape (B, C, T, H, W).

        Raises:
            ValueError: the shape has not five dimensions, a wrong number of bands, or a size that is not a
                multiple of the patch size.
        """
        self._check_bands(shape)
        for size, patch, axis in zip(shape[2:], self.patch_size, ("time", "height", "width"), strict=True):
            if size < patch or size % patch:
                raise ValueError(f"pixel_values: {axis} {size} is not a multiple of the patch size {patch}")
        time, height, width = self.patch_size
        return shape[2] // time, shape[3] // height, shape[4] // width

    def check_pixels(self, shape: Sequence[int]) -> None:
        """Refuse pixels that cannot be filled up to whole patches.

        Raises:
            ValueError: the shape has not five dimensions, a wrong number of bands, or a side of one patch or
                less.
        """
        self._check_bands(shape)
        for size, patch, axis in zip(shape[3:], self.patch_size[1:], ("height", "width"), strict=True):
            if size <= patch:
                raise ValueError(f"pixel_values: {axis} {size} must be larger than the patch size {patch}")

    def _check_bands(self, shape: Sequence[int]) -> None:
        if len(shape) != 5 or shape[1] != self.in_chans:
            wanted = f"(batch, {self.in_chans} bands, time, height, width)"
            raise ValueError(f"pixel_values: shape {tuple(shape)}, must be {wanted}")

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

    def _check_needs_no_rescaling(self, decoder: DecoderConfig) -> None:
        sides = set(self.patch_size[1:])
        if sides != {decoder.enlarged()}:
            raise ValueError(
                f"config.json: model_args.rescale: must be true: the decoder's image is {decoder.enlarged()} "
                f"times the patches' grid, and a patch has {' x '.join(map(str, self.patch_size[1:]))} pixels"
            )


def _read_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values of `PrithviConfig`, unchecked, from a config.json of any layout above.

    Raises:
        ValueError: config.json has none of the layouts, or the model is of another kind.
    """
    held, finetuned = tables_of(config)
    if "backbone" in finetuned:
        read = read_model(held, finetuned)
        return _sizes(read) | {"decoder": read["decoder"]}
    if "embed_dim" in finetuned:
        return _sizes({**finetuned, **_train_params(held)}) | _segmentation(held)
    if "embed_dim" in held:
        return _sizes(held) | _segmentation(held)
    raise ValueError("config.json: pretrained_cfg.embed_dim: missing; this is no Prithvi-EO model's")


def tables_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Find the table that describes the model, and TerraTorch's or the first release's `model_args` in it."""
    held = table_of(config, "pretrained_cfg") or config
    task = table_of(table_of(held, "model"), "init_args")
    return held, table_of(task, "model_args") or table_of(held, "model_args")


def table_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of config.json; an empty one where there is none."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {key}: must be a table")
    return value


def _sizes(held: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: held[key] for key in ENCODER_KEYS if held.get(key) is not None}
    if "img_size" in found:
        found["img_size"] = _pair(found["img_size"])
    if "patch_size" in found:
        found["patch_size"] = _patch(found["patch_size"], held.get("tubelet_size", 1))
    if "bands" in found:
        found["bands"] = [str(band) for band in as_list(found["bands"], "bands")]
    return found


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def _patch(value: Any, time: Any) -> Any:
    if isinstance(value, int):
        return (time, value, value)
    return (time, *value) if isinstance(value, list | tuple) and len(value) == 2 else value


def _train_params(held: Mapping[str, Any]) -> dict[str, Any]:
    params = table_of(held, "train_params")
    names = {"bands": "bands", "data_mean": "mean", "data_std": "std"}
    return {ours: params[theirs] for theirs, ours in names.items() if theirs in params}


def _segmentation(held: Mapping[str, Any]) -> dict[str, Any]:
    table = table_of(held, "segmentation")
    if not table:
        return {}
    unknown = sorted(set(table) - SEGMENTATION_KEYS)
    if unknown:
        raise ValueError(f"config.json: segmentation.{unknown[0]}: unknown")
    if (name := table.get("decoder", "fcn")) not in ("fcn", "FCNDecoder"):
        raise ValueError(f"config.json: segmentation.decoder: {name!r} is not supported, only FCNDecoder is")
    decoder = {
        key: table[key] for key in ("num_classes", "head_channels", "skip", "skip_channels") if key in table
    }
    decoder["channels"] = channels(table.get("channels", 256), table.get("num_convs"), "segmentation.")
    return {"decoder": decoder}
