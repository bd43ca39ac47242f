"""Keep the index of one gateway in step with the tiers, which other gateways change too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from baton.admission.fair_queue import FairQueue, QueueLimits, watched_queue
from baton.admission.fair_threads import FairThreads
from baton.errors import BatonError, GatewayOverloaded
from baton.library.handoff import UNSAVED, Handoff, HandoffState
from baton.library.here.records import Edit
from baton.library.index import HandoffIndex
from baton.library.tiers import Tier
from baton.telemetry.events import Events
from baton.telemetry.metrics import QueueMetrics

Result = TypeVar("Result")
THREADS = 8
FETCHES = 4
"""Fetches at once; they are not the threads that files of this machine are read by."""
PUSHES = 4
"""Handoffs that are copied to other machines at once, in threads that no request waits for."""
MAX_PUSHES = 64
"""Of more, the KV is not copied: the store is slower than the engines, and other machines compute."""
RETRY_AFTER_S = 5
LOOKS, WRITES = " looks", " writes"
"""What all tenants wait for takes turns of its own, like a tenant: looks for what other gateways changed, and
writes under the budget's lock. Neither waits behind removals, or behind a tenant's flood."""


class HandoffThreads:
    """The threads of one gateway's handoffs, shared between tenants.

    Args:
        wait_s: seconds that a request may wait for a thread; None: no limit.
        metrics: show the queues; None: nobody looks.

    Attributes:
        storage: look handoffs up, write and remove them.
        fetches: copy KV to this machine.
        pushes: copy KV and images to where other machines find them.
    """

    def __init__(self, wait_s: float | None = None, metrics: QueueMetrics | None = None) -> None:
        def threads(name: str, limits: QueueLimits) -> FairThreads:
            queue = watched_queue(limits, _busy, metrics, name) if metrics else FairQueue(limits, _busy)
            return FairThreads(queue, f"baton-{name}")

        self.storage = threads("handoffs", QueueLimits(THREADS, wait_s=wait_s))
        self.fetches = threads("handoff_fetches", QueueLimits(FETCHES, wait_s=wait_s))
        self.pushes = threads("handoff_pushes", QueueLimits(PUSHES, waiting=MAX_PUSHES))

    def close(self) -> None:
        """Begin no more fetches and pushes; those under way end by their deadlines."""
        self.fetches.close()
        self.pushes.close()


def _busy(_waited_s: float | None) -> BatonError:
    return GatewayOverloaded(
        "Too many requests use stored handoffs already; try again shortly.", retry_after_s=RETRY_AFTER_S
    )


class BackgroundWork:
    """The running work of one owner."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger("baton.handoffs")

    @property
    def running(self) -> frozenset[asyncio.Task[Any]]:
        """The tasks that have not ended yet."""
        return frozenset(self._running)

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run work; an error that nobody can expect is logged."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, BatonError):  # whoever awaits the task raises those
            self._log.error("handoff_work_failed", exc_info=error)


