"""Every handoff of one gateway: made, found, waited for, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import structlog

from baton.config.groups import HandoffSettings
from baton.engines.port import Engine, PlacedImage, TransferRequest
from baton.errors import (
    BatonError,
    HandoffNotFound,
    HandoffPending,
)
from baton.handoffs.budget import Room
from baton.handoffs.changes import Rules
from baton.handoffs.compatible import require_compatible
from baton.handoffs.index import Shelf
from baton.handoffs.record import HandoffRecord
from baton.handoffs.state import HandoffState
from baton.handoffs.storage import HandoffStorage
from baton.telemetry.metrics import HandoffMetrics

COMMIT_WITHIN_S = 5.0
"""A save runs beside the engine's work. What is not there by then is tokens only, until it is."""
GIVEN_UP_AFTER_S = 120.0
LOOK_EVERY_S = 0.25
"""The engine tells when a save is over; the store is looked at too, in case that was missed."""
FAILED_FOR_S = 60.0
"""A handoff whose request failed is shown this long, and never to be started from."""
SWEEP_EVERY_S = 2.0
ORPHANS_EVERY_S = 300.0
CLOSE_WITHIN_S = 3.0
MAX_PER_TENANT = 10_000
MAX_WEIGHT_PER_TENANT = 256 * 1024 * 1024
"""Bytes of token ids and messages; above it a tenant loses its oldest handoffs."""
Result = TypeVar("Result")


