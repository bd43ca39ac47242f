"""Save handoffs: wait for the KV, write images and record, then notify the requests that wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

import structlog

from baton.engines.kv_transfer import TransferRequest
from baton.errors import GatewayOverloaded
from baton.handoffs.records.background import WRITES, HandoffThreads, Result
from baton.handoffs.records.budget import RecordBudget
from baton.handoffs.records.changes import ChangeRules
from baton.handoffs.records.index import HandoffIndex
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.repository import Edit, RecordDeleted
from baton.handoffs.records.state import HandoffState
from baton.handoffs.records.storage import HandoffStorage
from baton.handoffs.records.sync import IndexSync

COMMIT_WITHIN_S = 5.0
"""The engine saves KV beside its other work. A handoff whose KV takes longer is ready before its KV is."""
GIVEN_UP_AFTER_S = 120.0
"""KV that is not saved by then is not waited for."""
AUTOMATIC_WITHIN_S = 30.0
"""An automatic handoff whose KV is not saved by then is dropped."""
LOOK_EVERY_S = 0.25
"""The engine reports the end of a save; the store is looked at too, in case that report was lost."""


class Saves:
    """The saves that are under way in one gateway.

    Args:
        index: the handoffs.
        storage: their files and KV.
        budget: makes room for records and images.
        rules: apply pins.
        sync: updates the index from disk.
        threads: of the handoffs.

    Attributes:
        closing: the gateway ends; KV is not waited for any longer.
    """

    def __init__(
        self,
        index: HandoffIndex,
        storage: HandoffStorage,
        budget: RecordBudget,
        rules: ChangeRules,
        sync: IndexSync,
        threads: HandoffThreads,
    ) -> None:
        self.closing = False
        self._index = index
        self._storage = storage
        self._budget = budget
        self._rules = rules
        self._sync = sync
        self._pending: dict[str, asyncio.Event] = {}
        self._awaited: Counter[str] = Counter()
        self._sharing: set[str] = set()
        self._threads = threads
        self._log = structlog.get_logger("baton.handoffs")

    def begin(self, record: HandoffRecord) -> None:
        """Note that a handoff is pending."""
        self._pending[record.id] = asyncio.Event()

    @property
    def pending(self) -> list[str]:
        """Ids of the handoffs that are still pending, here or for other machines."""
        return [*self._pending, *(self._sharing - self._pending.keys())]

    def is_pending(self, record: HandoffRecord) -> bool:
        """Return whether a handoff is still pending."""
        return record.id in self._pending

    async def wait(self, record: HandoffRecord, within_s: float) -> None:
        """Wait until a handoff is no longer pending, at most `within_s` seconds."""
        settled = self._pending.get(record.id)
        if settled is None:
            return
        self._awaited[record.id] += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(settled.wait(), within_s)
        finally:
            self._awaited[record.id] -= 1
            if not self._awaited[record.id]:
                del self._awaited[record.id]

    def is_awaited(self, record: HandoffRecord) -> bool:
        """Return whether anybody waits for a pending handoff."""
        return record.id in self._awaited

    def fail(self, record: HandoffRecord) -> None:
        """Mark a pending handoff as failed."""
        self._settle(record, HandoffState.FAILED)

    async def finish(self, record: HandoffRecord, transfer: TransferRequest) -> None:
        """Wait for the KV of a handoff whose tokens are known, and write its files.

        The engine reports when the KV is saved; the entry in the store is what counts.
        """
        try:
            await self._run(record, record.prepare)
            await self._write_images(record)
            if not await self._kv_known(record, transfer, COMMIT_WITHIN_S):
                await self._write_record(record)
                self._settle(record, HandoffState.READY)
                await self._kv_known(record, transfer, GIVEN_UP_AFTER_S)
            await self._share(record)
            await self._write_record(record)
        finally:
            self._sharing.discard(record.id)
            self._settle(record, HandoffState.READY)  # its token ids are known, with or without KV
            self._index.publish(record)
            if self._index.known(record.id) is None:  # deleted or expired: remove what was written since
                await self._run(record, self._storage.remove, record)

    async def finish_automatic(self, record: HandoffRecord, transfer: TransferRequest) -> None:
        """Write the record of an automatic handoff once its KV is saved; without KV nothing is left of it.

        Requests find it before the record is written: agents ask again as soon as they are answered, and
        nobody was promised that it outlives a crash.
        """
        try:
            await self._kv_known(record, transfer, AUTOMATIC_WITHIN_S)
            if record.bytes:
                await self._run(record, record.prepare)
                self._settle(record, HandoffState.READY)
                self._index.publish(record)
                await self._share(record)
                await self._write_record(record)
        finally:
            self._sharing.discard(record.id)
            self._settle(record, HandoffState.READY if record.bytes else HandoffState.FAILED)
            self._index.publish(record)
            if not record.bytes:
                self._index.forget(record)
            if self._index.known(record.id) is None:
                await self._run(record, self._storage.remove, record)

    async def _share(self, record: HandoffRecord) -> None:
        """Copy a handoff's KV to where other machines find it; requests of this machine need not wait."""
        if not self._storage.shared or not record.bytes:
            return
        self._sharing.add(record.id)
        if not record.image_data:
            self._settle(record, HandoffState.READY)
            self._index.publish(record)
        await self._push(self._storage.share, record)

    async def _push(
        self, work: Callable[[HandoffRecord], object], record: HandoffRecord, *, patient: bool = False
    ) -> None:
        """Write to the shared store beside all else; as the gateway ends, no longer."""
        try:
            await self._threads.pushes.run(record.tenant, work, record, patient=patient)
        except GatewayOverloaded:
            self._log.warning("handoff_not_shared", handoff=record.id, reason="too many are being pushed")
        except (RuntimeError, asyncio.CancelledError) as error:
            if not self.closing:
                raise
            self._log.warning("handoff_not_shared", handoff=record.id, reason=type(error).__name__)

    async def _run(self, record: HandoffRecord, work: Callable[..., Result], *args: object) -> Result:
        return await self._threads.storage.run(record.tenant, work, *args, patient=True)

    async def _write(self, work: Callable[..., Result], *args: object) -> Result:
        """Write while the budget's lock is held, which others wait for."""
        return await self._threads.storage.run(WRITES, work, *args, patient=True)

    async def write_unshared(self) -> None:
        """Write the records of handoffs that are still being pushed, as the gateway ends."""
        records = [self._index.known(each) for each in self._sharing]
        for record in records:
            if record is not None and not record.on_disk:
                await self._write_record(record)

    def _settle(self, record: HandoffRecord, state: HandoffState) -> None:
        record.state = state
        if (settled := self._pending.pop(record.id, None)) is not None:
            settled.set()

    async def _kv_known(self, record: HandoffRecord, transfer: TransferRequest, within_s: float) -> bool:
        """Wait until the KV is saved or its save has failed; returns whether that was known in time."""
        report, deadline = transfer.report, time.monotonic() + within_s
        while True:
            over = report.save_over.is_set() or not report.saves
            record.bytes = await self._run(record, self._storage.kv_bytes, record)
            if record.bytes or over or self.closing:
                return True
            if time.monotonic() >= deadline:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(report.save_over.wait(), LOOK_EVERY_S)

    async def _write_images(self, record: HandoffRecord) -> None:
        """Write a handoff's images to disk; without space for them the handoff ends with this process."""
        if record.image_data:
            async with self._budget.guard:
                fits = await self._budget.make_room(record, record.image_bytes)
                if fits and not self._storage.shared:
                    await self._write(self._storage.save_images, record)
            if fits and self._storage.shared:  # it counts bytes itself, and others need not wait for it
                await self._push(self._storage.save_images, record, patient=True)

    async def _write_record(self, record: HandoffRecord) -> None:
        """Write a record to disk, unless its images could not be: no other process could use it."""
        async with record.guard:
            record.state = HandoffState.READY
            edit = self._rules.settle(record.bytes, self._index.unsaved_usage(record) if record.pin else ())
            if record.on_disk or record.image_data or record not in self._index:
                self._sync.update(record, await self._run(record, self._storage.change, record, edit))
                return
            async with self._budget.guard:
                if await self._budget.make_room(record, record.disk_bytes):
                    await self._create(record, edit)
                else:
                    await self._write(self._storage.change, record, edit)
            self._index.count_bytes(record)

    async def _create(self, record: HandoffRecord, edit: Edit) -> None:
        try:
            record.on_disk = await self._write(self._storage.create, record, edit)
        except RecordDeleted:
            self._index.forget(record)
        if self._storage.shared:  # another gateway may have changed its lifetime while it was pending
            self._index.expire_in(record, self._sync.seconds_left(record))
