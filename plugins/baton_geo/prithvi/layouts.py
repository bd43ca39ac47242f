"""Read the layouts of config.json with which Prithvi-EO models were published.

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

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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


def read_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `PrithviConfig`, unchecked, from a config.json of any layout above.

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

    Args:
        config: contents of config.json.
        depth: number of the encoder's blocks.
        times: patches in time.

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
    """Return the table that describes the model, and TerraTorch's or the first release's table in it."""
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
