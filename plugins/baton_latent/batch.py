"""Read the running batch from vLLM's forward context, and run forward passes over parts of it.

This is the only module that reads and rewrites attention metadata, and it supports CPUs only: a part of a
batch needs its own metadata, whose type differs between vLLM's attention backends. tests/seams/test_latent.py
checks what is used of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from baton_latent.passes import Pass


@dataclass(frozen=True)
class Batch:
    """The batch of one engine step.

    Attributes:
        count: number of tokens, without padding.
        bounds: `requests + 1` ascending indices; request i has the tokens `bounds[i]` to `bounds[i + 1] - 1`.
        slots: slot of each token's KV, int64 `[count]`.
        kv: the KV cache of one layer, `[blocks, KV heads, block size, 2 * head size]`.
        block_size: slots in a block.
    """

    count: int
    bounds: list[int]
    slots: torch.Tensor
    kv: torch.Tensor
    block_size: int
    _context: ForwardContext
    _metadata: CPUAttentionMetadata

    def slots_before(self, rows: list[int], positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of the tokens before these positions, int64 `[rows]`.

        Args:
            positions: one position in the context for each of them, `[rows]`.
        """
        before = positions.long() - 1
        blocks = self._metadata.block_table[rows, before // self.block_size].long()
        return blocks * self.block_size + before % self.block_size

    @contextmanager
    def only(self, part: Pass, index: torch.Tensor, positions: torch.Tensor) -> Iterator[None]:
        """Restrict forward passes inside the context to a part of the batch.

        Args:
            part: the requests and their tokens.
            index: indices of the tokens in the batch, `[tokens]`.
            positions: the tokens' positions in their contexts, `[tokens]`.
        """
        made: dict[int, Any] = {}
        metadata, slots = {}, {}
        for name, whole in self._context.attn_metadata.items():
            if id(whole) not in made:
                made[id(whole)] = _metadata(
                    whole, self._context.no_compile_layers[name], part, index, positions
                )
            metadata[name] = made[id(whole)]
        for name, whole in self._context.slot_mapping.items():
            if id(whole) not in made:
                made[id(whole)] = whole[index]
            slots[name] = made[id(whole)]
        inside = replace(
            self._context,
            attn_metadata=metadata,
            slot_mapping=slots,
            # The compiled graph takes token ids; passes that start from vectors run eagerly.
            skip_compiled=self._context.skip_compiled or bool(part.latent),
        )
        with override_forward_context(inside):
            yield


def running_batch() -> Batch | None:
    """Return the batch of the current forward pass; None during the engine's warm-up."""
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict) or not context.attn_metadata:
        return None
    name, metadata = next(iter(context.attn_metadata.items()))
    kv = context.no_compile_layers[name].kv_cache
    return Batch(
        count=metadata.num_actual_tokens,
        bounds=metadata.query_start_loc.tolist(),
        slots=metadata.slot_mapping[: metadata.num_actual_tokens],
        kv=kv,
        block_size=kv.shape[2],  # [blocks, KV heads, block size, 2 * head size]
        _context=context,
        _metadata=metadata,
    )


def _metadata(
    whole: CPUAttentionMetadata, layer: Any, part: Pass, index: torch.Tensor, positions: torch.Tensor
) -> CPUAttentionMetadata:
    """Build a part's attention metadata as `CPUAttentionMetadataBuilder.build` does for a whole batch."""
    starts = torch.tensor([0, *part.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seen = (positions[starts[1:].long() - 1] + 1).to(torch.int32)
    impl = layer.impl
    scheduled = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(part.rows),
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        seq_lens=seen,
        dtype=layer.dtype,
        query_start_loc=starts,
        causal=whole.causal,
        sliding_window_size=impl.sliding_window,
        isa=layer.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        dynamic_causal=None,
        kv_cache_dtype=impl.kv_cache_dtype,
    )
    return replace(
        whole,
        num_actual_tokens=len(index),
        max_query_len=max(part.lengths),
        query_start_loc=starts,
        max_seq_len=int(seen.max()),
        seq_lens=seen,
        block_table=whole.block_table[part.rows],
        slot_mapping=whole.slot_mapping[index],
        scheduler_metadata=scheduled,
    )
