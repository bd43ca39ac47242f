"""Tell gateways of other machines of pending handoffs, and wait for theirs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from baton.admission.fair_threads import OURS
from baton.config.groups import HandoffSettings
from baton.engines.kv_transfer import TransferRequest
from baton.errors import GatewayOverloaded, HandoffPinsFull
from baton.library.handoff import Footprint, Handoff, HandoffState, scope_of
from baton.library.here.records import Edit, Others, RecordDeleted
from baton.library.index import HandoffIndex
from baton.library.sync import IndexSync
from baton.library.threads import WRITES, HandoffThreads, Result
from baton.library.tiers import PINNED_SHARE, HandoffStorage
from baton_kv.stores.base import StoreError

# Keep the records and images of handoffs within their share of the store's budget.


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

    async def make_room(self, record: Handoff | None, size: int) -> bool:
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

    async def _evict(self, record: Handoff | None, size: int) -> bool:
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


# Change a handoff's pin, label and lifetime, under the lock that all gateways over the store share.


PINNED_NON_KV_SHARE = 0.25
"""Share of the budget for the images and records of pinned handoffs: half of what all of these may take."""


@dataclass(frozen=True)
class ChangeRules:
    """The rules by which one gateway changes handoffs.

    Attributes:
        settings: the gateway's.
        pin: pins a handoff's KV in the store, or unpins it; returns whether it is pinned then.
        pinned_kv: returns the bytes of KV that pins protect, by scope, if this handoff were pinned too.
    """

    settings: HandoffSettings
    pin: Callable[[Handoff, bool], bool]
    pinned_kv: Callable[[Handoff], dict[str, int]]

    def apply(self, changes: dict[str, Any], now: float, unsaved: Iterable[Footprint], /) -> Edit:
        """Return an edit that sets `label`, `ttl_s` (from now) or `pin`, as a client asked.

        Args:
            changes: the fields that are set.
            now: seconds since the epoch.
            unsaved: usage of the handoffs that are in memory only.

        Raises:
            HandoffPinsFull: by the edit, when `pin` would take more than may be pinned.
        """

        def edit(record: Handoff, others: Others) -> None:
            if "pin" in changes:
                self._set_pin(record, bool(changes["pin"]), [*unsaved, *others()])
            if "label" in changes:
                record.label = changes["label"]
            if changes.get("ttl_s") is not None:
                self._renew(record, changes["ttl_s"], now)

        return edit

    def settle(self, size: int, unsaved: Iterable[Footprint], /) -> Edit:
        """Return an edit for the end of the saving request: it notes the KV's size and sets a requested pin.

        Args:
            size: bytes of the KV.
            unsaved: as for `apply`.
        """

        def edit(record: Handoff, others: Others) -> None:
            record.bytes = size
            if record.pin:
                try:
                    self._set_pin(record, True, [*unsaved, *others()])
                except HandoffPinsFull:
                    self._set_pin(record, False, [])

        return edit

    def _set_pin(self, record: Handoff, pin: bool, others: list[Footprint]) -> None:
        if pin and not self._fits(record, others):
            raise HandoffPinsFull()
        record.pin = pin
        if record.bytes or not pin:  # KV that is not saved yet is pinned when it is
            record.pin = self.pin(record, pin)

    def _fits(self, record: Handoff, others: list[Footprint]) -> bool:
        """Return whether a pin fits what may be pinned in all, and its tenant's share of that."""
        budget, mine = PINNED_SHARE * self.settings.whole_budget, record.footprint
        non_kv = mine.non_kv_bytes + sum(other.non_kv_bytes for other in others if other.pin)
        if non_kv > PINNED_NON_KV_SHARE * self.settings.whole_budget:
            return False
        pinned = Counter(self.pinned_kv(record))
        for other in others:
            pinned[scope_of(other.tenant)] += other.non_kv_bytes if other.pin else 0
        pinned[scope_of(mine.tenant)] += mine.non_kv_bytes
        share = budget / len(pinned)
        return pinned[scope_of(mine.tenant)] <= share and pinned.total() <= budget

    def _renew(self, record: Handoff, seconds: float, now: float) -> None:
        """Set the lifetime to `seconds` from now, within the longest one that the settings allow."""
        lives = min(seconds, self.settings.ttl_s)
        latest = record.created_at + max(self.settings.max_life_s, self.settings.ttl_s)
        until = min(now + lives, max(latest, record.expires_at))
        if until > now:  # otherwise the clock jumped, and the lifetime stays as it is
            record.expires_at, record.ttl_s = until, until - now


