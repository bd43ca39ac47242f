"""The connector's part in the worker: copy blocks between the KV cache and the store in background threads.

Loads run one after the other, whose copies `COPY_THREADS` threads share; as many saves at once as there are
cores for, automatic ones in a thread of low priority. What saves gather and loads prove may stay in memory.
Nothing here raises into the engine, where any exception would end it for every tenant: a load that fails is
reported, and the engine computes what it should have brought.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from baton_kv.blocks import CacheGroup, KVBlocks
from baton_kv.contract import (
    Transfer,
    TransferError,
    TransferFailure,
    TransferOutcome,
    Warmed,
    failure_of,
)
from baton_kv.copies import Fence, Staging, copies_for
from baton_kv.entry import Kept, Resident, SlabReader, is_expendable, seal, write, write_share
from baton_kv.format import EntryDescription, EntryLayout
from baton_kv.joins.rotation import KeyMover
from baton_kv.load import COPY_THREADS, GivenUp, Loader, PartLost
from baton_kv.messages import Gap, LoadJob, SaveJob, StepJobs
from baton_kv.stores.base import Commit, Piece, SharedFiles, SharedMissing, Store, StoreFull

logger = logging.getLogger(__name__)
Job = TypeVar("Job", LoadJob, SaveJob)
CORES_A_SAVER, MOST_SAVERS = 4, 4
"""A save takes a core from the model's CPU work."""
REST_S = 0.002
"""Longest wait of a step that computes nothing; a new request waits as long at most."""
LOW_PRIORITY = 19
"""Niceness (`man 7 sched`) of the thread of automatic saves: beside a busy model it hardly has a core."""
SPARE_WITHIN_S = 20.0
"""An automatic save is given up if it takes longer: requests may need the blocks that it holds."""
LOST = frozenset({TransferFailure.MISSING, TransferFailure.CORRUPT})
MOST_WARMING = 64
"""Most entries that are brought into memory, or whose outcome nobody has asked for yet."""
SWEPT_EVERY_S = 5.0
"""Seconds between two looks for KV in memory whose entries are gone."""
ComputeGaps = Callable[[Sequence[Gap], Sequence[int]], None]
"""Computes gaps of a context whose blocks are given."""


class Postponed(TransferError):
    """An automatic save was given up, because others had the cores, or the room in the store."""

    failure = TransferFailure.BUSY


@dataclass(frozen=True)
class Writing:
    """The way in which an entry is written.

    Attributes:
        deadline: monotonic seconds after which it is given up.
        commit: see `Store.put`.
    """

    deadline: float = math.inf
    commit: Commit | None = None


@dataclass
class FinishedJobs:
    """The jobs that finished since the last call.

    Attributes:
        saved: requests whose save ended, so that their blocks can be freed.
        loaded: requests whose load ended, successfully or not.
        failed: requests whose load failed, so that their blocks' contents are not valid.
        outcomes: the outcome of each job.
    """

    saved: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    outcomes: list[TransferOutcome] = field(default_factory=list)


