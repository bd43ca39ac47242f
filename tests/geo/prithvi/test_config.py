"""Every published layout of config.json, and errors that name the wrong key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from baton_geo.prithvi import DecoderConfig, PrithviConfig, PrithviSegmenter

BANDS = ["BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2"]
FLOODS = {"decoder": "FCNDecoder", "num_classes": 2}


def models_own(**changes: Any) -> dict[str, Any]:
    """The config.json published with Prithvi-EO-2.0-300M, with its keys that only pre-training needs."""
    return {
        "architecture": "prithvi_eo_v2_300",
        "num_classes": 0,
        "pretrained_cfg": {
            "img_size": 224, "num_frames": 4, "patch_size": [1, 16, 16], "in_chans": 6, "embed_dim": 1024,
            "depth": 24, "num_heads": 16, "decoder_embed_dim": 512, "decoder_depth": 8, "decoder_num_heads": 16,
            "mlp_ratio": 4, "coords_encoding": [], "coords_scale_learn": False, "mask_ratio": 0.75,
            "norm_pix_loss": False, "bands": ["B02", "B03", "B04", "B05", "B06", "B07"],
            "mean": [1087.0, 1342.0, 1433.0, 2734.0, 1958.0, 1363.0],
            "std": [2248.0, 2179.0, 2178.0, 1850.0, 1242.0, 1049.0],
            "origin_url": "https://models.example.org/Prithvi-EO-2.0-300M",
            "paper_ids": "arXiv:2412.02732",
            **changes,
        },
    }  # fmt: skip


def finetuned(**changes: Any) -> dict[str, Any]:
    """TerraTorch's `model_args` of a flood model, the FCN decoder in place of UperNet."""
    return {
        "backbone_pretrained": True,
        "backbone": "prithvi_eo_v2_300_tl",
        "decoder": "FCNDecoder",
        "decoder_channels": 256,
        "decoder_num_convs": 4,
        "num_classes": 2,
        "rescale": True,
        "backbone_bands": BANDS,
        "head_dropout": 0.1,
        "necks": [
            {"name": "SelectIndices", "indices": [5, 11, 17, 23]},
            {"name": "ReshapeTokensToImage"},
        ],
        **changes,
    }


def vllm_demo(args: dict[str, Any]) -> dict[str, Any]:
    """The layout vLLM's first Prithvi example had."""
    return {
        "architectures": ["PrithviGeoSpatialMAE"],
        "num_classes": 0,
        "pretrained_cfg": {"task_args": {"task": "SemanticSegmentationTask"}, "model_args": args},
    }


def terratorch_guide(args: dict[str, Any]) -> dict[str, Any]:
    """The layout of TerraTorch's guide to vLLM."""
    return {
        "architectures": ["Terratorch"],
        "num_classes": 0,
        "pretrained_cfg": {
            "seed_everything": 0,
            "input": {"data": {"pixel_values": {"type": "torch.Tensor", "shape": [6, 512, 512]}}},
            "model": {
                "class_path": "terratorch.tasks.SemanticSegmentationTask",
                "init_args": {"model_args": args, "model_factory": "EncoderDecoderFactory"},
            },
        },
    }


def first_release() -> dict[str, Any]:
    """Prithvi_100M_config.yaml, as JSON."""
    return {
        "model_args": {
            "decoder_depth": 8, "decoder_embed_dim": 512, "decoder_num_heads": 16, "depth": 12, "embed_dim": 768,
            "img_size": 224, "in_chans": 6, "num_frames": 3, "num_heads": 12, "patch_size": 16, "tubelet_size": 1,
        },
        "train_params": {
            "bands": ["B02", "B03", "B04", "B05", "B06", "B07"],
            "data_mean": [775.2290, 1080.9925, 1228.5855, 2497.2023, 2204.2148, 1610.8352],
            "data_std": [1281.526, 1270.0297, 1399.4802, 1368.3446, 1291.6764, 1154.5055],
            "mask_ratio": 0.75, "random_cropping": True,
        },
    }  # fmt: skip


def test_a_published_models_own_config_is_read() -> None:
    """Sizes, bands and statistics of a pre-trained model must be taken, its training's keys passed over."""
    config = PrithviConfig.from_hf(models_own())
    assert (config.img_size, config.patch_size, config.num_frames) == ((224, 224), (1, 16, 16), 4)
    assert (config.embed_dim, config.depth, config.num_heads, config.mlp_ratio) == (1024, 24, 16, 4.0)
    assert config.grid == (4, 14, 14)
    assert (config.bands[0], config.mean[5], config.std[0]) == ("B02", 1363.0, 2248.0)
    assert config.norm_eps == 1e-5
    assert (config.has_time, config.has_location, config.decoder) == (False, False, None)


