"""LLaVA-style models for vLLM: projected features of a vision tower replace the embeddings of image tokens.

Tower and text model are vLLM's own. Modules are named as in official checkpoints
(https://huggingface.co/llava-hf).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import LlavaConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from baton_vision.images import require_row
from baton_vision.llava_processing import LlavaDummyInputs, LlavaMultiModalProcessor, LlavaProcessingInfo
from baton_vision.towers import build_tower, feature_layers


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
    could raise one are refused in `llava_processing`.
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
