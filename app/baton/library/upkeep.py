"""Remove handoffs that have expired, are too many, or whose KV was evicted, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from baton.admission.fair_threads import OURS
from baton.errors import HandoffStoreUnavailable
from baton.library.handoff import Handoff, HandoffAudit
from baton.library.here.records import Others
from baton.library.index import HandoffIndex
from baton.library.saving import RecordBudget
from baton.library.sync import IndexSync
from baton.library.threads import HandoffThreads, Result
from baton.library.tiers import HandoffStorage
from baton.telemetry.metrics import AuditResult, HandoffMetrics

# Delete handoffs, and take back what other machines were told of them.


class Deletions:
    """Deletes handoffs of one gateway.

    Args:
        index: the handoffs.
        storage: their files and KV.
        sync: tells what other gateways over the store did.
        begin_work: runs work in the background, which goes on when the request that began it is cancelled.
        threads: of the handoffs.
    """

    def __init__(
        self,
        index: HandoffIndex,
        storage: HandoffStorage,
        sync: IndexSync,
        begin_work: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        threads: HandoffThreads,
    ) -> None:
        self._index = index
        self._storage = storage
        self._sync = sync
        self._begin_work = begin_work
        self._threads = threads.storage

    async def delete(self, record: Handoff) -> None:
        """Delete a handoff, its translations, and the automatic ones that continue it or that it continues.

        Raises:
            HandoffStoreUnavailable: the shared store failed; it is not deleted.
        """
        if self._storage.shared:  # others may have continued it meanwhile
            await self._sync.refresh()
        gone = self._index.with_translations(record)
        gone += [each for one in gone for each in self._index.relatives(one)]
        removing = self._remove_all(gone)
        if self._storage.remote:  # it is deleted for all machines, or not at all
            await asyncio.shield(self._begin_work(removing))
        for each in gone:
            self._index.forget(each)
        if not self._storage.remote:
            await asyncio.shield(self._begin_work(removing))

    async def _remove_all(self, records: Iterable[Handoff]) -> None:
        for record in records:
            async with record.guard:  # so that nobody writes it again after this
                await self._threads.run(record.tenant, self._storage.delete, record)

    async def retract(self, record: Handoff) -> None:
        """Take back what other machines were told of a handoff whose request failed; here it is shown."""
        async with record.guard:
            await self._threads.run(record.tenant, self._storage.remove, record, patient=True)
        record.announced = False


# Take KV out of use that led to another answer than computing it, on this machine and the others.


@dataclass(frozen=True)
class Distrust:
    """What an audit's result does to handoffs.

    Attributes:
        index: the handoffs of this gateway.
        storage: where their KV is.
        sync: keeps the index as other gateways' changes have it.
        kv_gone: notes that a handoff's KV is not here.
        threads: of the handoffs.
    """

    index: HandoffIndex
    storage: HandoffStorage
    sync: IndexSync
    kv_gone: Callable[[Handoff], None]
    threads: HandoffThreads

    async def remove_kv(self, record: Handoff, saved: str | None) -> None:
        """Move KV away, and all that may be made of it.

        Args:
            record: the handoff whose KV it is.
            saved: key of the entry that the request saved which loaded it; None: none.
        """
        for each in [record, *self.index.beginning_like(record), *self.index.blended_from(record)]:
            await self.threads.storage.run(each.tenant, self.storage.quarantine, each, patient=True)
            self.kv_gone(each)
            if self.storage.shared and not each.automatic:  # other machines may have copies
                with contextlib.suppress(HandoffStoreUnavailable):
                    await self._tell_kv_gone(each)
        if saved is not None:
            await self.threads.storage.run(record.tenant, self.storage.store.quarantine, saved, patient=True)

    async def _tell_kv_gone(self, record: Handoff) -> None:
        """Note in a record that its KV is not to be used.

        Raises:
            HandoffStoreUnavailable: the shared store failed.
        """

        def edit(changed: Handoff, _others: Others) -> None:
            changed.bytes = 0

        async with record.guard:
            now = await self.threads.storage.run(
                record.tenant, self.storage.change, record, edit, patient=True
            )
            self.sync.update(record, now)

    async def note(self, record: Handoff, audit: HandoffAudit) -> None:
        """Note the result of an audit of a handoff's KV."""
        wrong = audit.result is AuditResult.MISMATCH
        record = self.index.known(record.id) or record  # another gateway may have changed it
        if record.automatic or record not in self.index:
            return

        def edit(changed: Handoff, _others: Others) -> None:
            changed.audit = audit
            changed.bytes = 0 if wrong else changed.bytes

        async with record.guard:
            now = await self.threads.storage.run(
                record.tenant, self.storage.change, record, edit, patient=True
            )
            self.sync.update(record, now)


