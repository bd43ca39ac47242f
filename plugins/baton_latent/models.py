"""vLLM's model classes with latent steps; weights, layers and sampler are vLLM's own."""

from __future__ import annotations

from vllm.model_executor.models.gemma import GemmaForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from baton_latent.latent_steps import LatentSteps


class BatonLatentQwen2ForCausalLM(LatentSteps, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5 with latent steps."""


class BatonLatentLlamaForCausalLM(LatentSteps, LlamaForCausalLM):
    """Llama and models of the same architecture, with latent steps."""


class BatonLatentMistralForCausalLM(LatentSteps, MistralForCausalLM):
    """Mistral with latent steps."""


class BatonLatentGemmaForCausalLM(LatentSteps, GemmaForCausalLM):
    """Gemma, which scales its embeddings, with latent steps."""
