"""Persimmon for vLLM, the text model of Fuyu, which vLLM no longer has.

Its layers have rotary embeddings on half of each head, normalised queries and keys, squared ReLU, and
LayerNorm with bias, as in transformers' `PersimmonForCausalLM`.
"""
# No `from __future__ import annotations`: vLLM's compile decorator reads the types of `forward` as objects.

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn
from transformers import PersimmonConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors


class PersimmonMLP(nn.Module):
    """The feed-forward part: linear, activation, linear, both with bias."""

    def __init__(self, config: PersimmonConfig, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size,
            config.intermediate_size,
            quant_config=quant_config,
            prefix=f"{prefix}.dense_h_to_4h",
        )
        self.dense_4h_to_h = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=f"{prefix}.dense_4h_to_h",
        )
        self.act = get_act_fn(config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (tokens, hidden) to (tokens, hidden)."""
        wide, _ = self.dense_h_to_4h(hidden)
        narrow: Tensor
        narrow, _ = self.dense_4h_to_h(self.act(wide))
        return narrow


class PersimmonAttention(nn.Module):
    """Attention with queries and keys normalised per head before the rotary embedding."""

    def __init__(self, config: PersimmonConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        quant_config = vllm_config.quant_config
        heads, ranks = config.num_attention_heads, get_tensor_model_parallel_world_size()
        self.heads, self.head_size = heads // ranks, config.hidden_size // heads
        self.query_key_value = QKVParallelLinear(
            config.hidden_size,
            self.head_size,
            heads,
            bias=True,
            quant_config=quant_config,
            prefix=f"{prefix}.query_key_value",
        )
        self.dense = RowParallelLinear(
            config.hidden_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.dense"
        )
        self.normalised = config.qk_layernorm
        if self.normalised:
            self.q_layernorm = nn.LayerNorm(self.head_size, eps=config.layer_norm_eps)
            self.k_layernorm = nn.LayerNorm(self.head_size, eps=config.layer_norm_eps)
        self.rotary_emb = get_rope(
            self.head_size, config.max_position_embeddings, rope_parameters=config.rope_parameters
        )
        self.attn = Attention(
            self.heads,
            self.head_size,
            self.head_size**-0.5,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Map positions (tokens,) and hidden states (tokens, hidden) to (tokens, hidden)."""
        qkv, _ = self.query_key_value(hidden)
        query, key, value = qkv.chunk(3, dim=-1)
        if self.normalised:
            query = self._by_head(self.q_layernorm, query)
            key = self._by_head(self.k_layernorm, key)
        query, key = self.rotary_emb(positions, query, key)
        out: Tensor
        out, _ = self.dense(self.attn(query, key, value))
        return out

    def _by_head(self, norm: nn.Module, states: Tensor) -> Tensor:
        normalised: Tensor = norm(states.view(-1, self.heads, self.head_size))
        return normalised.view(-1, self.heads * self.head_size)


class PersimmonDecoderLayer(nn.Module):
    """Attention and feed-forward part, each after a LayerNorm and with a residual connection."""

    def __init__(self, config: PersimmonConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.self_attn = PersimmonAttention(config, vllm_config, f"{prefix}.self_attn")
        self.mlp = PersimmonMLP(config, vllm_config.quant_config, f"{prefix}.mlp")
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """Map positions (tokens,) and hidden states (tokens, hidden) to (tokens, hidden)."""
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden))
        after: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return after


@support_torch_compile
class PersimmonModel(nn.Module):
    """The embedding, the layers and the final norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: PersimmonConfig = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: PersimmonDecoderLayer(config, vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embeddings: Tensor = self.embed_tokens(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states (tokens, hidden), or the inputs of the next pipeline stage."""
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden = intermediate_tensors["hidden_states"]
        elif inputs_embeds is not None:
            hidden = inputs_embeds
        else:
            assert input_ids is not None
            hidden = self.embed_input_ids(input_ids)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden = layer(positions, hidden)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden})
        return self.final_layernorm(hidden)


class PersimmonForCausalLM(nn.Module, SupportsPP):
    """Persimmon with its language-model head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: PersimmonConfig = vllm_config.model_config.hf_config
        self._heads = config.num_attention_heads
        self.model = PersimmonModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """Return hidden states (tokens, hidden), or the inputs of the next pipeline stage."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(self._unmixed(weights))
        return loaded

    def _unmixed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Reorder weights: checkpoints group query, key and value by head, vLLM takes all queries first."""
        for name, weight in weights:
            if ".query_key_value." in name:
                by_head = weight.view(self._heads, 3, -1, *weight.shape[1:])
                yield name, by_head.transpose(0, 1).reshape(weight.shape)
            else:
                yield name, weight
