"""Load entries into the KV cache, in threads: where they were, and moved to other places of a context."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy

from baton_kv.blocks import GroupBlocks, KVBlocks
from baton_kv.contract import TransferError, TransferFailure, Warmed
from baton_kv.copies import Copies, Fence, Staging
from baton_kv.entry import Entry, Kept, Name, Resident
from baton_kv.format import EntryDescription, EntryIncompatible, EntryInvalid
from baton_kv.joins.rotation import KeyMover, Turn
from baton_kv.messages import Joined, LoadJob, Move
from baton_kv.stores.base import Store

COPY_THREADS = 2
"""One thread does not saturate the memory bandwidth; more than two would take cores from the model."""


class GivenUp(TransferError):
    """The request ended before its load was finished."""

    failure = TransferFailure.GIVEN_UP


class PartLost(TransferError):
    """The entry `key`, whose KV was to be moved, is corrupt or gone."""

    def __init__(self, key: str, error: TransferError) -> None:
        super().__init__(str(error))
        self.key = key
        self.failure = error.failure  # type: ignore[misc]  # that of what is wrong


class Loader:
    """Loads entries into one rank's part of the KV cache.

    Args:
        secret: the store's secret, 32 bytes.
        blocks: the part of the engine's KV cache that this rank holds.
        copiers: the threads that share the copies of one load.
        given_up: the requests whose load need not be finished; others add to it.
        resident: what was proved and is kept in memory, which loads add to.
        verify: whether to verify every chunk before it is used.

    Attributes:
        mover: how keys are moved; None: no KV is moved.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        blocks: KVBlocks,
        copies: Copies,
        copiers: ThreadPoolExecutor,
        given_up: Collection[str],
        resident: Resident,
        *,
        verify: bool,
    ) -> None:
        self._store = store
        self._secret = secret
        self._blocks = blocks
        self._copies = copies
        self._copiers = copiers
        self._given_up = given_up
        self._resident = resident
        self._verify = verify
        self.mover: KeyMover | None = None

    def load(self, fence: Fence, job: LoadJob) -> int:
        """Carry out a load; return the bytes of it that were proved before and in memory.

        Raises:
            GivenUp: the request ended meanwhile.
            TransferError: an entry cannot be used; a corrupt one is quarantined.
        """
        self._require_waiting(job)
        resident = self._load_in_place(fence, job) if any(each.ids for each in job.blocks) else 0
        if job.joined is not None:
            self._load_moved(fence, job, job.joined)
        return resident

    def _load_in_place(self, fence: Fence, job: LoadJob) -> int:
        resident = self._resident if self._verify else None
        try:
            with open_sources(self._store, self._secret, job, self._blocks, resident) as sources:
                return self._copy_layers(fence, partial(self._copy, sources, job))
        except EntryIncompatible:
            raise  # valid for another engine, so it is not quarantined
        except EntryInvalid as error:
            self._store.quarantine(job.key, error.part)
            raise

    def warm(self, key: str, block_size: int) -> Warmed:
        """Bring all of an entry into memory, with the files that it shares, unless it is there.

        Args:
            block_size: tokens in a block.

        Raises:
            TransferError: the entry cannot be used; a corrupt one is quarantined.
        """
        if not len(self._resident):
            return Warmed()
        try:
            with self._store.open(key) as reader:
                entry = Entry(reader, key, self._secret)
            described, groups = entry.description, self._blocks.groups
            if described.layers != self._blocks.shapes or len(described.firsts) != len(groups):
                # Another engine of the same weights may have saved it; it is not corrupt for that.
                raise EntryIncompatible("the entry has layers of other shapes than this engine")
            blocks = tuple(
                GroupBlocks(first, tuple(range(described.held(number).stop - first)))
                for number, group in enumerate(groups)
                for first in (0 if group.keeps_all else described.held(number).start,)
            )
            job = LoadJob("", key, blocks, described.computed, described.fingerprint, entry.digest)
            with open_sources(self._store, self._secret, job, self._blocks, self._resident) as sources:
                for source in sources:
                    self._bring(source)
                return replace(_warmed(sources, block_size), memory=len(self._resident))
        except EntryIncompatible:
            raise
        except EntryInvalid as error:
            self._store.quarantine(key, error.part)
            raise

    def _bring(self, source: Source) -> None:
        """Read and verify those runs of a source into memory that are not there."""
        if source.kept is None:
            return
        for layer in range(len(self._blocks)):
            for index in range(source.entry.description.runs(layer)):
                if source.kept.run(layer, index) is None:
                    read_run(source, self._blocks, layer, index, source.kept.room(layer, index))
                    source.kept.added(layer, index)

    def _load_moved(self, fence: Fence, job: LoadJob, joined: Joined) -> None:
        if self.mover is None:
            raise EntryIncompatible("this engine does not move KV")
        self._copy_layers(fence, partial(self._clear, self.mover, job, joined))
        for move in joined.moves:
            self._require_waiting(job)
            blocks = blocks_of(move, self.mover.packing.tokens)
            wanted = LoadJob(job.request_id, move.key, blocks, move.tokens, move.fingerprint, move.digest)
            try:
                with open_sources(self._store, self._secret, wanted, self._blocks) as sources:
                    self._copy_layers(fence, partial(self._move, self.mover, job, move, sources))
            except GivenUp:
                raise
            except TransferError as error:
                if isinstance(error, EntryInvalid) and not isinstance(error, EntryIncompatible):
                    self._store.quarantine(move.key, error.part)
                raise PartLost(move.key, error) from None

    def _copy_layers(self, fence: Fence, copy: Callable[[Staging, range], int]) -> int:
        """Copy all layers in several threads and wait for all of them, since they write to the blocks.

        This thread is one of them. Returns the sum of what `copy` returns.
        """

        def copy_some(some: range) -> int:
            with self._copies.staging(fence) as staging:
                return copy(staging, some)

        layers = range(len(self._blocks))
        shares: list[Future[int]] = []
        try:
            for number in range(1, COPY_THREADS):
                shares.append(self._copiers.submit(copy_some, layers[number::COPY_THREADS]))
            mine = copy_some(layers[::COPY_THREADS])
        finally:
            wait(shares)
        return mine + sum(share.result() for share in shares)

    def _require_waiting(self, job: LoadJob) -> None:
        if job.request_id in self._given_up:
            raise GivenUp

    def _copy(self, sources: list[Source], job: LoadJob, staging: Staging, layers: range) -> int:
        copier, resident = LoadCopier(self._blocks, staging, self._verify), 0
        for layer in layers:
            self._require_waiting(job)
            resident += sum(copier.copy(source, layer) for source in sources)
        return resident

    def _clear(self, mover: KeyMover, job: LoadJob, joined: Joined, staging: Staging, layers: range) -> int:
        copier = MoveCopier(self._blocks, staging, mover, job.table)
        for layer in layers:
            if layer >= mover.layers:
                copier.clear(joined.stop - joined.tokens, joined.stop, layer)
        return 0

    def _move(
        self,
        mover: KeyMover,
        job: LoadJob,
        move: Move,
        sources: list[Source],
        staging: Staging,
        layers: range,
    ) -> int:
        copier = MoveCopier(self._blocks, staging, mover, job.table)
        for layer in layers:
            self._require_waiting(job)
            if layer < mover.layers:
                copier.copy(move, sources, layer)
        return 0


