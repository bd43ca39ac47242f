"""Access the folders of a file store: open them by descriptor, lock the store, list and measure its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton_kv.folders import LOCK, FolderNotPrivate, bytes_in, folder, open_file, open_folder
from baton_kv.stores.base import StoreError
from baton_kv.stores.listing import StoredEntry, entries_in, number_in

IMAGES = "images"
RECORDS = "records"
RECORDS_TOTAL = "total"
"""File in the folder of the records: the bytes that they take, as decimal digits."""


class StoreTree:
    """The folders of a file store.

    Args:
        root: the store's folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def folder(self, name: str) -> Iterator[int]:
        """Open one of the root's folders for the time of the context; gives its descriptor."""
        with folder(self.root) as top:
            descriptor = open_folder(self.root / name, name=name, within=top)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def scope(self, scope: str) -> Iterator[int]:
        """Open the folder of a scope's entries for the time of the context; gives its descriptor."""
        with self.folder("entries") as entries:
            descriptor = open_folder(self.root / "entries" / scope, name=scope, within=entries)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, which excludes other processes and threads that enforce the budget."""
        with folder(self.root) as top:
            descriptor = open_file("lock", within=top, flags=LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def entries(self) -> list[StoredEntry]:
        """List the entries of all scopes.

        Raises:
            StoreError: a folder cannot be listed.
        """
        found: list[StoredEntry] = []
        try:
            with self.folder("entries") as entries:
                for scope in os.listdir(entries):
                    place = folder(self.root / "entries" / scope, name=scope, within=entries)
                    # Removed since it was listed, or not a folder of this user: it holds no entry.
                    with contextlib.suppress(FileNotFoundError, FolderNotPrivate), place as target:
                        found += entries_in(scope, target)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None
        return found

    def bytes_beside(self) -> int:
        """Return the bytes of the gateway's images and records, which count towards the budget.

        Raises:
            StoreError: a folder cannot be listed.
        """
        try:
            with folder(self.root) as top:
                return bytes_in(IMAGES, within=top) + number_in(f"{RECORDS}/{RECORDS_TOTAL}", top)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None

    def evict(self, entry: StoredEntry) -> None:
        """Remove an entry's file, if it is still there."""
        with contextlib.suppress(FileNotFoundError), self.scope(entry.scope) as target:
            os.unlink(entry.name, dir_fd=target)