class Handoffs:
    """The handoffs there are, with one owner.

    Args:
        settings: how long they live.
        storage: what they have outside this process.
        metrics: where they are counted.
        clock: monotonic seconds, by which they expire.
        wall: seconds since the epoch, which are shown and kept.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        storage: HandoffStorage,
        metrics: HandoffMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._storage = storage
        self._metrics = metrics
        metrics.store_budget.set(int(settings.budget))
        self._wall = wall
        self._shelf = Shelf(clock)
        self._rules = Rules(settings, storage.pin)
        self._room = Room(settings, self._shelf, storage, self._refresh)
        self._over: dict[str, asyncio.Event] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._closing = False
        self._log = structlog.get_logger("baton.handoffs")
        for record in storage.files.read_all():
            self._adopt(record)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sweep while inside; at the end wait a moment for what is being settled."""
        sweeper = asyncio.create_task(self._keep_sweeping(), name="handoff-sweeper")
        try:
            yield
        finally:
            self._closing = True
            sweeper.cancel()
            await asyncio.wait({sweeper, *self._background}, timeout=CLOSE_WITHIN_S)

    @contextlib.asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """At the end wait a moment for saves under way: the engines must not have ended by then."""
        try:
            yield
        finally:
            if self._settling:
                await asyncio.wait(self._settling, timeout=CLOSE_WITHIN_S)

    def begin(
        self,
        engine: Engine,
        tenant: str,
        *,
        parent: str | None,
        label: str | None = None,
        ttl_s: int | None = None,
        pin: bool = False,
    ) -> HandoffRecord:
        """A pending handoff, which a request is about to leave behind."""
        now = self._wall()
        lives = min(ttl_s or self._settings.ttl_s, self._settings.ttl_s)
        record = HandoffRecord(
            tenant=tenant,
            model=engine.name,
            weights=engine.weights,
            created_at=now,
            ttl_s=lives,
            expires_at=now + lives,
            pin=pin,
            parent=parent,
            label=label,
        )
        self._over[record.id] = asyncio.Event()
        self._shelf.keep(record, lives)
        if self._shelf.count(tenant) > MAX_PER_TENANT:
            self._make_room(tenant)
        return record

    def end(
        self, record: HandoffRecord, transfer: TransferRequest | None, tokens: Iterable[int] = ()
    ) -> None:
        """The request is over: these are its context's token ids, or it failed (`transfer` is None).

        Only the first call for a record counts.
        """
        if record.id not in self._over or record.tokens:
            return
        record.tokens.extend(tokens)
        if transfer is None or not record.tokens:
            record.state = HandoffState.FAILED
            self._shelf.live(record, min(FAILED_FOR_S, record.ttl_s))
            self._over.pop(record.id).set()
            return
        record.show(transfer.images)
        settling = self.begin_work(self._settle(record, transfer))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    async def settled(self, record: HandoffRecord, within_s: float) -> None:
        """Wait until a handoff is no longer pending, at most so long."""
        over = self._over.get(record.id)
        if over is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), within_s)

    async def source(self, handoff_id: str, engine: Engine, tenant: str) -> HandoffRecord:
        """The handoff a request starts from, once it is there.

        Raises:
            HandoffNotFound: unknown, expired, failed, or another tenant's: one answer for all.
            HandoffPending: it did not come within the deadline.
            HandoffIncompatible: it is of other weights, or holds latent steps or images that the engine
                cannot compute.
        """
        record = await self.get(handoff_id, tenant)
        await self.settled(record, self._settings.wait_s)
        if record.state is HandoffState.PENDING:
            raise HandoffPending()
        if record.state is HandoffState.FAILED or record not in self._shelf:
            raise HandoffNotFound()
        require_compatible(record, engine)
        return record

    async def images(self, record: HandoffRecord) -> list[PlacedImage]:
        """The images of a handoff's context, in order.

        Raises:
            HandoffImagesLost: one is not there any more, or not as it was.
        """
        return await asyncio.to_thread(self._storage.read_images, record) if record.images else []

    async def get(self, handoff_id: str, tenant: str) -> HandoffRecord:
        """One of the tenant's handoffs, also one that another gateway over the same store left or deleted.

        Raises:
            HandoffNotFound: unknown, expired, or another tenant's: one answer for all.
        """
        known = self._shelf.known(handoff_id)
        if known is None:
            if (left := await asyncio.to_thread(self._storage.find, handoff_id)) is not None:
                self._adopt(left)
        elif known.kept:
            self._take(known, await asyncio.to_thread(self._storage.reread, known))
        record = self._shelf.find(handoff_id)
        if record is None or record.tenant != tenant:
            raise HandoffNotFound()
        return record

    async def page(self, tenant: str, *, limit: int, after: str | None) -> tuple[list[HandoffRecord], bool]:
        """Some of the tenant's handoffs, of all gateways over the store, the newest first, and whether
        there are more.

        Raises:
            HandoffNotFound: there is no `after`.
        """
        await self._refresh()
        self._sweep()
        mine = self._shelf.of(tenant)[::-1]
        if after is not None:
            ids = [record.id for record in mine]
            if after not in ids:
                raise HandoffNotFound()
            mine = mine[ids.index(after) + 1 :]
        return mine[:limit], len(mine) > limit

    async def change(self, record: HandoffRecord, changes: dict[str, Any]) -> None:
        """Set `label`, `ttl_s` (from now, and no longer than a handoff may live in all) or `pin`.

        Raises:
            HandoffPinsFull: too much is pinned already.
            HandoffNotFound: it was deleted meanwhile, here or by another gateway over the same store.
        """
        await asyncio.shield(self.begin_work(self._change(record, changes)))

    async def _change(self, record: HandoffRecord, changes: dict[str, Any]) -> None:
        async with record.guard:
            others = self._shelf.unkept(record) if changes.get("pin") else []
            edit = self._rules.apply(changes, self._wall(), others)
            before = record.expires_at
            now = await asyncio.to_thread(self._storage.change, record, edit)
            self._take(record, now)
            if record not in self._shelf:
                raise HandoffNotFound()
            if now is record and record.expires_at != before:  # it is in memory only
                self._shelf.live(record, self._rest(record))

    async def delete(self, record: HandoffRecord) -> None:
        """Forget one; who loads it now comes to the end of it."""
        self._shelf.forget(record)
        await asyncio.shield(self.begin_work(self._remove(record)))

    async def _remove(self, record: HandoffRecord) -> None:
        async with record.guard:  # who writes it now has written it then
            await asyncio.to_thread(self._storage.remove, record)

    def begin_work(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Let something go on beside the requests, also when who began it is gone."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, BatonError):  # those are told to who waits
            self._log.error("handoff_work_failed", exc_info=error)

    async def _settle(self, record: HandoffRecord, transfer: TransferRequest) -> None:
        """Wait for the entry. The engine says when it is there; the store's rename is the truth."""
        try:
            await asyncio.to_thread(record.prepare)
            await self._keep_images(record)
            if not await self._committed(record, transfer, COMMIT_WITHIN_S):
                await self._write(record)
                self._ready(record)
                await self._committed(record, transfer, GIVEN_UP_AFTER_S)
            await self._write(record)
        finally:
            self._ready(record)  # its token ids are known, whatever became of its KV
            if self._shelf.known(record.id) is None:  # deleted or expired: what came after that goes too
                await asyncio.to_thread(self._storage.remove, record)

    async def _committed(self, record: HandoffRecord, transfer: TransferRequest, within_s: float) -> bool:
        """Whether it is known now what became of the save."""
        deadline = time.monotonic() + within_s
        while True:
            told = transfer.report.save_over.is_set() or not transfer.report.saves
            record.bytes = await asyncio.to_thread(self._storage.kv_bytes, record)
            if record.bytes or told or self._closing:
                return True
            if time.monotonic() >= deadline:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(transfer.report.save_over.wait(), LOOK_EVERY_S)

    def _ready(self, record: HandoffRecord) -> None:
        record.state = HandoffState.READY
        if (over := self._over.pop(record.id, None)) is not None:
            over.set()

    async def _keep_images(self, record: HandoffRecord) -> None:
        """Put a handoff's images on disk. Where there is no room its life ends with this process."""
        if record.image_data:
            async with self._room.guard:
                if await self._room.make(record, record.image_bytes):
                    await asyncio.to_thread(self._storage.keep_images, record)

    async def _write(self, record: HandoffRecord) -> None:
        """Put a record on disk as it is now. Without its images it is of no use to another process."""
        async with record.guard:
            record.state = HandoffState.READY
            edit = self._rules.settle(record.bytes, self._shelf.unkept(record) if record.pin else ())
            if record.kept or record.image_data or record not in self._shelf:
                self._take(record, await asyncio.to_thread(self._storage.change, record, edit))
                return
            async with self._room.guard:
                if await self._room.make(record, record.disk_bytes):
                    record.kept = await asyncio.to_thread(self._storage.create, record, edit)
                else:
                    await asyncio.to_thread(self._storage.change, record, edit)
            self._shelf.count_bytes(record)

    def _adopt(self, record: HandoffRecord) -> None:
        """A record of an earlier run, or of another gateway over the same store."""
        self._shelf.keep(record, self._rest(record))  # one that is over goes with the next sweep

    def _rest(self, record: HandoffRecord) -> float:
        """Seconds a record has still to live, by a clock that may have jumped."""
        return max(0.0, min(record.expires_at - self._wall(), record.ttl_s))

    def _take(self, known: HandoffRecord, now: HandoffRecord | None) -> None:
        """Take over what a kept record is now on disk; None: it is not there any more."""
        if now is None:
            self._shelf.forget(known)
        elif now is not known and now.revision > known.revision:
            renewed = now.expires_at != known.expires_at
            for name in ("label", "pin", "bytes", "ttl_s", "expires_at", "revision", "stamp", "disk_bytes"):
                setattr(known, name, getattr(now, name))
            self._shelf.count_bytes(known)
            if renewed:
                self._shelf.live(known, self._rest(known))

    async def _refresh(self) -> None:
        """Take over what other gateways over the store did."""
        news = await asyncio.to_thread(self._storage.refresh)
        for handoff_id in news.gone:
            if (gone := self._shelf.known(handoff_id)) is not None:
                self._shelf.forget(gone)
        for record in news.changed:
            if (known := self._shelf.known(record.id)) is None:
                self._adopt(record)
            else:
                self._take(known, record)

    async def _keep_sweeping(self) -> None:
        next_orphans = 0.0
        while True:
            try:
                if time.monotonic() >= next_orphans:
                    next_orphans = time.monotonic() + ORPHANS_EVERY_S
                    await asyncio.to_thread(self._storage.sweep_orphans)
                await self._refresh()
                self._sweep()
                for tenant in self._shelf.tenants:
                    self._make_room(tenant)
                async with self._room.guard:
                    await self._room.make(None, 0)
                self._metrics.kept.set(len(self._shelf))
                self._metrics.store_bytes.set(await asyncio.to_thread(self._storage.all_bytes))
            except Exception as error:  # noqa: BLE001  # the border of the sweeper: the next round may work
                self._log.warning("handoff_sweep_failed", reason=f"{type(error).__name__}: {error}")
            await asyncio.sleep(SWEEP_EVERY_S)

    def _sweep(self) -> None:
        """Drop what has expired; the files go in the background."""
        for record in self._shelf.over():
            self._shelf.drop(record)
            self._metrics.expired.inc()
            self.begin_work(self._remove_expired(record))

    async def _remove_expired(self, record: HandoffRecord) -> None:
        left = await asyncio.to_thread(self._storage.remove_expired, record)
        if left is not None:
            self._adopt(left)

    def _make_room(self, tenant: str) -> None:
        """A tenant that never stops leaving handoffs loses its oldest."""
        mine = self._shelf.of(tenant)
        weight = sum(record.weight for record in mine)
        for count, record in enumerate(mine):
            if len(mine) - count <= MAX_PER_TENANT and weight <= MAX_WEIGHT_PER_TENANT:
                return
            weight -= record.weight
            self._shelf.forget(record)
            self.begin_work(asyncio.to_thread(self._storage.remove, record))