@dataclass(frozen=True)
class Source:
    """An open entry and the blocks that are loaded from it, for each cache group.

    Attributes:
        kept: its runs that are in memory, or will be; None: there is no room for them.
        name: what its file was opened by.
    """

    entry: Entry
    blocks: tuple[GroupBlocks, ...]
    kept: Kept | None
    name: Name


@contextmanager
def open_sources(
    store: Store, secret: bytes, job: LoadJob, kv: KVBlocks, resident: Resident | None = None
) -> Iterator[list[Source]]:
    """Open the entries that a load needs, for the time of the context; what is proved in it stays `resident`.

    Raises:
        EntryInvalid: an entry is corrupt, or not the one that was named.
        EntryIncompatible: the entry was saved with another model, or replaced.
        StoreError: a file is missing or cannot be read.
    """
    with ExitStack() as opened:

        def open_entry(key: str, part: int | None = None) -> tuple[Entry, Kept | None]:
            reader = opened.enter_context(store.open(job.key, part))
            kept = resident.find(reader, key, (job.key, part)) if resident is not None else None
            if resident is None or kept is None:
                return Entry(reader, key, secret, part), None
            opened.callback(resident.release, kept)
            entry = Entry(reader, key, secret, part, kept.told)
            if entry.digest != kept.digest:  # the file has changed since it was asked
                return entry, None
            kept.told = entry.told
            return entry, kept

        def source(
            entry: Entry, kept: Kept | None, blocks: tuple[GroupBlocks, ...], part: int | None
        ) -> Source:
            _require_held(entry, blocks, kv, part)
            if resident is not None and kept is None and _most(entry.description, blocks):
                kept = opened.enter_context(resident.room(entry.description))
            return Source(entry, blocks, kept, (job.key, part))

        entry, kept = open_entry(job.key)
        entry.require(job.fingerprint)
        if job.digest not in (None, entry.digest):
            raise EntryIncompatible("the entry was replaced after its token ids were compared")
        found: list[Source] = []
        reached = 0
        for index, part in enumerate(entry.description.parts):
            taken = range(reached, part.stop)
            blocks = tuple(
                each.within(taken if group.keeps_all else range(0))
                for group, each in zip(kv.groups, job.blocks, strict=True)
            )
            if any(each.ids for each in blocks):
                other, held = open_entry(part.key, index)
                if other.digest != part.digest:
                    raise EntryIncompatible(f"part {index} is not the entry that was continued", index)
                found.append(source(other, held, blocks, index))
            reached = part.stop
        blocks = tuple(
            each.within(range(reached, sys.maxsize)) if group.keeps_all else each
            for group, each in zip(kv.groups, job.blocks, strict=True)
        )
        found.append(source(entry, kept, blocks, None))
        yield found
        for each in found:
            if resident is not None and each.kept is not None and not each.kept.digest:
                each.kept.told = each.entry.told
                resident.keep(each.kept, each.entry.digest, each.entry.told.layout.size, each.name)


