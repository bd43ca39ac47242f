"""vLLM's models, thinking. The weights, the layers and the sampler are vLLM's own."""

from __future__ import annotations

from vllm.model_executor.models.gemma import GemmaForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from baton_latent.thinking import LatentThinking


class BatonLatentQwen2ForCausalLM(LatentThinking, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class BatonLatentLlamaForCausalLM(LatentThinking, LlamaForCausalLM):
    """Llama, and what is built like it."""


class BatonLatentMistralForCausalLM(LatentThinking, MistralForCausalLM):
    """Mistral."""


class BatonLatentGemmaForCausalLM(LatentThinking, GemmaForCausalLM):
    """Gemma, whose embeddings enter the layers scaled."""
