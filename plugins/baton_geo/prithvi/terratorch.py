"""Read TerraTorch's `model_args` of a fine-tuned Prithvi model: backbone, necks, decoder and head.

`backbone` is a published model's name and `backbone_*` change it; `necks`, `decoder`, `decoder_*`, `head_*`,
`num_classes` and `rescale` are the rest. `PrithviModelFactory`, the older way, names `bands`, `num_frames`
and `in_channels` without the prefix. What only training uses (`*_pretrained`, `*_dropout`, `aux_heads`) is
passed over; what would change the answer and is not known is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

TASKS = MappingProxyType(
    {"SemanticSegmentationTask": "segmentation", "PixelwiseRegressionTask": "regression"}
)
FACTORIES = ("EncoderDecoderFactory", "PrithviModelFactory")
KINDS = MappingProxyType(
    {"FCNDecoder": "fcn", "fcn": "fcn", "UperNetDecoder": "upernet", "UNetDecoder": "unet"}
)
PLAIN_BANDS = ("BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2")
BOTH_COORDINATES = {"coords_encoding": ("time", "location"), "coords_scale_learn": True}
PLAIN: Mapping[str, Any] = {"img_size": 224, "num_frames": 1, "patch_size": (1, 16, 16), "bands": PLAIN_BANDS}
BASE = {"embed_dim": 768, "depth": 12, "num_heads": 12}
LARGE = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
HUGE = {"embed_dim": 1280, "depth": 32, "num_heads": 16, "patch_size": (1, 14, 14)}
# The published models, by TerraTorch's names for them; the last two are older names.
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
        "prithvi_vit_100": BASE,
        "prithvi_vit_tiny": {"embed_dim": 256, "depth": 4, "num_heads": 4},
    }
)
SIZES = (
    "img_size", "num_frames", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio",
    "coords_encoding", "coords_scale_learn", "bands",
)  # fmt: skip
OTHER_ENCODERS = ("vit_adapter", "vpt", "use_temporal", "norm_layer")  # of `backbone_*`: another computation
DECODER_KEYS = MappingProxyType(
    {
        "fcn": ("channels", "num_convs", "in_index"),
        "upernet": ("channels", "pool_scales", "align_corners", "scale_modules"),
        "unet": ("channels", "use_batchnorm", "attention_type"),
    }
)
HEAD_KEYS = MappingProxyType(
    {
        "segmentation": ("channel_list", "dropout"),
        "regression": ("channel_list", "dropout", "final_act", "learned_upscale_layers", "batch_norm"),
    }
)
NORMS = {True: True, "batchnorm": True, False: False, "identity": False}
TERRAMIND = (
    "is TerraMind, which is another family: it takes a table of modalities, each of a sensor of its own, "
    "instead of one stack of bands, and its weights and tokenizers are not Prithvi's; TerraTorch's own "
    "plugin serves it"
)


def read_model(held: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values of `PrithviConfig`, unchecked.

    Args:
        held: the table that describes the model and its task.
        args: its `model_args`.

    Raises:
        ValueError: the model is of another kind; the message names the key.
    """
    task, factory = _task(held), _of_task(held).get("model_factory", FACTORIES[0])
    if factory not in FACTORIES:
        raise ValueError(
            f"config.json: model.init_args.model_factory: {factory!r} is none of {', '.join(FACTORIES)}"
        )
    if args.get("peft_config"):
        raise ValueError(
            "config.json: model_args.peft_config: weights of adapters are not supported; merge them into the "
            "model and leave it out"
        )
    needed = ("decoder", "num_classes") if task == "segmentation" else ("decoder",)
    for key in needed:
        if key not in args:
            raise ValueError(f"config.json: model_args.{key}: missing")
    sizes = _backbone(args)
    return sizes | {"decoder": _decoder(args, task, sizes)}


def _of_task(held: Mapping[str, Any]) -> Mapping[str, Any]:
    model = held.get("model")
    args = model.get("init_args") if isinstance(model, Mapping) else None
    return args if isinstance(args, Mapping) else {}


