"""Room in the store for what is no KV: the records and images of handoffs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from baton.config.groups import HandoffSettings
from baton.handoffs.index import Shelf
from baton.handoffs.record import HandoffRecord
from baton.handoffs.storage import HandoffStorage
from baton_kv.stores.base import StoreError

BESIDE_SHARE = 0.5
"""Of the budget, for records and images: they do not go as KV does, for a handoff is nothing without them."""


class Room:
    """Evicts handoffs when their records and images take more than their share of the budget.

    Args:
        settings: with the budget.
        shelf: the handoffs.
        storage: what they have on disk.
        refresh: takes over what other gateways over the store did.

    Attributes:
        guard: held from when there is room until it is taken.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        shelf: Shelf,
        storage: HandoffStorage,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self.guard = asyncio.Lock()
        self._settings = settings
        self._shelf = shelf
        self._storage = storage
        self._refresh = refresh
        self._log = structlog.get_logger("baton.handoffs")

    async def make(self, record: HandoffRecord | None, size: int) -> bool:
        """Make room for so many bytes of a record or its images; whether there is."""
        try:
            if await self._evict(record, size):
                return True
            reason = "pinned handoffs take all the room for records"
        except StoreError as error:
            reason = str(error)
        self._log.warning("handoff_not_kept", reason=reason)
        return False

    async def _evict(self, record: HandoffRecord | None, size: int) -> bool:
        share, looked = BESIDE_SHARE * int(self._settings.budget), False
        if size > share:
            return False
        while (taken := await asyncio.to_thread(self._storage.beside_bytes) + size) > share:
            if not looked:
                await self._refresh()
                looked = True
                if taken - self._shelf.loose_bytes(record) > share:  # others would go for nothing
                    return False
            if (other := self._shelf.oldest_beside(record)) is None:
                return False
            self._shelf.forget(other)
            await asyncio.to_thread(self._storage.remove, other)
        return True
