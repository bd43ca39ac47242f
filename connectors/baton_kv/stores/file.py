"""Keep entries in a folder, on disk or in shared memory (`/dev/shm`).

root/                    mode 0700
  entries/SCOPE/ID.kv    an entry's own file, immutable; its modification time is its last use
  entries/SCOPE/ID.000   a file of another entry that this one needs too (a hard link), by its index
  entries/SCOPE/ID.pin   an empty file that protects the entry from eviction
  writing/               files being written; leftovers are removed when a store is opened
  quarantine/            the last few corrupt entries, for inspection
  images/                the gateway's images; they count towards the budget and are never evicted here
  records/               the gateway's records, likewise; `total` holds their bytes
  written                bytes of all entries ever placed, so that not every save need list the entries
  secret                 key of the digests, see `baton_kv.secret`
  lock                   held while the budget is enforced

A file's bytes are free when its last name is removed, so entries that share files need no other count.

Only this user may have access to the folders, and none may be a link: files are written and removed relative
to a descriptor of their folder, so nothing outside is touched, whatever links are planted inside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path

from baton_kv.contract import EXPENDABLE
from baton_kv.folders import CREATE, LOCK, FolderNotPrivate, folder, make_folder, open_file
from baton_kv.stores.base import (
    NOTHING_SHARED,
    Commit,
    Piece,
    SharedFiles,
    StoreError,
    StoreFull,
    at_once,
)
from baton_kv.stores.buffers import MAX_BUFFERS, rest
from baton_kv.stores.draft import FileDraft, discard
from baton_kv.stores.links import (
    link_of,
    link_shared,
    rename_shared,
    require_numbers,
    unlink_shared,
)
from baton_kv.stores.listing import (
    ABANDONED_AFTER_S,
    make_scope,
    pin_of,
    remove_abandoned,
    set_mark,
    split,
)
from baton_kv.stores.reader import FileReader, open_entry, touch
from baton_kv.stores.room import Room
from baton_kv.stores.tree import IMAGES, RECORDS, RECORDS_TOTAL, StoreTree

__all__ = ["ABANDONED_AFTER_S", "IMAGES", "RECORDS", "RECORDS_TOTAL", "FileStore"]

TEMPORARY = re.compile(r"\.[0-9a-f]{16}")
"""Pattern of temporary files in the root, from which the secret is linked."""
WRITING = re.compile(r"[0-9a-f]{32}(\.[0-9a-z]{1,8})?")
"""Pattern of the files in `writing`."""
FOLDERS = ("entries", "writing", "quarantine")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class FileStore:
    """The `Store` interface over a folder.

    Args:
        root: the folder, created with mode 0700 if it is missing.
        budget: bytes that entries may take in all; the least recently used are evicted first. None for no
            limit.
        fsync: flush an entry to the device before it becomes visible, and its name before `put` returns.
            Without it, an entry written just before a power failure may be truncated, which its digests
            detect.

    Raises:
        StoreError: the folder or one inside is a link, or other users may access it.
    """

    def __init__(self, root: Path, *, budget: int | None = None, fsync: bool = False) -> None:
        self._tree = StoreTree(root)
        self._room = Room(self._tree, budget)
        self._fsync = fsync
        try:
            make_folder(root)
            with folder(root) as top:
                for name in FOLDERS:
                    make_folder(root / name, name=name, within=top)
                require_numbers(root, top)
                remove_abandoned(top, TEMPORARY)
            with self._tree.folder("writing") as writing:
                remove_abandoned(writing, WRITING)
        except FolderNotPrivate as error:
            raise StoreError(error.strerror) from None

    @property
    def root(self) -> Path:
        return self._tree.root

    def put(
        self,
        key: str,
        parts: Iterable[Piece],
        *,
        size: int = 0,
        shared: SharedFiles = NOTHING_SHARED,
        commit: Commit = at_once,
    ) -> int:
        scope, name = split(key)
        self._room.require_possible(size)
        try:
            with self._tree.folder("writing") as writing:
                temporary = secrets.token_hex(16)
                try:
                    size = self._write(writing, temporary, parts, size, frees=not name.startswith(EXPENDABLE))
                    commit(partial(self._place, writing, temporary, scope, name, size, shared))
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary, dir_fd=writing)
            return size
        except OSError as error:
            raise _translated(error, key) from None

    @contextmanager
    def draft(
        self,
        key: str,
        name: str,
        *,
        size: int,
        rank: int,
        ranks: int,
        shared: SharedFiles = NOTHING_SHARED,
    ) -> Iterator[FileDraft]:
        scope, entry = split(key)
        self._room.require_possible(size)
        try:
            with self._tree.folder("writing") as writing:
                descriptor = open_file(name, within=writing, flags=LOCK)
                try:
                    yield FileDraft(
                        writing,
                        descriptor,
                        name,
                        rank,
                        ranks,
                        share=size // ranks,
                        write=self._write_at,
                        place=lambda sealed: self._place_draft(
                            writing, sealed, descriptor, (scope, entry), size, shared
                        ),
                    )
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise _translated(error, key) from None

    def _write_at(self, descriptor: int, view: memoryview, offset: int, needed: int) -> int:
        return self._retried(lambda: os.pwrite(descriptor, view, offset), needed)

    def _place_draft(
        self,
        writing: int,
        sealed: str,
        descriptor: int,
        target: tuple[str, str],
        size: int,
        shared: SharedFiles,
    ) -> None:
        touch(descriptor)
        if self._fsync:
            os.fsync(descriptor)
        self._place(writing, sealed, *target, size, shared)

    def discard(self, name: str) -> None:
        with contextlib.suppress(OSError), self._tree.folder("writing") as writing:
            discard(writing, name)

    def _write(self, writing: int, name: str, parts: Iterable[Piece], expected: int, *, frees: bool) -> int:
        size = 0
        with FileIO(os.open(name, CREATE, 0o600, dir_fd=writing), "wb") as stream:
            for part in parts:
                waiting = part if isinstance(part, list) else [memoryview(part).cast("B")]
                while left := sum(map(len, waiting)):
                    write = partial(os.writev, stream.fileno(), waiting[:MAX_BUFFERS])
                    written = self._retried(write, max(left, expected - size)) if frees else write()
                    size, waiting = size + written, rest(waiting, written)
            touch(stream.fileno())
            if self._fsync:
                os.fsync(stream.fileno())
        return size

    def _retried(self, write: Callable[[], int], needed: int) -> int:
        """Write as much as fits; on a full device, evict old entries if that frees `needed` bytes."""
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in NO_SPACE or not self._room.free(needed):
                    raise

    def _place(
        self, writing: int, temporary: str, scope: str, name: str, size: int, shared: SharedFiles
    ) -> None:
        """Evict what the budget demands, then give a written file and those that it shares their names."""
        with self._tree.folder("entries") as entries:
            made = make_scope(scope, entries)
            with folder(self._tree.root / "entries" / scope, name=scope, within=entries) as target:
                with self._tree.locked():
                    stem = secrets.token_hex(16)
                    try:
                        link_shared(shared, stem, target)
                        self._room.make(size, replaced=(scope, name), linked=stem)
                        self._room.count(size)
                        rename_shared(len(shared.keys), stem, name, target)
                        os.rename(temporary, name, src_dir_fd=writing, dst_dir_fd=target)
                    finally:
                        unlink_shared(stem, target)
                if self._fsync:
                    os.fsync(target)
            if self._fsync and made:
                os.fsync(entries)

    @contextmanager
    def open(self, key: str, part: int | None = None) -> Iterator[FileReader]:
        with open_entry(self._path(key, part), key) as reader:
            yield reader

    def exists(self, key: str, part: int | None = None) -> bool:
        return self._size(key, part) is not None

    def bytes_of(self, key: str) -> int:
        total, reached = 0, self._size(key, None)
        part = 0
        while reached is not None:
            total, reached, part = total + reached, self._size(key, part), part + 1
        return total

    def _size(self, key: str, part: int | None) -> int | None:
        """Return the size of one of an entry's files; None if it is not there."""
        try:
            status = os.lstat(self._path(key, part))
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def delete(self, key: str) -> bool:
        scope, name = split(key)
        try:
            with self._tree.scope(scope) as target:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(pin_of(name), dir_fd=target)
                try:
                    os.unlink(name, dir_fd=target)
                finally:
                    unlink_shared(name, target)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"deleting {key}: {error.strerror}") from None
        return True

    def quarantine(self, key: str, part: int | None = None) -> None:
        scope, name = split(key)
        with contextlib.suppress(OSError):
            self._tree.quarantine(scope, name if part is None else link_of(name, part))

    def pin(self, key: str, pinned: bool) -> None:
        scope, name = split(key)
        try:
            with self._tree.folder("entries") as entries:
                if pinned:
                    make_scope(scope, entries)
                with folder(self._tree.root / "entries" / scope, name=scope, within=entries) as target:
                    set_mark(pin_of(name), target, pinned)
        except FileNotFoundError:
            return  # nothing to unpin
        except OSError as error:
            raise StoreError(f"pinning {key}: {error.strerror}") from None

    def pinned(self, *, also: str | None = None) -> dict[str, int]:
        return self._tree.listing().pinned(also)

    def keys(self) -> Iterator[str]:
        for each in self._tree.listing().entries:
            yield each.key

    def size(self) -> int:
        return self._tree.bytes_beside() + self._tree.listing().size

    def make_room(self, size: int) -> None:
        try:
            with self._tree.locked():
                self._room.make(size)
        except OSError as error:
            raise StoreError(f"making room: {error.strerror}") from None

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        oldest = time.time() - older_than_s
        try:
            with self._tree.locked():
                self._tree.unlink_loose()
            with self._tree.folder("writing") as writing:
                remove_abandoned(writing, WRITING)
        except OSError as error:
            raise StoreError(f"sweeping: {error.strerror}") from None
        old = [each.key for each in self._tree.listing().entries if each.used_ns <= oldest * 1e9]
        return sum(self.delete(key) for key in old if not wanted(key))

    def _path(self, key: str, part: int | None) -> Path:
        scope, name = split(key)
        return self._tree.root / "entries" / scope / (name if part is None else link_of(name, part))


def _translated(error: OSError, key: str) -> StoreError:
    """Return the store's own exception for an error of the device."""
    kind = StoreFull if error.errno in NO_SPACE else StoreError
    return kind(f"writing {key}: {error.strerror}")
