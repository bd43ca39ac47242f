"""Describe vLLM's cache groups: layers whose blocks are allocated together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheGroup:
    """One cache group.

    Attributes:
        window: number of tokens that its layers attend to, the newest included; None for all. The blocks of a
            windowed group are freed when all their tokens are behind the window.
    """

    window: int | None = None

    def first_block(self, tokens: int, block_size: int) -> int:
        """Return the index of the first block that the token after `tokens` computed ones needs.

        Source: `SlidingWindowManager.get_num_skipped_tokens` in `vllm.v1.core.single_type_kv_cache_manager`.
        """
        return 0 if self.window is None else max(0, tokens - self.window + 1) // block_size


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
