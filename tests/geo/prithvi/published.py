"""What TerraTorch's and Prithvi's published example configurations say of model, task, data and tiles.

Facts of `examples/`, `integrationtests/` and `tests/resources/configs` of TerraTorch (November 2025), of `configs/` of
Prithvi-EO-2.0, and of TerraTorch's guide to vLLM; what only training uses is left out. Prithvi's configurations leave the
backbone open: here it is the one whose depth their `SelectIndices` fits.
"""

from __future__ import annotations

from typing import Any

SIX = ["BLUE", "GREEN", "RED", "NIR_NARROW", "SWIR_1", "SWIR_2"]
NUMBERED = ["0", "1", "2", "3", "4", "5"]
S2_AND_S1 = [
    "COASTAL_AEROSOL", "BLUE", "GREEN", "RED", "RED_EDGE_1", "RED_EDGE_2", "RED_EDGE_3", "NIR_BROAD", "NIR_NARROW",
    "CIRRUS", "SWIR_1", "SWIR_2", "VV", "VH",
]  # fmt: skip
OF_300 = [5, 11, 17, 23]
OF_100 = [2, 5, 8, 11]
OF_600 = [7, 15, 23, 31]
UNET = {"decoder": "UNetDecoder", "decoder_channels": [512, 256, 128, 64]}
CROPS = [
    "Natural Vegetation", "Forest", "Corn", "Soybeans", "Wetlands", "Developed/Barren", "Open Water", "Winter Wheat",
    "Alfalfa", "Fallow/Idle Cropland", "Cotton", "Sorghum", "Other",
]  # fmt: skip
BURNS = {
    "means": [0.033349706741586264, 0.05701185520536176, 0.05889748132001316, 0.2323245113436119, 0.1972854853760658,
              0.11944914225186566],
    "stds": [0.02269135568823774, 0.026807560223070237, 0.04004109844362779, 0.07791732423672691, 0.08708738838140137,
             0.07241979477437814],
}  # fmt: skip
FLOODS = {
    "means": [0.1412956, 0.13795798, 0.12353792, 0.30902815, 0.2044958, 0.11912015],
    "stds": [0.07406382, 0.07370365, 0.08692279, 0.11798815, 0.09772074, 0.07659938],
    "constant_scale": 0.0001,
}
CROP_NUMBERS = {
    "means": [494.905781, 815.239594, 924.335066, 2968.881459, 2634.621962, 1739.579917],
    "stds": [284.925432, 357.84876, 575.566823, 896.601013, 951.900334, 921.407808],
}
BIOMASS = {
    "means": [547.36707, 898.5121, 1020.9082, 2665.5352, 2340.584, 1610.1407],
    "stds": [411.4701, 558.54065, 815.94025, 812.4403, 1113.7145, 1067.641],
}
SCARS = {
    "means": [0.052829564761523104, 0.07822514779700994, 0.09545302348640401, 0.2128596444116123, 0.2363016737011897,
              0.17234100022878698],
    "stds": [0.028757146620143812, 0.03540772770593507, 0.05291947163682527, 0.06949186937256507, 0.08958868240264736,
             0.08198354165348874],
    "constant_scale": 1.0,
}  # fmt: skip


def necks(indices: list[int], *, times: int = 1, pyramid: bool = True) -> list[dict[str, Any]]:
    reshape = {"name": "ReshapeTokensToImage"} | ({"effective_time_dim": times} if times > 1 else {})
    last = [{"name": "LearnedInterpolateToPyramidal"}] if pyramid else []
    return [{"name": "SelectIndices", "indices": indices}, reshape, *last]


def generic(numbers: dict[str, Any], bands: list[str] | None = None) -> dict[str, Any]:
    args = {"dataset_bands": bands or SIX, "output_bands": bands or SIX, "no_data_replace": 0, **numbers}
    return {"class_path": "terratorch.datamodules.GenericNonGeoSegmentationDataModule", "init_args": args}


def module(name: str, **args: Any) -> dict[str, Any]:
    return {"class_path": f"terratorch.datamodules.{name}", "init_args": args}


def config(
    args: dict[str, Any], data: dict[str, Any] | None, task: str = "SemanticSegmentationTask", **others: Any
) -> dict[str, Any]:
    """A config.json as TerraTorch's script for vLLM makes it of a YAML configuration."""
    factory = others.pop("factory", "EncoderDecoderFactory")
    init = {"model_args": args, "model_factory": factory, "freeze_backbone": False, **others}
    pretrained: dict[str, Any] = {"model": {"class_path": f"terratorch.tasks.{task}", "init_args": init}}
    if data is not None:
        pretrained["data"] = data
    return {"architectures": ["Terratorch"], "num_classes": 0, "pretrained_cfg": pretrained}


