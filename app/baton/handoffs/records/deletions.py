"""Delete handoffs, and take back what other machines were told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from baton.handoffs.records.background import HandoffThreads
from baton.handoffs.records.index import HandoffIndex
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.storage import HandoffStorage
from baton.handoffs.records.sync import IndexSync


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

    async def delete(self, record: HandoffRecord) -> None:
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

    async def _remove_all(self, records: Iterable[HandoffRecord]) -> None:
        for record in records:
            async with record.guard:  # so that nobody writes it again after this
                await self._threads.run(record.tenant, self._storage.delete, record)

    async def retract(self, record: HandoffRecord) -> None:
        """Take back what other machines were told of a handoff whose request failed; here it is shown."""
        async with record.guard:
            await self._threads.run(record.tenant, self._storage.remove, record, patient=True)
        record.announced = False
