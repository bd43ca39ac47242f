"""Save handoffs: wait for the KV, make room, write images and record, and tell whoever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from baton.admission.fair_threads import OURS
from baton.config.groups import HandoffSettings
from baton.engines.transfers import TransferRequest
from baton.errors import GatewayOverloaded, HandoffPinsFull
from baton.library.handoff import PINNED_SHARE, Footprint, Handoff, HandoffState, scope_of
from baton.library.here.records import Edit, Others, RecordDeleted
from baton.library.holdings import WRITES, Holdings, Result
from baton_kv.stores.base import StoreError

# Change a handoff's pin, label and lifetime, under the lock that all gateways over the store share.


PINNED_NON_KV_SHARE = 0.25
"""Share of the budget for the images and records of pinned handoffs: half of what all of these may take."""


@dataclass(frozen=True)
class ChangeRules:
    """The rules by which one gateway changes handoffs.

    Attributes:
        pin: pins a handoff's KV in the store, or unpins it; returns whether it is pinned then.
        pinned_kv: returns the bytes of KV that pins protect, by scope, if this handoff were pinned too.
    """

    settings: HandoffSettings
    pin: Callable[[Handoff, bool], bool]
    pinned_kv: Callable[[Handoff], dict[str, int]]

    def apply(self, changes: dict[str, Any], now: float, unsaved: Iterable[Footprint], /) -> Edit:
        """Return an edit that sets `label`, `ttl_s` (from now) or `pin`, as a client asked.

        Args:
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
        """Return the edit at the end of a save: it notes the KV's size and sets a requested pin."""

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


# Keep records and images within their share of the budget, write them, and announce what is pending.


NON_KV_SHARE = 0.5
"""Share of the budget for records and images. The store cannot evict them as it evicts KV: a handoff without
its record is lost, one without KV is prefilled."""
COMMIT_WITHIN_S = 5.0
"""The engine saves KV beside its other work. A handoff whose KV takes longer is ready before its KV is."""
GIVEN_UP_AFTER_S = 120.0
"""KV that is not saved by then is not waited for."""
AUTOMATIC_WITHIN_S = 30.0
"""An automatic handoff whose KV is not saved by then is dropped."""
LOOK_EVERY_S = 0.25
"""The engine reports the end of a save; the store is looked at too, in case that report was lost."""
ANNOUNCED_EVERY_S = 0.1
"""How often a pending handoff of another gateway is looked at while a request waits for it."""
REPORT_EVERY_S = 4.0
"""How often other gateways are told that a handoff is still pending; they expect it for 15 s."""