class Holdings:
    """The handoffs that one gateway knows, and the tiers that they are in.

    Args:
        wall: seconds since the epoch.

    Attributes:
        pool: the store that other machines share; None: there is none.
        remote: a handoff may be elsewhere than on this machine.
    """

    def __init__(
        self,
        index: HandoffIndex,
        tier: Tier,
        threads: HandoffThreads,
        wall: Callable[[], float],
        events: Events | None = None,
    ) -> None:
        self.index = index
        self.tier = tier
        self.here = tier.here
        self.pool = tier.here.pool
        self.remote = self.pool is not None or tier is not tier.here
        self.threads = threads
        self.wall = wall
        self._events = events
        self._refreshing: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    def tell(self, what: str, record: Handoff, **more: object) -> None:
        """Send a handoff's tenant the event of its end, if somebody of it listens."""
        if self._events is not None:
            self._events.tell(record.tenant, f"handoff.{what}", lambda: {"handoff": record.brief(), **more})

    async def run(
        self, tenant: str, work: Callable[..., Result], *args: Any, patient: bool = False
    ) -> Result:
        """Call a tier in a thread; see `FairThreads.run`."""
        return await self.threads.storage.run(tenant, work, *args, patient=patient)

    def adopt(self, record: Handoff) -> None:
        """Add a record of an earlier run, or of another gateway over the same store."""
        self.index.add(record, self.seconds_left(record))  # an expired one goes with the next sweep
        self.index.publish(record)

    def seconds_left(self, record: Handoff) -> float:
        """Return the seconds until a record expires; the clock may have jumped since it was written."""
        return max(0.0, min(record.expires_at - self.wall(), record.ttl_s))

    def merge_newer(self, known: Handoff, now: Handoff | None) -> None:
        """Update a record of the index with what a tier has.

        Args:
            now: the record as it is in the tier; None: it was deleted. The archive knows whether an archived
                one was: that one may be looked up again.
        """
        if now is None:
            self._gone_elsewhere(known)
        elif now is known:
            return
        elif known.state is HandoffState.PENDING:
            if now.state is not HandoffState.PENDING:  # another gateway has saved it
                self.index.drop(known)
                self._found(now)
        elif now.state is HandoffState.PENDING:
            self._merge_unwritten(known, now)
        elif now.revision > known.revision:
            renewed = now.expires_at != known.expires_at
            known.take(now)
            known.stamp, known.disk_bytes = now.stamp, now.disk_bytes
            self.index.count_bytes(known)
            self.index.publish(known)
            if renewed:
                self.index.expire_in(known, self.seconds_left(known))

    def _found(self, record: Handoff) -> None:
        """Add a record that another gateway has written."""
        self.adopt(record)
        if record in self.index and record.state is HandoffState.READY:
            self.tell("created", record)

    def _gone_elsewhere(self, known: Handoff) -> None:
        """Evict a record that is gone: it has expired, was deleted, or only the archive has it still."""
        if known in self.index:
            self.index.evict(known)
            over = "evicted" if known.archived else "deleted"
            self.tell("expired" if known.expires_at <= self.wall() else over, known)

    def _merge_unwritten(self, known: Handoff, now: Handoff | None) -> None:
        """Update a record that is being saved here, and that other machines know as pending.

        Args:
            now: the pending record, as others may have changed it; None: it was deleted.
        """
        if now is None:
            self.index.forget(known)
            self.tell("deleted", known)
        elif now is not known and now.revision > known.revision:
            known.take(now, but={*UNSAVED, "revision", "pin"})  # with those it is written over this one
            self.index.expire_in(known, self.seconds_left(known))

    async def change(self, record: Handoff, edit: Edit, *, patient: bool = False) -> None:
        """Apply an edit to a record in its tier, and here; whoever calls holds the record's guard.

        Raises:
            HandoffStoreUnavailable: a tier failed.
        """
        now = await self.run(record.tenant, self.tier.change, record, edit, patient=patient)
        self.merge_newer(record, now)

    async def look_up(self, handoff_id: str, tenant: str) -> Handoff | None:
        """Return a handoff as its tier has it now, unless it is unknown, deleted or expired.

        Args:
            tenant: who asks; one of another tenant may be returned all the same.

        Raises:
            HandoffStoreUnavailable: the pool, which may know it, does not answer.
        """
        known = self.index.known(handoff_id)
        if known is None:
            if (found := await self.run(tenant, self.tier.find, handoff_id, tenant)) is not None:
                self.adopt(found)
        elif known.on_disk or known.archived:
            self.merge_newer(known, await self.run(tenant, self.tier.reread, known))
        elif known.announced:
            self._merge_unwritten(known, await self.run(tenant, self.tier.reread, known))
        return self.index.find(handoff_id)

    async def refresh(self) -> None:
        """Update the index with everything that other gateways over the store changed.

        Whoever asks while one look is under way shares the next one: it is one look however many ask.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._look_again(self._refreshing))
        await asyncio.shield(self._next)

    async def _look_again(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        self._refreshing, self._next = self._next, None
        news = await self.run(LOOKS, self.here.records.refresh, patient=True)
        for handoff_id in news.gone:
            if (gone := self.index.known(handoff_id)) is not None:
                await self._gone(gone)
        for record in news.changed:
            if (known := self.index.known(record.id)) is None:
                self._found(record)
            else:
                self.merge_newer(known, record)

    async def _gone(self, known: Handoff) -> None:
        """Evict a record that is gone elsewhere; one that is being saved here may just have expired there."""
        if known.on_disk or known.archived:
            self._gone_elsewhere(known)
        elif known.announced:
            now = await self.run(LOOKS, self.tier.reread, known, patient=True)
            self._merge_unwritten(known, now)
