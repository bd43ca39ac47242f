"""Fuyu for vLLM: raw patches pass one linear layer and replace the embeddings of image tokens.

There is no vision tower; the text model is Persimmon. Modules are named as in official checkpoints
(https://huggingface.co/adept/fuyu-8b).

An image's placeholders stand before the prompt, row by row. For an image two patches wide and three high, the
expanded prompt is, as transformers' FuyuProcessor writes it, `II# II# II# <s> prompt <0x04>` with I for
`|SPEAKER|` and # for `|NEWLINE|`. Only the I are replaced by embeddings; `<0x04>` begins the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import BatchFeature, FuyuConfig, FuyuProcessor
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict, MultiModalInput
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
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
from vllm.sequence import IntermediateTensors

from baton_vision.images import ImageParser, refusal, require_proportions, require_row, require_tensor
from baton_vision.persimmon import PersimmonForCausalLM
from baton_vision.placeholders import Canvas, drop_leading_grid

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


@MULTIMODAL_REGISTRY.register_processor(
    FuyuMultiModalProcessor, info=FuyuProcessingInfo, dummy_inputs=FuyuDummyInputs
)
class BatonFuyuForCausalLM(nn.Module, SupportsMultiModal, SupportsPP):
    """Fuyu-8B and models of the same architecture.

    No exception may leave `embed_multimodal` or `forward`: it would end the engine for everybody. Inputs that
    could raise one are refused while it is processed.
    """

    # Old checkpoints have `language_model.model.` and `language_model.lm_head.`; see also `llava`.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_regex={
            re.compile(r"^lm_head\."): "language_model.lm_head.",
            re.compile(r"^model\."): "",
            re.compile(r"^language_model\.(?!model\.|lm_head\.)"): "language_model.model.",
        }
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return None
        raise ValueError("Only image modality is supported")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: FuyuConfig = vllm_config.model_config.hf_config
        require_row(config.image_token_id, config.text_config.vocab_size)
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_embed_tokens = ReplicatedLinear(
                config.patch_size * config.patch_size * config.num_channels,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "vision_embed_tokens"),
            )
        with self._mark_language_model(vllm_config):
            self.language_model = PersimmonForCausalLM(
                vllm_config=vllm_config.with_hf_config(config.text_config),
                prefix=maybe_prefix(prefix, "language_model"),
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Return each image's embeddings, (patches, hidden).

        Args:
            kwargs: `image_patches`, (patches, values of a patch) for each image in the model's dtype; absent
                in vLLM's dry runs.
        """
        images = kwargs.get("image_patches")
        if images is None:
            return []
        assert isinstance(images, Tensor | Sequence)  # vLLM stacks images of equal size
        embeddings, _ = self.vision_embed_tokens(torch.cat(list(images)))
        return list(torch.split(embeddings, [len(patches) for patches in images]))

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
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded

    def get_mm_mapping(self) -> MultiModelKeys:
        return MultiModelKeys.from_string_field(
            language_model="language_model", connector="vision_embed_tokens", tower_model=[]
        )
