"""Keep the index of one gateway in step with the records on disk, which other gateways change too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.library.handoff import SAVERS, Handoff, HandoffState
from baton.library.index import HandoffIndex
from baton.library.threads import LOOKS, HandoffThreads
from baton.library.tiers import HandoffStorage


class IndexSync:
    """Adds records to the index and updates them from disk.

    Args:
        index: the handoffs of this gateway.
        storage: the records on disk.
        wall: seconds since the epoch.
        threads: of the handoffs.
    """

    def __init__(
        self,
        index: HandoffIndex,
        storage: HandoffStorage,
        wall: Callable[[], float],
        threads: HandoffThreads,
    ) -> None:
        self._index = index
        self._storage = storage
        self._wall = wall
        self._threads = threads.storage
        self._refreshing: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    def adopt(self, record: Handoff) -> None:
        """Add a record of an earlier run, or of another gateway over the same store."""
        self._index.add(record, self.seconds_left(record))  # an expired one goes with the next sweep
        self._index.publish(record)

    def seconds_left(self, record: Handoff) -> float:
        """Return the seconds until a record expires; the clock may have jumped since it was written."""
        return max(0.0, min(record.expires_at - self._wall(), record.ttl_s))

    def update(self, known: Handoff, now: Handoff | None) -> None:
        """Update a record of the index from disk.

        Args:
            known: the record in the index.
            now: the record as it is on disk; None: it was deleted. The archive knows whether an archived one
                was: that one may be looked up again.
        """
        if now is None:
            self._index.evict(known)
        elif now is not known and known.state is HandoffState.PENDING:
            if now.state is not HandoffState.PENDING:  # another gateway has saved it
                self._index.drop(known)
                self.adopt(now)
        elif now.state is HandoffState.PENDING:
            self._update_unwritten(known, now)
        elif now is not known and now.revision > known.revision:
            renewed = now.expires_at != known.expires_at
            known.take(now)
            known.stamp, known.disk_bytes = now.stamp, now.disk_bytes
            self._index.count_bytes(known)
            self._index.publish(known)
            if renewed:
                self._index.expire_in(known, self.seconds_left(known))

    async def look_up(self, handoff_id: str, tenant: str) -> Handoff | None:
        """Return a handoff as it is on disk now, unless it is unknown, deleted or expired.

        Args:
            handoff_id: its id.
            tenant: who asks; one of another tenant may be returned all the same.

        Raises:
            HandoffStoreUnavailable: the shared store, which may know it, does not answer.
        """
        known = self._index.known(handoff_id)
        if known is None:
            if (found := await self._threads.run(tenant, self._storage.find, handoff_id, tenant)) is not None:
                self.adopt(found)
        elif known.on_disk or known.archived:
            self.update(known, await self._threads.run(tenant, self._storage.reread, known))
        elif known.announced:
            self._update_unwritten(known, await self._threads.run(tenant, self._storage.reread, known))
        return self._index.find(handoff_id)

    def _update_unwritten(self, known: Handoff, now: Handoff | None) -> None:
        """Update a record that is being saved here, and that other machines know as pending.

        Args:
            known: the record in the index.
            now: the pending record, as others may have changed it; None: it was deleted.
        """
        if now is None:
            self._index.forget(known)
        elif now is not known and now.revision > known.revision:
            known.take(now, but={*SAVERS, "revision", "pin"})  # with those it is written over this one
            self._index.expire_in(known, self.seconds_left(known))

    async def _gone(self, known: Handoff) -> None:
        """Evict a record that is gone elsewhere; one that is being saved here may just have expired there."""
        if known.on_disk or known.archived:
            self._index.evict(known)
        elif known.announced:
            now = await self._threads.run(LOOKS, self._storage.reread, known, patient=True)
            self._update_unwritten(known, now)

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
        news = await self._threads.run(LOOKS, self._storage.refresh, patient=True)
        for handoff_id in news.gone:
            if (gone := self._index.known(handoff_id)) is not None:
                await self._gone(gone)
        for record in news.changed:
            if (known := self._index.known(record.id)) is None:
                self.adopt(record)
            else:
                self.update(known, record)
