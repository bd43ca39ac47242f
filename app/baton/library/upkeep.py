"""Remove handoffs that have expired, are too many, or whose KV was evicted, in the background."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from baton.admission.fair_threads import OURS
from baton.library.handoff import Handoff, HandoffState
from baton.library.holdings import Holdings, Result
from baton.library.saving import Saving
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


class Upkeep:
    """Sweeps the handoffs of one gateway."""

    def __init__(
        self,
        holdings: Holdings,
        saving: Saving,
        metrics: HandoffMetrics,
        in_background: Callable[[Coroutine[Any, Any, Any]], object],
    ) -> None:
        self._holdings = holdings
        self._index = holdings.index
        self._here = holdings.here
        self._saving = saving
        self._metrics = metrics
        self._in_background = in_background
        self._log = structlog.get_logger("baton.handoffs")

    async def run(self) -> None:
        """Sweep until this is cancelled."""
        next_orphans = 0.0
        while True:
            began = time.monotonic()
            try:
                if time.monotonic() >= next_orphans:
                    next_orphans = time.monotonic() + ORPHANS_EVERY_S
                    await self._run(self._here.sweep_orphans)
                await self.sweep()
            except Exception as error:  # noqa: BLE001  # the border of the sweeper: the next round may work
                self._log.warning("handoff_sweep_failed", reason=f"{type(error).__name__}: {error}")
            rest = (time.monotonic() - began) / SWEEP_SHARE
            await asyncio.sleep(min(max(SWEEP_EVERY_S, rest), SWEEP_AT_LEAST_EVERY_S))

    async def sweep(self) -> None:
        await self._holdings.refresh()
        self.drop_expired()
        for tenant in self._index.tenants:
            self.evict_oldest(tenant)
        async with self._saving.guard:
            await self._saving.make_room(None, 0)
        await self.forget_evicted()
        self._metrics.kept.set(len(self._index))
        self._metrics.store_bytes.set(await self._run(self._here.store.size))

    def drop_expired(self) -> None:
        """Drop expired handoffs; their files are removed in the background."""
        for record in self._index.expired():
            self._index.drop(record)
            if not record.automatic:  # most of those give way to one that continues them
                self._metrics.expired.inc()
            self._in_background(self._remove_expired(record))

    async def _remove_expired(self, record: Handoff) -> None:
        extended = await self._run(self._holdings.tier.remove_expired, record)
        if extended is not None:
            self._holdings.adopt(extended)
        elif record.state is HandoffState.READY:
            self._holdings.tell("expired", record)

    async def forget_evicted(self) -> None:
        """Remove some of the automatic handoffs whose KV was evicted; they would hide others from prompts."""
        found = self._index.automatic_records()
        some = random.sample(found, min(len(found), EVICTED_LOOKS))
        if not some:
            return
        sizes = await self._run(self._holdings.tier.sizes, some)
        for record, size in zip(some, sizes, strict=True):
            if not size:
                self.kv_gone(record)

    def kv_gone(self, record: Handoff) -> None:
        """Note that a handoff's KV cannot be used any more; an automatic one is removed."""
        had, record.bytes = record.bytes, 0
        self._index.publish(record)
        if record not in self._index:
            return
        if record.automatic:
            self._evict(record)
        elif had:
            self._holdings.tell("evicted", record, kv_only=True)

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
        self._holdings.tell("evicted", record)
        self._in_background(self._run(self._here.remove, record))

    async def _run(self, work: Callable[..., Result], *args: object) -> Result:
        return await self._holdings.run(OURS, work, *args, patient=True)
