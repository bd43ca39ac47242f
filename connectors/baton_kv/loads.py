"""Copy the blocks of an entry, and of the entries that it continues, into the KV cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from baton_kv.blocks import KVBlocks
from baton_kv.cache_groups import GroupBlocks
from baton_kv.copies import Staging
from baton_kv.entry import Entry
from baton_kv.entry_format import EntryIncompatible, EntryInvalid
from baton_kv.messages import LoadJob
from baton_kv.stores.base import Store


@dataclass(frozen=True)
class Source:
    """An open entry and the blocks that are loaded from it.

    Attributes:
        entry: the entry.
        blocks: the blocks that are loaded from it, for each cache group.
    """

    entry: Entry
    blocks: tuple[GroupBlocks, ...]


@contextmanager
def open_sources(store: Store, secret: bytes, job: LoadJob, kv: KVBlocks) -> Iterator[list[Source]]:
    """Open the entries that a load needs, for the time of the context.

    Args:
        store: the store.
        secret: the store's secret, 32 bytes.
        job: the load.
        kv: the KV cache.

    Raises:
        EntryInvalid: an entry is corrupt, or not the one that was named.
        EntryIncompatible: the entry was saved with another model, or replaced.
        StoreError: a file is missing or cannot be read.
    """
    with ExitStack() as opened:
        entry = Entry(opened.enter_context(store.open(job.key)), job.key, secret)
        entry.require(job.fingerprint)
        if job.digest not in (None, entry.digest):
            raise EntryIncompatible("the entry was replaced after its token ids were compared")
        found: list[Source] = []
        reached = 0
        for index, part in enumerate(entry.description.parts):
            taken = range(reached, part.stop)
            blocks = tuple(
                each.within(taken if group.window is None else range(0))
                for group, each in zip(kv.groups, job.blocks, strict=True)
            )
            if any(each.ids for each in blocks):
                reader = opened.enter_context(store.open(job.key, index))
                other = Entry(reader, part.key, secret, index)
                if other.digest != part.digest:
                    raise EntryIncompatible(f"part {index} is not the entry that was continued", index)
                found.append(_source(other, blocks, kv, index))
            reached = part.stop
        blocks = tuple(
            each.within(range(reached, sys.maxsize)) if group.window is None else each
            for group, each in zip(kv.groups, job.blocks, strict=True)
        )
        found.append(_source(entry, blocks, kv, None))
        yield found


def _source(entry: Entry, blocks: tuple[GroupBlocks, ...], kv: KVBlocks, part: int | None) -> Source:
    """Return a source, after checking that the entry holds these blocks in the shape of the KV cache.

    Raises:
        EntryInvalid: it does not.
    """
    described = entry.description
    if described.layers != kv.shapes or len(described.firsts) != len(blocks):
        raise EntryInvalid("the entry's layers do not have the shape of this KV cache", part)
    for first, each in zip(described.firsts, blocks, strict=True):
        if each.ids and (each.first < first or each.indexes.stop > described.blocks):
            raise EntryInvalid("the entry has fewer blocks than the load needs", part)
    return Source(entry, blocks)


@dataclass(frozen=True)
class LoadCopier:
    """Copies layers, run by run, while each run is in the processor's cache.

    Attributes:
        kv: the KV cache.
        staging: what this thread copies with.
        verify: whether to verify each chunk before it is copied. Unverified bytes are read straight into the
            KV cache where that is contiguous in host memory.
    """

    kv: KVBlocks
    staging: Staging
    verify: bool

    def copy(self, source: Source, layer: int) -> None:
        """Copy one layer of a source.

        Raises:
            EntryInvalid: a chunk does not match its digest, or the file is too short.
        """
        described = source.entry.description
        blocks = source.blocks[described.layers[layer].group]
        if not blocks.ids:
            return
        size, first = described.layers[layer].run_blocks, described.first(layer)
        runs = range((blocks.first - first) // size, -(-(blocks.indexes.stop - first) // size))
        if not self.verify and self.staging.rows(self.kv.pool(layer, self.kv.heads(layer)), ()) is not None:
            self._read_rows(source.entry, layer, runs, blocks)
            return
        for index in runs:
            self._copy_run(source.entry, layer, index, blocks.within(described.run(layer, index)))

    def _copy_run(self, entry: Entry, layer: int, index: int, wanted: GroupBlocks) -> None:
        """Copy the wanted blocks of a run through a buffer."""
        run, heads = entry.description.run(layer, index), self.kv.heads(layer)
        size = len(heads) * len(run) * entry.description.layers[layer].slab_bytes
        data = self.staging.buffer(size)[:size]
        if self.verify:
            entry.run(layer, index, heads, data)
        else:
            entry.read_slabs(layer, index, heads.start, run.start, [data])
        self.staging.scatter(self.kv.pool(layer, heads), wanted.ids, data, wanted.first - run.start)

    def _read_rows(self, entry: Entry, layer: int, runs: range, blocks: GroupBlocks) -> None:
        """Read the blocks of some runs into the KV cache itself, whole runs of all heads at once."""
        described, heads = entry.description, self.kv.heads(layer)
        pool, begins = self.kv.pool(layer, heads), runs.start
        waiting: list[memoryview] = []
        for index in runs:
            run = described.run(layer, index)
            wanted = blocks.within(run)
            rows, count = self.staging.rows(pool, wanted.ids) or [], len(wanted.ids)
            if count == len(run) and len(heads) == described.layers[layer].heads:
                begins = begins if waiting else index
                waiting += rows
                continue
            for position, head in enumerate(heads):
                mine = rows[position * count : (position + 1) * count]
                entry.read_slabs(layer, index, head, wanted.first, mine)
        if waiting:
            start = described.run(layer, begins).start
            entry.read_slabs(layer, begins, heads.start, start, waiting)
