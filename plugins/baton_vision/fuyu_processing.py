"""Process Fuyu's inputs: put an image's placeholders before the prompt, row by row, and cut it into patches.

For an image two patches wide and three high, the expanded prompt is, as transformers' FuyuProcessor writes
it, `II# II# II# <s> prompt <0x04>` with I for `|SPEAKER|` and # for `|NEWLINE|`. Only the I are replaced by
embeddings; `<0x04>` begins the answer.
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
    """Facts about a Fuyu model that do not depend on a request: limits, special tokens, patch sizes."""

    def get_hf_config(self) -> FuyuConfig:
        return self.ctx.get_hf_config(FuyuConfig)

    def get_hf_processor(self, **kwargs: object) -> FuyuProcessor:
        return self.ctx.get_hf_processor(FuyuProcessor, **kwargs)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Return a limit of one image: the model was trained with one image before the prompt."""
        return {"image": 1}

    def get_data_parser(self) -> ImageParser:
        return ImageParser(self.require_grid)

    @property
    def canvas(self) -> Canvas:
        """Return the image and patch sizes of the checkpoint's image processor."""
        processor = self.get_hf_processor().image_processor
        size, patch = processor.size, processor.patch_size
        return Canvas(
            width=size["width"],
            height=size["height"],
            patch_width=patch["width"],
            patch_height=patch["height"],
        )

    def require_grid(self, width: int, height: int) -> None:
        """Refuse an image of unsuitable proportions or without a patch left after shrinking.

        Raises:
            VLLMValidationError: the size is not suitable.
        """
        require_proportions(width, height)
        if 0 in self.canvas.patches(width, height):
            raise refusal(
                f"an image of {width} x {height} pixels is too narrow to be shrunk to the model's size"
            )

    def token(self, text: str) -> int:
        """Return the id of a special token."""
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
        """Return the number of values of a patch."""
        config = self.get_hf_config()
        count: int = config.patch_size * config.patch_size * config.num_channels
        return count


class FuyuDummyInputs(BaseDummyInputsBuilder[FuyuProcessingInfo]):
    """The largest inputs of a prompt, with which vLLM measures memory: one image of maximum size."""

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
    """Expands prompts and cuts images for Fuyu."""

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """Process inputs as vLLM does, but accept prompts that are already expanded.

        Raises:
            VLLMValidationError: the image tokens in the prompt are not those of its image.
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
        """Prepare a user's prompt to follow an image: without `<s>`, and ending with `<0x04>`."""
        first, answer = self.info.get_tokenizer().bos_token_id, self.info.token(BEGINNING_OF_ANSWER)
        follows = prompt[1:] if prompt[:1] == [first] else prompt
        return list(follows) if follows[-1:] == [answer] else [*follows, answer]

    def _get_hf_mm_text(self, mm_counts: Mapping[str, int]) -> str | None:
        return ""  # without a text, FuyuProcessor does not cut patches

    def _call_hf_processor(
        self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        """Return FuyuProcessor's patches without its token ids, which are not those of this prompt."""
        (image,) = ImageProcessorItems(hf_data["images"])
        width, height = ImageProcessorItems([image]).get_image_size(0)
        columns, rows = self.info.canvas.patches(width, height)
        patches = super()._call_hf_processor(hf_data, hf_kwargs).get("image_patches")
        if isinstance(patches, Tensor) and patches.ndim == 1:
            patches = patches[None]  # FuyuProcessor squeezes the dimension of a single patch
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
