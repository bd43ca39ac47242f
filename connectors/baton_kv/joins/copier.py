"""Copy KV of an entry to another place of a context: unpack, rotate the keys, pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from baton_kv.blocks import KVBlocks
from baton_kv.cache_groups import GroupBlocks
from baton_kv.copies import Staging
from baton_kv.joins.packing import SlabPacking
from baton_kv.joins.rotation import Rotation, Turn
from baton_kv.loads import Source
from baton_kv.moves import Move


@dataclass(frozen=True)
class KeyMover:
    """How one engine's keys are moved.

    Attributes:
        packing: where a slab holds its keys and values.
        rotation: the model's position embedding.
        layers: number of the model's layers; those behind hold hidden states, which are not moved.
    """

    packing: SlabPacking
    rotation: Rotation
    layers: int


def blocks_of(move: Move, block_size: int) -> tuple[GroupBlocks, ...]:
    """Return the blocks of its entry that a move reads, numbered from 0."""
    first, stop = move.start // block_size, -(-(move.start + move.tokens) // block_size)
    return (GroupBlocks(first, tuple(range(stop - first))),)


@dataclass(frozen=True)
class MoveCopier:
    """Copies layers of moves into a KV cache in host memory.

    Attributes:
        kv: the KV cache, of one cache group with all heads.
        staging: what this thread copies with.
        mover: how keys are moved.
        table: the blocks of the context, in order.
    """

    kv: KVBlocks
    staging: Staging
    mover: KeyMover
    table: Sequence[int]
    _turns: dict[tuple[int, int, int], Turn] = field(default_factory=dict, init=False)

    def copy(self, move: Move, sources: Sequence[Source], layer: int) -> None:
        """Copy one layer of a move from the open entry and its parts.

        Raises:
            EntryInvalid: a chunk does not match its digest.
        """
        for source in sources:
            described, blocks = source.entry.description, source.blocks[0]
            if not blocks.ids:
                continue
            size, first = described.layers[layer].run_blocks, described.first(layer)
            for index in range((blocks.first - first) // size, -(-(blocks.indexes.stop - first) // size)):
                self._copy_run(move, source, layer, index)

    def _copy_run(self, move: Move, source: Source, layer: int, index: int) -> None:
        """Copy the tokens of a move that one run of blocks holds."""
        described, packing, heads = source.entry.description, self.mover.packing, self.kv.heads(layer)
        run, tokens = described.run(layer, index), packing.tokens
        size = len(heads) * len(run) * described.layers[layer].slab_bytes
        data = source.entry.run(layer, index, heads, self.staging.buffer(size)[:size])
        wanted = source.blocks[0].within(run).indexes
        start = max(move.start, wanted.start * tokens)
        count = min(move.start + move.tokens, wanted.stop * tokens) - start
        slabs = numpy.frombuffer(data, packing.dtype).reshape(len(heads), len(run), -1)
        keys, values = packing.unpack(slabs[:, wanted.start - run.start : wanted.stop - run.start])
        inside = slice(start - wanted.start * tokens, start - wanted.start * tokens + count)
        keys, values = keys[:, inside], values[:, inside]
        to = move.to + start - move.start
        self.mover.rotation.apply(keys, self._turn(start, to, count))
        pool = self.kv.pool(layer, heads).numpy().reshape(len(heads), self.kv.count, -1, copy=False)
        pool = pool.view(packing.dtype)
        at = to
        while at < to + count:
            first = at % tokens
            until = min(to + count, at - first + tokens)
            part = slice(at - to, until - to)
            packing.pack(pool[:, self.table[at // tokens]], first, keys[:, part], values[:, part])
            at = until

    def _turn(self, start: int, to: int, count: int) -> Turn:
        """Return the rotation of these tokens, which is the same in all layers."""
        place = (start, to, count)
        if place not in self._turns:
            self._turns[place] = self.mover.rotation.turn(start, to, count)
        return self._turns[place]

    def clear(self, start: int, stop: int, layer: int) -> None:
        """Clear blocks of a layer of hidden states, which moved tokens have none of, nor need.

        Args:
            start: index in the context of the first token that is not loaded where it was.
            stop: index after the last one that is moved.
            layer: index of the layer.
        """
        size = self.mover.packing.tokens
        pool = self.kv.pool(layer, self.kv.heads(layer)).numpy()
        for block in self.table[start // size : -(-stop // size)]:
            pool[:, block] = 0
