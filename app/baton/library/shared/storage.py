"""Open the shared store of the settings."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from baton.config.groups import HandoffSettings
from baton.errors import HandoffPinsFull, HandoffStoreUnavailable, SettingsError
from baton.library.handoff import Handoff, scope_of
from baton.library.here.records import Edit, pool_secret, proof_of
from baton.library.shared.connection import SharedAddress, SharedConnection, number
from baton.library.shared.files import PoolFiles, Room, SharedFile
from baton.library.shared.records import SharedImages, SharedRecords, lifetime_ms
from baton.library.tiers import PINNED_SHARE, HandoffStorage, counting
from baton.telemetry.metrics import SharedStoreMetrics
from baton_kv.folders import install_secret
from baton_kv.format import shared_keys
from baton_kv.stores.base import Reader, SharedFiles, Store, StoreError
from baton_kv.stores.file import FileStore

# Read, write and remove what handoffs have on this machine and in the shared store. All calls block.
#
# The engines of a machine see its own store alone. A handoff's KV is pushed to the shared store when it was
# saved here, and fetched from there before a request is given to an engine; what is here is a copy, which may
# be evicted at any time.


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

    def announce(self, record: Handoff) -> None:
        self.records.announce(record)

    def keep_pending(self, ids: Sequence[str]) -> list[str]:
        try:
            return self.records.keep_pending(ids)
        except HandoffStoreUnavailable:
            return []

    def create(self, record: Handoff, edit: Edit) -> bool:
        return self.records.create(record, edit)

    def save_images(self, record: Handoff) -> None:
        self.images.save(record)

    def share(self, record: Handoff) -> bool:
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

    def is_here(self, record: Handoff) -> bool:
        return self.store.exists(record.key)

    def drop_copy(self, record: Handoff) -> None:
        if self.is_here(record):
            super().quarantine(record)

    def fetch(self, record: Handoff, within_s: float) -> int:
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

    def stored_bytes(self, records: Sequence[Handoff]) -> list[int]:
        here = [self.store.bytes_of(record.key) for record in records]
        missing = [record.key for record, size in zip(records, here, strict=True) if not size]
        try:
            found = dict(zip(missing, self.files.sizes(missing), strict=True))
        except HandoffStoreUnavailable:
            found = {}
        return [
            size or found.get(record.key, record.bytes) for record, size in zip(records, here, strict=True)
        ]

    def pin(self, record: Handoff, pin: bool) -> bool:
        answer = self.files.pin(record.key, pin, int(PINNED_SHARE * self.budget))
        if answer == 0:
            raise HandoffPinsFull()
        if pin and not self._fits_here(record):
            if answer == -1 and self.is_here(record):  # and nowhere else
                raise HandoffPinsFull()
            return True  # what is here is a copy
        return super().pin(record, pin)

    def _fits_here(self, record: Handoff) -> bool:
        """Return whether KV is here and may be protected here too: this store is often the smaller one."""
        if not self.is_here(record):
            return False
        pinned = HandoffStorage.pinned_kv(self, record)
        most = PINNED_SHARE * self.budget_here
        mine = pinned.get(scope_of(record.tenant), 0)
        return sum(pinned.values()) <= most and mine <= most / max(1, len(pinned))

    def pinned_kv(self, record: Handoff) -> dict[str, int]:
        key = self.connection.own_key("pinned")
        try:
            found = self.connection.ask("look", lambda client: client.hgetall(key))
        except HandoffStoreUnavailable:
            return {scope_of(record.tenant): sys.maxsize}  # nothing fits
        return {scope.decode(errors="replace"): number(size) for scope, size in found.items()}

    def quarantine(self, record: Handoff) -> None:
        super().quarantine(record)
        with contextlib.suppress(HandoffStoreUnavailable):
            self.files.drop([record.key])


def _read_into(reader: Reader, start: int, view: memoryview) -> int:
    return reader.read_into(start, [view])


def open_shared(
    settings: HandoffSettings, store: Store, folder: Path, metrics: SharedStoreMetrics
) -> SharedStorage:
    """Return a storage whose handoffs other machines share.

    Args:
        settings: with the address of the shared store.
        store: the store of this machine.
        folder: the folder of that store.
        metrics: where exchanges are counted.

    Raises:
        SettingsError: a file is missing, the local store has another secret, or the shared store refuses this
            gateway. A shared store that does not answer is no reason: it is used once it does.
    """
    address = address_of(settings)
    connection = SharedConnection(address, metrics)
    connection.require_usable()
    try:
        install_secret(folder, address.secret)
    except (OSError, ValueError) as error:
        raise SettingsError(f"handoffs.store: {error}") from None
    budget = int(settings.shared_budget)
    files = PoolFiles(connection, metrics)
    records = SharedRecords(connection, files, budget)
    images = SharedImages(files, budget, settings.shared_fetch_s)
    return SharedStorage(
        store,
        records,
        images,
        connection,
        files,
        budget,
        budget_here=int(settings.budget),
        fetch_s=settings.shared_fetch_s,
    )


def address_of(settings: HandoffSettings) -> SharedAddress:
    """Return the address of the shared store, with what the files of the settings say.

    Raises:
        SettingsError: a file cannot be read, or the secret is too short.
    """
    assert settings.shared is not None
    assert settings.shared_secret_file is not None
    password = settings.shared_password_file
    ca_file = settings.shared_ca_file
    return SharedAddress(
        settings.shared,
        settings.shared_pool,
        pool_secret(settings.shared_secret_file),
        _text("handoffs.shared_password_file", password) if password is not None else None,
        settings.shared_timeout_s,
        str(ca_file) if ca_file is not None else None,
    )


def _text(setting: str, path: Path) -> str:
    try:
        return path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"{setting}: {path}: {reason}") from None
