"""Keep the records and images of handoffs within their share of the store's budget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from baton.config.groups import HandoffSettings
from baton.handoffs.records.background import WRITES, HandoffThreads, Result
from baton.handoffs.records.index import HandoffIndex
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.storage import HandoffStorage
from baton_kv.stores.base import StoreError

NON_KV_SHARE = 0.5
"""Share of the budget for records and images. The store cannot evict them as it evicts KV: a handoff without
its record is lost, one without KV is prefilled."""


class RecordBudget:
    """Evicts handoffs when their records and images take more than their share of the budget.

    Args:
        settings: with the budget.
        index: the handoffs.
        storage: their files and KV.
        refresh: reads what other gateways over the store changed.
        threads: of the handoffs.

    Attributes:
        guard: hold it from `make_room` until the bytes are written.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        index: HandoffIndex,
        storage: HandoffStorage,
        refresh: Callable[[], Awaitable[None]],
        threads: HandoffThreads,
    ) -> None:
        self.guard = asyncio.Lock()
        self._settings = settings
        self._index = index
        self._storage = storage
        self._refresh = refresh
        self._threads = threads.storage
        self._log = structlog.get_logger("baton.handoffs")

    async def make_room(self, record: HandoffRecord | None, size: int) -> bool:
        """Evict handoffs until `size` more bytes fit.

        Args:
            record: the handoff whose record or images are to be written; it is not evicted.
            size: bytes.

        Returns:
            Whether they fit.
        """
        try:
            if await self._evict(record, size):
                return True
            reason = "pinned handoffs take all of the budget for records"
        except StoreError as error:
            reason = str(error)
        self._log.warning("handoff_not_kept", reason=reason)
        return False

    async def _evict(self, record: HandoffRecord | None, size: int) -> bool:
        share, refreshed = NON_KV_SHARE * self._settings.whole_budget, False
        if size > share:
            return False
        while (taken := await self._run(self._storage.non_kv_bytes) + size) > share:
            if not refreshed:
                await self._refresh()
                refreshed = True
                if taken - self._index.evictable_bytes(record) > share:  # evicting all would not be enough
                    return False
            if (other := self._index.next_evictable(record)) is None:
                return False
            self._index.evict(other)
            await self._run(self._storage.remove, other)
        return True

    async def _run(self, work: Callable[..., Result], *args: object) -> Result:
        return await self._threads.run(WRITES, work, *args, patient=True)