def read_run(source: Source, kv: KVBlocks, layer: int, index: int, data: memoryview) -> None:
    """Read and verify this rank's heads of a run, and bring them into the order of this KV cache.

    Raises:
        EntryInvalid: a chunk does not match its tag, or the file is too short.
    """
    source.entry.run(layer, index, kv.heads(layer), data)
    kv.repack(layer, data, source.entry.description.packing)


def _warmed(sources: Sequence[Source], block_size: int) -> Warmed:
    """Sum up what of an entry is in memory: bytes, and tokens from the first whose KV is all there."""
    held = [source.kept is not None and source.kept.whole for source in sources]
    whole, described = all(held), sources[-1].entry.description
    reached = 0
    for there, part in zip(held, described.parts, strict=False):
        if not there:
            break
        reached = part.stop * block_size
    return Warmed(
        sum(source.kept.held for source in sources if source.kept is not None),
        described.computed if whole else min(reached, described.computed),
        whole,
    )


def _most(described: EntryDescription, blocks: tuple[GroupBlocks, ...]) -> bool:
    """Return whether these are at least half of an entry's blocks: less is not worth its room."""
    held = sum(len(described.held(group)) for group in range(len(described.firsts)))
    return 2 * sum(len(each.ids) for each in blocks) >= held


def _require_held(entry: Entry, blocks: tuple[GroupBlocks, ...], kv: KVBlocks, part: int | None) -> None:
    """Check that an entry holds these blocks in the shape of the KV cache.

    Raises:
        EntryInvalid: it does not.
    """
    described = entry.description
    if described.layers != kv.shapes or len(described.firsts) != len(blocks):
        raise EntryInvalid("the entry's layers do not have the shape of this KV cache", part)
    if not kv.reads(described.packing):
        raise EntryIncompatible("the entry's keys and values are in an order that this engine cannot read")
    for group, each in enumerate(blocks):
        held = described.held(group)
        if each.ids and (each.first < held.start or each.indexes.stop > held.stop):
            raise EntryInvalid("the entry has fewer blocks than the load needs", part)


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

    def copy(self, source: Source, layer: int) -> int:
        """Copy one layer of a source; return the bytes of it that were proved before and in memory.

        Raises:
            EntryInvalid: a chunk does not match its digest, or the file is too short.
        """
        described = source.entry.description
        blocks = source.blocks[described.layers[layer].group]
        if not blocks.ids:
            return 0
        size, first = described.layers[layer].run_blocks, described.first(layer)
        runs = range((blocks.first - first) // size, -(-(blocks.indexes.stop - first) // size))
        alike = described.packing == self.kv.packing
        pool = self.kv.pool(layer, self.kv.heads(layer))
        if not self.verify and alike and self.staging.rows(pool, ()) is not None:
            self._read_rows(source.entry, layer, runs, blocks)
            return 0
        return sum(self._copy_run(source, layer, index, blocks) for index in runs)

    def _copy_run(self, source: Source, layer: int, index: int, blocks: GroupBlocks) -> int:
        """Copy those of some blocks that are in a run, from where they are in memory or through there."""
        entry, kept = source.entry, source.kept
        run, heads = entry.description.run(layer, index), self.kv.heads(layer)
        wanted = blocks.within(run)
        slab_bytes = entry.description.layers[layer].slab_bytes
        size = len(heads) * len(run) * slab_bytes
        data = kept.run(layer, index) if kept is not None else None
        resident = data is not None
        if data is None:
            data = kept.room(layer, index) if kept is not None else self.staging.buffer(size)[:size]
            if self.verify:
                read_run(source, self.kv, layer, index, data)
            else:
                entry.read_slabs(layer, index, heads.start, run.start, [data])
                self.kv.repack(layer, data, entry.description.packing)
            if kept is not None:
                kept.added(layer, index)
        self.staging.scatter(self.kv.pool(layer, heads), wanted.ids, data, wanted.first - run.start)
        return len(self.kv.writes(layer)) * len(wanted.ids) * slab_bytes if resident else 0

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
        data = self.staging.buffer(size)[:size]
        read_run(source, self.kv, layer, index, data)
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

        `start` is the first token of the context that is not loaded where it was, `stop` follows the last.
        """
        size = self.mover.packing.tokens
        pool = self.kv.pool(layer, self.kv.heads(layer)).numpy()
        for block in self.table[start // size : -(-stop // size)]:
            pool[:, block] = 0