@pytest.mark.parametrize(
    ("changes", "grid"),
    [
        ({"embed_dim": 768, "depth": 12, "num_heads": 12, "num_frames": 3}, (3, 14, 14)),  # 1.0-100M
        ({"embed_dim": 1280, "depth": 32, "patch_size": [1, 14, 14]}, (4, 16, 16)),  # 2.0-600M
        ({"embed_dim": 192, "depth": 12, "num_heads": 3, "num_frames": 1}, (1, 14, 14)),  # 2.0-tiny
        ({"patch_size": 16}, (4, 14, 14)),
        ({"patch_size": 16, "tubelet_size": 2}, (2, 14, 14)),
        ({"patch_size": [16, 8]}, (4, 14, 28)),
        ({"img_size": [224, 448]}, (4, 14, 28)),
    ],
)
def test_every_published_size_is_read(changes: dict[str, Any], grid: tuple[int, int, int]) -> None:
    """All sizes of the family, and each way to write a patch's or an image's size, must give the right grid."""
    assert PrithviConfig.from_hf(models_own(**changes)).grid == grid


def test_coordinates_are_read() -> None:
    """A -TL config must give an encoder that takes dates and place, with a learned scale."""
    config = PrithviConfig.from_hf(models_own(coords_encoding=["time", "location"], coords_scale_learn=True))
    assert (config.has_time, config.has_location, config.coords_scale_learn) == (True, True, True)
    config = PrithviConfig.from_hf(models_own(coords_encoding=["location"]))
    assert (config.has_time, config.has_location, config.coords_scale_learn) == (False, True, False)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (FLOODS, DecoderConfig(num_classes=2, channels=(256,) * 4)),
        (FLOODS | {"channels": 96, "num_convs": 3}, DecoderConfig(num_classes=2, channels=(96,) * 3)),
        (FLOODS | {"channels": [96, 48, 32]}, DecoderConfig(num_classes=2, channels=(96, 48, 32))),
        (FLOODS | {"decoder": "fcn", "dropout": 0.1}, DecoderConfig(num_classes=2)),
        (
            FLOODS | {"head_channels": [32], "skip": True, "skip_channels": 16},
            DecoderConfig(num_classes=2, head_channels=(32,), skip=True, skip_channels=16),
        ),
    ],
)
def test_a_decoder_is_told_beside_the_sizes(table: dict[str, Any], expected: DecoderConfig) -> None:
    """Our `segmentation` table must give the decoder it describes, the published one by default."""
    assert PrithviConfig.from_hf(models_own(segmentation=table)).decoder == expected


@pytest.mark.parametrize("layout", [vllm_demo, terratorch_guide])
def test_a_finetuned_models_config_is_read(layout: Any) -> None:
    """Both places a fine-tuned model's `model_args` are published in must give the same model."""
    config = PrithviConfig.from_hf(layout(finetuned()))
    assert (config.embed_dim, config.depth, config.num_frames, config.in_chans) == (1024, 24, 1, 6)
    assert (config.has_time, config.has_location, config.coords_scale_learn) == (True, True, True)
    assert config.decoder == DecoderConfig(num_classes=2, channels=(256,) * 4)
    assert config.bands == tuple(BANDS)


@pytest.mark.parametrize(
    ("backbone", "embed_dim", "depth", "heads", "patch", "coords"),
    [
        ("prithvi_eo_tiny", 256, 4, 4, 16, False),
        ("prithvi_eo_v1_100", 768, 12, 12, 16, False),
        ("prithvi_eo_v2_tiny_tl", 192, 12, 3, 16, True),
        ("prithvi_eo_v2_100", 768, 12, 12, 16, False),
        ("prithvi_eo_v2_100_tl", 768, 12, 12, 16, True),
        ("prithvi_eo_v2_300", 1024, 24, 16, 16, False),
        ("prithvi_eo_v2_300_tl", 1024, 24, 16, 16, True),
        ("prithvi_eo_v2_600", 1280, 32, 16, 14, False),
        ("prithvi_eo_v2_600_tl", 1280, 32, 16, 14, True),
        ("terratorch_prithvi_eo_v2_600_tl", 1280, 32, 16, 14, True),
    ],
)
def test_every_published_backbone_has_its_sizes(
    backbone: str, embed_dim: int, depth: int, heads: int, patch: int, coords: bool
) -> None:
    """A backbone's published name must stand for its published sizes."""
    config = PrithviConfig.from_hf(vllm_demo(finetuned(backbone=backbone, necks=None)))
    assert (config.embed_dim, config.depth, config.num_heads) == (embed_dim, depth, heads)
    assert config.patch_size == (1, patch, patch)
    assert (config.has_time, config.has_location) == (coords, coords)