# Save handoffs: wait for the KV, write images and record, then notify the requests that wait.


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

    def begin(self, record: Handoff) -> None:
        """Note that a handoff is pending."""
        self._pending[record.id] = asyncio.Event()

    @property
    def pending(self) -> list[str]:
        """Ids of the handoffs that are still pending, here or for other machines."""
        return [*self._pending, *(self._sharing - self._pending.keys())]

    def is_pending(self, record: Handoff) -> bool:
        """Return whether a handoff is still pending."""
        return record.id in self._pending

    async def wait(self, record: Handoff, within_s: float) -> None:
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

    def is_awaited(self, record: Handoff) -> bool:
        """Return whether anybody waits for a pending handoff."""
        return record.id in self._awaited

    def fail(self, record: Handoff) -> None:
        """Mark a pending handoff as failed."""
        self._settle(record, HandoffState.FAILED)

    async def finish(self, record: Handoff, transfer: TransferRequest) -> None:
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

    async def finish_automatic(self, record: Handoff, transfer: TransferRequest) -> None:
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

    async def _share(self, record: Handoff) -> None:
        """Copy a handoff's KV to where other machines find it; requests of this machine need not wait."""
        if not self._storage.shared or not record.bytes:
            return
        self._sharing.add(record.id)
        if not record.image_data:
            self._settle(record, HandoffState.READY)
            self._index.publish(record)
        await self._push(self._storage.share, record)

    async def _push(
        self, work: Callable[[Handoff], object], record: Handoff, *, patient: bool = False
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

    async def _run(self, record: Handoff, work: Callable[..., Result], *args: object) -> Result:
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

    def _settle(self, record: Handoff, state: HandoffState) -> None:
        record.state = state
        if (settled := self._pending.pop(record.id, None)) is not None:
            settled.set()

    async def _kv_known(self, record: Handoff, transfer: TransferRequest, within_s: float) -> bool:
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

    async def _write_images(self, record: Handoff) -> None:
        """Write a handoff's images to disk; without space for them the handoff ends with this process."""
        if record.image_data:
            async with self._budget.guard:
                fits = await self._budget.make_room(record, record.image_bytes)
                if fits and not self._storage.shared:
                    await self._write(self._storage.save_images, record)
            if fits and self._storage.shared:  # it counts bytes itself, and others need not wait for it
                await self._push(self._storage.save_images, record, patient=True)

    async def _write_record(self, record: Handoff) -> None:
        """Write a record to disk, unless its images could not be: no other process could use it."""
        async with record.guard:
            record.state = HandoffState.READY
            edit = self._rules.settle(
                record.bytes, self._index.unsaved_footprints(record) if record.pin else ()
            )
            if record.on_disk or record.image_data or record not in self._index:
                self._sync.update(record, await self._run(record, self._storage.change, record, edit))
                return
            async with self._budget.guard:
                if await self._budget.make_room(record, record.disk_bytes):
                    await self._create(record, edit)
                else:
                    await self._write(self._storage.change, record, edit)
            self._index.count_bytes(record)

    async def _create(self, record: Handoff, edit: Edit) -> None:
        try:
            record.on_disk = await self._write(self._storage.create, record, edit)
        except RecordDeleted:
            self._index.forget(record)
        if self._storage.shared:  # another gateway may have changed its lifetime while it was pending
            self._index.expire_in(record, self._sync.seconds_left(record))


ANNOUNCED_EVERY_S = 0.1
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

    async def announce(self, record: Handoff) -> None:
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

    async def wait(self, record: Handoff, within_s: float) -> None:
        """Wait until another gateway has saved a handoff, or has stopped to report that it will.

        Raises:
            HandoffStoreUnavailable: the shared store, which knows it, does not answer.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            found = await self._sync.look_up(record.id, record.tenant)
            if found is None or found.state is not HandoffState.PENDING:
                return
            await asyncio.sleep(ANNOUNCED_EVERY_S)

    def _announced(self) -> list[str]:
        found = [self._index.known(each) for each in self._saves.pending]
        return [record.id for record in found if record is not None and record.announced]
