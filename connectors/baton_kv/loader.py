"""Load entries into the KV cache, in threads: where they were, and moved to other places of a context."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from baton_kv.blocks import KVBlocks
from baton_kv.contract import TransferError, TransferFailure
from baton_kv.copies import Copies, Fence, Staging
from baton_kv.entry_format import EntryIncompatible, EntryInvalid
from baton_kv.joins.copier import KeyMover, MoveCopier, blocks_of
from baton_kv.loads import LoadCopier, Source, open_sources
from baton_kv.messages import LoadJob
from baton_kv.moves import Joined, Move
from baton_kv.stores.base import Store

COPY_THREADS = 2
"""One thread does not saturate the memory bandwidth; more than two would take cores from the model."""


class GivenUp(TransferError):
    """The request ended before its load was finished."""

    failure = TransferFailure.GIVEN_UP


class PartLost(TransferError):
    """An entry whose KV was to be moved is corrupt or gone.

    Args:
        key: its key.
        error: what is wrong with it.
    """

    def __init__(self, key: str, error: TransferError) -> None:
        super().__init__(str(error))
        self.key = key
        self.failure = error.failure  # type: ignore[misc]  # that of what is wrong


class Loader:
    """Loads entries into one rank's part of the KV cache.

    Args:
        store: the store of the entries.
        secret: the store's secret, 32 bytes.
        blocks: the part of the engine's KV cache that this rank holds.
        copies: how threads copy.
        copiers: the threads that share the copies of one load.
        given_up: the requests whose load need not be finished, which others add to.
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
        *,
        verify: bool,
    ) -> None:
        self._store = store
        self._secret = secret
        self._blocks = blocks
        self._copies = copies
        self._copiers = copiers
        self._given_up = given_up
        self._verify = verify
        self.mover: KeyMover | None = None

    def load(self, fence: Fence, job: LoadJob) -> None:
        """Carry out a load.

        Raises:
            GivenUp: the request ended meanwhile.
            TransferError: an entry cannot be used; a corrupt one is quarantined.
        """
        self._require_waiting(job)
        if any(each.ids for each in job.blocks):
            self._load_in_place(fence, job)
        if job.joined is not None:
            self._load_moved(fence, job, job.joined)

    def _load_in_place(self, fence: Fence, job: LoadJob) -> None:
        try:
            with open_sources(self._store, self._secret, job, self._blocks) as sources:
                self._copy_layers(fence, partial(self._copy, sources, job))
        except EntryIncompatible:
            raise  # valid for another engine, so it is not quarantined
        except EntryInvalid as error:
            self._store.quarantine(job.key, error.part)
            raise

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

    def _copy_layers(self, fence: Fence, copy: Callable[[Staging, range], None]) -> None:
        """Copy all layers in several threads and wait for all of them, since they write to the blocks."""

        def copy_some(some: range) -> None:
            with self._copies.staging(fence) as staging:
                copy(staging, some)

        layers = range(len(self._blocks))
        shares: list[Future[None]] = []
        try:
            for number in range(COPY_THREADS):
                shares.append(self._copiers.submit(copy_some, layers[number::COPY_THREADS]))
        finally:
            wait(shares)
        for share in shares:
            share.result()

    def _require_waiting(self, job: LoadJob) -> None:
        if job.request_id in self._given_up:
            raise GivenUp

    def _copy(self, sources: list[Source], job: LoadJob, staging: Staging, layers: range) -> None:
        copier = LoadCopier(self._blocks, staging, self._verify)
        for layer in layers:
            self._require_waiting(job)
            for source in sources:
                copier.copy(source, layer)

    def _clear(self, mover: KeyMover, job: LoadJob, joined: Joined, staging: Staging, layers: range) -> None:
        copier = MoveCopier(self._blocks, staging, mover, job.table)
        for layer in layers:
            if layer >= mover.layers:
                copier.clear(joined.stop - joined.tokens, joined.stop, layer)

    def _move(
        self,
        mover: KeyMover,
        job: LoadJob,
        move: Move,
        sources: list[Source],
        staging: Staging,
        layers: range,
    ) -> None:
        copier = MoveCopier(self._blocks, staging, mover, job.table)
        for layer in layers:
            self._require_waiting(job)
            if layer < mover.layers:
                copier.copy(move, sources, layer)
