"""Remove handoffs that have expired, are too many, or whose KV was evicted, in the background."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from baton.admission.fair_threads import OURS
from baton.handoffs.records.background import HandoffThreads, Result
from baton.handoffs.records.budget import RecordBudget
from baton.handoffs.records.index import HandoffIndex
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.storage import HandoffStorage
from baton.handoffs.records.sync import IndexSync
from baton.telemetry.metrics import HandoffMetrics

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

    async def _remove_expired(self, record: HandoffRecord) -> None:
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

    def kv_gone(self, record: HandoffRecord) -> None:
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

    def _evict(self, record: HandoffRecord) -> None:
        self._index.evict(record)
        self._begin_work(self._run(self._storage.remove, record))

    async def _run(self, work: Callable[..., Result], *args: object) -> Result:
        return await self._threads.run(OURS, work, *args, patient=True)
