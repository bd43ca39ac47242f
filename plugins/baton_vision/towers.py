"""The vision towers of LLaVA-style models: vLLM's own. A further one is a row here.

vLLM's `get_vision_encoder_info` would do for a part of it, but imports Pixtral's, and with it torchvision.
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
    """What vLLM has for one kind of tower: the module, and how many tokens it makes of an image."""

    model: type[nn.Module]
    info: type[VisionEncoderInfo]


TOWERS = {
    CLIPVisionConfig: Tower(CLIPVisionModel, CLIPEncoderInfo),
    SiglipVisionConfig: Tower(SiglipVisionModel, SiglipEncoderInfo),
}
"""By the type of `vision_config`."""


def tower_of(config: LlavaConfig) -> Tower:
    """The kind of tower a model has.

    Raises:
        ValueError: one that is not known here.
    """
    kind = type(config.vision_config)
    if kind not in TOWERS:
        known = ", ".join(each.__name__ for each in TOWERS)
        raise ValueError(f"vision_config is a {kind.__name__}; known here: {known}")
    return TOWERS[kind]


def encoder_info(config: LlavaConfig) -> VisionEncoderInfo:
    """Sizes and counts of a model's tower."""
    return tower_of(config).info(config)


def feature_layers(config: LlavaConfig) -> list[int]:
    """The layers whose outputs are the features, side by side; -1 is the last, 0 the embeddings."""
    chosen = config.vision_feature_layer
    return [chosen] if isinstance(chosen, int) else list(chosen)


def build_tower(config: LlavaConfig, quant_config: Any, prefix: str) -> nn.Module:
    """A model's tower up to the deepest layer that is used, without the norm behind the last."""
    depth = config.vision_config.num_hidden_layers
    return tower_of(config).model(
        config.vision_config,
        quant_config=quant_config,
        num_hidden_layers_override=max(get_layer_index(layer, depth) for layer in feature_layers(config)),
        require_post_norm=False,
        prefix=prefix,
    )