def _task(held: Mapping[str, Any]) -> str:
    """Return the task; of a config that names none, it is segmentation."""
    model, older = held.get("model"), held.get("task_args")
    path = model.get("class_path") if isinstance(model, Mapping) else None
    key = "model.class_path"
    if path is None and isinstance(older, Mapping):
        path, key = older.get("task"), "task_args.task"
    name = "SemanticSegmentationTask" if path is None else str(path).rpartition(".")[2]
    if name not in TASKS:
        raise ValueError(f"config.json: {key}: {path!r} is not supported, only {' and '.join(TASKS)} are")
    return TASKS[name]


def _backbone(args: Mapping[str, Any]) -> dict[str, Any]:
    name = str(args["backbone"]).removeprefix("terratorch_")
    if "terramind" in name.casefold():
        raise ValueError(f"config.json: model_args.backbone: {name!r} {TERRAMIND}")
    if name not in BACKBONES:
        known = ", ".join(BACKBONES)
        raise ValueError(f"config.json: model_args.backbone: {name!r} is none of {known}")
    for key in OTHER_ENCODERS:
        if args.get(f"backbone_{key}"):
            raise ValueError(f"config.json: model_args.backbone_{key}: is not supported")
    older = {"bands": args.get("bands"), "num_frames": args.get("num_frames")}  # PrithviModelFactory's
    changes = {key: args.get(f"backbone_{key}", older.get(key)) for key in SIZES}
    sizes = {
        **PLAIN,
        **BACKBONES[name],
        **{key: value for key, value in changes.items() if value is not None},
    }
    bands = without_intervals(as_list(sizes["bands"], "model_args.backbone_bands"))
    return sizes | {"in_chans": len(bands), "bands": bands}


def without_intervals(bands: Sequence[Any]) -> list[Any]:
    """Write out TerraTorch's intervals of bands: `[1, 3]` in a list of bands is 1, 2, 3."""
    out: list[Any] = []
    for band in bands:
        ends = band if isinstance(band, list | tuple) and len(band) == 2 else None
        if ends and all(isinstance(end, int) for end in ends) and 0 <= ends[1] - ends[0] < 4096:
            out += range(ends[0], ends[1] + 1)
        else:
            out.append(band)
    return out


def as_list(value: Any, key: str) -> list[Any]:
    """Return a list of config.json.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"config.json: {key}: must be a list")
    return list(value)


def _decoder(args: Mapping[str, Any], task: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    name = args["decoder"]
    kind = KINDS.get(name.removeprefix("terratorch_")) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"config.json: model_args.decoder: {name!r} is not supported; FCNDecoder, UperNetDecoder and "
            "UNetDecoder are"
        )
    given = _known(args, "decoder_", DECODER_KEYS[kind])
    head = _known(args, "head_", HEAD_KEYS[task])
    blocks, pyramid = _features(args, sizes)
    values: dict[str, Any] = {
        "kind": kind,
        "task": task,
        "num_classes": args["num_classes"] if task == "segmentation" else 1,
        "head_channels": head.get("channel_list") or (),
        "pyramid": pyramid,
    }
    if kind == "fcn":
        if pyramid is not None:
            raise ValueError("config.json: model_args.necks: FCNDecoder takes no pyramid")
        block = _chosen(blocks, given.get("in_index", -1), "model_args.decoder_in_index")
        values["blocks"] = [-1 if block == sizes["depth"] - 1 else block]
        values["channels"] = channels(
            given.get("channels", 256), given.get("num_convs"), "model_args.decoder_"
        )
    elif kind == "upernet":
        for key in ("pool_scales", "align_corners", "scale_modules"):
            if given.get(key) is not None:
                values[key] = given[key]
        scaled = bool(given.get("scale_modules"))
        if scaled and pyramid is not None:
            raise ValueError(
                "config.json: model_args.decoder_scale_modules: the necks make a pyramid already"
            )
        values |= {"blocks": blocks[:4] if scaled else blocks, "channels": [given.get("channels", 256)]}
    else:
        if given.get("attention_type") is not None:
            raise ValueError("config.json: model_args.decoder_attention_type: is not supported")
        norm = given.get("use_batchnorm", True)
        if not isinstance(norm, bool | str) or norm not in NORMS:
            raise ValueError(f"config.json: model_args.decoder_use_batchnorm: {norm!r} is not supported")
        widths = as_list(given.get("channels"), "model_args.decoder_channels")
        values |= {"blocks": blocks, "channels": widths, "batch_norm": NORMS[norm]}
    if task == "regression":
        module, _, act = str(head.get("final_act") or "torch.nn.Identity").rpartition(".")
        if not module.startswith("torch.nn"):
            raise ValueError(
                f"config.json: model_args.head_final_act: {head['final_act']!r} is not supported"
            )
        values |= {"upscale": head.get("learned_upscale_layers", 0), "final_act": act}
    return values


def _known(args: Mapping[str, Any], prefix: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Take the arguments of one part; of the head's, `head_channel_list` is `channel_list`.

    Raises:
        ValueError: the part has no such argument.
    """
    given = {key.removeprefix(prefix): value for key, value in args.items() if key.startswith(prefix)}
    unknown = sorted(set(given) - set(keys))
    if unknown:
        raise ValueError(f"config.json: model_args.{prefix}{unknown[0]}: is not supported")
    return given


