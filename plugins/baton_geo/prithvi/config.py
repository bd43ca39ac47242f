"""Read the configuration of a Prithvi-EO model from a config.json, in the layouts that were published.

1. The models' own (1.0 and 2.0): `pretrained_cfg` holds `img_size`, `num_frames`, `patch_size`, `embed_dim`
   and so on. A decoder is given by our table beside them, `pretrained_cfg.segmentation`:
   `{"decoder": "FCNDecoder", "num_classes": 2, "channels": 256, "num_convs": 4, "head_channels": [],
   "skip": false}`. (Not `decoder` at the top: transformers would take that for a text model's configuration.)
2. TerraTorch's fine-tuned models: `pretrained_cfg.model_args`, or `pretrained_cfg.model.init_args.model_args`
   as its vLLM guide has it: `backbone` is a published model's name, `backbone_*` change it, `decoder`,
   `decoder_*`, `head_*`, `necks` and `num_classes` are the rest.
3. The first release of 1.0 (`Prithvi_100M_config.yaml`): `model_args` holds sizes, with an integer
   `patch_size` and `tubelet_size`; `train_params` holds bands, means and deviations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from baton_geo.card import Band, Card, ClassLabel, ReadOnlyModel

Coordinates = Literal["time", "location"]
GREYS = 220
"""The lightest grey of classes without a colour."""
ENCODER_KEYS = (
    "img_size", "num_frames", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "coords_encoding", "coords_scale_learn", "norm_eps", "bands", "mean", "std",
)  # fmt: skip
PLAIN_BANDS = ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")
BOTH_COORDINATES = {"coords_encoding": ("time", "location"), "coords_scale_learn": True}
PLAIN: Mapping[str, Any] = {"img_size": 224, "num_frames": 1, "patch_size": (1, 16, 16), "bands": PLAIN_BANDS}
BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
HUGE = {"embed_dim": 1280, "depth": 32, "num_heads": 16, "patch_size": (1, 14, 14)}
# The published models, by TerraTorch's names for them.
BACKBONES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "prithvi_eo_tiny": {"embed_dim": 256, "depth": 4, "num_heads": 4},
        "prithvi_eo_v1_100": BASE,
        "prithvi_eo_v2_tiny_tl": {"embed_dim": 192, "depth": 12, "num_heads": 3, **BOTH_COORDINATES},
        "prithvi_eo_v2_100": BASE,
        "prithvi_eo_v2_100_tl": BASE | BOTH_COORDINATES,
        "prithvi_eo_v2_300": LARGE,
        "prithvi_eo_v2_300_tl": LARGE | BOTH_COORDINATES,
        "prithvi_eo_v2_600": HUGE,
        "prithvi_eo_v2_600_tl": HUGE | BOTH_COORDINATES,
    }
)
FCN_NAMES = ("fcn", "FCNDecoder")
SEGMENTATION_KEYS = frozenset(
    {"decoder", "num_classes", "channels", "num_convs", "head_channels", "dropout", "skip", "skip_channels"}
)


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


def card_of(hf_config: Mapping[str, Any]) -> Card:
    """Read the card in a model's config.json, or make a plain one from a published configuration.

    Raises:
        ValueError: config.json has neither a `baton_geo` table nor means, deviations and a decoder.
    """
    if (table := hf_config.get("baton_geo")) is not None:
        return Card.model_validate(table)
    config = PrithviConfig.from_hf(hf_config)
    published = hf_config["pretrained_cfg"]
    names = published.get("bands") or [f"band {number + 1}" for number in range(config.in_chans)]
    means, stds = published.get("mean"), published.get("std")
    if means is None or stds is None or config.decoder is None:
        raise ValueError("config.json: has neither a `baton_geo` table nor `mean`, `std` and a decoder")
    bands = tuple(
        Band(name=str(name), mean=mean, std=std) for name, mean, std in zip(names, means, stds, strict=True)
    )
    count = config.decoder.num_classes
    labels = tuple(
        ClassLabel(name=f"class {value}", colour=(GREYS - GREYS * value // count,) * 3)
        for value in range(count)
    )
    tile = config.img_size[-1]
    return Card(bands=bands, classes=labels, frames=config.num_frames, tile=tile, overlap=tile // 8)


def read_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values of `PrithviConfig`, unchecked, from a config.json of any layout above.

    Raises:
        ValueError: config.json has none of the layouts, or the model is of another kind.
    """
    held, finetuned = _held(config)
    if "backbone" in finetuned:
        return _terratorch(finetuned)
    if "embed_dim" in finetuned:
        return _sizes({**finetuned, **_train_params(held)}) | _segmentation(held)
    if "embed_dim" in held:
        return _sizes(held) | _segmentation(held)
    raise ValueError("config.json: pretrained_cfg.embed_dim: missing; this is no Prithvi-EO model's")


