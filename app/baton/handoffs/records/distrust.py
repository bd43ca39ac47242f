"""Take KV out of use that led to another answer than computing it, on this machine and the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import HandoffStoreUnavailable
from baton.handoffs.records.background import HandoffThreads
from baton.handoffs.records.index import HandoffIndex
from baton.handoffs.records.public import HandoffAudit
from baton.handoffs.records.record import HandoffRecord
from baton.handoffs.records.repository import OtherUsage
from baton.handoffs.records.storage import HandoffStorage
from baton.handoffs.records.sync import IndexSync
from baton.telemetry.audit_metrics import AuditResult


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
    kv_gone: Callable[[HandoffRecord], None]
    threads: HandoffThreads

    async def remove_kv(self, record: HandoffRecord, saved: str | None) -> None:
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

    async def _tell_kv_gone(self, record: HandoffRecord) -> None:
        """Note in a record that its KV is not to be used.

        Raises:
            HandoffStoreUnavailable: the shared store failed.
        """

        def edit(changed: HandoffRecord, _others: OtherUsage) -> None:
            changed.bytes = 0

        async with record.guard:
            now = await self.threads.storage.run(
                record.tenant, self.storage.change, record, edit, patient=True
            )
            self.sync.update(record, now)

    async def note(self, record: HandoffRecord, audit: HandoffAudit) -> None:
        """Note the result of an audit of a handoff's KV."""
        wrong = audit.result is AuditResult.MISMATCH
        record = self.index.known(record.id) or record  # another gateway may have changed it
        if record.automatic or record not in self.index:
            return

        def edit(changed: HandoffRecord, _others: OtherUsage) -> None:
            changed.audit = audit
            changed.bytes = 0 if wrong else changed.bytes

        async with record.guard:
            now = await self.threads.storage.run(
                record.tenant, self.storage.change, record, edit, patient=True
            )
            self.sync.update(record, now)
