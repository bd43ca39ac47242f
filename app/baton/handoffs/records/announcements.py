"""Tell gateways of other machines of pending handoffs, and wait for theirs."""

from __future__ import annotations

import asyncio
import time
from array import array

import structlog

from baton.admission.fair_threads import OURS
from baton.handoffs.records.background import HandoffThreads
from baton.handoffs.records.index import HandoffIndex
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.saves import Saves
from baton.handoffs.records.state import HandoffState
from baton.handoffs.records.storage import HandoffStorage
from baton.handoffs.records.sync import IndexSync

LOOK_EVERY_S = 0.1
"""How often a pending handoff of another gateway is looked at while a request waits for it."""
REPORT_EVERY_S = 4.0
"""How often other gateways are told that a handoff is still pending; they expect it for 15 s."""


class Announcements:
    """The pending handoffs of one gateway, as other machines see them, and those of others.

    Args:
        index: the handoffs.
        storage: tells other machines.
        saves: the saves under way here.
        sync: reads what others have written.
        threads: of the handoffs.
    """

    def __init__(
        self,
        index: HandoffIndex,
        storage: HandoffStorage,
        saves: Saves,
        sync: IndexSync,
        threads: HandoffThreads,
    ) -> None:
        self._index = index
        self._storage = storage
        self._saves = saves
        self._threads = threads.storage
        self._sync = sync
        self._log = structlog.get_logger("baton.handoffs")

    async def announce(self, record: HandoffRecord) -> None:
        """Tell others of a pending handoff, unless it has been saved by now."""
        async with record.guard:
            if not self._saves.is_pending(record) or record.on_disk:
                return
            copy = record.model_copy(update={"tokens": array("i")})
            await self._threads.run(record.tenant, self._storage.announce, copy, patient=True)
            record.announced, record.revision = copy.announced, copy.revision

    async def run(self) -> None:
        """Tell others what is still pending, and forget what they have deleted, until this is cancelled."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                deleted = await self._threads.run(
                    OURS, self._storage.keep_pending, self._announced(), patient=True
                )
            except Exception as error:  # noqa: BLE001  # the border of this task: the next report may work
                self._log.warning("handoffs_not_reported", reason=f"{type(error).__name__}: {error}")
                continue
            for handoff_id in deleted:
                if (record := self._index.known(handoff_id)) is not None and not record.on_disk:
                    self._index.forget(record)

    async def wait(self, record: HandoffRecord, within_s: float) -> None:
        """Wait until another gateway has saved a handoff, or has stopped to report that it will.

        Raises:
            HandoffStoreUnavailable: the shared store, which knows it, does not answer.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            found = await self._sync.look_up(record.id, record.tenant)
            if found is None or found.state is not HandoffState.PENDING:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    def _announced(self) -> list[str]:
        found = [self._index.known(each) for each in self._saves.pending]
        return [record.id for record in found if record is not None and record.announced]