def tiled(crop: int, stride: int) -> dict[str, Any]:
    sides = {"h_crop": crop, "h_stride": stride, "w_crop": crop, "w_stride": stride}
    return {"tiled_inference_parameters": sides | {"average_patches": True}}


V2_300 = {"backbone": "prithvi_eo_v2_300", "backbone_pretrained": True, "backbone_bands": SIX}
AUX = {
    "aux_heads": [
        {
            "name": "aux_head",
            "decoder": "FCNDecoder",
            "decoder_args": {"decoder_channels": 256, "decoder_num_convs": 2},
        }
    ],
    "aux_loss": {"aux_head": 1.0},
}
SEN1FLOODS11_VIT = V2_300 | UNET | {
    "backbone_drop_path": 0.1, "necks": necks(OF_300), "head_channel_list": [256], "head_dropout": 0.1, "num_classes": 2,
}  # fmt: skip
DUAL_LR = {
    "decoder": "FCNDecoder", "backbone_pretrained": True, "backbone": "prithvi_eo_v1_100", "decoder_channels": 256,
    "backbone_bands": SIX, "num_classes": 2, "head_dropout": 0.1, "decoder_num_convs": 4, "head_channel_list": [256],
    "necks": necks([-1], pyramid=False),
}  # fmt: skip
SCARS_ARGS = UNET | {
    "backbone_pretrained": True, "backbone_drop_path": 0.1, "backbone_bands": NUMBERED, "num_classes": 2,
    "head_dropout": 0.1,
}  # fmt: skip
GUIDE = {
    "backbone_pretrained": True, "backbone": "prithvi_eo_v2_300_tl", "decoder": "UperNetDecoder", "decoder_channels": 256,
    "decoder_scale_modules": True, "num_classes": 2, "rescale": True, "backbone_bands": SIX, "head_dropout": 0.1,
    "necks": necks(OF_300, pyramid=False),
}  # fmt: skip

