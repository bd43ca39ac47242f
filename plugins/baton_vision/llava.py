"""LLaVA-style models for vLLM: projected features of a vision tower replace the embeddings of image tokens.

Tower and text model are vLLM's own. Modules are named as in official checkpoints
(https://huggingface.co/llava-hf).

A prompt's `<image>` tokens are expanded to as many as the tower gives embeddings. To add a tower, add a row
to `TOWERS`; vLLM's `get_vision_encoder_info` is not used because it imports Pixtral's tower, which needs
torchvision.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import BatchFeature, CLIPVisionConfig, LlavaConfig, LlavaProcessor, SiglipVisionConfig
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.clip import CLIPEncoderInfo, CLIPVisionModel
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.siglip import SiglipEncoderInfo, SiglipVisionModel
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    get_layer_index,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.model_executor.models.vision import VisionEncoderInfo, get_num_selected_vision_tokens
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
    TimingContext,
)
from vllm.sequence import IntermediateTensors

from baton_vision.contract import MISCOUNTED
from baton_vision.images import ImageParser, refusal, require_proportions, require_row, require_tensor
from baton_vision.placeholders import collapse_runs


class Tower(NamedTuple):
    """vLLM's classes for one kind of tower.

    Attributes:
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


class LlavaProcessingInfo(BaseProcessingInfo):
    """Facts about a LLaVA model that do not depend on a request: limits, image token, tokens an image."""

    def get_hf_config(self) -> LlavaConfig:
        return self.ctx.get_hf_config(LlavaConfig)

    def get_hf_processor(self, **kwargs: object) -> LlavaProcessor:
        processor = self.ctx.get_hf_processor(LlavaProcessor, **kwargs)
        if processor.patch_size is None:  # missing in some checkpoints; the tower has it
            processor.patch_size = self.encoder.get_patch_size()
        return processor

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_data_parser(self) -> ImageParser:
        return ImageParser(require_proportions)

    @property
    def encoder(self) -> VisionEncoderInfo:
        return encoder_info(self.get_hf_config())

    @property
    def image_token(self) -> int:
        """Return the id of `<image>`: once an image in a user's prompt, many times in an expanded one."""
        token: int = self.get_hf_config().image_token_index
        return token

    @property
    def tokens_an_image(self) -> int:
        """Return the number of image tokens, the same for all images since they are resized to one size."""
        side = self.encoder.get_image_size()
        patches = self.encoder.get_num_image_tokens(image_width=side, image_height=side)
        count: int = get_num_selected_vision_tokens(
            patches, self.get_hf_config().vision_feature_select_strategy
        )
        return count


