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
from baton.engines.engine import LocalEngine
from baton.engines.transfers import TransferRequest
from baton.errors import HandoffNotFound, HandoffStoreUnavailable
from baton.images.image import PlacedImage
from baton.library.fetches import Fetches
from baton.library.handoff import Context, Handoff, HandoffAudit, HandoffState, PrefixMatch, new_id
from baton.library.here.records import Others
from baton.library.holdings import BackgroundWork, HandoffThreads, Holdings, Result
from baton.library.index import HandoffIndex
from baton.library.saving import Saving
from baton.library.tiers import Tier
from baton.library.upkeep import Upkeep
from baton.telemetry.events import Events
from baton.telemetry.metrics import AuditResult, HandoffMetrics

FAILED_FOR_S = 60.0
"""A handoff whose request failed is listed this long; it cannot be continued."""
NOTHING_MORE = Context()
CLOSE_WITHIN_S = 3.0
SAVES_END_WITHIN_S = 30.0


class Library:
    """Owns every handoff of one gateway.

    Args:
        clock: monotonic seconds, by which handoffs expire.
        wall: seconds since the epoch, which clients see and records hold.
        automatic: whether requests that name no handoff look for one.
        threads: wait for the tiers; None: their queues are not watched, and refuse nobody.
        events: tell clients what becomes of handoffs; None: nobody listens.

    Attributes:
        background: what goes on when the request that began it is cancelled.
        index: the handoffs that this gateway knows.
        holdings: keeps the index in step with the tiers.
        saving: saves pending handoffs.
        upkeep: removes what has expired or does not fit.
        fetches: copies KV from other tiers to this machine.
    """

    def __init__(
        self,
        settings: HandoffSettings,
        tier: Tier,
        metrics: HandoffMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        automatic: bool = True,
        threads: HandoffThreads | None = None,
        events: Events | None = None,
    ) -> None:
        metrics.store_budget.set(int(settings.budget))
        self.background = BackgroundWork()
        self._settings = settings
        is_elsewhere = None if tier.here.pool is None else lambda record: not tier.here.is_here(record)
        self.index = HandoffIndex(clock, automatic=automatic, is_elsewhere=is_elsewhere)
        self._tier = tier
        self._pool = tier.here.pool
        self._threads = threads or HandoffThreads()
        self.holdings = Holdings(self.index, tier, self._threads, wall, events)
        self.saving = Saving(self.holdings, settings)
        self.upkeep = Upkeep(self.holdings, self.saving, metrics, self.in_background)
        self.fetches = Fetches(self.holdings, metrics, settings.fetch_s)
        self._finishing: set[asyncio.Task[None]] = set()
        for record in (found := tier.here.records.read_all()):
            self.holdings.adopt(record)
        tier.begin(found)

    def in_background(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run work that goes on when the request that began it is cancelled."""
        return self.background.begin(work)

    async def proof(self, challenge: str, tenant: str) -> str | None:
        """Answer a challenge as only gateways over the same store can; None: there is no store."""
        return await self.holdings.run(tenant, self._tier.here.proof, challenge)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sweep while inside; at the end wait a moment for background work."""
        tasks = {asyncio.create_task(self.upkeep.run(), name="handoff-sweeper")}
        if self._pool is not None:
            tasks.add(asyncio.create_task(self.saving.keep_announced(), name="handoffs-pending"))
        try:
            yield
        finally:
            self.saving.closing = True
            for task in tasks:
                task.cancel()
            await asyncio.wait({*tasks, *self.background.running}, timeout=CLOSE_WITHIN_S)
            self._threads.close()
            await in_own_thread(self._tier.close)

    @contextlib.asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Wait a moment, at the end, for saves under way. The engines must still run then."""
        try:
            yield
        finally:
            if self._finishing:
                await asyncio.wait(self._finishing, timeout=CLOSE_WITHIN_S)
                await asyncio.wait({self.in_background(self.saving.write_unshared())}, timeout=CLOSE_WITHIN_S)

    def begin(
        self,
        engine: LocalEngine,
        tenant: str,
        *,
        parents: Sequence[str] = (),
        label: str | None = None,
        ttl_s: int | None = None,
        pin: bool = False,
        automatic: str | None = None,
        translated_from: str | None = None,
        exact: bool = True,
        cache_key: str | None = None,
    ) -> Handoff:
        """Register a pending handoff, which a request is about to save.

        Args:
            parents: ids of the handoffs that it continues, the one whose files it may share first.
            ttl_s: seconds it lives; None, or more than the settings allow: as long as they allow.
            automatic: id of a handoff that the gateway saves by itself; None: a client asked for it.
            translated_from: id of the handoff of other weights whose text it holds.
            exact: False until it is known that no KV was moved.
            cache_key: digest of the `prompt_cache_key` of an automatic one's request, if it had one.
        """
        now = self.holdings.wall()
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
            cache_key=cache_key,
        )
        self.saving.begin(record)
        self.index.add(record, lives)
        if self._pool is not None and not record.automatic:
            self.in_background(self.saving.announce(record))
        self.upkeep.make_room(tenant)
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
            transfer: the request to the engine, with its report; None: the request failed.
            reason: why the request failed, for its client.
        """
        if not self.saving.is_pending(record) or record.tokens:
            return
        if transfer is None or not tokens:
            record.error = reason
            self.index.expire_in(record, min(FAILED_FOR_S, record.ttl_s))
            self.saving.fail(record)
            if self._pool is not None:
                self.in_background(self.saving.retract(record))
            return
        record.fill(tokens, context, transfer.images)
        finish = self.saving.finish_automatic if record.automatic else self.saving.finish
        saving = self.in_background(finish(record, transfer))
        self._finishing.add(saving)
        saving.add_done_callback(self._finishing.discard)

    async def settled(self, record: Handoff, within_s: float) -> bool:
        """Wait until a handoff is no longer pending, at most `within_s` seconds; returns whether it was."""
        was_pending = record.state is HandoffState.PENDING or self.saving.is_pending(record)
        await self.saving.settled(record, within_s)
        return was_pending

    def is_awaited(self, record: Handoff) -> bool:
        """Return whether a request waits for a pending handoff."""
        return self.saving.is_awaited(record)

    async def images(self, record: Handoff) -> list[PlacedImage]:
        """Return the images of a handoff's context, in order.

        Raises:
            HandoffImagesLost: an image is missing or has changed.
        """
        if not record.images:
            return []
        return await self.holdings.run(record.tenant, self._tier.read_images, record)

    async def get(self, handoff_id: str, tenant: str) -> Handoff:
        """Return one of a tenant's handoffs, also one that another gateway over the same store saved.

        Raises:
            HandoffNotFound: the id is unknown, deleted, expired, or another tenant's; clients cannot tell
                which.
        """
        record = await self.holdings.look_up(handoff_id, tenant)
        if record is None or record.tenant != tenant or record.automatic:
            raise HandoffNotFound()
        await self._require_origin(record)
        return record

    async def _require_origin(self, record: Handoff) -> None:
        """Refuse a translation of a handoff that has ended, of a translation perhaps."""
        origin: Handoff | None = record
        passed: set[str] = set()
        while origin is not None and origin.translated_from is not None and origin.id not in passed:
            passed.add(origin.id)
            origin = await self.holdings.look_up(origin.translated_from, record.tenant)
        if origin is None or origin.id in passed:  # no gateway makes a circle
            raise HandoffNotFound()

    async def page(self, tenant: str, *, limit: int, after: str | None) -> tuple[list[Handoff], bool]:
        """Return a page of a tenant's handoffs, of all gateways over the store, the newest first.

        Args:
            after: id of the last handoff of the page before; None: the first page.

        Returns:
            The page, and whether older handoffs follow.

        Raises:
            HandoffNotFound: the tenant has no handoff with the id `after`.
        """
        await self.holdings.refresh()
        last = self.index.find(after) if after is not None else None
        if after is not None and (last is None or last.tenant != tenant or not self._is_listed(last)):
            raise HandoffNotFound()
        listed = (each for each in self.index.newest(tenant, last) if self._is_listed(each))
        page = list(islice(listed, limit + 1))
        return page[:limit], len(page) > limit

    def _is_listed(self, record: Handoff) -> bool:
        """Return whether a handoff is shown: it and what it is a translation of have not expired."""
        origins = [record.id] if record.translated_from is None else [record.id, record.translated_from]
        return not record.automatic and all(self.index.find(each) is not None for each in origins)

    async def change(self, record: Handoff, changes: dict[str, Any]) -> None:
        """Set a handoff's `label`, `ttl_s` (from now, within the longest life) or `pin`.

        Raises:
            HandoffPinsFull: the pin would take more than may be pinned.
            HandoffNotFound: the handoff was deleted meanwhile, here or by another gateway over the store.
        """
        await asyncio.shield(self.in_background(self._change(record, changes)))

    async def _change(self, record: Handoff, changes: dict[str, Any]) -> None:
        async with record.guard:
            unsaved = self.index.unsaved_footprints(record) if changes.get("pin") else []
            edit = self.saving.rules.apply(changes, self.holdings.wall(), unsaved)
            before = record.expires_at
            await self.holdings.change(record, edit)
            if record not in self.index:
                raise HandoffNotFound()
            if record.expires_at != before:  # also where it is in memory only
                self.index.expire_in(record, self.holdings.seconds_left(record))
            self.holdings.tell("changed", record)

    def note_use(
        self, record: Handoff, outcome: str, reason: str | None, *, loaded: int, resident: int
    ) -> None:
        """Note that a request started from a handoff, and what became of its KV.

        Args:
            outcome: as `handoff.source` of an answer has it.
            reason: why it was recomputed; None: it was not.
            loaded: number of its tokens whose KV was loaded.
            resident: number of those whose KV the engine still had.
        """
        record.use.note(int(self.holdings.wall()), outcome, reason)
        told = {"outcome": outcome, "reason": reason, "loaded_tokens": loaded, "resident_tokens": resident}
        self.holdings.tell("used", record, **told)

    async def describe(self, records: Sequence[Handoff]) -> list[dict[str, object]]:
        """Return handoffs as their routes show them: with where their KV lies, and how they were used."""
        if not records:
            return []
        tiers = await self.holdings.run(records[0].tenant, self._tier.places, records)
        return [record.row(tier) for record, tier in zip(records, tiers, strict=True)]

    def longest_prefix(
        self, tenant: str, weights: str, prompt: Sequence[int], usable: Callable[[Handoff], bool]
    ) -> PrefixMatch | None:
        """Return the tenant's handoff with stored KV that shares most tokens with a prompt, if any does.

        See `PrefixIndex.find`; `usable` is asked of expired ones too.
        """
        return self.index.prefixes.find(tenant, weights, prompt, usable)

    def has_expired(self, record: Handoff) -> bool:
        """Return whether a handoff that was found has expired, or is not there any more."""
        return self.index.find(record.id) is not record

    def keyed(self, tenant: str, cache_key: str) -> list[Handoff]:
        """Return the automatic handoffs that a tenant's requests with a key left, the newest first."""
        return self.index.keyed(tenant, cache_key)

    def translations_of(self, record: Handoff) -> list[Handoff]:
        """Return the handoffs that hold the text of one of other weights, unless they have expired."""
        found = self.index.translations_of(record)
        return [each for each in found if self.index.find(each.id) is each]

    def seconds_left(self, record: Handoff) -> float:
        """Return the seconds until a handoff expires."""
        return self.holdings.seconds_left(record)

    def kv_gone(self, record: Handoff) -> None:
        """Note that a handoff's KV cannot be used any more; an automatic one is removed."""
        if self.holdings.remote:
            self.in_background(self._kv_gone_here(record))
        else:
            self.upkeep.kv_gone(record)

    async def _kv_gone_here(self, record: Handoff) -> None:
        """Note that a handoff's KV is not here, and perhaps nowhere."""
        if not any(await self.holdings.run(OURS, self._tier.sizes, [record], patient=True)):
            self.upkeep.kv_gone(record)

    def is_here(self, record: Handoff) -> bool:
        """Return whether the engines of this machine find a handoff's KV, if it is stored at all."""
        return not self.holdings.remote or self._tier.here.is_here(record)

    def skipped_fetch_s(self, record: Handoff) -> float | None:
        """Return the estimated seconds of a fetch that was skipped for computing; None: none was."""
        return self.fetches.skipped_s(record)

    async def fetch_here(self, record: Handoff, engine: LocalEngine, *, ahead: bool = False) -> None:
        """Copy a handoff's KV to this machine, if that is faster than computing it.

        Whatever the pool and the archive do, the request goes on: what is not here is computed.

        Args:
            ahead: no request waits for it, so that it is copied however long that takes.
        """
        if not self.holdings.remote:
            return
        no_kv = record.on_disk and not (record.bytes or self.saving.is_saving(record))
        if self._pool is not None and no_kv:
            await self.holdings.run(record.tenant, self._tier.here.drop_copy, record)
        wanted = record.bytes and (ahead or record.weights == engine.weights)
        if wanted and not await self.fetches.fetch_here(record, engine, ahead=ahead):
            self.kv_gone(record)

    def __contains__(self, record: Handoff) -> bool:
        """Check whether a handoff is still there."""
        return record in self.index

    async def distrust(self, record: Handoff, saved: str | None) -> None:
        """Move KV away that led to another answer than computing it, and all that may be made of it.

        Args:
            saved: key of the entry that the request saved which loaded it; None: none.
        """
        await self._quarantine(record, saved)
        if self._finishing:  # a save under way may write the same KV again
            await asyncio.wait(self._finishing, timeout=SAVES_END_WITHIN_S)
            await self._quarantine(record, saved)

    async def _quarantine(self, record: Handoff, saved: str | None) -> None:
        run = self.holdings.run
        for each in [record, *self.index.beginning_like(record), *self.index.blended_from(record)]:
            await run(each.tenant, self._tier.quarantine, each, patient=True)
            self.kv_gone(each)
            if self._pool is not None and not each.automatic:  # other machines may have copies
                with contextlib.suppress(HandoffStoreUnavailable):
                    await self._note(each, kv_gone=True)
        if saved is not None:
            await run(record.tenant, self._tier.here.store.quarantine, saved, patient=True)

    async def note_audit(self, record: Handoff, audit: HandoffAudit) -> None:
        """Note the result of an audit of a handoff's KV."""
        record = self.index.known(record.id) or record  # another gateway may have changed it
        if not record.automatic and record in self.index:
            await self._note(record, audit, kv_gone=audit.result is AuditResult.MISMATCH)

    async def _note(self, record: Handoff, audit: HandoffAudit | None = None, *, kv_gone: bool) -> None:
        """Note in a record an audit, and that its KV is not to be used.

        Raises:
            HandoffStoreUnavailable: a tier failed.
        """

        def edit(changed: Handoff, _others: Others) -> None:
            changed.audit = audit or changed.audit
            changed.bytes = 0 if kv_gone else changed.bytes

        async with record.guard:
            await self.holdings.change(record, edit, patient=True)

    async def delete(self, record: Handoff) -> None:
        """Delete a handoff, its translations, and the automatic ones that continue it or that it continues.

        Requests that load it already are not disturbed.

        Raises:
            HandoffStoreUnavailable: a tier failed; it is not deleted.
        """
        if self._pool is not None:  # others may have continued it meanwhile
            await self.holdings.refresh()
        gone = self.index.with_translations(record)
        gone += [each for one in gone for each in self.index.relatives(one)]
        await asyncio.shield(self.in_background(self._delete_all(gone)))

    async def _delete_all(self, records: Sequence[Handoff]) -> None:
        for record in records:
            async with record.guard:  # so that nobody writes it again after this
                await self.holdings.run(record.tenant, self._tier.delete, record)
                self.index.forget(record)
                self.holdings.tell("deleted", record)