def test_a_backbone_may_be_changed() -> None:
    """`backbone_*` must override the published sizes, the number of bands following the bands."""
    necks = [{"name": "ReshapeTokensToImage", "effective_time_dim": 3}]
    config = PrithviConfig.from_hf(
        vllm_demo(
            finetuned(
                backbone_num_frames=3, backbone_bands=["RED", "GREEN"], backbone_img_size=512, necks=necks,
                head_channel_list=[128, 64],
            )
        )
    )  # fmt: skip
    assert (config.num_frames, config.in_chans, config.grid) == (3, 2, (3, 32, 32))
    assert config.decoder == DecoderConfig(num_classes=2, head_channels=(128, 64))


def test_the_first_releases_config_is_read() -> None:
    """The keys of Prithvi 1.0's first release must give the model its later config gives."""
    config = PrithviConfig.from_hf(first_release())
    assert (config.grid, config.patch_size, config.embed_dim) == ((3, 14, 14), (1, 16, 16), 768)
    assert (config.bands[5], config.mean[0], config.std[5]) == ("B07", 775.2290, 1154.5055)


@pytest.mark.parametrize(
    ("backbone", "counted"),
    [
        ("prithvi_eo_v2_tiny_tl", 5_634_050),
        ("prithvi_eo_v1_100", 86_237_184),
        ("prithvi_eo_v2_300_tl", 303_886_338),
        ("prithvi_eo_v2_600_tl", 631_188_482),
    ],
)
def test_published_sizes_have_published_parameter_counts(backbone: str, counted: int) -> None:
    """An encoder of a published size must have as many parameters as were counted on the published class."""
    with torch.device("meta"):
        model = PrithviSegmenter(PrithviConfig.from_hf(vllm_demo(finetuned(backbone=backbone, necks=None))))
    assert sum(parameter.numel() for parameter in model.encoder.parameters()) == counted


