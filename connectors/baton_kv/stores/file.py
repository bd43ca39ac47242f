"""Keep entries in a folder, on disk or in shared memory (`/dev/shm`).

root/                    mode 0700
  entries/SCOPE/ID.kv    an entry's own file, immutable; its modification time is its last use
  entries/SCOPE/ID.000   a file of another entry that this one needs too (a hard link), by its index
  entries/SCOPE/ID.pin   an empty file that protects the entry from eviction
  writing/               files being written, which count; leftovers are removed when a store is opened
  quarantine/            the last few corrupt entries, for inspection
  images/                the gateway's images; they count towards the budget and are never evicted here
  records/               the gateway's records, likewise; `total` holds their bytes
  written                bytes of all entries ever placed, so that not every save need list the entries
  secret                 key of the digests, see `baton_kv.folders`
  lock                   held while the budget is enforced

A file's bytes are free when its last name is removed, so entries that share files need no other count.

Only this user may have access to the folders, and none may be a link: files are written and removed relative
to a descriptor of their folder, so nothing outside is touched, whatever links are planted inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path

from baton_kv.contract import EXPENDABLE
from baton_kv.folders import (
    CREATE,
    LOCK,
    READ,
    FolderNotPrivate,
    file_system_of,
    folder,
    make_folder,
    open_file,
)
from baton_kv.stores.base import (
    NOTHING_SHARED,
    Buffer,
    Commit,
    EntryMissing,
    Piece,
    SharedFiles,
    StoreError,
    StoreFull,
)
from baton_kv.stores.room import Room
from baton_kv.stores.tree import (
    ABANDONED_AFTER_S,
    IMAGES,
    RECORDS,
    RECORDS_TOTAL,
    StoreTree,
    link_of,
    link_shared,
    make_scope,
    pin_of,
    remove_abandoned,
    rename_shared,
    require_numbers,
    split,
    touch,
    unlink_shared,
)

__all__ = ["ABANDONED_AFTER_S", "IMAGES", "RECORDS", "RECORDS_TOTAL", "FileStore"]

TEMPORARY = re.compile(r"\.[0-9a-f]{16}")
"""Pattern of temporary files in the root, from which the secret is linked."""
WRITING = re.compile(rf"({EXPENDABLE})?[0-9a-f]{{32}}(\.[0-9a-z]{{1,8}})?")
"""Pattern of the files in `writing`."""
SEALING = "sealing"
"""Suffix of a draft that all ranks have finished, while the last of them completes it."""
FOLDERS = ("entries", "writing", "quarantine")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
LARGE_PAGE_BYTES = 2 * 1024 * 1024
MADV_COLLAPSE = 25
"""Has the kernel put a range of a file in memory on one large page; from Linux 6.1 on, see madvise(2)."""
MAP_FIXED, MAP_FAILED = 0x10, 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
READABLE = CREATE ^ os.O_WRONLY | os.O_RDWR
MAX_BUFFERS = 1024
"""Most buffers that one system call takes on Linux (IOV_MAX)."""


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
        self._in_memory = "tmpfs" in file_system_of(root)

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
        commit: Commit | None = None,
    ) -> int:
        scope, name = split(key)
        self._room.require_possible(size)
        try:
            with self._tree.folder("writing") as writing:
                expendable = name.startswith(EXPENDABLE)
                temporary = (EXPENDABLE if expendable else "") + secrets.token_hex(16)
                try:
                    size = self._write(writing, temporary, parts, size, frees=not expendable)
                    place = partial(self._place, writing, temporary, scope, name, size, shared)
                    commit(place) if commit else place()
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
                    if rank == 0 and self._in_memory:
                        use_large_pages(descriptor, size)
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
            _discard(writing, name)

    def _write(self, writing: int, name: str, parts: Iterable[Piece], expected: int, *, frees: bool) -> int:
        size = 0
        with FileIO(os.open(name, READABLE, 0o600, dir_fd=writing), "wb") as stream:
            begun = use_large_pages(stream.fileno(), expected) if self._in_memory else 0
            for part in parts:
                waiting = part if isinstance(part, list) else [memoryview(part).cast("B")]
                while left := sum(map(len, waiting)):
                    write = partial(os.writev, stream.fileno(), waiting[:MAX_BUFFERS])
                    written = self._retried(write, max(left, expected - size)) if frees else write()
                    size, waiting = size + written, _rest(waiting, written)
            if size < begun:
                os.ftruncate(stream.fileno(), size)
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
                        try:
                            self._room.make(size, replaced=(scope, name), linked=stem, written_as=temporary)
                        except StoreFull:  # gone at once, or the next would count it
                            _discard(writing, temporary)
                            raise
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
        path = self._path(key, part)
        try:
            if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
                raise StoreError(f"reading {key}: its folder is a link or not a folder")
            descriptor = os.open(path, READ)
        except FileNotFoundError:
            raise EntryMissing(key) from None
        except OSError as error:
            raise StoreError(f"reading {key}: {error.strerror}") from None
        try:
            try:
                status = os.fstat(descriptor)
            except OSError as error:
                raise StoreError(f"reading: {error.strerror}") from None
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"reading {key}: not a regular file")
            with contextlib.suppress(OSError):
                touch(descriptor)  # the least recently used entry is evicted first
            yield FileReader(descriptor, status.st_size)
        finally:
            os.close(descriptor)

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
                    if pinned:
                        os.close(open_file(pin_of(name), within=target, flags=LOCK))
                    else:
                        os.unlink(pin_of(name), dir_fd=target)
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
        return self._tree.bytes_beside() + self._tree.being_written() + self._tree.listing().size

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


class FileDraft:
    """The `Draft` interface over a file in the store's folder `writing`.

    A rank that has finished creates the empty file `NAME.RANK`. A rank that finds those of all ranks renames
    the draft to `NAME.sealing`, which succeeds for exactly one.

    Args:
        share: bytes that this rank is expected to write.
        write: writes some bytes at an offset and returns their number; on a full device it first frees as
            many bytes as it is told.
        place: moves a file of the folder to the entry's name, within the budget.
    """

    def __init__(
        self,
        writing: int,
        descriptor: int,
        name: str,
        rank: int,
        ranks: int,
        *,
        share: int,
        write: Callable[[int, memoryview, int, int], int],
        place: Callable[[str], None],
    ) -> None:
        self._writing = writing
        self._descriptor = descriptor
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._left = share
        self._write = write
        self._place = place

    def write_at(self, offset: int, parts: Sequence[Buffer]) -> None:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                written = self._write(self._descriptor, view, offset, max(len(view), self._left))
                offset += written
                self._left -= written
                view = view[written:]

    def read(self, start: int, stop: int) -> bytes:
        found = os.pread(self._descriptor, stop - start, start)
        if len(found) != stop - start:
            raise StoreError("reading a draft: it is shorter than it was")
        return found

    def finish(self) -> bool:
        os.close(os.open(f"{self._name}.{self._rank}", CREATE, 0o600, dir_fd=self._writing))
        present = set(os.listdir(self._writing))
        if not all(f"{self._name}.{rank}" in present for rank in range(self._ranks)):
            return False
        try:
            os.rename(self._name, self._sealing, src_dir_fd=self._writing, dst_dir_fd=self._writing)
        except FileNotFoundError:
            return False  # another rank found all finished too, and seals
        return True

    def place(self) -> None:
        self._place(self._sealing)
        with contextlib.suppress(OSError):  # the entry is in its place; what is left behind is swept
            _discard(self._writing, self._name)

    @property
    def _sealing(self) -> str:
        return f"{self._name}.{SEALING}"


class FileReader:
    """A `Reader` of an open file of `size` bytes.

    It reads with `pread`, not from a memory map: a read error in a map would kill the process (SIGBUS).
    """

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
        filled, waiting = 0, list(buffers)
        while waiting:
            try:
                count = os.preadv(self._descriptor, waiting[:MAX_BUFFERS], start + filled)
            except OSError as error:
                raise StoreError(f"reading: {error.strerror}") from None
            if count == 0:
                break
            filled, waiting = filled + count, _rest(waiting, count)
        return filled


def use_large_pages(descriptor: int, size: int) -> int:
    """Have the first `size` bytes of a new file in memory on large pages, as far as the system has them.

    These are taken several times as fast as small ones, and written and read so. Only whole ones are used,
    so no memory is wasted; what cannot be had costs nothing. What others write meanwhile stays. Returns the
    bytes that the file has at least.
    """
    size -= size % LARGE_PAGE_BYTES
    if not size:
        return 0
    with contextlib.suppress(OSError):  # full: whoever writes next finds out, and makes room
        for place in (*range(0, size, LARGE_PAGE_BYTES), size - 1):
            os.posix_fallocate(descriptor, place, 1)  # a range without any page would be left as it is
        _collapse(descriptor, size)
    return size


def _collapse(descriptor: int, size: int) -> None:
    """Ask for large pages through a map that begins where one may; nothing is read or written through it."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    room = size + LARGE_PAGE_BYTES
    place = libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if place == MAP_FAILED:
        return
    begin = -(-place // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    if libc.mmap(begin, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0) == begin:
        libc.madvise(begin, size, MADV_COLLAPSE)
    libc.munmap(place, room)


def _discard(writing: int, name: str) -> None:
    """Remove a draft and the files beside it, if they are there."""
    for each in os.listdir(writing):
        if each == name or each.startswith(f"{name}."):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(each, dir_fd=writing)


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the buffers without their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def _translated(error: OSError, key: str) -> StoreError:
    """Translate an error of the device into the store's own exception."""
    kind = StoreFull if error.errno in NO_SPACE else StoreError
    return kind(f"writing {key}: {error.strerror}")
