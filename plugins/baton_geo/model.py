"""Run a Prithvi segmentation model as a multimodal pooling model of vLLM: tiles in, class scores out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import IdentityPooler
from vllm.model_executor.models.interfaces import IsAttentionFree, MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.interfaces_base import attn_type
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from baton_geo.prithvi import PrithviConfig, PrithviSegmenter, load
from baton_geo.processing import PrithviDummyInputs, PrithviProcessingInfo, PrithviProcessor


@attn_type("attention_free")
@MULTIMODAL_REGISTRY.register_processor(
    PrithviProcessor, info=PrithviProcessingInfo, dummy_inputs=PrithviDummyInputs
)
class PrithviForSegmentation(nn.Module, IsAttentionFree, SupportsMultiModal):
    """`PrithviSegmenter` behind vLLM's interface: one prompt is one tile, one output its scores.

    No exception may leave `forward`: it would kill the engine for every client. Input that could raise one is
    refused where tiles are parsed (`processing.TileShapes`).
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
        self.model = PrithviSegmenter(self.config)
        self.pooler = IdentityPooler()
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
        """Compute the class scores of every tile of the step.

        Args:
            input_ids: (tokens,): one per tile.
            positions: (tokens,).
            intermediate_tensors: unused; there is one pipeline stage.
            inputs_embeds: unused.
            pixel_values: (tiles, C, T, H, W) float32, normalised; None in vLLM's dry runs.
            temporal_coords: (tiles, T, 2) [year, day of year] for models that encode time.
            location_coords: (tiles, 2) [latitude, longitude] for models that encode place.
            kwargs: unused.

        Returns:
            (tiles, classes, H, W) float32 logits; in a dry run (tokens, hidden size) zeros.
        """
        if pixel_values is None:
            return torch.zeros((positions.shape[-1], self._hidden_size), device=positions.device)
        scores: Tensor = self.model(pixel_values.to(self._dtype), temporal_coords, location_coords)
        return scores.float()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {f"model.{name}" for name in load(self.model, weights)}
