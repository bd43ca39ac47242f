"""Move KV in an engine of vLLM's: find out whether it can, and compute the tokens between moved ones.

CPUs only: attention metadata is the backend's own. tests/seams/test_joins.py checks what is used of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from baton_kv.joins.packing import PackingUnknown, SlabPacking
from baton_kv.joins.rotation import KeyMover, Rotation
from baton_kv.messages import Gap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROTATING = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM"),
        *("BatonLatentLlamaForCausalLM", "BatonLatentMistralForCausalLM", "BatonLatentQwen2ForCausalLM"),
        "BatonLatentGemmaForCausalLM",
    }
)
"""vLLM's classes of models whose layers all rotate their keys as the last thing before they are stored, and
whose moved KV was compared. Of a model with images it is the class of the text model in it."""
ROTATIONS = (RotaryEmbedding, Llama3RotaryEmbedding)
"""Rotations that depend on the position alone."""


class MovesUnsupported(Exception):
    """This engine's KV cannot be moved; the message says why."""


def make_mover(model: Any, config: VllmConfig, rows_a_block: int) -> tuple[KeyMover, GapForward]:
    """Make an engine's key mover, and the forward pass that computes tokens between moved ones.

    Raises:
        MovesUnsupported: its KV cannot be moved.
    """
    _require_plain(config, rows_a_block)
    text_model = model.get_language_model() if isinstance(model, SupportsMultiModal) else model
    if type(text_model).__name__ not in ROTATING:
        raise MovesUnsupported(f"KV of {type(text_model).__name__} was never moved and compared")
    layers = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if isinstance(layer, Attention)
    }
    block_size = config.cache_config.block_size
    _require_plain_attention(layers)
    first = next(iter(layers.values()))
    packing = _learn(first, block_size)
    rotation = _rotation(model, first.head_size, config, by_values=packing.by_values)
    mover = KeyMover(packing, rotation, len(layers))
    return mover, GapForward(model, config, layers, block_size)


def _require_plain(config: VllmConfig, rows_a_block: int) -> None:
    """Refuse engines whose KV is not one token's, or not in this process alone."""
    if not current_platform.is_cpu():
        raise MovesUnsupported("KV is moved on CPUs only")
    if config.parallel_config.tensor_parallel_size > 1:
        raise MovesUnsupported("KV is not moved with tensor parallelism")
    if config.lora_config is not None:
        raise MovesUnsupported("KV is not moved with LoRA adapters")
    if config.speculative_config is not None:
        raise MovesUnsupported("KV is not moved with speculative decoding")
    if rows_a_block != 1:
        raise MovesUnsupported("the blocks of the KV cache are split")


def _require_plain_attention(layers: dict[str, Any]) -> None:
    """Refuse layers whose KV is more, or other, than keys and values of the layer's own."""
    if not layers or not all(type(layer.impl) is CPUAttentionBackendImpl for layer in layers.values()):
        raise MovesUnsupported("the model's layers have no keys and values of their own")
    impls = [layer.impl for layer in layers.values()]
    if any(impl.sliding_window != -1 or impl.sinks is not None for impl in impls):
        raise MovesUnsupported("the model has sliding windows or attention sinks")
    if any(impl.alibi_slopes is not None or impl.kv_sharing_target_layer_name for impl in impls):
        raise MovesUnsupported("the model's layers share KV, or have no rotary positions")
    if any(impl.is_fp8_kv_cache for impl in impls):
        raise MovesUnsupported("the KV cache is quantized")
    if len({(impl.num_heads, impl.num_kv_heads, impl.head_size) for impl in impls}) != 1:
        raise MovesUnsupported("the model's layers differ in their heads")


