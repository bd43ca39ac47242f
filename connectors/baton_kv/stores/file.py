"""A store in a folder, on disk or in shared memory (`/dev/shm`).

root/                    mode 0700
  entries/SCOPE/ID.kv    one immutable file an entry; its modification time is its last use
  entries/SCOPE/ID.pin   an empty file: that entry stays when others go for the budget
  writing/               what is being written; swept when a store is opened
  quarantine/            what proved wrong, for a person to look at; swept to a few
  images/                the gateway's: counted with the entries, never evicted by them
  records/               the gateway's, as the images; `total` holds the bytes they take
  lock                   held while the budget is enforced

Every folder must belong to this user alone, and none may be a link: what is written or removed is named
relative to a descriptor of its folder, so that nothing outside is touched whatever is planted inside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from baton_kv.folders import (
    CREATE,
    LOCK,
    FolderRefused,
    bytes_in,
    folder,
    make_folder,
    open_file,
    open_folder,
)
from baton_kv.stores.base import Buffer, EntryMissing, StoreError, StoreFull
from baton_kv.stores.tree import (
    ABANDONED_AFTER_S,
    SUFFIX,
    Found,
    entries_in,
    make_scope,
    number_in,
    pin_of,
    remove_abandoned,
    set_mark,
    split,
)

__all__ = ["ABANDONED_AFTER_S", "IMAGES", "RECORDS", "RECORDS_TOTAL", "FileReader", "FileStore"]

IMAGES = "images"
RECORDS = "records"
RECORDS_TOTAL = "total"
"""A file among the records: bytes that they take, as decimal digits."""
ASIDE = re.compile(r"\.[0-9a-f]{16}")
"""The name of a file that is being written into the root: the secret."""
WRITING = re.compile(r"[0-9a-f]{32}")
"""The name of an entry that is being written."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
KEPT_IN_QUARANTINE = 2
MAX_BUFFERS = 1024
"""What one `preadv` takes on Linux (IOV_MAX)."""