class WorkerRole:
    """The connector's state in the worker.

    Args:
        secret: the store's secret, 32 bytes.
        blocks: the part of the engine's KV cache that this rank holds.
        verify: whether to verify every chunk before it is used.
        ranks: number of ranks, all of which are given the same jobs.
        resident: bytes of proved KV that may stay in memory; without `verify` none does.
        savers: number of saves that run at once, beside automatic ones.
    """

    def __init__(
        self,
        store: Store,
        secret: bytes,
        blocks: KVBlocks,
        *,
        verify: bool = True,
        rank: int = 0,
        ranks: int = 1,
        resident: int = 0,
        savers: int = 1,
    ) -> None:
        self._store = store
        self._secret = secret
        self._blocks = blocks
        self._rank = rank
        self._ranks = ranks
        # Each of these threads may copy at the same time as the others.
        self._copies = copies_for(blocks.device, COPY_THREADS + savers + 1, blocks.largest_run)
        self._loading: set[str] = set()
        self._given_up: set[str] = set()
        self._done: queue.SimpleQueue[tuple[LoadJob | SaveJob, TransferOutcome]] = queue.SimpleQueue()
        self._copiers = self._threads(COPY_THREADS - 1, "copy")  # the one that loads copies too
        self._load_thread = self._threads(1, "load")
        memory = self._copies.memory(resident) if resident and verify else memoryview(b"")
        self._resident = Resident(memory, [len(blocks.heads(layer)) for layer in range(len(blocks))])
        self._loader = Loader(
            store,
            secret,
            blocks,
            self._copies,
            self._copiers,
            self._given_up,
            self._resident,
            verify=verify,
        )
        self._saver = self._threads(savers, "save")
        self._spare_saver = self._threads(1, "spare", niceness=LOW_PRIORITY)
        self._placer = self._threads(1, "place")
        self._warmer = self._threads(1, "warm", niceness=LOW_PRIORITY)
        self._warming: OrderedDict[str, Future[Warmed]] = OrderedDict()
        self._closed = threading.Event()
        if memory:
            threading.Thread(target=self._keep_swept, name="baton-kv-sweep", daemon=True).start()
        # Begun here, or its thread would have the priority of who needs it first.
        self._placer.submit(os.getpid).result()
        self._closing = False
        self._compute_gaps: ComputeGaps | None = None
        self._ended = threading.Event()
        self._waiting: deque[tuple[LoadJob, TransferOutcome]] = deque()

    def enable_moves(self, mover: KeyMover, compute_gaps: ComputeGaps) -> None:
        """Enable moves of KV to other places; `compute_gaps` runs in the main thread."""
        self._loader.mover, self._compute_gaps = mover, compute_gaps

    def _threads(self, count: int, name: str, niceness: int = 0) -> ThreadPoolExecutor:
        def begin() -> None:
            self._copies.begin_thread()
            if niceness:
                _lower_priority(niceness)

        return ThreadPoolExecutor(count, thread_name_prefix=f"baton-kv-{name}", initializer=begin)

    def warm(self, key: str, block_size: int) -> Warmed | None:
        """Bring an entry into memory, in the background; the first call after that returns what is there.

        Loads go on beside it. None: it is still at work. Each call may begin it anew, which costs little
        where all is there.

        Args:
            block_size: tokens in a block.
        """
        if (found := self._warming.get(key)) is None:
            while len(self._warming) >= MOST_WARMING:
                ended = next((each for each, work in self._warming.items() if work.done()), None)
                if ended is None:
                    return Warmed(failure=TransferFailure.BUSY)
                del self._warming[ended]  # nobody has asked for it again
            try:
                self._warming[key] = self._warmer.submit(self._warmed, key, block_size)
            except RuntimeError as error:  # it is shut down
                return Warmed(failure=failure_of(error))
            return None
        if not found.done():
            return None
        del self._warming[key]
        return found.result()

    def _warmed(self, key: str, block_size: int) -> Warmed:
        try:
            return self._loader.warm(key, block_size)
        except TransferError as error:
            failure = failure_of(error)
            if failure in LOST and self._store.exists(
                key
            ):  # a file that it shares: a load uses what is before
                failure = TransferFailure.NOT_WHOLE
            return Warmed(failure=failure)
        except Exception as error:  # the thread's last handler: whoever asks again is told
            logger.exception("bringing %s into memory failed", key)
            return Warmed(failure=failure_of(error))

    def sweep(self) -> None:
        """Drop KV from memory whose entries the store has no more."""
        self._resident.sweep(self._store.exists)

    def _keep_swept(self) -> None:
        while not self._closed.wait(SWEPT_EVERY_S):
            self.sweep()

    def start(self, jobs: StepJobs) -> None:
        """Begin the jobs of a step without waiting for them."""
        self._loading.update(load.request_id for load in jobs.loads)
        self._given_up.update(self._loading.intersection(jobs.given_up))
        if not jobs.loads and not jobs.saves:
            return
        try:
            fence = self._copies.fence()
        except RuntimeError as error:  # of the GPU; the engine will say more
            failed: list[LoadJob | SaveJob] = [*jobs.loads, *jobs.saves]
            for job in failed:
                self._done.put((job, self._outcome(job, failure_of(error), 0.0)))
            return
        for load in jobs.loads:
            self._begin(self._load_thread, load, partial(self._loader.load, fence))
        for save in jobs.saves:
            if is_expendable(save.key) and self._ranks == 1:
                deadline = time.monotonic() + SPARE_WITHIN_S
                self._begin(self._spare_saver, save, partial(self._save_in_idle_time, fence, deadline))
            else:
                self._begin(self._saver, save, partial(self._save, fence))

    def _begin(self, pool: ThreadPoolExecutor, job: Job, work: Callable[[Job], int | None]) -> None:
        try:
            pool.submit(self._run, job, work)
        except RuntimeError as error:  # no thread can be started, or it is shut down: release the request
            self._done.put((job, self._outcome(job, failure_of(error), 0.0)))

    def rest(self) -> None:
        """Wait a moment for a load to end, in a step that computes nothing.

        The engine would only ask again, with the interpreter's lock, which the threads that copy need.
        """
        if self._loading and not self._waiting:
            self._ended.wait(REST_S)
            self._ended.clear()

    def poll(self) -> FinishedJobs:
        """Return the jobs that finished since the last call."""
        finished = FinishedJobs()
        while not self._done.empty():
            job, outcome = self._done.get()
            if isinstance(job, LoadJob) and self._needs_gaps(job, outcome):
                self._waiting.append((job, outcome))
                continue
            self._note(finished, job, outcome)
        while self._waiting:
            job, outcome = self._waiting.popleft()
            computes = job.request_id not in self._given_up
            self._note(finished, job, self._with_gaps(job, outcome))
            if computes:
                break  # one in each step, so that none takes long
        return finished

    def _note(self, finished: FinishedJobs, job: LoadJob | SaveJob, outcome: TransferOutcome) -> None:
        """Add a job that has ended."""
        if isinstance(job, SaveJob):
            finished.saved.add(job.request_id)
        else:
            finished.loaded.add(job.request_id)
            self._loading.discard(job.request_id)
            self._given_up.discard(job.request_id)
            if outcome.failure is not None:
                finished.failed.add(job.request_id)
        finished.outcomes.append(outcome)

    @staticmethod
    def _needs_gaps(job: LoadJob, outcome: TransferOutcome) -> bool:
        """Return whether tokens between moved ones are still to be computed after a load."""
        return outcome.failure is None and job.joined is not None and bool(job.joined.gaps)

    def _with_gaps(self, job: LoadJob, outcome: TransferOutcome) -> TransferOutcome:
        """Compute the tokens between moved ones after a load; return the outcome of both."""
        if job.request_id in self._given_up:
            return replace(outcome, failure=TransferFailure.GIVEN_UP)
        assert self._compute_gaps is not None
        assert job.joined is not None
        began = time.monotonic()
        try:
            self._compute_gaps(job.joined.gaps, job.table)
        except Exception as error:  # the model's border: the engine computes all of the request instead
            logger.exception("computing tokens between moved ones of %s failed", job.key)
            return replace(outcome, failure=failure_of(error))
        return replace(outcome, seconds=outcome.seconds + time.monotonic() - began)

    def shutdown(self) -> None:
        """Wait for running jobs and cancel those that wait; automatic saves are given up."""
        self._closing = True
        self._closed.set()
        for pool in (
            self._load_thread,
            self._saver,
            self._spare_saver,
            self._placer,
            self._copiers,
            self._warmer,
        ):
            pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job, work: Callable[[Job], int | None]) -> None:
        """Carry out a job; `work` may return the bytes of a load that were in memory."""
        kind = Transfer.SAVE if isinstance(job, SaveJob) else Transfer.LOAD
        began = time.monotonic()
        failure: TransferFailure | None = None
        key, resident = job.key, 0
        try:
            resident = work(job) or 0
        except GivenUp as error:
            failure = failure_of(error)
        except TransferError as error:
            key = error.key if isinstance(error, PartLost) else key
            logger.warning("KV %s of %s failed: %s", kind, key, error)
            failure = failure_of(error)
        except BaseException as error:  # the thread's last handler: the request must be released
            logger.exception("KV %s of %s failed", kind, job.key)
            failure = failure_of(error)
        outcome = self._outcome(job, failure, time.monotonic() - began)
        self._done.put((job, replace(outcome, key=key, resident=resident)))
        self._ended.set()

    def _outcome(
        self, job: LoadJob | SaveJob, failure: TransferFailure | None, seconds: float
    ) -> TransferOutcome:
        saves = isinstance(job, SaveJob)
        joined = job.joined if isinstance(job, LoadJob) else None
        firsts = self._firsts(job) if isinstance(job, SaveJob) else [each.first for each in job.blocks]
        counts = [each.indexes.stop - first for each, first in zip(job.blocks, firsts, strict=True)]
        return TransferOutcome(
            request_id=job.request_id,
            key=job.key,
            kind=Transfer.SAVE if saves else Transfer.LOAD,
            tag=job.tag,
            failure=failure,
            tokens=job.computed if isinstance(job, SaveJob) else job.tokens,
            moved=sum(move.tokens for move in joined.moves) if joined is not None else 0,
            computed=sum(len(gap.tokens) for gap in joined.gaps) if joined is not None else 0,
            bytes=self._blocks.bytes_of(counts),
            seconds=seconds,
        )

    def _save(self, fence: Fence, job: SaveJob) -> None:
        try:
            self._write(fence, job, Writing())
        except (SharedMissing, StoreFull):
            if self._ranks > 1 or not job.parts:  # other ranks have written their shares already
                raise
            self._write(fence, replace(job, parts=()), Writing())  # what it shares may be gone, or larger

    def _save_in_idle_time(self, fence: Fence, deadline: float, job: SaveJob) -> None:
        """Save with low priority, and give up at the deadline."""
        how = Writing(deadline, lambda place: self._placer.submit(place).result())
        try:
            try:
                self._write(fence, job, how)
            except SharedMissing:
                self._write(fence, replace(job, parts=()), how)
        except StoreFull:
            raise Postponed("entries that clients asked for are not evicted for it") from None

    def _write(self, fence: Fence, job: SaveJob, how: Writing) -> None:
        described = EntryDescription(
            key=job.key,
            fingerprint=job.fingerprint,
            tokens=len(job.tokens),
            computed=job.computed,
            layers=self._blocks.shapes,
            blocks=_context_blocks(self._blocks.groups, job),
            firsts=tuple(self._firsts(job)),
            stops=_stops(job),
            states=job.states,
            parts=job.parts,
            images=job.images,
            packing=self._blocks.packing,
        )
        shared = SharedFiles(tuple(part.key for part in job.parts), job.source)
        with self._copies.staging(fence) as staging:
            if self._ranks > 1:  # none of them knows the entry's digest, nor has all that it holds
                slabs = partial(self._slabs, job, described, staging, how.deadline, None)
                self._write_share(job, described, slabs, shared)
                return
            with self._resident.room(described) as kept:
                slabs = partial(self._slabs, job, described, staging, how.deadline, kept)
                digest = ""

                def whole() -> Generator[Piece]:
                    nonlocal digest
                    digest = yield from write(described, job.tokens, slabs, self._secret)

                size = self._store.put(
                    job.key, whole(), size=described.kv_bytes, shared=shared, commit=how.commit
                )
                if kept is not None:
                    self._resident.keep(kept, digest, size, (job.key, None))
                for index, part in enumerate(job.parts):
                    self._resident.share(part.digest, (job.key, index))

    def _write_share(
        self, job: SaveJob, described: EntryDescription, slabs: SlabReader, shared: SharedFiles
    ) -> None:
        """Write this rank's heads into the draft of all ranks; the last rank completes it."""
        size = EntryLayout(described).size
        place = self._store.draft(
            job.key, job.draft, size=size, rank=self._rank, ranks=self._ranks, shared=shared
        )
        with place as draft:
            write_share(draft, described, self._blocks.writes, slabs, self._secret)
            if draft.finish():
                seal(draft, described, job.tokens, self._secret)
                draft.place()

    def _slabs(
        self,
        job: SaveJob,
        described: EntryDescription,
        staging: Staging,
        deadline: float,
        kept: Kept | None,
        layer: int,
        heads: range,
        blocks: range,
    ) -> list[memoryview]:
        """Gather the slabs of a run of blocks, in memory where they are to stay."""
        if time.monotonic() > deadline or (self._closing and deadline < math.inf):
            raise Postponed("others had the cores for too long, or the engine stops")
        ids = job.blocks[self._blocks.shapes[layer].group].within(blocks).ids
        if kept is None:
            return staging.gather(self._blocks.pool(layer, heads), ids)
        index = (blocks.start - described.first(layer)) // described.layers[layer].run_blocks
        slabs = staging.gather(self._blocks.pool(layer, heads), ids, kept.room(layer, index))
        kept.added(layer, index)  # what is digested and written is this
        return slabs

    def _firsts(self, job: SaveJob) -> list[int]:
        """Return the first block of each cache group that a save writes."""
        shared = job.parts[-1].stop if job.parts else 0
        groups = zip(self._blocks.groups, job.blocks, strict=True)
        return [shared if group.keeps_all else each.first for group, each in groups]


def _context_blocks(groups: Sequence[CacheGroup], job: SaveJob) -> int:
    """Return the number of blocks of a context in the groups that keep all of them, or in the first group."""
    whole = (each.indexes.stop for group, each in zip(groups, job.blocks, strict=True) if group.keeps_all)
    return next(whole, job.blocks[0].indexes.stop)


def _stops(job: SaveJob) -> tuple[int, ...]:
    """Return the last block of each cache group that a save writes, plus one; none if it is the same one."""
    stops = tuple(each.indexes.stop for each in job.blocks)
    return stops if len(set(stops)) > 1 else ()


def savers_for(cores: int, ranks: int = 1) -> int:
    """Return how many saves each of so many ranks should run at once on the cores that they share."""
    return max(1, min(MOST_SAVERS, cores // ranks // CORES_A_SAVER))


def _lower_priority(niceness: int) -> None:
    """Lower this thread's priority, so that it runs for the most part where others leave a core idle."""
    with contextlib.suppress(OSError, AttributeError):  # not on every system
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