SEGMENTATION: dict[str, dict[str, Any]] = {
    "burn_scars": config(
        V2_300 | UNET | {
            "backbone_drop_path": 0.1, "necks": necks(OF_300), "head_channel_list": [256], "head_dropout": 0.1,
            "num_classes": 2,
        },
        generic(BURNS), **tiled(512, 496),
    ),
    "multi_temporal_crop": config(
        V2_300 | {
            "decoder": "FCNDecoder", "backbone_in_channels": 6, "rescale": False, "backbone_num_frames": 3,
            "num_classes": 13, "head_dropout": 0.1, "decoder_channels": 512, "head_channel_list": [128, 64],
        },
        generic(CROP_NUMBERS), class_names=CROPS, **tiled(224, 196),
    ),
    "multimodal_prithvi_sen1floods11": config(
        {
            "backbone": "prithvi_eo_v2_300", "backbone_pretrained": False, "backbone_bands": S2_AND_S1,
            "decoder": "FCNDecoder", "decoder_num_convs": 4, "decoder_channels": 256, "num_classes": 2,
            "head_dropout": 0.1, "head_channel_list": [256],
        },
        module(
            "GenericMultiModalDataModule", modalities=["S2L2A", "S1"], concat_bands=True, no_data_replace=0,
            means={
                "S2L2A": [1793.243, 1924.863, 2184.553, 2340.936, 2671.402, 3240.082, 3468.412, 3563.244, 3627.704,
                          3711.071, 3416.714, 2849.625],
                "S1": [-12.577, -20.265],
            },
            stds={
                "S2L2A": [1160.144, 1201.092, 1219.943, 1397.225, 1400.035, 1373.136, 1429.17, 1485.025, 1447.836,
                          1652.703, 1471.002, 1365.30],
                "S1": [5.179, 5.872],
            },
        ),
    ),
    "prithvi_tiny_finetune_chesapeake": config(
        {
            "backbone": "prithvi_eo_tiny", "backbone_out_indices": OF_100, "decoder": "UperNetDecoder",
            "decoder_channels": 128, "decoder_scale_modules": True,
            "backbone_bands": ["RED", "GREEN", "BLUE", "NIR_NARROW"], "num_classes": 7, "rescale": True,
            "backbone_num_frames": 1, "backbone_embed_dim": 192, "backbone_depth": 12, "backbone_num_heads": 3,
        },
        module("MChesapeakeLandcoverNonGeoDataModule", bands=["RED", "GREEN", "BLUE", "NIR"]),
    ),
    "sen1floods11_vit": config(SEN1FLOODS11_VIT, generic(FLOODS), **AUX),
    "sen1floods11_vit_local_ckpt": config(
        SEN1FLOODS11_VIT | {"backbone_pretrained": False, "backbone_ckpt_path": "Prithvi_EO_V2_300M.pt"},
        generic(FLOODS), **AUX,
    ),
    "sen1floods11_vit_dual_lr": config(DUAL_LR, generic(FLOODS), **AUX),
    "tutorial_burnscars": config(
        V2_300 | UNET | {
            "backbone_img_size": 512, "backbone_coords_encoding": [], "necks": necks(OF_300), "head_dropout": 0.1,
            "num_classes": 2,
        },
        generic(BURNS),
    ),
    "tutorial_multitemporal_crop": config(
        V2_300 | UNET | {
            "backbone": "prithvi_eo_v2_300_tl", "backbone_num_frames": 3, "backbone_coords_encoding": [],
            "necks": necks(OF_300, times=3), "head_dropout": 0.1, "num_classes": 13,
        },
        module("MultiTemporalCropClassificationDataModule", expand_temporal_dimension=True),
    ),
    "integration_eo_v1_100": config(
        SCARS_ARGS | {"backbone": "prithvi_eo_v1_100", "necks": necks(OF_100)}, generic(SCARS, NUMBERED), **tiled(512, 448)
    ),
    "integration_eo_v2_300": config(
        SCARS_ARGS | {"backbone": "prithvi_eo_v2_300", "necks": necks(OF_300)}, generic(SCARS, NUMBERED), **tiled(512, 448)
    ),
    "integration_eo_v2_600": config(
        SCARS_ARGS | {"backbone": "prithvi_eo_v2_600", "necks": necks(OF_600)}, generic(SCARS, NUMBERED), **tiled(512, 448)
    ),
    "manufactured_600_tiled": config(
        {
            "decoder": "UperNetDecoder", "pretrained": False, "backbone": "prithvi_eo_v2_600", "decoder_channels": 256,
            "in_channels": 6, "bands": SIX, "num_frames": 1, "num_classes": 2, "head_dropout": 0.5708022831486758,
        },
        module(
            "GenericNonGeoSegmentationDataModule", dataset_bands=[[0, 11]], output_bands=[[1, 3], [4, 6]],
            no_data_replace=0, **BIOMASS,
        ),
        factory="PrithviModelFactory", **tiled(224, 192),
    ),
    "burnintensity": config(
        {
            "backbone_pretrained": True, "backbone": "prithvi_eo_v2_600", "decoder": "UperNetDecoder",
            "backbone_in_channels": 6, "backbone_coords_encoding": ["location"], "num_classes": 5, "rescale": True,
            "backbone_bands": ["BLUE", "GREEN", "RED", "NIR", "SWIR_1", "SWIR_2"], "backbone_num_frames": 3,
            "head_dropout": 0.1, "decoder_channels": 512, "head_channel_list": [128, 64],
            "necks": necks(OF_600, times=3, pyramid=False),
        },
        module("BurnIntensityNonGeoDataModule", use_full_data=True), **tiled(224, 196),
    ),
    "firescars": config(
        {
            "backbone_pretrained": True, "backbone": "prithvi_eo_v2_600_tl", "decoder": "UperNetDecoder",
            "decoder_channels": 256, "decoder_scale_modules": True, "backbone_coords_encoding": ["time", "location"],
            "num_classes": 2, "rescale": True, "head_dropout": 0.1, "necks": necks(OF_600, pyramid=False),
            "backbone_bands": ["BLUE", "GREEN", "RED", "NIR_BROAD", "SWIR_1", "SWIR_2"],
        },
        module("FireScarsNonGeoDataModule", no_data_replace=0, use_metadata=True),
    ),
    "landslide": config(
        {
            "backbone_pretrained": True, "backbone": "prithvi_eo_v2_600", "decoder": "UperNetDecoder", "num_classes": 2,
            "rescale": True, "backbone_bands": ["BLUE", "GREEN", "RED", "NIR_BROAD", "SWIR_1", "SWIR_2"],
            "head_dropout": 0.1, "decoder_channels": 256, "head_channel_list": [128, 64],
            "necks": necks(OF_600, pyramid=False),
        },
        module("Landslide4SenseNonGeoDataModule", bands=["BLUE", "GREEN", "RED", "NIR_BROAD", "SWIR_1", "SWIR_2"]),
    ),
    "multicrop": config(
        {
            "backbone": "prithvi_eo_v1_100", "decoder": "UperNetDecoder", "num_classes": 13, "backbone_pretrained": True,
            "backbone_coords_encoding": ["time", "location"], "rescale": True, "backbone_bands": SIX, "head_dropout": 0.1,
            "decoder_channels": 256, "backbone_num_frames": 3, "necks": necks(OF_100, times=3, pyramid=False),
        },
        module("MultiTemporalCropClassificationDataModule", bands=SIX),
    ),
    "sen1floods11": config(
        {
            "backbone_pretrained": False, "backbone": "prithvi_eo_v1_100", "decoder": "UperNetDecoder",
            "decoder_channels": 256, "decoder_scale_modules": True, "num_classes": 2, "rescale": True,
            "backbone_bands": SIX, "head_dropout": 0.1, "necks": necks(OF_100, pyramid=False),
        },
        module("Sen1Floods11NonGeoDataModule", constant_scale=0.0001, no_data_replace=0, bands=SIX),
    ),
    "vllm_guide": config(GUIDE, module("Sen1Floods11NonGeoDataModule", constant_scale=0.0001, no_data_replace=0, bands=SIX)),
}  # fmt: skip

