"""Fuyu for vLLM: raw patches pass one linear layer and replace the embeddings of image tokens.

There is no vision tower; the text model is Persimmon. Modules are named as in official checkpoints
(https://huggingface.co/adept/fuyu-8b).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import FuyuConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from baton_vision.fuyu_processing import FuyuDummyInputs, FuyuMultiModalProcessor, FuyuProcessingInfo
from baton_vision.images import require_row
from baton_vision.persimmon import PersimmonForCausalLM


@MULTIMODAL_REGISTRY.register_processor(
    FuyuMultiModalProcessor, info=FuyuProcessingInfo, dummy_inputs=FuyuDummyInputs
)
class BatonFuyuForCausalLM(nn.Module, SupportsMultiModal, SupportsPP):
    """Fuyu-8B and models of the same architecture.

    No exception may leave `embed_multimodal` or `forward`: it would end the engine for everybody. Inputs that
    could raise one are refused in `fuyu_processing`.
    """

    # Old checkpoints have `language_model.model.` and `language_model.lm_head.`; see also `llava_model`.
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
