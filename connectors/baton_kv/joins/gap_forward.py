"""Compute the KV of the tokens between moved ones, all gaps of a context in one forward pass.

Each gap is given to the model as if it were a request of its own, with the blocks of the whole context: its
tokens attend to all before them, moved or computed. CPUs only: attention metadata is the backend's own.
tests/seams/test_joins.py checks what is used of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from baton_kv.moves import Gap

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
        """Compute gaps of a context and write their KV into its blocks.

        Args:
            gaps: the gaps, in order.
            table: the blocks of the context, in order.
        """
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
