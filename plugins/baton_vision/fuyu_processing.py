"""Fuyu's inputs: an image is put before the prompt, row by row, and its patches are the embeddings.

What the model sees of an image two patches wide and three high, as HuggingFace's FuyuProcessor writes it, is
`II# II# II# <s> prompt <0x04>` with I `|SPEAKER|` and # `|NEWLINE|`. Only the I are embeddings; `<0x04>`
begins the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from transformers import BatchFeature, FuyuConfig, FuyuProcessor
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptIndexTargets,
    PromptInsertion,
    PromptUpdate,
    PromptUpdateDetails,
    TimingContext,
)

from baton_vision.grid import Canvas
from baton_vision.images import ImageParser, refusal, require_proportions, require_tensor
from baton_vision.placeholders import drop_leading_grid

END_OF_IMAGE = "<s>"
BEGINNING_OF_ANSWER = "<0x04>"


class FuyuProcessingInfo(BaseProcessingInfo):
    """What is known of a Fuyu model before any image."""

    def get_hf_config(self) -> FuyuConfig:
        return self.ctx.get_hf_config(FuyuConfig)

    def get_hf_processor(self, **kwargs: object) -> FuyuProcessor:
        return self.ctx.get_hf_processor(FuyuProcessor, **kwargs)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """One: FuyuProcessor puts one image before a prompt, and so was the model trained."""
        return {"image": 1}

    def get_data_parser(self) -> ImageParser:
        return ImageParser(self.require_grid)

    @property
    def canvas(self) -> Canvas:
        """What images are shrunk to and cut into, as the checkpoint's image processor says."""
        processor = self.get_hf_processor().image_processor
        size, patch = processor.size, processor.patch_size
        return Canvas(
            width=size["width"],
            height=size["height"],
            patch_width=patch["width"],
            patch_height=patch["height"],
        )

    def require_grid(self, width: int, height: int) -> None:
        """Refuse images that nothing would be left of."""
        require_proportions(width, height)
        if 0 in self.canvas.patches(width, height):
            raise refusal(f"an image of {width} x {height} pixels is too narrow to be shrunk")

    def token(self, text: str) -> int:
        """The id of a special token."""
        found: int = self.get_tokenizer().get_vocab()[text]
        return found

    @property
    def image_token(self) -> int:
        return self.token(self.get_hf_processor().image_token)

    @property
    def newline_token(self) -> int:
        return self.token(self.get_hf_processor().image_newline_token)

    @property
    def patch_values(self) -> int:
        """How many values a patch has."""
        config = self.get_hf_config()
        count: int = config.patch_size * config.patch_size * config.num_channels
        return count


class FuyuDummyInputs(BaseDummyInputsBuilder[FuyuProcessingInfo]):
    """The most a prompt can hold, for vLLM to measure memory with: an image as large as they are taken."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        canvas, count = self.info.canvas, mm_counts.get("image", 0)
        images = self._get_dummy_images(
            width=canvas.width, height=canvas.height, num_images=count, overrides=mm_options.get("image")
        )
        return {"image": images}


class FuyuMultiModalProcessor(BaseMultiModalProcessor[FuyuProcessingInfo]):
    """Prompt and image as the model takes them."""

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """As vLLM's; a prompt expanded before stays as it is.

        Raises:
            VLLMValidationError: image tokens in the prompt that are not those of its image.
        """
        info = self.info
        if info.image_token not in inputs.prompt and info.newline_token not in inputs.prompt:
            return super().apply(replace(inputs, prompt=self._open(inputs.prompt)), timing_ctx)
        try:
            bare = drop_leading_grid(
                inputs.prompt, info.image_token, info.newline_token, info.token(END_OF_IMAGE)
            )
        except ValueError as error:
            raise refusal(str(error)) from error
        processed = super().apply(replace(inputs, prompt=bare), timing_ctx)
        if processed["prompt_token_ids"] != list(inputs.prompt):
            raise refusal("the image tokens in the prompt are not those of its image")
        return processed

    def _open(self, prompt: list[int]) -> list[int]:
        """A user's prompt as it follows an image: no beginning of its own, and then an answer is due."""
        first, answer = self.info.get_tokenizer().bos_token_id, self.info.token(BEGINNING_OF_ANSWER)
        follows = prompt[1:] if prompt[:1] == [first] else prompt
        return list(follows) if follows[-1:] == [answer] else [*follows, answer]

    def _get_hf_mm_text(self, mm_counts: Mapping[str, int]) -> str | None:
        return ""  # FuyuProcessor cuts no patches without a text

    def _call_hf_processor(
        self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        """Patches as FuyuProcessor cuts them, and of them alone: its token ids are not this prompt's."""
        (image,) = ImageProcessorItems(hf_data["images"])
        width, height = ImageProcessorItems([image]).get_image_size(0)
        columns, rows = self.info.canvas.patches(width, height)
        patches = super()._call_hf_processor(hf_data, hf_kwargs).get("image_patches")
        if isinstance(patches, Tensor) and patches.ndim == 1:
            patches = patches[None]  # of a single one FuyuProcessor squeezes the dimension away
        shape = (columns * rows, self.info.patch_values)
        require_tensor(patches, shape, self.info.ctx.model_config.dtype, "an image's patches")
        return BatchFeature({"image_patches": [patches]})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"image_patches": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        image, newline, end = self.info.image_token, self.info.newline_token, self.info.token(END_OF_IMAGE)

        def grid(index: int) -> PromptUpdateDetails:
            width, height = mm_items.get_items("image", ImageProcessorItems).get_image_size(index)
            columns, rows = self.info.canvas.patches(width, height)
            tokens = [*([image] * columns + [newline]) * rows, end]
            return PromptUpdateDetails.select_token_id(tokens, embed_token_id=image)

        return [PromptInsertion(modality="image", target=PromptIndexTargets.start(), insertion=grid)]
