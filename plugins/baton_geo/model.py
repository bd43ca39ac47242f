"""Run a Prithvi segmentation model as a multimodal pooling model of vLLM: tiles in, class scores out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import ModalityData, MultiModalDataDict, MultiModalInput, mm_input
from vllm.model_executor.layers.pooler import IdentityPooler
from vllm.model_executor.models.interfaces import IsAttentionFree, MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.interfaces_base import attn_type
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptUpdate,
    TimingContext,
)
from vllm.sequence import IntermediateTensors

from baton_geo.prithvi import PrithviConfig, PrithviEmbedder, PrithviSegmenter, card_of, load

MODALITY = "image"
PIXELS, TIMES, PLACES = "pixel_values", "temporal_coords", "location_coords"


class TileShapes:
    """The shapes of the fields of a model's tiles.

    vLLM runs several tiles in one step, so all tiles have the same shapes.

    Raises:
        ValueError: the card's tile does not suit the model.
    """

    def __init__(self, config: PrithviConfig, tile: int) -> None:
        pixels = (config.in_chans, config.num_frames, tile, tile)
        config.check_pixels((1, *pixels))
        self.fields: dict[str, tuple[int, ...]] = {PIXELS: pixels}
        if "time" in config.coords_encoding:
            self.fields[TIMES] = (config.num_frames, 2)
        if "location" in config.coords_encoding:
            self.fields[PLACES] = (2,)

    def check(self, data: Mapping[str, torch.Tensor]) -> None:
        """Refuse a tile on which the model would fail inside the engine.

        Raises:
            ValueError: a field is missing, unknown, of a wrong shape or dtype, or not finite.
        """
        if set(data) != set(self.fields):
            raise ValueError(f"a tile has the fields {sorted(self.fields)}, not {sorted(map(str, data))}")
        for name, shape in self.fields.items():
            value = data[name]
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"{name}: must be a tensor of shape {shape}, not {given}")
            if value.dtype != torch.float32:
                raise ValueError(f"{name}: must be float32, not {str(value.dtype).removeprefix('torch.')}")
            if not np.isfinite(value.detach().cpu().numpy()).all():  # torch would start a thread pool
                raise ValueError(f"{name}: holds NaN or infinity")


class TileItems(ModalityDataItems[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]):
    """One tile with its coordinates; a prompt has exactly one."""

    def get_count(self) -> int:
        return 1

    def get(self, index: int) -> Mapping[str, torch.Tensor]:
        if index != 0:
            raise IndexError(index)  # ends iteration over the items
        tile: Mapping[str, torch.Tensor] = self.data
        return tile

    def get_processor_data(self) -> Mapping[str, object]:
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        return self.get(0)


class TileParser(MultiModalDataParser):
    """A parser that takes `{"image": {"pixel_values": ..., ...}}` and nothing else."""

    def __init__(self, shapes: TileShapes, **options: Any) -> None:
        super().__init__(**options)
        self._shapes = shapes

    def _parse_image_data(self, data: ModalityData[Any]) -> ModalityDataItems[Any, Any] | None:
        if not isinstance(data, dict):
            raise ValueError("an image must be a dict of tensors: a tile, as the IO processor cuts them")
        self._shapes.check(data)
        return TileItems(data, MODALITY)


class PrithviProcessingInfo(BaseProcessingInfo):
    @cached_property
    def shapes(self) -> TileShapes:
        hf_config = self.get_hf_config()
        config = PrithviConfig.from_hf(hf_config.to_dict())
        return TileShapes(config, card_of(hf_config.to_dict()).tile)

    def get_data_parser(self) -> MultiModalDataParser:
        return TileParser(self.shapes, expected_hidden_size=self._get_expected_hidden_size())

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {MODALITY: 1}


class PrithviDummyInputs(BaseDummyInputsBuilder[PrithviProcessingInfo]):
    """Dummy tiles of zeros: every tile costs the same, so any is the worst case."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: MultiModalDummyOptions,
    ) -> MultiModalDataDict:
        return {MODALITY: {name: torch.zeros(shape) for name, shape in self.info.shapes.fields.items()}}


class PrithviProcessor(BaseMultiModalProcessor[PrithviProcessingInfo]):
    """A processor that passes tiles through: they are normalised, and prompts have no placeholders."""

    requires_tokenizer = False

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {name: MultiModalFieldConfig.batched(MODALITY) for name in self.info.shapes.fields}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        return []

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        tile = inputs.mm_data_items[MODALITY].get(0)
        features = BatchFeature({name: value.unsqueeze(0) for name, value in tile.items()})
        fields = self._get_mm_fields_config(features, inputs.hf_processor_mm_kwargs)
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        serial = inputs.prompt if isinstance(inputs.prompt, list) and inputs.prompt else [0]
        return mm_input(
            prompt_token_ids=serial,
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(features, fields),
            mm_hashes=inputs.get_mm_hashes(self.info.model_id, algorithm),
            mm_placeholders={MODALITY: [PlaceholderRange(offset=0, length=0)]},
        )


@attn_type("attention_free")
@MULTIMODAL_REGISTRY.register_processor(
    PrithviProcessor, info=PrithviProcessingInfo, dummy_inputs=PrithviDummyInputs
)
class PrithviForSegmentation(nn.Module, IsAttentionFree, SupportsMultiModal):
    """A Prithvi model behind vLLM's interface: a prompt is a tile, an output its probabilities or values.

    No exception may leave `forward`: it would kill the engine for every client. Input that could raise one is
    refused where tiles are parsed (`TileShapes`).
    """

    supports_multimodal_raw_input_only = True
    is_pooling_model = True

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return None
        raise ValueError("Only image modality is supported")

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.config = PrithviConfig.from_hf(model_config.hf_config.to_dict())
        alone = self.config.decoder is None
        self.model = PrithviEmbedder(self.config) if alone else PrithviSegmenter(self.config)
        self.pooler = IdentityPooler()
        self._values = self.config.decoder is None or self.config.decoder.task == "regression"
        self._hidden_size = model_config.get_hidden_size()
        self._dtype = model_config.dtype

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """Return zeros: a prompt's only token is a serial number, which the model does not use."""
        return torch.zeros((input_ids.shape[0], self._hidden_size), device=input_ids.device)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        temporal_coords: Tensor | None = None,
        location_coords: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Compute the classes' probabilities, or the values, of every tile of the step.

        Args:
            input_ids: (tokens,): one per tile.
            positions: (tokens,).
            intermediate_tensors: unused; there is one pipeline stage.
            pixel_values: (tiles, C, T, H, W) float32, normalised; None in vLLM's dry runs.
            temporal_coords: (tiles, T, 2) [year, day of year] for models that encode time.
            location_coords: (tiles, 2) [latitude, longitude] for models that encode place.

        Returns:
            (tiles, classes, H, W) uint8 probabilities, 255 being 1; a pixel without finite scores has 0 for
            all classes. Of a regression (tiles, 1, H, W) float32 values, of an encoder alone (tiles, D, h, w)
            float32 vectors. In a dry run (tokens, hidden size) zeros.
        """
        if pixel_values is None:
            return torch.zeros((positions.shape[-1], self._hidden_size), device=positions.device)
        scores: Tensor = self.model(pixel_values.to(self._dtype), temporal_coords, location_coords)
        if self._values:
            return scores.float()
        chances = scores.float().softmax(dim=1).nan_to_num(nan=0.0)
        return chances.mul_(255).add_(0.5).to(torch.uint8)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {f"model.{name}" for name in load(self.model, weights)}
