"""Every handoff of one gateway: made, found, waited for, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from baton.engines.port import Engine, Relay
from baton.errors import HandoffIncompatible, HandoffNotFound, HandoffPending
from baton.handoffs.record import HandoffRecord, HandoffState
from baton.settings import HandoffSettings
from baton_kv.stores.base import EntryMissing, Store, StoreError

COMMIT_WITHIN_S = 5.0
"""A save runs beside the engine's work; what is not in the store by then is tokens only."""
LOOK_EVERY_S = 0.005
FAILED_FOR_S = 60.0
"""A handoff whose request failed is shown this long, and never to be started from."""
MAX_PER_TENANT = 10_000


class Handoffs:
    """The handoffs there are, with one owner.

    Args:
        settings: how long they live.
        store: where their KV is; the connector writes it, this side looks, and deletes.
        records: a folder for what is known of them, so that they outlive the process; None: they do not.
    """

    def __init__(self, settings: HandoffSettings, store: Store, records: Path | None) -> None:
        self._settings = settings
        self._store = store
        self._folder = records
        self._records: dict[str, HandoffRecord] = {}
        self._over: dict[str, asyncio.Event] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("baton.handoffs")
        self._read()

    def begin(
        self, engine: Engine, tenant: str, *, parent: str | None, label: str | None, ttl_s: int | None
    ) -> HandoffRecord:
        """A pending handoff, which a request is about to leave behind."""
        now = time.time()
        lives = min(ttl_s or self._settings.ttl_s, self._settings.ttl_s)
        record = HandoffRecord(
            tenant=tenant,
            model=engine.name,
            weights=engine.weights,
            created_at=now,
            expires_at=now + lives,
            parent=parent,
            label=label,
        )
        self._sweep(now)
        self._make_room(tenant)
        self._records[record.id] = record
        self._over[record.id] = asyncio.Event()
        return record

    def end(self, record: HandoffRecord, relay: Relay | None) -> None:
        """The request is over: its token ids are known, or it failed (`relay` is None)."""
        if relay is None or not relay.prompt_ids:
            record.state = HandoffState.FAILED
            record.expires_at = min(record.expires_at, time.time() + FAILED_FOR_S)
            self._over.pop(record.id).set()
            return
        record.tokens = [*relay.prompt_ids, *relay.output_ids]
        self._start(self._settle(record))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

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
            HandoffIncompatible: it is of other weights.
        """
        record = self.get(handoff_id, tenant)
        await self.settled(record, self._settings.wait_s)
        if record.state is HandoffState.PENDING:
            raise HandoffPending()
        if record.state is HandoffState.FAILED:
            raise HandoffNotFound()
        if record.weights != engine.weights:
            raise HandoffIncompatible(
                f"The handoff is of the model '{record.model}', the request of '{engine.name}': "
                "their weights differ.",
                param="handoff.from",
            )
        return record

    def get(self, handoff_id: str, tenant: str) -> HandoffRecord:
        """One of the tenant's handoffs.

        Raises:
            HandoffNotFound: unknown, expired, or another tenant's: one answer for all.
        """
        self._sweep(time.time())
        record = self._records.get(handoff_id)
        if record is None or record.tenant != tenant:
            raise HandoffNotFound()
        return record

    def list(self, tenant: str) -> list[HandoffRecord]:
        """The tenant's handoffs, the newest first."""
        self._sweep(time.time())
        mine = [record for record in self._records.values() if record.tenant == tenant]
        return sorted(mine, key=lambda record: record.created_at, reverse=True)

    async def delete(self, handoff_id: str, tenant: str) -> None:
        """Forget one; who loads it now comes to the end of it.

        Raises:
            HandoffNotFound: as `get`.
        """
        record = self.get(handoff_id, tenant)
        del self._records[record.id]
        await asyncio.to_thread(self._remove, record)

    async def close(self) -> None:
        """Wait for what is being settled."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    async def _settle(self, record: HandoffRecord) -> None:
        """Wait for the entry: the store's rename is the truth."""
        try:
            deadline = time.monotonic() + COMMIT_WITHIN_S
            while time.monotonic() < deadline:
                if await asyncio.to_thread(self._store.exists, record.key):
                    break
                await asyncio.sleep(LOOK_EVERY_S)
            record.bytes = await asyncio.to_thread(self._size, record)
            record.state = HandoffState.READY
            await asyncio.to_thread(self._write, record)
            if record.id not in self._records:  # deleted or expired meanwhile: what came after it goes too
                await asyncio.to_thread(self._remove, record)
        finally:
            record.state = HandoffState.READY  # its token ids are known, whatever became of its KV
            self._over.pop(record.id).set()

    def _size(self, record: HandoffRecord) -> int:
        try:
            with self._store.open(record.key) as reader:
                return len(reader)
        except (EntryMissing, StoreError):
            return 0

    def _sweep(self, now: float) -> None:
        """Drop what has expired; the files go in the background."""
        for record in [record for record in self._records.values() if record.expires_at <= now]:
            del self._records[record.id]
            self._start(asyncio.to_thread(self._remove, record))

    def _make_room(self, tenant: str) -> None:
        """A tenant that never stops leaving handoffs loses its oldest."""
        mine = [record for record in self._records.values() if record.tenant == tenant]
        for record in mine[: max(0, len(mine) + 1 - MAX_PER_TENANT)]:
            del self._records[record.id]
            self._start(asyncio.to_thread(self._remove, record))

    def _remove(self, record: HandoffRecord) -> None:
        try:
            if self._folder is not None:
                _file(self._folder, record).unlink(missing_ok=True)
            self._store.delete(record.key)
        except (OSError, StoreError) as error:
            self._log.warning("handoff_not_removed", reason=type(error).__name__)

    def _write(self, record: HandoffRecord) -> None:
        if self._folder is None:
            return
        path = _file(self._folder, record)
        aside = path.with_suffix(".new")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(record.model_dump_json())
            os.replace(aside, path)
        except OSError as error:
            self._log.warning("handoff_not_kept", reason=error.strerror)  # it lives as long as the process

    def _read(self) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.glob("*.json"):
            try:
                record = HandoffRecord.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                self._log.warning("handoff_unreadable", file=path.name)
                path.unlink(missing_ok=True)
                continue
            if record.expires_at <= time.time():
                self._remove(record)
            else:
                self._records[record.id] = record


def _file(folder: Path, record: HandoffRecord) -> Path:
    return folder / f"{record.id}.json"
