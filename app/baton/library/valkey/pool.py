"""Open the pool of the settings: the store that gateways of several machines share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.config.groups import HandoffSettings
from baton.errors import HandoffPinsFull, HandoffStoreUnavailable, SettingsError
from baton.library.handoff import PINNED_SHARE, Handoff, scope_of
from baton.library.here.entries import Deadline, LocalFile, copy_entry, opened
from baton.library.here.records import pool_secret
from baton.library.valkey.connection import ValkeyAddress, ValkeyConnection, number
from baton.library.valkey.files import Room, ValkeyFiles
from baton.library.valkey.records import FETCH_S, ValkeyImages, ValkeyRecords, lifetime_ms
from baton.telemetry.metrics import SharedStoreMetrics
from baton_kv.folders import install_secret
from baton_kv.stores.base import Store

# Copy the KV of handoffs between this machine and the pool, and protect it there. All calls block.
#
# The engines of a machine see its own store alone. A handoff's KV is pushed to the pool when it was saved
# here, and fetched from there before a request is given to an engine; what is here is a copy, which may be
# evicted at any time.


@dataclass(frozen=True)
class ValkeyPool:
    """The store that gateways of several machines share: a Valkey server.

    Attributes:
        budget: bytes that all handoffs may take there.
        fetch_s: seconds in which a handoff's KV must have been fetched.
    """

    connection: ValkeyConnection
    files: ValkeyFiles
    records: ValkeyRecords
    images: ValkeyImages
    budget: int
    fetch_s: float

    def close(self) -> None:
        """Close the connections."""
        self.files.close()
        self.connection.close()

    def push(self, record: Handoff, store: Store) -> None:
        """Copy a handoff's KV from a machine's store."""
        room = Room(self.budget, lifetime_ms(record), automatic=record.automatic)
        with opened(store, record.key) as found:
            files = [LocalFile.of(key, reader) for key, reader in found]
            self.files.push(record.key, files, room)

    def fetch(self, record: Handoff, store: Store, within_s: float) -> int:
        """Copy a handoff's KV to a machine's store; see `Tier.fetch`."""
        deadline = Deadline.within(FETCH_S, self.fetch_s, within_s)
        names, left = self.files.use(record.key, automatic=record.automatic), record.bytes
        if not names or names[-1] != record.key:
            return 0

        def read(index: int) -> tuple[int, Generator[bytes]]:
            nonlocal left
            size, chunks = self.files.chunks(names[index], deadline, left)
            left -= size
            return size, chunks

        return copy_entry(store, names, read)

    def sizes(self, records: Sequence[Handoff]) -> list[int]:
        """Return the sizes of several handoffs' KV, those of their records if nobody knows."""
        try:
            return self.files.sizes([record.key for record in records])
        except HandoffStoreUnavailable:
            return [record.bytes for record in records]

    def pin(self, record: Handoff, pin: bool) -> bool:
        """Pin a handoff's KV or unpin it; returns whether the pool has it.

        Raises:
            HandoffPinsFull: the pin does not fit.
        """
        answer = self.files.pin(record.key, pin, int(PINNED_SHARE * self.budget))
        if answer == 0:
            raise HandoffPinsFull()
        return answer == 1

    def pinned(self, record: Handoff) -> dict[str, int]:
        """Return the bytes of KV that pins protect, by scope; if nobody knows, no pin fits."""
        key = self.connection.own_key("pinned")
        try:
            found = self.connection.ask("look", lambda client: client.hgetall(key))
        except HandoffStoreUnavailable:
            return {scope_of(record.tenant): sys.maxsize}  # nothing fits
        return {scope.decode(errors="replace"): number(size) for scope, size in found.items()}

    def drop(self, record: Handoff) -> None:
        """Remove a handoff's KV, if the server answers."""
        with contextlib.suppress(HandoffStoreUnavailable):
            self.files.drop([record.key])


def open_pool(settings: HandoffSettings, folder: Path, metrics: SharedStoreMetrics) -> ValkeyPool:
    """Open the pool of the settings for a machine whose store is in a folder.

    Raises:
        SettingsError: a file is missing, the local store has another secret, or the shared store refuses this
            gateway. A shared store that does not answer is no reason: it is used once it does.
    """
    address = address_of(settings)
    connection = ValkeyConnection(address, metrics)
    connection.require_usable()
    try:
        install_secret(folder, address.secret)
    except (OSError, ValueError) as error:
        raise SettingsError(f"handoffs.store: {error}") from None
    budget = int(settings.shared_budget)
    files = ValkeyFiles(connection, metrics)
    records = ValkeyRecords(connection, files, budget)
    images = ValkeyImages(files, budget, settings.shared_fetch_s)
    return ValkeyPool(connection, files, records, images, budget, settings.shared_fetch_s)


def address_of(settings: HandoffSettings) -> ValkeyAddress:
    """Return the address of the shared store, with what the files of the settings say.

    Raises:
        SettingsError: a file cannot be read, or the secret is too short.
    """
    assert settings.shared is not None
    assert settings.shared_secret_file is not None
    password = settings.shared_password_file
    ca_file = settings.shared_ca_file
    return ValkeyAddress(
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