class LlavaDummyInputs(BaseDummyInputsBuilder[LlavaProcessingInfo]):
    """The largest inputs of a prompt, with which vLLM measures memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        image_token: str = self.info.get_hf_processor().image_token
        return image_token * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        side = self.info.encoder.get_image_size()
        count = mm_counts.get("image", 0)
        images = self._get_dummy_images(
            width=side, height=side, num_images=count, overrides=mm_options.get("image")
        )
        return {"image": images}


class LlavaMultiModalProcessor(BaseMultiModalProcessor[LlavaProcessingInfo]):
    """Expands prompts and prepares pixels for LLaVA."""

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """Process inputs as vLLM does, but accept prompts that are already expanded, in whole or in part.

        Raises:
            VLLMValidationError: the number of image tokens is not that of the images.
        """
        token, images = self.info.image_token, inputs.mm_data_items.get_count("image", strict=False)
        bare, found = inputs.prompt, inputs.prompt.count(token)
        if found != images:
            bare = collapse_runs(inputs.prompt, token, self.info.tokens_an_image)
        if bare.count(token) != images:
            raise refusal(f"{images} images for {found} {MISCOUNTED}")
        return super().apply(replace(inputs, prompt=bare), timing_ctx)

    def _call_hf_processor(
        self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        processed = super()._call_hf_processor(hf_data, hf_kwargs)
        images, side = hf_data["images"], self.info.encoder.get_image_size()
        assert isinstance(images, Sequence)  # vLLM's `ImageProcessorItems` has a list
        shape = (len(images), 3, side, side)
        require_tensor(
            processed.get("pixel_values"), shape, self.info.ctx.model_config.dtype, "an image's pixels"
        )
        return processed

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        token = self.info.image_token
        embeddings = [token] * self.info.tokens_an_image
        return [PromptReplacement(modality="image", target=[token], replacement=embeddings)]


class LlavaProjector(nn.Module):
    """The projector from the tower's features to the text model's embeddings: linear, activation, linear."""

    def __init__(self, config: LlavaConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        wide = config.vision_config.hidden_size * len(feature_layers(config))
        hidden, bias = config.text_config.hidden_size, config.multimodal_projector_bias
        self.linear_1 = ColumnParallelLinear(
            wide, hidden, bias=bias, quant_config=quant_config, prefix=f"{prefix}.linear_1"
        )
        self.act = get_act_fn(config.projector_hidden_act)
        self.linear_2 = RowParallelLinear(
            hidden, hidden, bias=bias, quant_config=quant_config, prefix=f"{prefix}.linear_2"
        )

    def forward(self, features: Tensor) -> Tensor:
        """Project (images, patches, features) to (images, patches, hidden)."""
        hidden, _ = self.linear_1(features)
        embeddings: Tensor
        embeddings, _ = self.linear_2(self.act(hidden))
        return embeddings


@MULTIMODAL_REGISTRY.register_processor(
    LlavaMultiModalProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputs
)
class BatonLlavaForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsPP):
    """LLaVA 1.5 and models of the same architecture: a CLIP or SigLIP tower, a projector, a text model.

    No exception may leave `embed_multimodal` or `forward`: it would end the engine for everybody. Inputs that
    could raise one are refused while it is processed.
    """

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    # Applied in this order. Checkpoints up to transformers 4.51 have `language_model.model.` and
    # `language_model.lm_head.`; later ones `model.` before everything but the head; transformers 5 leaves out
    # `vision_model.` in memory and may write `language_model.` for the text model without its head.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_regex={
            re.compile(r"^lm_head\."): "language_model.lm_head.",
            re.compile(r"^model\."): "",
            re.compile(r"^language_model\.(?!model\.|lm_head\.)"): "language_model.model.",
            re.compile(r"^vision_tower\.(?!vision_model\.)"): "vision_tower.vision_model.",
        }
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return "<image>"
        raise ValueError("Only image modality is supported")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: LlavaConfig = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self._layers = feature_layers(config)
        self._strategy = config.vision_feature_select_strategy
        require_row(config.image_token_index, config.text_config.vocab_size)
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_tower = build_tower(config, quant_config, maybe_prefix(prefix, "vision_tower"))
            self.multi_modal_projector = LlavaProjector(
                config, quant_config, maybe_prefix(prefix, "multi_modal_projector")
            )
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.text_config,
                prefix=maybe_prefix(prefix, "language_model"),
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Return each image's embeddings, (tokens an image, hidden).

        Args:
            kwargs: `pixel_values`, (images, 3, side, side) in the model's dtype; absent in vLLM's dry runs.
        """
        pixels = kwargs.get("pixel_values")
        if pixels is None:
            return []
        features = self.vision_tower(
            pixels, select_layers=self._layers, feature_select_strategy=self._strategy
        )
        return self.multi_modal_projector(features)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states (tokens, hidden); vLLM has merged image embeddings into `inputs_embeds`."""
        if intermediate_tensors is not None:
            inputs_embeds = None
        return self.language_model.model(
            input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded

    def get_mm_mapping(self) -> MultiModelKeys:
        return MultiModelKeys.from_string_field(
            language_model="language_model", connector="multi_modal_projector", tower_model="vision_tower"
        )
