"""Build the vision towers of LLaVA-style models from vLLM's modules; to add one, add a row to `TOWERS`.

vLLM's `get_vision_encoder_info` is not used because it imports Pixtral's tower, which needs torchvision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers import CLIPVisionConfig, LlavaConfig, SiglipVisionConfig
from vllm.model_executor.models.clip import CLIPEncoderInfo, CLIPVisionModel
from vllm.model_executor.models.siglip import SiglipEncoderInfo, SiglipVisionModel
from vllm.model_executor.models.utils import get_layer_index
from vllm.model_executor.models.vision import VisionEncoderInfo


class Tower(NamedTuple):
    """vLLM's classes for one kind of tower.

    Attributes:
        model: the module.
        info: computes image sizes and numbers of image tokens.
    """

    model: type[nn.Module]
    info: type[VisionEncoderInfo]


TOWERS = {
    CLIPVisionConfig: Tower(CLIPVisionModel, CLIPEncoderInfo),
    SiglipVisionConfig: Tower(SiglipVisionModel, SiglipEncoderInfo),
}
"""Towers by the type of `vision_config`."""


def tower_of(config: LlavaConfig) -> Tower:
    """Return the tower for a model's configuration.

    Raises:
        ValueError: the type of `vision_config` is not in `TOWERS`.
    """
    kind = type(config.vision_config)
    if kind not in TOWERS:
        known = ", ".join(each.__name__ for each in TOWERS)
        raise ValueError(f"vision_config is a {kind.__name__}; supported are {known}")
    return TOWERS[kind]


def encoder_info(config: LlavaConfig) -> VisionEncoderInfo:
    """Return vLLM's description of the tower: image size, patch size, number of image tokens."""
    return tower_of(config).info(config)


def feature_layers(config: LlavaConfig) -> list[int]:
    """Return the layers whose outputs are concatenated as features; -1 is the last, 0 the embeddings."""
    chosen = config.vision_feature_layer
    return [chosen] if isinstance(chosen, int) else list(chosen)


def build_tower(config: LlavaConfig, quant_config: Any, prefix: str) -> nn.Module:
    """Build the tower up to the deepest layer that is used, without the final norm."""
    depth = config.vision_config.num_hidden_layers
    return tower_of(config).model(
        config.vision_config,
        quant_config=quant_config,
        num_hidden_layers_override=max(get_layer_index(layer, depth) for layer in feature_layers(config)),
        require_post_norm=False,
        prefix=prefix,
    )
