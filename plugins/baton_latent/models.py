"""vLLM's model classes with latent steps: the input of a placeholder is the seed of the token before it.

Weights, layers and sampler are vLLM's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.models.gemma import GemmaForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.platforms import current_platform

from baton_latent.batch import Batch, running_batch
from baton_latent.contract import CONNECTOR, MEMORY_KEY, PLACEHOLDER_KEY, choose_placeholder
from baton_latent.memory import LatentMemory
from baton_latent.passes import Pass, plan
from baton_latent.projection import TiedProjection, UntiedProjection, VocabularyShard, to_length

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.baton_latent")


class LatentSteps(torch.nn.Module):
    """A mixin that is placed before one of vLLM's model classes.

    A position with the placeholder token is a latent step: its input is not the token's embedding but the
    projection of the last hidden state of the position before it. A batch without placeholders goes through
    the model unchanged.

    Raises:
        ValueError: the engine's configuration does not support latent steps.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **others: Any) -> None:
        _require_supported(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)
        model = vllm_config.model_config
        self._placeholder = _placeholder(model)
        self._memory = LatentMemory(
            model.get_hidden_size(), model.dtype, torch.device(current_platform.device_type)
        )
        self._projection: TiedProjection | UntiedProjection | None = None
        vllm_config.compilation_config.static_forward_context[MEMORY_KEY] = self._memory
        logger.info("latent steps: %s, placeholder token %d", type(self).__name__, self._placeholder)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = super().load_weights(weights)
        self._prepare()
        return loaded

    def compute_logits(self, hidden_states: torch.Tensor, *others: Any) -> torch.Tensor | None:
        """Return vLLM's logits with the placeholder masked, so that it is never sampled."""
        logits: torch.Tensor | None = super().compute_logits(hidden_states, *others)
        if logits is not None:
            logits[..., self._placeholder] = float("-inf")
        return logits

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        batch = running_batch()
        if batch is None or input_ids is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        self._memory.require(batch.kv, batch.block_size)
        is_placeholder = input_ids[: batch.count] == self._placeholder
        first = positions[: batch.count] == 0
        mixtures = self._mixtures(self._memory.take_mixtures(batch.slots, first & is_placeholder))
        is_latent = is_placeholder & ~first
        if mixtures or is_latent.any():
            latent = sorted({*is_latent.nonzero().flatten().tolist(), *mixtures})
            return self._forward_in_passes(batch, input_ids, positions, latent, mixtures)
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        self._memory.write(batch.slots, hidden[: batch.count])
        return hidden

    def _forward_in_passes(
        self,
        batch: Batch,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        latent: list[int],
        mixtures: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Return the hidden states `[tokens, hidden]` of a batch with latent tokens.

        Args:
            input_ids: token ids with padding, `[tokens]`.
            positions: positions of the tokens in their contexts, `[tokens]`.
            latent: ascending indices of the latent tokens, and of those with a mixture.
            mixtures: input of each token with a mixture, `[hidden]`, by its index.
        """
        began = time.monotonic()
        hidden = torch.zeros(
            len(input_ids), self._memory.width, dtype=self._memory.dtype, device=input_ids.device
        )
        ordinary = 0.0  # seconds of the first pass, if it has no latent tokens
        rows: set[int] = set()
        parts = plan(batch.bounds, latent)
        for number, part in enumerate(parts):
            index = torch.cat([torch.arange(*span) for span in zip(part.starts, part.ends, strict=True)])
            inputs = self._inputs(batch, part, index, input_ids, positions, mixtures) if part.latent else None
            with batch.only(part, index, positions[index]):
                ids = input_ids[index] if inputs is None else None
                found = super().forward(ids, positions[index], None, inputs)
            hidden[index] = found
            self._memory.write(batch.slots[index], found)
            rows.update(part.latent_rows)
            if number == 0 and not part.latent:
                ordinary = time.monotonic() - began
        passes = sum(bool(part.latent) for part in parts)
        self._record_steps(
            len(latent) - len(mixtures), len(rows), passes, time.monotonic() - began - ordinary
        )
        return hidden

    def _inputs(
        self,
        batch: Batch,
        part: Pass,
        index: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        mixtures: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Return the first layer's inputs `[tokens, hidden]`: embeddings, mixtures, projected seeds."""
        inputs: torch.Tensor = self.embed_input_ids(input_ids[index])
        for place in mixtures.keys() & set(part.latent):
            inputs[index == place] = mixtures[place].to(inputs.dtype)
        seeded = [(row, at) for row, at in part.latent_tokens if at not in mixtures]
        if seeded:
            places = torch.tensor([at for _, at in seeded])
            rows = [row for row, _ in seeded]
            seeds = self._memory.read(batch.slots_before(rows, positions[places]))
            inputs[torch.isin(index, places)] = self._project(seeds).to(inputs.dtype)
        return inputs

    def _mixtures(self, given: dict[int, tuple[Sequence[int], Sequence[float]]]) -> dict[int, torch.Tensor]:
        """Return mixtures of token embeddings, each `[hidden]`, as long as an embedding is on average.

        A mixture with unknown tokens is left out: its token keeps the placeholder's embedding.
        """
        known = self.config.vocab_size
        return {
            place: self._mixed(tokens, weights)
            for place, (tokens, weights) in given.items()
            if len(tokens) == len(weights) and max(tokens) < known
        }

    def _mixed(self, tokens: Sequence[int], weights: Sequence[float]) -> torch.Tensor:
        if self._projection is None:
            self._prepare()
        assert self._projection is not None
        rows = self.embed_input_ids(torch.tensor(tokens)).float()
        return to_length(torch.tensor(weights) @ rows, self._projection.length)

    def _project(self, seeds: torch.Tensor) -> torch.Tensor:
        if self._projection is None:  # the loader did not call load_weights
            self._prepare()
        assert self._projection is not None
        return self._projection(seeds)

    def _prepare(self) -> None:
        """Compute the projection from this process's rows of the weights, without padding rows."""
        held = self.model.embed_tokens.shard_indices
        rows = held.org_vocab_end_index - held.org_vocab_start_index
        shard = VocabularyShard(held.org_vocab_start_index, tensor_model_parallel_all_reduce)
        embedding = self.model.embed_tokens.weight.data[:rows]
        scale = float(getattr(self.model, "normalizer", 1.0))
        if self.config.tie_word_embeddings:
            self._projection = TiedProjection(embedding, scale, super().compute_logits, shard)
        else:
            self._projection = UntiedProjection(embedding, self.lm_head.weight.data[:rows], scale, shard)

    def _record_steps(self, steps: int, requests: int, passes: int, seconds: float) -> None:
        """Add to the counters.

        Args:
            passes: number of forward passes with latent tokens.
        """
        self._memory.steps += steps
        self._memory.seconds += seconds
        logger.debug(
            "latent steps: %d of %d requests in %.1f ms (%.1f ms a step)",
            steps,
            requests,
            seconds * 1000,
            seconds / passes * 1000,
        )


def _placeholder(model: Any) -> int:
    named = getattr(model.hf_config, PLACEHOLDER_KEY, None)
    token = choose_placeholder(model.model) if named is None else named
    if type(token) is not int or not 0 <= token < model.get_vocab_size():
        raise ValueError(f"baton_latent: {PLACEHOLDER_KEY} must be a token id of the model, not {token!r}")
    return token


def _require_supported(config: VllmConfig) -> None:
    if (
        config.parallel_config.pipeline_parallel_size > 1
    ):  # the first stage does not see the last hidden states
        raise ValueError("baton_latent: pipeline parallelism above 1 is not supported")
    if not current_platform.is_cpu():
        raise ValueError("baton_latent: latent steps are supported on CPUs only")
    if config.speculative_config is not None or config.lora_config is not None:
        raise ValueError("baton_latent: speculative decoding and LoRA are not supported with latent steps")
    if config.model_config.runner_type != "generate":
        raise ValueError("baton_latent: latent steps need a model with the runner `generate`")
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != CONNECTOR:
        raise ValueError(
            f"baton_latent: latent steps support no KV connector but {CONNECTOR}, which moves their seeds"
        )
    if config.model_config.enable_prompt_embeds:  # a batch of embeddings has no token ids
        raise ValueError("baton_latent: enable_prompt_embeds is not supported")


class BatonLatentQwen2ForCausalLM(LatentSteps, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5 with latent steps."""


class BatonLatentLlamaForCausalLM(LatentSteps, LlamaForCausalLM):
    """Llama and models of the same architecture, with latent steps."""


class BatonLatentMistralForCausalLM(LatentSteps, MistralForCausalLM):
    """Mistral with latent steps."""


class BatonLatentGemmaForCausalLM(LatentSteps, GemmaForCausalLM):
    """Gemma, which scales its embeddings, with latent steps."""
