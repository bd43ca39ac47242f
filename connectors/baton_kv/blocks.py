"""Read and write the engine's KV cache by layer, head and block, as opaque bytes.

vLLM gives every layer as a logical view `[blocks, heads, tokens, values]` of its allocation, whatever the
layout in memory is (`vllm.v1.kv_cache_interface.create_kv_cache_views`). What is moved is a slab: one head of
one block, its tokens in order. This module does not import vLLM: it takes tensors and gives bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from baton_kv.format import LayerShape


@dataclass(frozen=True)
class CacheGroup:
    """One cache group.

    Attributes:
        window: number of tokens that its layers attend to, the newest included; None for all. The blocks of a
            windowed group are freed when all their tokens are behind the window.
        block_size: tokens in a block; None: as many as in blocks of full attention.
        state: whether its layers have a running state instead of KV (Mamba, GDN). The engine has it, of all
            tokens that it has computed, in the last block; an entry has states as blocks of this group.
    """

    window: int | None = None
    block_size: int | None = None
    state: bool = False

    @property
    def keeps_all(self) -> bool:
        """Return whether a continuation needs all blocks of a context."""
        return self.window is None and not self.state

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a block, once it is known."""
        assert self.block_size is not None
        return self.block_size

    def sized(self, block_size: int) -> CacheGroup:
        """Return the group with this block size, unless it has one of its own."""
        return self if self.block_size is not None else replace(self, block_size=block_size)

    def count(self, tokens: int) -> int:
        """Return the number of blocks of so many tokens."""
        return -(-tokens // self.tokens)

    def first_block(self, tokens: int) -> int:
        """Return the index of the first block that the token after `tokens` computed ones needs.

        Source: `get_num_skipped_tokens` of `SlidingWindowManager` and `MambaManager` in
        `vllm.v1.core.single_type_kv_cache_manager`.
        """
        behind = tokens - 1 if self.state else 0 if self.window is None else tokens - self.window + 1
        return max(0, behind) // self.tokens


FULL_ATTENTION = (CacheGroup(),)
"""The cache groups of a model whose layers all attend to all tokens."""


@dataclass(frozen=True)
class GroupBlocks:
    """Consecutive blocks of a context in one cache group.

    Attributes:
        first: index, in the context, of the first of them.
        ids: their blocks of the pool, in the order of the context.
    """

    first: int
    ids: tuple[int, ...]

    @property
    def indexes(self) -> range:
        """Return their indexes in the context."""
        return range(self.first, self.first + len(self.ids))

    def within(self, blocks: range) -> GroupBlocks:
        """Return those of them that are among `blocks`, indexes in the context."""
        start, stop = max(blocks.start, self.first), min(blocks.stop, self.indexes.stop)
        return GroupBlocks(start, self.ids[start - self.first : max(start, stop) - self.first])


class SlabOrder(Protocol):
    """The order of keys and values in an engine's slabs; `joins.packing.Packings` is one."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    def knows(self, name: str) -> bool:
        """Return whether slabs in the order of this name can be read."""
        ...

    def repack(self, layer: int, slabs: memoryview, name: str) -> None:
        """Bring slabs of a layer, which are in the order of this name, into the engine's own, in place."""
        ...


class LayoutRefused(Exception):
    """The KV tensors cannot be moved by heads and blocks."""


@dataclass(frozen=True)
class HeadShard:
    """The KV heads of one layer that one tensor-parallel rank holds.

    With fewer heads than ranks, several ranks hold the same head (replicas); they write it by turns, layer by
    layer.

    Attributes:
        first: number of the first head in the whole model.
        count: number of heads that this rank holds.
        total: number of heads of the whole model.
        replica: number of this rank among those with the same heads.
        replicas: number of ranks with the same heads.
    """

    first: int
    count: int
    total: int
    replica: int = 0
    replicas: int = 1

    @classmethod
    def of_rank(cls, total: int, rank: int, ranks: int) -> HeadShard:
        """Return the shard of a rank, of `total` heads of the whole model, as vLLM divides heads over ranks.

        Raises:
            LayoutRefused: the heads cannot be divided equally.
        """
        if total % ranks == 0:
            return cls(rank * (total // ranks), total // ranks, total)
        if ranks % total == 0:
            replicas = ranks // total
            return cls(rank // replicas, 1, total, rank % replicas, replicas)
        raise LayoutRefused(f"{total} KV heads cannot be divided over {ranks} ranks")

    def writes(self, layer: int) -> range:
        """Return the heads of a layer that this rank writes, by their numbers in the whole model."""
        turn = layer % self.replicas == self.replica
        return range(self.first, self.first + self.count) if turn else range(0)

    @property
    def heads(self) -> range:
        """Return the heads that this rank holds, by their numbers in the whole model."""
        return range(self.first, self.first + self.count)


class KVBlocks:
    """The KV tensors of all layers of one rank.

    Args:
        layers: the KV tensors in the order of the model's layers, each `[blocks, heads, tokens, values]` of
            any dtype and layout, or `[blocks, bytes]` for a layer whose KV has no heads. A block of the pool
            may be split into several rows (kernel blocks), one after the other.
        count: number of blocks in the pool; None takes the first tensor's first dimension.
        shard: the heads that this rank holds; None for all heads, without tensor parallelism.
        group_of: index of each layer's cache group; None: all are in the first.
        order: the order of keys and values in its slabs; None: those of no other order can be read.

    Attributes:
        packing: name of the order of keys and values in this engine's slabs; empty: it has none.
        count: number of blocks in the pool.
        shapes: the shape of each layer in the whole model.
        groups: the model's cache groups.

    Raises:
        LayoutRefused: a tensor has another shape, or values that are not contiguous.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        count: int | None = None,
        shard: HeadShard | None = None,
        groups: tuple[CacheGroup, ...] = FULL_ATTENTION,
        group_of: Sequence[int] | None = None,
        order: SlabOrder | None = None,
    ) -> None:
        self.groups = groups
        self._order = order
        self.packing = order.name if order is not None else ""
        self.count = layers[0].shape[0] if count is None else count
        self._layers = [_by_head(layer, self.count) for layer in layers]
        self._shards = [shard or HeadShard(0, layer.shape[0], layer.shape[0]) for layer in self._layers]
        for layer, held in zip(self._layers, self._shards, strict=True):
            if layer.shape[0] != held.count:
                raise LayoutRefused(
                    f"a KV tensor has {layer.shape[0]} heads, this rank should hold {held.count}"
                )
        self.shapes = tuple(
            LayerShape(held.total, layer[0, 0].numel(), group)
            for layer, held, group in zip(
                self._layers, self._shards, group_of or [0] * len(layers), strict=True
            )
        )

    def __len__(self) -> int:
        return len(self._layers)

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Return the bytes that this rank writes of so many blocks of each cache group.

        Those of all ranks are the whole blocks.
        """
        return sum(
            len(self.writes(layer)) * shape.slab_bytes * counts[shape.group]
            for layer, shape in enumerate(self.shapes)
        )

    @property
    def rows_a_block(self) -> tuple[int, ...]:
        """Return the number of rows (kernel blocks) that one block of the pool is split into, by layer."""
        return tuple(int(layer.shape[2]) for layer in self._layers)

    def reads(self, packing: str) -> bool:
        """Return whether slabs that were packed so can be used here."""
        return packing == self.packing or (self._order is not None and self._order.knows(packing))

    def repack(self, layer: int, slabs: memoryview, packing: str) -> None:
        """Bring slabs of a layer, which were packed so, into this engine's order."""
        if packing != self.packing and self._order is not None:
            self._order.repack(layer, slabs, packing)

    def heads(self, layer: int) -> range:
        """Return the heads of a layer that this rank holds."""
        return self._shards[layer].heads

    def writes(self, layer: int) -> range:
        """Return the heads of a layer that this rank writes into an entry."""
        return self._shards[layer].writes(layer)

    @property
    def device(self) -> torch.device:
        """Return the device of the KV cache."""
        return self._layers[0].device

    @property
    def largest_run(self) -> int:
        """Return the bytes of this rank's heads in the largest run of blocks, which is copied at once."""
        return max(
            len(self.heads(layer)) * shape.run_blocks * shape.slab_bytes
            for layer, shape in enumerate(self.shapes)
        )

    def pool(self, layer: int, heads: range) -> torch.Tensor:
        """Return some of this rank's heads of a layer, uint8 `[heads, blocks, rows, tokens, bytes]`."""
        if heads == self.heads(layer):
            return self._layers[layer]
        first = heads.start - self._shards[layer].first
        return self._layers[layer][first : first + len(heads)]


def _by_head(layer: torch.Tensor, count: int) -> torch.Tensor:
    """View a layer as uint8 `[heads, blocks, kernel blocks, tokens, bytes]`, without copying."""
    if layer.dim() == 2:
        layer = layer[:, None, None, :]
    if layer.dim() != 4 or not 0 < count <= layer.shape[0] or layer.shape[0] % count or layer.stride(-1) != 1:
        raise LayoutRefused(
            f"a KV tensor cannot be moved by heads: shape {tuple(layer.shape)}, strides {layer.stride()}, "
            f"{count} blocks"
        )
    as_bytes = layer.view(torch.uint8)
    return as_bytes.unflatten(0, (count, layer.shape[0] // count)).permute(2, 0, 1, 3, 4)
