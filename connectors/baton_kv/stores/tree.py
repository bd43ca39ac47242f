"""Access the folders of a file store: open them by descriptor, lock the store, list and measure its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton_kv.folders import LOCK, FolderNotPrivate, bytes_in, folder, open_file, open_folder
from baton_kv.stores.base import StoreError
from baton_kv.stores.links import names_of, unlink_corrupt, unlink_loose, unlink_shared
from baton_kv.stores.listing import SUFFIX, Listing, StoredEntry, list_scope, number_in

IMAGES = "images"
RECORDS = "records"
KEPT_IN_QUARANTINE = 2
RECORDS_TOTAL = "total"
"""File in the folder of the records: the bytes that they take, as decimal digits."""
WRITTEN = "written"
"""File in the root: the bytes of all entries that were ever placed, as decimal digits."""


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

    def listing(self) -> Listing:
        """List the entries and files of all scopes.

        Raises:
            StoreError: a folder cannot be listed.
        """
        found = Listing()
        try:
            for scope, target in self._scopes():
                list_scope(found, scope, target)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None
        return found

    def unlink_loose(self, but: str = "") -> None:
        """Remove what killed processes left among the entries; called with the lock held.

        Args:
            but: stem of the names that are linked for an entry that is being written.
        """
        for _, target in self._scopes():
            unlink_loose(target, but)

    def _scopes(self) -> Iterator[tuple[str, int]]:
        """Yield every scope and a descriptor of its folder."""
        with self.folder("entries") as entries:
            for scope in os.listdir(entries):
                place = folder(self.root / "entries" / scope, name=scope, within=entries)
                # Removed since it was listed, or not a folder of this user: it holds no entry.
                with contextlib.suppress(FileNotFoundError, FolderNotPrivate), place as target:
                    yield scope, target

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

    def written(self) -> int:
        """Return the bytes of all entries that were ever placed."""
        with folder(self.root) as top:
            return number_in(WRITTEN, top)

    def add_written(self, size: int) -> None:
        """Count an entry that is about to be placed; called with the lock held."""
        with folder(self.root) as top:
            total = number_in(WRITTEN, top) + size
            descriptor = open_file(WRITTEN, within=top, flags=LOCK)
        try:
            os.pwrite(descriptor, f"{total:020}".encode(), 0)
        finally:
            os.close(descriptor)

    def quarantine(self, scope: str, corrupt: str) -> None:
        """Move a corrupt file away, and remove all its other names.

        Args:
            scope: the scope.
            corrupt: one of the file's names in the scope's folder.
        """
        with self.scope(scope) as source, self.folder("quarantine") as target:
            found = names_of(os.stat(corrupt, dir_fd=source, follow_symlinks=False).st_ino, source)
            os.rename(corrupt, f"{time.time_ns()}{SUFFIX}", src_dir_fd=source, dst_dir_fd=target)
            for each in found:
                unlink_corrupt(each, source)
            for old in sorted(os.listdir(target))[:-KEPT_IN_QUARANTINE]:
                os.unlink(old, dir_fd=target)

    def evict(self, entry: StoredEntry) -> None:
        """Remove an entry's names, if they are still there."""
        with contextlib.suppress(FileNotFoundError), self.scope(entry.scope) as target:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=target)
            unlink_shared(entry.name, target)
