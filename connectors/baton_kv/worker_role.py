"""The connector's part in the worker: copy blocks between the KV cache and the store in background threads.

Loads run one after the other, as do saves; `COPY_THREADS` threads share the copies of one load. Nothing here
raises into the engine, where any exception would end it for every tenant: a load that fails reports its
blocks, and the engine recomputes them.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from baton_kv.blocks import KVBlocks
from baton_kv.contract import Transfer, TransferError, TransferFailure, TransferOutcome, failure_of
from baton_kv.entry import Entry, EntryDescription, EntryIncompatible, EntryInvalid, write
from baton_kv.messages import LoadJob, SaveJob, StepJobs
from baton_kv.stores.base import Store

logger = logging.getLogger(__name__)
Job = TypeVar("Job", LoadJob, SaveJob)
COPY_THREADS = 2
"""One thread does not saturate the memory bandwidth; more than two would take cores from the model."""


class GivenUp(TransferError):
    """The request ended before its load was finished."""

    failure = TransferFailure.GIVEN_UP


@dataclass
class FinishedJobs:
    """The jobs that finished since the last call.

    Attributes:
        saved: requests whose save ended, so that their blocks can be freed.
        loaded: requests whose load ended, successfully or not.
        failed_blocks: block ids whose contents are not valid.
        outcomes: the outcome of each job.
    """

    saved: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    outcomes: list[TransferOutcome] = field(default_factory=list)


class WorkerRole:
    """The connector's state in the worker.

    Args:
        store: the store of the entries.
        secret: the store's secret, 32 bytes.
        fingerprint: fingerprint of this engine's model and KV layout.
        blocks: the engine's KV cache.
        verify: whether to verify every chunk before it is used.
    """

    def __init__(
        self, store: Store, secret: bytes, fingerprint: str, blocks: KVBlocks, *, verify: bool = True
    ) -> None:
        self._store = store
        self._secret = secret
        self._fingerprint = fingerprint
        self._blocks = blocks
        self._verify = verify
        self._buffers = threading.local()
        self._loading: set[str] = set()
        self._given_up: set[str] = set()
        self._done: queue.SimpleQueue[tuple[LoadJob | SaveJob, TransferOutcome]] = queue.SimpleQueue()
        self._copiers = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="baton-kv-copy")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-save")

    def start(self, jobs: StepJobs) -> None:
        """Begin the jobs of a step without waiting for them."""
        self._loading.update(load.request_id for load in jobs.loads)
        self._given_up.update(self._loading.intersection(jobs.given_up))
        for load in jobs.loads:
            self._begin(self._loader, load, self._load)
        for save in jobs.saves:
            self._begin(self._saver, save, self._save)

    def _begin(self, pool: ThreadPoolExecutor, job: Job, work: Callable[[Job], None]) -> None:
        try:
            pool.submit(self._run, job, work)
        except RuntimeError as error:  # no thread can be started, or it is shut down: release the request
            self._done.put((job, self._outcome(job, failure_of(error), 0.0)))

    def poll(self) -> FinishedJobs:
        """Return the jobs that finished since the last call."""
        finished = FinishedJobs()
        while not self._done.empty():
            job, outcome = self._done.get()
            finished.outcomes.append(outcome)
            if isinstance(job, SaveJob):
                finished.saved.add(job.request_id)
                continue
            finished.loaded.add(job.request_id)
            self._loading.discard(job.request_id)
            self._given_up.discard(job.request_id)
            if outcome.failure is not None:
                finished.failed_blocks.update(job.block_ids)
        return finished

    def shutdown(self) -> None:
        """Wait for running jobs and cancel those that wait."""
        for pool in (self._loader, self._saver, self._copiers):
            pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job, work: Callable[[Job], None]) -> None:
        kind = Transfer.SAVE if isinstance(job, SaveJob) else Transfer.LOAD
        began = time.monotonic()
        failure: TransferFailure | None = None
        try:
            work(job)
        except GivenUp as error:
            failure = failure_of(error)
        except TransferError as error:
            logger.warning("KV %s of %s failed: %s", kind, job.key, error)
            failure = failure_of(error)
        except BaseException as error:  # the thread's last handler: the request must be released
            logger.exception("KV %s of %s failed", kind, job.key)
            failure = failure_of(error)
        self._done.put((job, self._outcome(job, failure, time.monotonic() - began)))

    def _outcome(
        self, job: LoadJob | SaveJob, failure: TransferFailure | None, seconds: float
    ) -> TransferOutcome:
        saves = isinstance(job, SaveJob)
        return TransferOutcome(
            request_id=job.request_id,
            key=job.key,
            kind=Transfer.SAVE if saves else Transfer.LOAD,
            tag=job.tag,
            failure=failure,
            tokens=job.computed if isinstance(job, SaveJob) else job.tokens,
            bytes=len(self._blocks) * len(job.block_ids) * self._blocks.block_bytes,
            seconds=seconds,
        )

    def _load(self, job: LoadJob) -> None:
        self._require_waiting(job)
        try:
            with self._store.open(job.key) as reader:
                entry = Entry(reader, job.key, self._secret)
                entry.require(self._fingerprint)
                if job.digest not in (None, entry.digest):
                    raise EntryIncompatible("the entry was replaced after its token ids were compared")
                self._require_shape(entry.description, job)
                self._copy_layers(partial(self._copy if self._verify else self._copy_unverified, entry, job))
        except EntryIncompatible:
            raise  # valid for another engine, so it is not quarantined
        except EntryInvalid:
            self._store.quarantine(job.key)
            raise

    def _copy_layers(self, copy: Callable[[range], None]) -> None:
        """Copy all layers in several threads and wait for all of them, since they write to the blocks."""
        layers = range(len(self._blocks))
        shares: list[Future[None]] = []
        try:
            for number in range(COPY_THREADS):
                shares.append(self._copiers.submit(copy, layers[number::COPY_THREADS]))
        finally:
            wait(shares)
        for share in shares:
            share.result()

    def _require_waiting(self, job: LoadJob) -> None:
        if job.request_id in self._given_up:
            raise GivenUp

    def _require_shape(self, described: EntryDescription, job: LoadJob) -> None:
        wanted = (len(self._blocks), self._blocks.block_bytes)
        if (described.layers, described.block_bytes) != wanted:
            raise EntryInvalid("the entry's layers or blocks do not have the shape of this KV cache")
        if job.first_block + len(job.block_ids) > described.blocks:
            raise EntryInvalid("the entry has fewer blocks than the load needs")

    def _copy(self, entry: Entry, job: LoadJob, layers: range) -> None:
        """Verify and copy chunk by chunk, while each is in the CPU's cache."""
        described = entry.description
        size = described.block_bytes
        buffer = self._buffer(described.chunk_blocks * size)
        end = job.first_block + len(job.block_ids)
        for layer in layers:
            self._require_waiting(job)
            for index in range(job.first_block // described.chunk_blocks, described.chunks):
                blocks = described.chunk(index)
                first, last = max(blocks.start, job.first_block), min(blocks.stop, end)
                if first >= last:
                    break
                data = entry.chunk(layer, index, buffer)
                ids = job.block_ids[first - job.first_block : last - job.first_block]
                self._blocks.scatter(
                    layer, ids, data[(first - blocks.start) * size : (last - blocks.start) * size]
                )

    def _buffer(self, size: int) -> memoryview:
        """Return this thread's buffer, page-aligned and reused."""
        if len(getattr(self._buffers, "chunk", b"")) < size:
            self._buffers.chunk = memoryview(mmap.mmap(-1, size))
        buffer: memoryview = self._buffers.chunk
        return buffer

    def _copy_unverified(self, entry: Entry, job: LoadJob, layers: range) -> None:
        """Copy without verifying, straight into the KV cache if that is in host memory."""
        for layer in layers:
            self._require_waiting(job)
            rows = self._blocks.rows(layer, job.block_ids)
            if rows is None:
                data = memoryview(bytearray(len(job.block_ids) * self._blocks.block_bytes))
                entry.read_blocks(layer, job.first_block, [data])
                self._blocks.scatter(layer, job.block_ids, data)
            else:
                entry.read_blocks(layer, job.first_block, rows)

    def _save(self, job: SaveJob) -> None:
        described = EntryDescription(
            key=job.key,
            fingerprint=self._fingerprint,
            tokens=len(job.tokens),
            computed=job.computed,
            layers=len(self._blocks),
            blocks=len(job.block_ids),
            block_bytes=self._blocks.block_bytes,
            images=job.images,
        )
        parts = write(
            described, job.tokens, lambda layer: self._blocks.gather(layer, job.block_ids), self._secret
        )
        size = described.layers * described.blocks * described.block_bytes
        self._store.put(job.key, parts, size=size)