def _rotation(model: Any, head_size: int, config: VllmConfig, *, by_values: bool) -> Rotation:
    """Return the model's position embedding."""
    found = {
        id(module): module for module in model.modules() if isinstance(module, RotaryEmbeddingBase)
    }.values()
    if not found or not all(type(module) in ROTATIONS for module in found):
        raise MovesUnsupported("the model has other position embeddings than plain rotary ones")
    first, *others = found
    same = (torch.equal(first.cos_sin_cache, other.cos_sin_cache) for other in others)
    if not all(same) or len({module.is_neox_style for module in found}) != 1:
        raise MovesUnsupported("the model's layers rotate their keys in different ways")
    if first.rotary_dim > head_size or len(first.cos_sin_cache) < config.model_config.max_model_len:
        raise MovesUnsupported("the table of the position embedding is too short")
    # The engine rounds the table to the dtype of the keys.
    table = first.cos_sin_cache.to(config.model_config.dtype).float().numpy()
    return Rotation(table, halves=first.is_neox_style, by_values=by_values)


def _learn(layer: Any, block_size: int) -> SlabPacking:
    """Learn how a layer's blocks are packed."""

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor) -> None:
        key_cache, value_cache = cache.view(1, 1, 2 * block_size, -1).chunk(2, dim=2)
        slots = torch.arange(block_size)
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, layer.isa)

    try:
        return SlabPacking.learn(block_size, layer.head_size, layer.dtype, write)
    except PackingUnknown:
        raise MovesUnsupported("the attention backend does not store keys and values as they are") from None


@dataclass(frozen=True)
class GapForward:
    """Forward passes of one engine's model outside its batches.

    Attributes:
        model: vLLM's model.
        config: the engine's configuration.
        layers: its attention layers by name, all of the same shape.
        block_size: tokens in a block.
    """

    model: Any
    config: VllmConfig
    layers: dict[str, Any]
    block_size: int

    def run(self, gaps: Sequence[Gap], table: Sequence[int]) -> None:
        """Compute gaps of a context, in order, and write their KV into its blocks, in order in `table`."""
        positions = torch.cat([torch.arange(gap.start, gap.stop) for gap in gaps])
        tokens = torch.tensor([token for gap in gaps for token in gap.tokens], dtype=torch.int32)
        blocks = torch.tensor(table, dtype=torch.int32)
        slots = blocks[positions // self.block_size].long() * self.block_size + positions % self.block_size
        metadata = self._metadata(gaps, blocks, slots)
        with (
            torch.inference_mode(),
            set_forward_context(
                dict.fromkeys(self.layers, metadata),
                self.config,
                num_tokens=len(tokens),
                slot_mapping=dict.fromkeys(self.layers, slots),
                skip_compiled=True,
            ),
        ):
            self.model(tokens, positions, None, None)

    def _metadata(
        self, gaps: Sequence[Gap], blocks: torch.Tensor, slots: torch.Tensor
    ) -> CPUAttentionMetadata:
        """Build attention metadata as `CPUAttentionMetadataBuilder.build` does for a batch."""
        lengths = torch.tensor([0, *(len(gap.tokens) for gap in gaps)], dtype=torch.int32)
        starts = lengths.cumsum(0, dtype=torch.int32)
        seen = torch.tensor([gap.stop for gap in gaps], dtype=torch.int32)
        layer = next(iter(self.layers.values()))
        impl = layer.impl
        return CPUAttentionMetadata(
            num_actual_tokens=len(slots),
            max_query_len=int(lengths.max()),
            query_start_loc=starts,
            max_seq_len=int(seen.max()),
            seq_lens=seen,
            block_table=blocks.expand(len(gaps), -1).contiguous(),
            slot_mapping=slots,
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(gaps),
                num_heads=impl.num_heads,
                num_kv_heads=impl.num_kv_heads,
                head_dim=impl.head_size,
                seq_lens=seen,
                dtype=layer.dtype,
                query_start_loc=starts,
                causal=True,
                sliding_window_size=-1,
                isa=layer.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=impl.kv_cache_dtype,
            ),
        )