class FileReader:
    """A `Reader` of an open file. Never a memory map: a read error there would end the whole process."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> bytes:
        try:
            return os.pread(self._descriptor, max(0, stop - start), start)
        except OSError as error:
            raise StoreError(f"reading: {error.strerror}") from None

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> int:
        filled = 0
        waiting = [buffer.cast("B") for buffer in buffers if len(buffer)]
        while waiting:
            try:
                count = os.preadv(self._descriptor, waiting[:MAX_BUFFERS], start + filled)
            except OSError as error:
                raise StoreError(f"reading: {error.strerror}") from None
            if count == 0:
                break
            filled += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = waiting[0][count:]
        return filled


class FileStore:
    """The `Store` interface over a folder.

    Args:
        root: the folder; made with mode 0700 when it is missing.
        budget: bytes that entries may take in all; the least recently used go first. None: no limit.
        fsync: wait until an entry is on the device before it is visible, and until its name is before
            `put` returns; without it an entry written just before a power cut may be torn, which its
            digests tell.

    Raises:
        StoreError: the folder, or one in it, is a link, or belongs to others or is open to them.
    """

    def __init__(self, root: Path, *, budget: int | None = None, fsync: bool = False) -> None:
        self._root = root
        self._budget = budget
        self._fsync = fsync
        try:
            make_folder(root)
            with folder(root) as top:
                for name in ("entries", "writing", "quarantine"):
                    make_folder(root / name, name=name, within=top)
                remove_abandoned(top, ASIDE)
            with self._folder("writing") as writing:
                remove_abandoned(writing, WRITING)
        except FolderRefused as error:
            raise StoreError(error.strerror) from None

    @property
    def root(self) -> Path:
        return self._root

    def put(self, key: str, parts: Iterable[Buffer], *, size: int = 0) -> int:
        scope, name = split(key)
        try:
            if self._budget is not None and size > self._budget:
                raise StoreFull(f"an entry of {size} bytes does not fit the store's {self._budget}")
            with self._folder("writing") as writing:
                temporary = secrets.token_hex(16)
                try:
                    size = self._write(writing, temporary, parts, size)
                    self._place(writing, temporary, scope, name, size)
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary, dir_fd=writing)
            return size
        except OSError as error:
            kind = StoreFull if error.errno in NO_SPACE else StoreError
            raise kind(f"writing {key}: {error.strerror}") from None

    def _write(self, writing: int, name: str, parts: Iterable[Buffer], expected: int) -> int:
        size = 0
        with FileIO(os.open(name, CREATE, 0o600, dir_fd=writing), "wb") as stream:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    written = self._write_some(stream, view, max(len(view), expected - size))
                    size += written
                    view = view[written:]
            _touch(stream.fileno())
            if self._fsync:
                os.fsync(stream.fileno())
        return size

    def _write_some(self, stream: FileIO, view: memoryview, needed: int) -> int:
        """Write what fits; where the device is full, old entries go, if that makes room for all of it."""
        while True:
            try:
                return stream.write(view)
            except OSError as error:
                if error.errno not in NO_SPACE or not self._free(needed):
                    raise

    def _place(self, writing: int, temporary: str, scope: str, name: str, size: int) -> None:
        """Give a written file its name, in the room that is made for it."""
        with self._folder("entries") as entries:
            made = make_scope(scope, entries)
            with folder(self._root / "entries" / scope, name=scope, within=entries) as target:
                with self._locked():
                    self._make_room(size, keep=(scope, name))
                    os.rename(temporary, name, src_dir_fd=writing, dst_dir_fd=target)
                if self._fsync:
                    os.fsync(target)
            if self._fsync and made:
                os.fsync(entries)

    def _free(self, size: int) -> bool:
        """Evict entries of so many bytes in all, or none; whether they went."""
        freed = 0
        with self._locked():
            loose = self._loose(self._files())
            if sum(each.size for each in loose) < size:
                return False
            for each in loose:
                if freed >= size:
                    break
                self._evict(each)
                freed += each.size
        return True

    def _make_room(self, size: int, *, keep: tuple[str, str] | None = None) -> None:
        if self._budget is None:
            return
        files = self._files()
        others = [each for each in files if (each.scope, each.name) != keep]
        total = self._beside() + sum(each.size for each in others)
        if total + size <= self._budget:
            return
        loose = [each for each in self._loose(files) if (each.scope, each.name) != keep]
        if size + total - sum(each.size for each in loose) > self._budget:
            raise StoreFull(f"an entry of {size} bytes does not fit the store's {self._budget}")
        for each in loose:
            if total + size <= self._budget:
                return
            self._evict(each)
            total -= each.size

    def _evict(self, found: Found) -> None:
        with contextlib.suppress(FileNotFoundError), self._scope(found.scope) as target:
            os.unlink(found.name, dir_fd=target)

    def _beside(self) -> int:
        """Bytes of the gateway's images and records, which are no entries."""
        try:
            with folder(self._root) as top:
                return bytes_in(IMAGES, within=top) + number_in(f"{RECORDS}/{RECORDS_TOTAL}", top)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None

    def _loose(self, files: Sequence[Found]) -> list[Found]:
        """The entries that may go: of who holds more than a fair share first, and of those the least
        recently used.
        """
        held: Counter[str] = Counter()
        for each in files:
            held[each.scope] += each.size
        share = (self._budget or held.total()) / max(1, len(held))
        loose = [each for each in files if not each.pinned]
        return sorted(loose, key=lambda each: (held[each.scope] <= share, each.used_ns))

    @contextmanager
    def open(self, key: str) -> Iterator[FileReader]:
        path = self._path(key)
        try:
            if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
                raise StoreError(f"reading {key}: its folder is a link or no folder")
            # Without O_NONBLOCK a pipe in an entry's place would hold the engine for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise EntryMissing(key) from None
        except OSError as error:
            raise StoreError(f"reading {key}: {error.strerror}") from None
        try:
            status = self._status(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"reading {key}: not an entry")
            with contextlib.suppress(OSError):
                _touch(descriptor)  # the last one used is the last to be evicted
            yield FileReader(descriptor, status.st_size)
        finally:
            os.close(descriptor)

    @staticmethod
    def _status(descriptor: int) -> os.stat_result:
        try:
            return os.fstat(descriptor)
        except OSError as error:
            raise StoreError(f"reading: {error.strerror}") from None

    def exists(self, key: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        except OSError:
            return False

    def delete(self, key: str) -> bool:
        scope, name = split(key)
        try:
            with self._scope(scope) as target:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(pin_of(name), dir_fd=target)
                os.unlink(name, dir_fd=target)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"deleting {key}: {error.strerror}") from None
        return True

    def quarantine(self, key: str) -> None:
        scope, name = split(key)
        with contextlib.suppress(OSError), self._scope(scope) as source, self._folder("quarantine") as target:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(pin_of(name), dir_fd=source)
            os.rename(name, f"{time.time_ns()}{SUFFIX}", src_dir_fd=source, dst_dir_fd=target)
            for old in sorted(os.listdir(target))[:-KEPT_IN_QUARANTINE]:
                os.unlink(old, dir_fd=target)

    def pin(self, key: str, pinned: bool) -> None:
        scope, name = split(key)
        try:
            with self._folder("entries") as entries:
                if pinned:
                    make_scope(scope, entries)
                with folder(self._root / "entries" / scope, name=scope, within=entries) as target:
                    set_mark(pin_of(name), target, pinned)
        except FileNotFoundError:
            return  # there is nothing to unpin
        except OSError as error:
            raise StoreError(f"pinning {key}: {error.strerror}") from None

    def keys(self) -> Iterator[str]:
        for each in self._files():
            yield each.key

    def size(self) -> int:
        return self._beside() + sum(each.size for each in self._files())

    def make_room(self, size: int) -> None:
        try:
            with self._locked():
                self._make_room(size)
        except OSError as error:
            raise StoreError(f"making room: {error.strerror}") from None

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        oldest = time.time() - older_than_s
        old = [each.key for each in self._files() if each.used_ns <= oldest * 1e9]
        return sum(self.delete(key) for key in old if not wanted(key))

    def _path(self, key: str) -> Path:
        return self._root / "entries" / "/".join(split(key))

    def _files(self) -> list[Found]:
        found: list[Found] = []
        try:
            with self._folder("entries") as entries:
                for scope in os.listdir(entries):
                    place = folder(self._root / "entries" / scope, name=scope, within=entries)
                    # Gone since it was listed, or no folder of this user's: it holds no entry.
                    with contextlib.suppress(FileNotFoundError, FolderRefused), place as target:
                        found += entries_in(scope, target)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None
        return found

    @contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        """A descriptor of one of the root's folders."""
        with folder(self._root) as top:
            descriptor = open_folder(self._root / name, name=name, within=top)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _scope(self, scope: str) -> Iterator[int]:
        """A descriptor of the folder of a scope's entries."""
        with self._folder("entries") as entries:
            descriptor = open_folder(self._root / "entries" / scope, name=scope, within=entries)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with folder(self._root) as top:
            descriptor = open_file("lock", within=top, flags=LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _touch(descriptor: int) -> None:
    """Set the time of last use finer than the kernel does by itself, which is by its tick."""
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))