def test_a_config_cannot_be_changed() -> None:
    """A configuration must be frozen: engines share it."""
    config = PrithviConfig.from_hf(models_own())
    with pytest.raises(ValidationError):
        config.depth = 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 100}, "embed_dim: 100 is not a multiple of 16"),
        ({"embed_dim": "wide"}, "embed_dim: Input should be a valid integer"),
        ({"num_heads": 10}, "num_heads: 10 does not divide embed_dim 1024"),
        ({"num_heads": None}, "num_heads: Field required"),
        ({"depth": 0}, "depth: Input should be greater than or equal to 1"),
        ({"img_size": 220}, r"img_size: \(220, 220\) is not a multiple of patch_size \(16, 16\)"),
        ({"img_size": [224, 224, 3]}, "img_size"),
        ({"patch_size": [1, 2, 16, 16]}, "patch_size"),
        ({"patch_size": [0, 16, 16]}, "patch_size: must be at least 1"),
        ({"patch_size": [3, 16, 16]}, "num_frames: 4 is not a multiple of patch_size 3"),
        ({"coords_encoding": ["season"]}, r"coords_encoding\.0: Input should be 'time' or 'location'"),
        (
            {"coords_encoding": ["time"], "patch_size": [2, 16, 16]},
            "coords_encoding: time needs a patch_size of 1 in time",
        ),
        ({"bands": ["B02"]}, "bands: 1 values for in_chans 6"),
        ({"bands": "B02"}, "bands: must be a list"),
        ({"mean": [1.0, 2.0]}, "mean: 2 values for in_chans 6"),
        ({"std": [1.0] * 7}, "std: 7 values for in_chans 6"),
        ({"segmentation": "FCNDecoder"}, "segmentation: must be a table"),
        (
            {"segmentation": FLOODS | {"decoder": "UperNetDecoder"}},
            "segmentation.decoder: 'UperNetDecoder' is not",
        ),
        (
            {"segmentation": FLOODS | {"decoder": ["fcn"]}},
            r"segmentation.decoder: \['fcn'\] is not supported",
        ),
        ({"segmentation": FLOODS | {"sharp": True}}, "segmentation.sharp: unknown"),
        ({"segmentation": {"decoder": "fcn"}}, "decoder.num_classes: Field required"),
        ({"segmentation": FLOODS | {"num_classes": 0}}, "decoder.num_classes: Input should be greater"),
        ({"segmentation": FLOODS | {"num_convs": 0}}, "segmentation.num_convs: must be 1 to 8"),
        ({"segmentation": FLOODS | {"num_convs": 10**9}}, "segmentation.num_convs: must be 1 to 8"),
        (
            {"segmentation": FLOODS | {"num_convs": 2, "channels": [8]}},
            "segmentation.num_convs: 2, but 1 channels",
        ),
        ({"segmentation": FLOODS | {"channels": [8, 0]}}, "decoder.channels: channels must be at least 1"),
        ({"segmentation": FLOODS | {"channels": "wide"}}, "segmentation.channels: must be a list"),
    ],
)
def test_errors_name_the_key(changes: dict[str, Any], message: str) -> None:
    """A wrong value must be a ValueError that begins with the file and names the key."""
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        PrithviConfig.from_hf(models_own(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "prithvi_eo_v3"}, "model_args.backbone: 'prithvi_eo_v3' is none of prithvi_eo_tiny, "),
        ({"backbone": ["prithvi"]}, "model_args.backbone: "),
        (
            {"decoder": "ASPPSegmentationHead"},
            "model_args.decoder: 'ASPPSegmentationHead' is not supported; FCN",
        ),
        ({"decoder": "UperNetDecoder"}, "model_args.decoder_num_convs: is not supported"),
        ({"decoder_kernel": 3}, "model_args.decoder_kernel: is not supported"),
        ({"head_fc_dim": 3}, "model_args.head_fc_dim: is not supported"),
        ({"decoder_in_index": 4}, "model_args.decoder_in_index: 4 is none of 4 features"),
        ({"backbone_out_indices": [24]}, "model_args.backbone_out_indices: 24 is none of 24 features"),
        ({"backbone_depth": 0}, "model_args.backbone_depth: must be 1 to 1024"),
        ({"decoder_num_convs": "four"}, "model_args.decoder_num_convs: must be 1 to 8"),
        ({"backbone_bands": 6}, "model_args.backbone_bands: must be a list"),
        ({"necks": {"name": "ReshapeTokensToImage"}}, "model_args.necks: must be a list"),
        ({"necks": ["ReshapeTokensToImage"]}, "model_args.necks.0.name: None is not supported"),
        ({"necks": [{"name": "LearnedInterpolateToPyramidal"}]}, "model_args.necks.0.name: 'Learned"),
        (
            {"necks": [{"name": "SelectIndices", "indices": [5, 24]}]},
            "model_args.necks.0.indices: 24 is none of 24 features",
        ),
        ({"necks": [{"name": "SelectIndices", "indices": 5}]}, "model_args.necks.0.indices: must be a list"),
        (
            {"necks": [{"name": "SelectIndices", "indices": [23]}]},
            "model_args.necks: ReshapeTokensToImage: missing",
        ),
        (
            {"necks": [{"name": "ReshapeTokensToImage"}, {"name": "LearnedInterpolateToPyramidal"}]},
            "model_args.necks: FCNDecoder takes no pyramid",
        ),
        (
            {"necks": [{"name": "ReshapeTokensToImage", "remove_cls_token": False}]},
            "model_args.necks.0.remove_cls_token: must be true",
        ),
        (
            {"backbone_num_frames": 3, "necks": [{"name": "ReshapeTokensToImage"}]},
            "model_args.necks.0.effective_time_dim: must be 3, the patches in time",
        ),
    ],
)
def test_a_finetuned_model_of_another_kind_is_refused(changes: dict[str, Any], message: str) -> None:
    """A fine-tuned model that would answer otherwise than its authors' must be refused by key, never guessed."""
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        PrithviConfig.from_hf(vllm_demo(finetuned(**changes)))


@pytest.mark.parametrize("key", ["decoder", "num_classes"])
def test_a_finetuned_model_must_say_its_decoder(key: str) -> None:
    """Without a decoder or its classes a fine-tuned model's config must be refused."""
    args = finetuned()
    del args[key]
    with pytest.raises(ValueError, match=f"model_args.{key}: missing"):
        PrithviConfig.from_hf(vllm_demo(args))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "llama", "hidden_size": 64},
        {"pretrained_cfg": {}},
        {"pretrained_cfg": {"model": {}}},
    ],
)
def test_another_models_config_is_refused(config: dict[str, Any]) -> None:
    """A config.json that is none of this family's must be refused as that."""
    with pytest.raises(ValueError, match="this is no Prithvi-EO model's"):
        PrithviConfig.from_hf(config)


@pytest.mark.parametrize("config", [models_own(segmentation=FLOODS), vllm_demo(finetuned()), first_release()])
def test_reading_leaves_the_config_alone(config: dict[str, Any]) -> None:
    """Reading must not change what was read."""
    before = copy.deepcopy(config)
    PrithviConfig.from_hf(config)
    assert config == before