def channels(value: Any, count: Any, key: str) -> list[Any]:
    """Return the width after each doubling of an FCN decoder: one number repeated, or a list of them."""
    if isinstance(value, int):
        count = 4 if count is None else count
        if not isinstance(count, int) or not 1 <= count <= 8:
            raise ValueError(f"config.json: {key}num_convs: must be 1 to 8")
        return [value] * count
    listed = as_list(value, f"{key}channels")
    if count is not None and count != len(listed):
        raise ValueError(f"config.json: {key}num_convs: {count}, but {len(listed)} channels")
    return listed


def _chosen(blocks: list[int], index: Any, key: str) -> int:
    if not isinstance(index, int) or not -len(blocks) <= index < len(blocks):
        raise ValueError(f"config.json: {key}: {index!r} is none of {len(blocks)} features")
    return blocks[index]


def _features(args: Mapping[str, Any], sizes: Mapping[str, Any]) -> tuple[list[int], int | None]:
    """Follow the necks: the blocks whose tokens the decoder takes, and the place of the pyramid."""
    depth, frames, patch = sizes["depth"], sizes["num_frames"], sizes["patch_size"]
    if not isinstance(depth, int) or not 1 <= depth <= 1024:
        raise ValueError("config.json: model_args.backbone_depth: must be 1 to 1024")
    times = frames // patch[0] if isinstance(patch, list | tuple) and isinstance(frames, int) else frames
    blocks = list(range(depth))
    if (indices := args.get("backbone_out_indices")) is not None:
        key = "model_args.backbone_out_indices"
        blocks = [_chosen(blocks, index, key) for index in as_list(indices, key)]
    pyramid: int | None = None
    necks = as_list(args.get("necks") or [], "model_args.necks")
    images = not necks  # without necks TerraTorch makes images of the tokens itself
    for place, neck in enumerate(necks):
        key = f"model_args.necks.{place}"
        name = neck.get("name") if isinstance(neck, Mapping) else None
        if name == "SelectIndices":
            blocks = [
                _chosen(blocks, index, f"{key}.indices")
                for index in as_list(neck.get("indices"), f"{key}.indices")
            ]
        elif name == "ReshapeTokensToImage":
            if neck.get("remove_cls_token", True) is not True:
                raise ValueError(f"config.json: {key}.remove_cls_token: must be true")
            if neck.get("effective_time_dim", 1) != times:
                raise ValueError(
                    f"config.json: {key}.effective_time_dim: must be {times}, the patches in time"
                )
            images = True
        elif name == "LearnedInterpolateToPyramidal" and images and pyramid is None:
            pyramid = place
        else:
            raise ValueError(
                f"config.json: {key}.name: {name!r} is not supported"
                + (" here" if name == "LearnedInterpolateToPyramidal" else "")
            )
    if not images:
        raise ValueError("config.json: model_args.necks: ReshapeTokensToImage: missing")
    if not blocks:
        raise ValueError("config.json: model_args.necks: no block is left")
    return blocks, pyramid
