"""Read, write and remove what handoffs have on this machine and in the shared store. All calls block.

The engines of a machine see its own store alone. A handoff's KV is pushed to the shared store when it was
saved here, and fetched from there before a request is given to an engine; what is here is a copy, which may
be evicted at any time.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import structlog

from baton.errors import HandoffPinsFull, HandoffStoreUnavailable
from baton.handoffs.records.changes import PINNED_SHARE
from baton.handoffs.records.record import HandoffRecord, scope_of
from baton.handoffs.records.repository import Edit
from baton.handoffs.records.storage import HandoffStorage, counting
from baton.handoffs.records.store_proof import proof_of
from baton.handoffs.shared.connection import SharedConnection, number
from baton.handoffs.shared.files import PoolFiles, Room, SharedFile
from baton.handoffs.shared.records import SharedRecords, lifetime_ms
from baton_kv.format import shared_keys
from baton_kv.stores.base import Reader, SharedFiles, StoreError
from baton_kv.stores.file import FileStore

log = structlog.get_logger("baton.handoffs")


@dataclass(frozen=True)
class SharedStorage(HandoffStorage):
    """A `HandoffStorage` whose records, images and KV other machines see too.

    Attributes:
        connection: to the shared store.
        files: its files.
        budget: bytes that all handoffs may take there.
        budget_here: bytes that they may take on this machine.
        fetch_s: seconds in which a handoff's KV must have been fetched.
    """

    records: SharedRecords
    connection: SharedConnection
    files: PoolFiles
    budget: int
    budget_here: int
    fetch_s: float

    @property
    def shared(self) -> bool:
        return True

    def proof(self, challenge: str) -> str | None:
        assert isinstance(self.store, FileStore)
        return proof_of(self.secret(self.store.root), self.connection.store_id(), challenge)

    def close(self) -> None:
        self.files.close()
        self.connection.close()

    def announce(self, record: HandoffRecord) -> None:
        self.records.announce(record)

    def keep_pending(self, ids: Sequence[str]) -> list[str]:
        try:
            return self.records.keep_pending(ids)
        except HandoffStoreUnavailable:
            return []

    def create(self, record: HandoffRecord, edit: Edit) -> bool:
        return self.records.create(record, edit)

    def save_images(self, record: HandoffRecord) -> None:
        self.images.save(record)

    def share(self, record: HandoffRecord) -> bool:
        room = Room(self.budget, lifetime_ms(record), automatic=record.automatic)
        try:
            with ExitStack() as stack:
                self.files.push(record.key, self._local_files(record.key, stack), room)
        except (HandoffStoreUnavailable, StoreError) as error:
            log.warning("handoff_not_shared", handoff=record.id, reason=str(error))
            return False
        return True

    def _local_files(self, key: str, stack: ExitStack) -> list[SharedFile]:
        """Open the files of an entry of this machine, its own last."""
        own = stack.enter_context(self.store.open(key))
        names = [*shared_keys(own), key]
        readers = [stack.enter_context(self.store.open(key, part)) for part in range(len(names) - 1)]
        return [
            SharedFile(name, len(reader), partial(_read_into, reader))
            for name, reader in zip(names, [*readers, own], strict=True)
        ]

    def is_here(self, record: HandoffRecord) -> bool:
        return self.store.exists(record.key)

    def drop_copy(self, record: HandoffRecord) -> None:
        if self.is_here(record):
            super().quarantine(record)

    def fetch(self, record: HandoffRecord, within_s: float) -> int:
        until, size, names = time.monotonic() + min(within_s, self.fetch_s), 0, self.files.names(record.key)
        left = record.bytes
        if not names or names[-1] != record.key:
            return 0
        for index, name in enumerate(names):
            if self.store.exists(name):
                continue
            length, chunks = self.files.chunks(name, until, left)
            left -= length
            shared = SharedFiles(tuple(names[:index]), names[index - 1]) if index else SharedFiles()
            with contextlib.closing(chunks), counting(size):
                size += self.store.put(name, chunks, size=length, shared=shared)
        self.files.touch(record.key, automatic=record.automatic)
        return size

    def stored_bytes(self, records: Sequence[HandoffRecord]) -> list[int]:
        here = [self.store.bytes_of(record.key) for record in records]
        missing = [record.key for record, size in zip(records, here, strict=True) if not size]
        try:
            found = dict(zip(missing, self.files.sizes(missing), strict=True))
        except HandoffStoreUnavailable:
            found = {}
        return [
            size or found.get(record.key, record.bytes) for record, size in zip(records, here, strict=True)
        ]

    def pin(self, record: HandoffRecord, pin: bool) -> bool:
        answer = self.files.pin(record.key, pin, int(PINNED_SHARE * self.budget))
        if answer == 0:
            raise HandoffPinsFull()
        if pin and not self._fits_here(record):
            if answer == -1 and self.is_here(record):  # and nowhere else
                raise HandoffPinsFull()
            return True  # what is here is a copy
        return super().pin(record, pin)

    def _fits_here(self, record: HandoffRecord) -> bool:
        """Return whether KV is here and may be protected here too: this store is often the smaller one."""
        if not self.is_here(record):
            return False
        pinned = HandoffStorage.pinned_kv(self, record)
        most = PINNED_SHARE * self.budget_here
        mine = pinned.get(scope_of(record.tenant), 0)
        return sum(pinned.values()) <= most and mine <= most / max(1, len(pinned))

    def pinned_kv(self, record: HandoffRecord) -> dict[str, int]:
        key = self.connection.own_key("pinned")
        try:
            found = self.connection.ask("look", lambda client: client.hgetall(key))
        except HandoffStoreUnavailable:
            return {scope_of(record.tenant): sys.maxsize}  # nothing fits
        return {scope.decode(errors="replace"): number(size) for scope, size in found.items()}

    def quarantine(self, record: HandoffRecord) -> None:
        super().quarantine(record)
        with contextlib.suppress(HandoffStoreUnavailable):
            self.files.drop([record.key])


def _read_into(reader: Reader, start: int, view: memoryview) -> int:
    return reader.read_into(start, [view])