def check_necks(config: Mapping[str, Any], *, depth: int, times: int) -> None:
    """Refuse TerraTorch necks other than the FCN decoder's here, which takes the last block as an image.

    Raises:
        ValueError: a neck is not supported; the message names it.
    """
    necks = _listed(_held(config)[1].get("necks") or [], "model_args.necks")
    for place, neck in enumerate(necks):
        key = f"config.json: model_args.necks.{place}"
        name = neck.get("name") if isinstance(neck, Mapping) else None
        if name == "SelectIndices":
            chosen = _listed(neck.get("indices"), f"{key}.indices")
            if not chosen or chosen[-1] not in (-1, depth - 1):
                raise ValueError(f"{key}.indices: the last must be the last block's, {depth - 1}")
        elif name == "ReshapeTokensToImage":
            if neck.get("remove_cls_token", True) is not True:
                raise ValueError(f"{key}.remove_cls_token: must be true")
            if neck.get("effective_time_dim", 1) != times:
                raise ValueError(f"{key}.effective_time_dim: must be {times}, the patches in time")
        else:
            raise ValueError(f"{key}.name: {name!r} is not supported")


def _held(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Find the table that describes the model, and TerraTorch's or the first release's table in it."""
    held = _table(config, "pretrained_cfg") or config
    task = _table(_table(held, "model"), "init_args")
    return held, _table(task, "model_args") or _table(held, "model_args")


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
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
        found["bands"] = [str(band) for band in _listed(found["bands"], "bands")]
    return found


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def _patch(value: Any, time: Any) -> Any:
    if isinstance(value, int):
        return (time, value, value)
    return (time, *value) if isinstance(value, list | tuple) and len(value) == 2 else value


def _listed(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"config.json: {key}: must be a list")
    return list(value)


def _train_params(held: Mapping[str, Any]) -> dict[str, Any]:
    params = _table(held, "train_params")
    names = {"bands": "bands", "data_mean": "mean", "data_std": "std"}
    return {ours: params[theirs] for theirs, ours in names.items() if theirs in params}


def _segmentation(held: Mapping[str, Any]) -> dict[str, Any]:
    table = _table(held, "segmentation")
    if not table:
        return {}
    unknown = sorted(set(table) - SEGMENTATION_KEYS)
    if unknown:
        raise ValueError(f"config.json: segmentation.{unknown[0]}: unknown")
    _require_fcn(table.get("decoder", "fcn"), "segmentation.decoder")
    decoder = {
        key: table[key] for key in ("num_classes", "head_channels", "skip", "skip_channels") if key in table
    }
    decoder["channels"] = _channels(table.get("channels", 256), table.get("num_convs"), "segmentation.")
    return {"decoder": decoder}


def _require_fcn(name: Any, key: str) -> None:
    if name not in FCN_NAMES:
        raise ValueError(f"config.json: {key}: {name!r} is not supported, only FCNDecoder is")


def _channels(channels: Any, count: Any, key: str) -> list[Any]:
    if isinstance(channels, int):
        count = 4 if count is None else count
        if not isinstance(count, int) or not 1 <= count <= 8:
            raise ValueError(f"config.json: {key}num_convs: must be 1 to 8")
        return [channels] * count
    listed = _listed(channels, f"{key}channels")
    if count is not None and count != len(listed):
        raise ValueError(f"config.json: {key}num_convs: {count}, but {len(listed)} channels")
    return listed


def _terratorch(args: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("decoder", "num_classes"):
        if key not in args:
            raise ValueError(f"config.json: model_args.{key}: missing")
    _require_fcn(args["decoder"], "model_args.decoder")
    if args.get("decoder_in_index", -1) != -1:
        raise ValueError("config.json: model_args.decoder_in_index: must be -1, the last block")
    decoder = {
        "num_classes": args["num_classes"],
        "channels": _channels(
            args.get("decoder_channels", 256), args.get("decoder_num_convs"), "model_args.decoder_"
        ),
        "head_channels": args.get("head_channel_list") or (),
    }
    return _backbone(args) | {"decoder": decoder}


def _backbone(args: Mapping[str, Any]) -> dict[str, Any]:
    name = str(args["backbone"]).removeprefix("terratorch_")
    if name not in BACKBONES:
        known = ", ".join(BACKBONES)
        raise ValueError(f"config.json: model_args.backbone: {name!r} is none of {known}")
    changes = {
        key: args[f"backbone_{key}"] for key in ENCODER_KEYS if args.get(f"backbone_{key}") is not None
    }
    sizes = {**PLAIN, **BACKBONES[name], **changes}
    return _sizes({"in_chans": len(_listed(sizes["bands"], "model_args.backbone_bands")), **sizes})
