"""The handoffs of one gateway: create, find, wait for, list, change, delete and expire them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import islice
from typing import Any

from baton.admission.fair_threads import OURS, in_own_thread
from baton.config.groups import HandoffSettings
from baton.engines.kv_transfer import TransferRequest
from baton.engines.port import Engine
from baton.errors import HandoffNotFound
from baton.images.placed_image import PlacedImage
from baton.library.fetches import Fetches
from baton.library.handoff import Context, Handoff, HandoffAudit, HandoffState, new_id
from baton.library.index import HandoffIndex
from baton.library.prefixes import PrefixMatch
from baton.library.saving import Announcements, ChangeRules, RecordBudget, Saves
from baton.library.sync import IndexSync
from baton.library.threads import BackgroundWork, HandoffThreads, Result
from baton.library.tiers import HandoffStorage
from baton.library.upkeep import Deletions, Distrust, Sweeper
from baton.telemetry.metrics import HandoffMetrics

FAILED_FOR_S = 60.0
"""A handoff whose request failed is listed this long; it cannot be continued."""
NOTHING_MORE = Context()
CLOSE_WITHIN_S = 3.0
SAVES_END_WITHIN_S = 30.0


class Library:
    """Owns every handoff of one gateway.

    Args:
        settings: how long handoffs live.
        storage: their files and KV.
        metrics: where they are counted.
        clock: monotonic seconds, by which handoffs expire.
        wall: seconds since the epoch, which clients see and records hold.
        automatic: whether requests that name no handoff look for one.
        threads: wait for the storage; None: their queues are not watched, and refuse nobody.

    Attributes:
        background: what goes on when the request that began it is cancelled.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        storage: HandoffStorage,
        metrics: HandoffMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        automatic: bool = True,
        threads: HandoffThreads | None = None,
    ) -> None:
        self._settings = settings
        self._storage = storage
        self._metrics = metrics
        metrics.store_budget.set(int(settings.budget))
        self._wall = wall
        self.background = BackgroundWork()
        self._index = HandoffIndex(clock, automatic=automatic)
        self._rules = ChangeRules(settings, storage.pin, storage.pinned_kv)
        self._threads = threads = threads or HandoffThreads()
        self._sync = IndexSync(self._index, storage, wall, threads)
        self._budget = RecordBudget(settings, self._index, storage, self._sync.refresh, threads)
        self._sweeper = Sweeper(
            self._index, storage, self._sync, self._budget, metrics, self.background.begin, threads
        )
        self._saves = Saves(self._index, storage, self._budget, self._rules, self._sync, threads)
        self._announcements = Announcements(self._index, storage, self._saves, self._sync, threads)
        self._deletions = Deletions(self._index, storage, self._sync, self.background.begin, threads)
        self._distrust = Distrust(self._index, storage, self._sync, self.kv_gone, threads)
        self._fetches = Fetches(storage, metrics, settings.fetch_s, threads)
        self._saving: set[asyncio.Task[None]] = set()
        for record in (found := storage.records.read_all()):
            self._sync.adopt(record)
        storage.begin_archiving(found)

    @property
    def storage(self) -> HandoffStorage:
        """What the handoffs have on disk and in a shared store."""
        return self._storage

    async def proof(self, challenge: str, tenant: str) -> str | None:
        """Return `HandoffStorage.proof` for a tenant's request."""
        return await self._threads.storage.run(tenant, self._storage.proof, challenge)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sweep while inside; at the end wait a moment for background work."""
        tasks = {asyncio.create_task(self._sweeper.run(), name="handoff-sweeper")}
        if self._storage.shared:
            tasks.add(asyncio.create_task(self._announcements.run(), name="handoffs-pending"))
        try:
            yield
        finally:
            self._saves.closing = True
            for task in tasks:
                task.cancel()
            await asyncio.wait({*tasks, *self.background.running}, timeout=CLOSE_WITHIN_S)
            self._threads.close()
            await in_own_thread(self._storage.close)

    @contextlib.asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Wait a moment, at the end, for saves under way. The engines must still run then."""
        try:
            yield
        finally:
            if self._saving:
                await asyncio.wait(self._saving, timeout=CLOSE_WITHIN_S)
                await asyncio.wait({self.begin_work(self._saves.write_unshared())}, timeout=CLOSE_WITHIN_S)

    def begin(
        self,
        engine: Engine,
        tenant: str,
        *,
        parents: Sequence[str] = (),
        label: str | None = None,
        ttl_s: int | None = None,
        pin: bool = False,
        automatic: str | None = None,
        translated_from: str | None = None,
        exact: bool = True,
    ) -> Handoff:
        """Register a pending handoff, which a request is about to save.

        Args:
            engine: the engine that saves it.
            tenant: its owner.
            parents: ids of the handoffs that it continues, the one whose files it may share first.
            label: the client's label.
            ttl_s: seconds it lives; None, or more than the settings allow: as long as they allow.
            pin: exempt its KV from eviction.
            automatic: id of a handoff that the gateway saves by itself; None: a client asked for it.
            translated_from: id of the handoff of other weights whose text it holds.
            exact: False until it is known that no KV was moved.
        """
        now = self._wall()
        lives = min(ttl_s or self._settings.ttl_s, self._settings.ttl_s)
        record = Handoff(
            id=automatic or new_id(),
            automatic=automatic is not None,
            tenant=tenant,
            model=engine.name,
            weights=engine.weights,
            created_at=now,
            ttl_s=lives,
            expires_at=now + lives,
            pin=pin,
            parent=parents[0] if parents else None,
            parents=list(parents),
            label=label,
            translated_from=translated_from,
            exact=exact,
        )
        self._saves.begin(record)
        self._index.add(record, lives)
        if self._storage.shared and not record.automatic:
            self.begin_work(self._announcements.announce(record))
        self._sweeper.make_room(tenant)
        return record

    def end(
        self,
        record: Handoff,
        transfer: TransferRequest | None,
        tokens: Sequence[int] = (),
        context: Context = NOTHING_MORE,
        reason: str | None = None,
    ) -> None:
        """Save a pending handoff, whose request has ended. Only the first call for a record counts.

        Args:
            record: the handoff.
            transfer: the request to the engine, with its report; None: the request failed.
            tokens: every token id of the context.
            context: what else is known of it.
            reason: why the request failed, for its client.
        """
        if not self._saves.is_pending(record) or record.tokens:
            return
        if transfer is None or not tokens:
            record.error = reason
            self._index.expire_in(record, min(FAILED_FOR_S, record.ttl_s))
            self._saves.fail(record)
            if self._storage.shared:
                self.begin_work(self._deletions.retract(record))
            return
        record.fill(tokens, context, transfer.images)
        finish = self._saves.finish_automatic if record.automatic else self._saves.finish
        saving = self.begin_work(finish(record, transfer))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)

    async def settled(self, record: Handoff, within_s: float) -> None:
        """Wait until a handoff is no longer pending, at most `within_s` seconds."""
        if record.state is HandoffState.PENDING and not self._saves.is_pending(record):
            await self._announcements.wait(record, within_s)
        await self._saves.wait(record, within_s)

    def is_awaited(self, record: Handoff) -> bool:
        """Return whether a request waits for a pending handoff."""
        return self._saves.is_awaited(record)

    async def images(self, record: Handoff) -> list[PlacedImage]:
        """Return the images of a handoff's context, in order.

        Raises:
            HandoffImagesLost: an image is missing or has changed.
        """
        if not record.images:
            return []
        return await self._threads.storage.run(record.tenant, self._storage.read_images, record)

    async def get(self, handoff_id: str, tenant: str) -> Handoff:
        """Return one of a tenant's handoffs, also one that another gateway over the same store saved.

        Raises:
            HandoffNotFound: the id is unknown, deleted, expired, or another tenant's; clients cannot tell
                which.
        """
        record = await self._sync.look_up(handoff_id, tenant)
        if record is None or record.tenant != tenant or record.automatic:
            raise HandoffNotFound()
        await self._require_origin(record)
        return record

    async def _require_origin(self, record: Handoff) -> None:
        """Refuse a translation of a handoff that has ended, of a translation perhaps.

        Raises:
            HandoffNotFound: it has.
        """
        origin: Handoff | None = record
        passed: set[str] = set()
        while origin is not None and origin.translated_from is not None and origin.id not in passed:
            passed.add(origin.id)
            origin = await self._sync.look_up(origin.translated_from, record.tenant)
        if origin is None or origin.id in passed:  # no gateway makes a circle
            raise HandoffNotFound()

    async def page(self, tenant: str, *, limit: int, after: str | None) -> tuple[list[Handoff], bool]:
        """Return a page of a tenant's handoffs, of all gateways over the store, the newest first.

        Args:
            tenant: the owner.
            limit: most handoffs of the page.
            after: id of the last handoff of the page before; None: the first page.

        Returns:
            The page, and whether older handoffs follow.

        Raises:
            HandoffNotFound: the tenant has no handoff with the id `after`.
        """
        await self._sync.refresh()
        last = self._index.find(after) if after is not None else None
        if after is not None and (last is None or last.tenant != tenant or not self._is_listed(last)):
            raise HandoffNotFound()
        listed = (each for each in self._index.newest(tenant, last) if self._is_listed(each))
        page = list(islice(listed, limit + 1))
        return page[:limit], len(page) > limit

    def _is_listed(self, record: Handoff) -> bool:
        """Return whether a handoff is shown: it and what it is a translation of have not expired."""
        origins = [record.id] if record.translated_from is None else [record.id, record.translated_from]
        return not record.automatic and all(self._index.find(each) is not None for each in origins)

    async def change(self, record: Handoff, changes: dict[str, Any]) -> None:
        """Set a handoff's `label`, `ttl_s` (from now, within the longest life) or `pin`.

        Raises:
            HandoffPinsFull: the pin would take more than may be pinned.
            HandoffNotFound: the handoff was deleted meanwhile, here or by another gateway over the store.
        """
        await asyncio.shield(self.begin_work(self._change(record, changes)))

    async def _change(self, record: Handoff, changes: dict[str, Any]) -> None:
        async with record.guard:
            unsaved = self._index.unsaved_footprints(record) if changes.get("pin") else []
            edit = self._rules.apply(changes, self._wall(), unsaved)
            before = record.expires_at
            now = await self._threads.storage.run(record.tenant, self._storage.change, record, edit)
            self._sync.update(record, now)
            if record not in self._index:
                raise HandoffNotFound()
            if now is record and record.expires_at != before:  # it is in memory only
                self._index.expire_in(record, self._sync.seconds_left(record))

    def longest_prefix(
        self, tenant: str, weights: str, prompt: Sequence[int], usable: Callable[[Handoff], bool]
    ) -> PrefixMatch | None:
        """Return the tenant's handoff with stored KV that shares most tokens with a prompt, if any does.

        See `PrefixIndex.find`.
        """
        return self._index.prefixes.find(
            tenant,
            weights,
            prompt,
            lambda record: self._index.find(record.id) is record and usable(record),
        )

    def translations_of(self, record: Handoff) -> list[Handoff]:
        """Return the handoffs that hold the text of one of other weights, unless they have expired."""
        found = self._index.translations_of(record)
        return [each for each in found if self._index.find(each.id) is each]

    def seconds_left(self, record: Handoff) -> float:
        """Return the seconds until a handoff expires."""
        return self._sync.seconds_left(record)

    def kv_gone(self, record: Handoff) -> None:
        """Note that a handoff's KV cannot be used any more; an automatic one is removed."""
        if self._storage.remote:
            self.begin_work(self._kv_gone(record))
        else:
            self._sweeper.kv_gone(record)

    async def _kv_gone(self, record: Handoff) -> None:
        """Note that a handoff's KV is not here, and perhaps nowhere."""
        if not any(await self._threads.storage.run(OURS, self._storage.stored_bytes, [record], patient=True)):
            self._sweeper.kv_gone(record)

    def is_here(self, record: Handoff) -> bool:
        """Return whether the engines of this machine find a handoff's KV, if it is stored at all."""
        return self._storage.is_here(record)

    def skipped_fetch_s(self, record: Handoff) -> float | None:
        """Return how long a fetch would take that was slower than computing; None: there was none."""
        return self._fetches.skipped_s(record)

    async def bring(self, record: Handoff, engine: Engine) -> None:
        """Copy a handoff's KV to this machine, if that is faster than computing it.

        Whatever the shared store and the archive do, the request goes on: what is not here is computed.

        Args:
            record: the handoff.
            engine: the engine that is to load it.
        """
        if self._storage.shared and record.on_disk and not (record.bytes or record.id in self._saves.pending):
            await self._threads.storage.run(record.tenant, self._storage.drop_copy, record)
        if self._storage.remote and record.bytes and record.weights == engine.weights:
            await self._fetches.bring(record, engine)
            if not await self._threads.storage.run(record.tenant, self._storage.is_here, record):
                self.kv_gone(record)

    def __contains__(self, record: Handoff) -> bool:
        """Whether a handoff is still there."""
        return record in self._index

    async def distrust(self, record: Handoff, saved: str | None) -> None:
        """Move KV away that led to another answer than computing it, and all that may be made of it.

        Args:
            record: the handoff whose KV it is.
            saved: key of the entry that the request saved which loaded it; None: none.
        """
        await self._distrust.remove_kv(record, saved)
        if self._saving:  # a save under way may write the same KV again
            await asyncio.wait(self._saving, timeout=SAVES_END_WITHIN_S)
            await self._distrust.remove_kv(record, saved)

    async def note_audit(self, record: Handoff, audit: HandoffAudit) -> None:
        """Note the result of an audit of a handoff's KV."""
        await self._distrust.note(record, audit)

    async def delete(self, record: Handoff) -> None:
        """Delete a handoff, its translations, and the automatic ones that continue it or that it continues.

        Requests that load it already are not disturbed.

        Raises:
            HandoffStoreUnavailable: the shared store failed; it is not deleted.
        """
        await self._deletions.delete(record)

    def begin_work(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run work in the background, which goes on when the request that began it is cancelled."""
        return self.background.begin(work)