class Saving:
    """The handoffs that one gateway saves, and what they may take.

    Attributes:
        rules: by which pins are set.
        guard: hold it from `make_room` until the bytes are written.
        closing: the gateway ends; KV is not waited for any longer.
    """

    def __init__(self, holdings: Holdings, settings: HandoffSettings) -> None:
        self.rules = ChangeRules(settings, holdings.here.pin, holdings.here.pinned_kv)
        self.guard = asyncio.Lock()
        self.closing = False
        self._holdings = holdings
        self._index = holdings.index
        self._here = holdings.here
        self._pool = holdings.pool
        self._share = NON_KV_SHARE * settings.whole_budget
        self._pending: dict[str, asyncio.Event] = {}
        self._awaited: Counter[str] = Counter()
        self._sharing: set[str] = set()
        self._log = structlog.get_logger("baton.handoffs")

    def begin(self, record: Handoff) -> None:
        """Note that a handoff is pending."""
        self._pending[record.id] = asyncio.Event()

    def is_pending(self, record: Handoff) -> bool:
        """Return whether this gateway still saves a handoff."""
        return record.id in self._pending

    def is_saving(self, record: Handoff) -> bool:
        """Return whether a handoff is not yet ready for all machines."""
        return record.id in self._pending or record.id in self._sharing

    def is_awaited(self, record: Handoff) -> bool:
        """Return whether a request waits for a pending handoff."""
        return record.id in self._awaited

    async def settled(self, record: Handoff, within_s: float) -> None:
        """Wait until a handoff is no longer pending, here or on another machine.

        Raises:
            HandoffStoreUnavailable: the pool, which knows it, does not answer.
        """
        if record.state is HandoffState.PENDING and not self.is_pending(record):
            await self._settled_elsewhere(record, within_s)
        if (settled := self._pending.get(record.id)) is None:
            return
        self._awaited[record.id] += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(settled.wait(), within_s)
        finally:
            self._awaited[record.id] -= 1
            if not self._awaited[record.id]:
                del self._awaited[record.id]

    async def _settled_elsewhere(self, record: Handoff, within_s: float) -> None:
        """Wait until another gateway has saved a handoff, or has stopped to report that it will."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            found = await self._holdings.look_up(record.id, record.tenant)
            if found is None or found.state is not HandoffState.PENDING:
                return
            await asyncio.sleep(ANNOUNCED_EVERY_S)

    async def announce(self, record: Handoff) -> None:
        """Show other machines a pending handoff, unless it has been saved by now."""
        async with record.guard:
            if self._pool is None or not self.is_pending(record) or record.on_disk:
                return
            copy = record.model_copy(update={"tokens": array("i")})
            await self._holdings.run(record.tenant, self._pool.records.announce, copy, patient=True)
            record.announced, record.revision = copy.announced, copy.revision

    async def keep_announced(self) -> None:
        """Report what is still pending, and forget what others have deleted, until this is cancelled."""
        while self._pool is not None:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                report = self._pool.records.keep_pending
                deleted = await self._holdings.run(OURS, report, self.announced(), patient=True)
            except Exception as error:  # noqa: BLE001  # the border of this task: the next report may work
                self._log.warning("handoffs_not_reported", reason=f"{type(error).__name__}: {error}")
                continue
            for handoff_id in deleted:
                if (record := self._index.known(handoff_id)) is not None and not record.on_disk:
                    self._index.forget(record)

    def announced(self) -> list[str]:
        """Return the ids of the handoffs that are still pending for other machines."""
        found = [self._index.known(each) for each in {**self._pending, **dict.fromkeys(self._sharing)}]
        return [record.id for record in found if record is not None and record.announced]

    def fail(self, record: Handoff) -> None:
        """Mark a pending handoff as failed."""
        self._settle(record, HandoffState.FAILED)

    async def retract(self, record: Handoff) -> None:
        """Take back what other machines were shown of a handoff whose request failed; here it is listed."""
        async with record.guard:
            await self._run(record, self._here.remove, record)
        record.announced = False

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
            await self._push_kv(record)
            await self._write_record(record)
        finally:
            await self._ended(record, HandoffState.READY)  # its token ids are known, with or without KV

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
                await self._push_kv(record)
                await self._write_record(record)
        finally:
            await self._ended(record, HandoffState.READY if record.bytes else HandoffState.FAILED)

    async def _ended(self, record: Handoff, state: HandoffState) -> None:
        self._sharing.discard(record.id)
        self._settle(record, state)
        self._index.publish(record)
        if state is HandoffState.FAILED:
            self._index.forget(record)
        if self._index.known(record.id) is None:  # deleted or expired: remove what was written since
            await self._run(record, self._here.remove, record)

    def _settle(self, record: Handoff, state: HandoffState) -> None:
        record.state = state
        if (settled := self._pending.pop(record.id, None)) is not None:
            settled.set()
            if state is HandoffState.READY and record in self._index:
                self._holdings.tell("created", record)

    async def _kv_known(self, record: Handoff, transfer: TransferRequest, within_s: float) -> bool:
        """Wait until the KV is saved or its save has failed; returns whether that was known in time."""
        report, deadline = transfer.report, time.monotonic() + within_s
        while True:
            over = report.save_over.is_set() or not report.saves
            record.bytes = await self._run(record, self._here.kv_bytes, record)
            if record.bytes or over or self.closing:
                return True
            if time.monotonic() >= deadline:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(report.save_over.wait(), LOOK_EVERY_S)

    async def _push_kv(self, record: Handoff) -> None:
        """Copy a handoff's KV to where other machines find it; requests of this machine need not wait."""
        if self._pool is None or not record.bytes:
            return
        self._sharing.add(record.id)
        if not record.image_data:
            self._settle(record, HandoffState.READY)
            self._index.publish(record)
        await self._push(self._here.share, record)

    async def _push(
        self, work: Callable[[Handoff], object], record: Handoff, *, patient: bool = False
    ) -> None:
        """Write to the pool beside all else; as the gateway ends, no longer."""
        try:
            await self._holdings.threads.pushes.run(record.tenant, work, record, patient=patient)
        except GatewayOverloaded:
            self._log.warning("handoff_not_shared", handoff=record.id, reason="too many are being pushed")
        except (RuntimeError, asyncio.CancelledError) as error:
            if not self.closing:
                raise
            self._log.warning("handoff_not_shared", handoff=record.id, reason=type(error).__name__)

    async def write_unshared(self) -> None:
        """Write the records of handoffs that are still being pushed, as the gateway ends."""
        records = [self._index.known(each) for each in self._sharing]
        for record in records:
            if record is not None and not record.on_disk:
                await self._write_record(record)

    async def _write_images(self, record: Handoff) -> None:
        """Write a handoff's images; without space for them the handoff ends with this process."""
        if not record.image_data:
            return
        async with self.guard:
            fits = await self.make_room(record, record.image_bytes)
            if fits and self._pool is None:
                await self._write(self._here.save_images, record)
        if fits and self._pool is not None:  # it counts bytes itself, and others need not wait for it
            await self._push(self._here.save_images, record, patient=True)

    async def _write_record(self, record: Handoff) -> None:
        """Write a record, unless its images could not be: no other process could use it."""
        async with record.guard:
            record.state = HandoffState.READY
            edit = self.rules.settle(
                record.bytes, self._index.unsaved_footprints(record) if record.pin else ()
            )
            if record.on_disk or record.image_data or record not in self._index:
                await self._holdings.change(record, edit, patient=True)
                return
            async with self.guard:
                if await self.make_room(record, record.disk_bytes):
                    await self._create(record, edit)
                else:
                    await self._write(self._holdings.tier.change, record, edit)
            self._index.count_bytes(record)

    async def _create(self, record: Handoff, edit: Edit) -> None:
        before = record.expires_at
        try:
            record.on_disk = await self._write(self._holdings.tier.create, record, edit)
        except RecordDeleted:
            self._index.forget(record)
        if record.expires_at != before:  # another gateway changed it while it was pending
            self._index.expire_in(record, self._holdings.seconds_left(record))

    async def make_room(self, record: Handoff | None, size: int) -> bool:
        """Evict handoffs until `size` more bytes of records and images fit; returns whether they do.

        Args:
            record: the handoff whose record or images are to be written; it is not evicted.
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
        refreshed = False
        if size > self._share:
            return False
        while (taken := await self._write(self._here.non_kv_bytes) + size) > self._share:
            if not refreshed:
                await self._holdings.refresh()
                refreshed = True
                if taken - self._index.evictable_bytes(record) > self._share:  # all would not be enough
                    return False
            if (other := self._index.next_evictable(record)) is None:
                return False
            self._index.evict(other)
            self._holdings.tell("evicted", other)
            await self._write(self._here.remove, other)
        return True

    async def _run(self, record: Handoff, work: Callable[..., Result], *args: object) -> Result:
        return await self._holdings.run(record.tenant, work, *args, patient=True)

    async def _write(self, work: Callable[..., Result], *args: object) -> Result:
        """Write while the budget's guard is held, which others wait for."""
        return await self._holdings.run(WRITES, work, *args, patient=True)