REGRESSION: dict[str, dict[str, Any]] = {
    "tutorial_agb": config(
        V2_300 | UNET | {"backbone_num_frames": 1, "backbone_img_size": 512, "necks": necks(OF_300)},
        generic(BIOMASS), "PixelwiseRegressionTask",
    ),
    "biomassters": config(
        {
            "backbone_pretrained": True, "backbone": "prithvi_eo_v2_600", "decoder": "UperNetDecoder", "rescale": True,
            "backbone_bands": SIX, "head_dropout": 0.1, "decoder_channels": 512, "backbone_num_frames": 4,
            "necks": necks(OF_600, times=4, pyramid=False),
        },
        module("BioMasstersNonGeoDataModule", bands=SIX, sensors=["S2"]), "PixelwiseRegressionTask",
    ),
    "manufactured_300": config(
        {
            "decoder": "UperNetDecoder", "pretrained": False, "backbone": "prithvi_eo_v2_300",
            "backbone_drop_path_rate": 0.3, "backbone_patch_size": 16, "decoder_channels": 64, "num_frames": 1,
            "in_channels": 6, "bands": SIX, "head_dropout": 0.5708022831486758, "head_final_act": "torch.nn.ReLU",
            "head_learned_upscale_layers": 2,
        },
        generic(BIOMASS), "PixelwiseRegressionTask", factory="PrithviModelFactory",
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sen1floods11_vit_peft": (
        config(DUAL_LR | {"peft_config": {"method": "LORA", "replace_qkv": "qkv"}}, None),
        "model_args.peft_config: weights of adapters",
    ),
    "sen1floods11_vit_smp": (
        config(DUAL_LR | {"decoder": "smp_FPN"}, None), "model_args.decoder: 'smp_FPN' is not supported",
    ),
    "eurosat": (
        config({"decoder": "IdentityDecoder", "backbone": "prithvi_eo_v2_300", "num_classes": 10}, None,
               "ClassificationTask"),
        "model.class_path: 'terratorch.tasks.ClassificationTask' is not supported",
    ),
    "object_detection": (
        config({"framework": "mask-rcnn", "backbone": "prithvi_eo_v2_600"}, None, "ObjectDetectionTask"),
        "model.class_path: 'terratorch.tasks.ObjectDetectionTask' is not supported",
    ),
    "prithvi_swin_B": (
        config(DUAL_LR | {"backbone": "prithvi_swin_B"}, None), "model_args.backbone: 'prithvi_swin_B' is none of",
    ),
    "terramind": (
        config(DUAL_LR | {"backbone": "terramind_v1_base"}, None),
        "model_args.backbone: 'terramind_v1_base' is TerraMind, which is another family",
    ),
    "vit_adapter": (
        config(DUAL_LR | {"backbone_vit_adapter": True}, None), "model_args.backbone_vit_adapter: is not supported",
    ),
    "an activation of its own": (
        config(
            {"decoder": "FCNDecoder", "backbone": "prithvi_eo_v2_300", "head_final_act": "mine.ReLU"}, None,
            "PixelwiseRegressionTask",
        ),
        "model_args.head_final_act: 'mine.ReLU' is not supported",
    ),
    "another factory": (
        config(DUAL_LR, None, factory="SMPModelFactory"), "model.init_args.model_factory: 'SMPModelFactory'",
    ),
}  # fmt: skip