SWEEP_EVERY_S = 2.0
SWEEP_SHARE = 0.05
"""Share of the time that sweeps may take: with many handoffs they are less frequent."""
SWEEP_AT_LEAST_EVERY_S = 60.0
ORPHANS_EVERY_S = 300.0
EVICTED_LOOKS = 100
"""In each sweep it is seen whether the KV of so many automatic handoffs, drawn at random, still exists."""
MAX_PER_TENANT = 10_000
MAX_WEIGHT_PER_TENANT = 256 * 1024 * 1024
"""Bytes of token ids and messages in memory; above it a tenant's oldest handoffs are evicted."""


class Sweeper:
    """Sweeps the handoffs of one gateway.

    Args:
        index: the handoffs.
        storage: their files and KV.
        sync: reads what other gateways over the store changed.
        budget: evicts handoffs for their records and images.
        metrics: where handoffs are counted.
        begin_work: runs work in the background.
        threads: of the handoffs.
    """

    def __init__(
        self,
        index: HandoffIndex,
        storage: HandoffStorage,
        sync: IndexSync,
        budget: RecordBudget,
        metrics: HandoffMetrics,
        begin_work: Callable[[Coroutine[Any, Any, Any]], object],
        threads: HandoffThreads,
    ) -> None:
        self._index = index
        self._storage = storage
        self._sync = sync
        self._budget = budget
        self._metrics = metrics
        self._begin_work = begin_work
        self._threads = threads.storage
        self._log = structlog.get_logger("baton.handoffs")

    async def run(self) -> None:
        """Sweep until this is cancelled."""
        next_orphans = 0.0
        while True:
            began = time.monotonic()
            try:
                if time.monotonic() >= next_orphans:
                    next_orphans = time.monotonic() + ORPHANS_EVERY_S
                    await self._run(self._storage.sweep_orphans)
                await self._sweep()
            except Exception as error:  # noqa: BLE001  # the border of the sweeper: the next round may work
                self._log.warning("handoff_sweep_failed", reason=f"{type(error).__name__}: {error}")
            rest = (time.monotonic() - began) / SWEEP_SHARE
            await asyncio.sleep(min(max(SWEEP_EVERY_S, rest), SWEEP_AT_LEAST_EVERY_S))

    async def _sweep(self) -> None:
        await self._sync.refresh()
        self.drop_expired()
        for tenant in self._index.tenants:
            self.evict_oldest(tenant)
        async with self._budget.guard:
            await self._budget.make_room(None, 0)
        await self.forget_evicted()
        self._metrics.kept.set(len(self._index))
        self._metrics.store_bytes.set(await self._run(self._storage.all_bytes))

    def drop_expired(self) -> None:
        """Drop expired handoffs; their files are removed in the background."""
        for record in self._index.expired():
            self._index.drop(record)
            if not record.automatic:  # most of those give way to one that continues them
                self._metrics.expired.inc()
            self._begin_work(self._remove_expired(record))

    async def _remove_expired(self, record: Handoff) -> None:
        extended = await self._run(self._storage.remove_expired, record)
        if extended is not None:
            self._sync.adopt(extended)

    async def forget_evicted(self) -> None:
        """Remove some of the automatic handoffs whose KV was evicted; they would hide others from prompts."""
        found = self._index.automatic_records()
        some = random.sample(found, min(len(found), EVICTED_LOOKS))
        sizes = await self._run(self._storage.stored_bytes, some)
        for record, size in zip(some, sizes, strict=True):
            if not size:
                self.kv_gone(record)

    def kv_gone(self, record: Handoff) -> None:
        """Note that a handoff's KV cannot be used any more; an automatic one is removed."""
        record.bytes = 0
        self._index.publish(record)
        if record.automatic and record in self._index:
            self._evict(record)

    def evict_oldest(self, tenant: str) -> None:
        """Evict a tenant's oldest handoffs above its limits of number and memory, automatic ones first."""
        mine = self._index.by_eviction(tenant)
        weight = sum(self._index.weight_of(record) for record in mine)
        for count, record in enumerate(mine):
            if len(mine) - count <= MAX_PER_TENANT and weight <= MAX_WEIGHT_PER_TENANT:
                return
            weight -= self._index.weight_of(record)
            self._evict(record)

    def make_room(self, tenant: str) -> None:
        """Evict a tenant's oldest handoffs if it has too many."""
        if self._index.count(tenant) > MAX_PER_TENANT:
            self.evict_oldest(tenant)

    def _evict(self, record: Handoff) -> None:
        self._index.evict(record)
        self._begin_work(self._run(self._storage.remove, record))

    async def _run(self, work: Callable[..., Result], *args: object) -> Result:
        return await self._threads.run(OURS, work, *args, patient=True)
