"""Process LLaVA's inputs: expand each `<image>` token to as many as the tower gives embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import BatchFeature, LlavaConfig, LlavaProcessor
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.model_executor.models.vision import VisionEncoderInfo, get_num_selected_vision_tokens
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

from baton_vision.contract import MISCOUNTED
from baton_vision.images import ImageParser, refusal, require_proportions, require_tensor
from baton_vision.placeholders import collapse_runs
from baton_vision.towers import encoder_info


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
