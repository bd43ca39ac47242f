"""A store in a folder, on disk or in shared memory (`/dev/shm`).

root/                    mode 0700
  entries/SCOPE/ID.kv    one immutable file an entry; its modification time is its last use
  entries/SCOPE/ID.pin   an empty file: that entry stays when others go for the budget
  writing/               what is being written; swept when a store is opened
  quarantine/            what proved wrong, for a person to look at; swept to a few
  images/                the gateway's: counted with the entries, never evicted by them
  lock                   held while the budget is enforced
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

from baton_kv.stores.base import Buffer, EntryMissing, StoreError, StoreFull

KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}")
SUFFIX = ".kv"
PIN = ".pin"
BESIDE = "images"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
ABANDONED_AFTER_S = 600
"""A file that has been in `writing` this long has no writer any more."""
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
        fsync: wait until an entry is on the device before it is visible; without it an entry written
            just before a power cut may be torn, which its digests tell.
    """

    def __init__(self, root: Path, *, budget: int | None = None, fsync: bool = False) -> None:
        self._root = root
        self._budget = budget
        self._fsync = fsync
        for folder in (root, root / "entries", root / "writing", root / "quarantine"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.geteuid() or stat.S_IMODE(root.stat().st_mode) & 0o077:
            raise StoreError(f"{root} belongs to others or is open to them; it must be yours, with mode 0700")
        self._sweep()

    @property
    def root(self) -> Path:
        return self._root

    def put(self, key: str, parts: Iterable[Buffer], *, size: int = 0) -> int:
        target = self._path(key)
        temporary = self._root / "writing" / secrets.token_hex(16)
        try:
            if self._budget is not None and size > self._budget:
                raise StoreFull(f"an entry of {size} bytes does not fit the store's {self._budget}")
            size = self._write(temporary, parts, size)
            with self._locked():
                self._make_room(size, keep=target)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                os.rename(temporary, target)
            return size
        except OSError as error:
            kind = StoreFull if error.errno in NO_SPACE else StoreError
            raise kind(f"writing {key}: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _write(self, path: Path, parts: Iterable[Buffer], expected: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        size = 0
        with FileIO(os.open(path, flags, 0o600), "wb") as stream:
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

    def _free(self, size: int) -> bool:
        """Evict entries of so many bytes in all, or none; whether they went."""
        freed = 0
        with self._locked():
            loose = self._loose()
            if sum(taken for taken, _ in loose) < size:
                return False
            for taken, path in loose:
                if freed >= size:
                    break
                path.unlink(missing_ok=True)
                freed += taken
        return True

    def _make_room(self, size: int, *, keep: Path) -> None:
        if self._budget is None:
            return
        loose = [(taken, path) for taken, path in self._loose() if path != keep]
        total = self._beside() + sum(status.st_size for path, status in self._files() if path != keep)
        if size + total - sum(taken for taken, _ in loose) > self._budget:
            raise StoreFull(f"an entry of {size} bytes does not fit the store's {self._budget}")
        for taken, path in loose:
            if total + size <= self._budget:
                return
            path.unlink(missing_ok=True)
            total -= taken

    def _beside(self) -> int:
        try:
            return bytes_in(self._root / BESIDE)
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None

    def _loose(self) -> list[tuple[int, Path]]:
        """Sizes and paths of the entries that may go: of who holds more than a fair share first, and of
        those the least recently used.
        """
        files = list(self._files())
        held: Counter[str] = Counter()
        for path, status in files:
            held[path.parent.name] += status.st_size
        share = (self._budget or held.total()) / max(1, len(held))
        loose = [
            (held[path.parent.name] <= share, status.st_mtime_ns, status.st_size, path)
            for path, status in files
            if not path.with_suffix(PIN).exists()
        ]
        return [(size, path) for _, _, size, path in sorted(loose)]

    @contextmanager
    def open(self, key: str) -> Iterator[FileReader]:
        path = self._path(key)
        try:
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
        return self._path(key).is_file()

    def delete(self, key: str) -> bool:
        path = self._path(key)
        try:
            path.with_suffix(PIN).unlink(missing_ok=True)
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"deleting {key}: {error.strerror}") from None
        return True

    def quarantine(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(key).with_suffix(PIN).unlink(missing_ok=True)
            os.rename(self._path(key), self._root / "quarantine" / f"{time.time_ns()}{SUFFIX}")
            kept = sorted((self._root / "quarantine").iterdir())
            for path in kept[:-KEPT_IN_QUARANTINE]:
                path.unlink(missing_ok=True)

    def pin(self, key: str, pinned: bool) -> None:
        mark = self._path(key).with_suffix(PIN)
        try:
            if pinned:
                mark.parent.mkdir(mode=0o700, exist_ok=True)
                mark.touch(mode=0o600)
            else:
                mark.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"pinning {key}: {error.strerror}") from None

    def keys(self) -> Iterator[str]:
        for path, _ in self._files():
            yield _key(path)

    def size(self) -> int:
        return self._beside() + sum(status.st_size for _, status in self._files())

    def make_room(self, size: int) -> None:
        try:
            with self._locked():
                self._make_room(size, keep=self._root)
        except OSError as error:
            raise StoreError(f"making room: {error.strerror}") from None

    def sweep(self, *, wanted: Callable[[str], bool], older_than_s: float) -> int:
        oldest = time.time() - older_than_s
        old = [_key(path) for path, status in self._files() if status.st_mtime <= oldest]
        return sum(self.delete(key) for key in old if not wanted(key))

    def _path(self, key: str) -> Path:
        if KEY.fullmatch(key) is None:
            raise StoreError("not a key of this store")
        return self._root / "entries" / f"{key}{SUFFIX}"

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            paths = list((self._root / "entries").glob(f"*/*{SUFFIX}"))
        except OSError as error:
            raise StoreError(f"listing: {error.strerror}") from None
        for path in paths:
            with contextlib.suppress(OSError):  # gone since it was listed
                status = path.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield path, status

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(
            self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what a killed writer left behind."""
        for path in (*(self._root / "writing").iterdir(), *self._root.glob(".*")):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat(follow_symlinks=False).st_mtime > ABANDONED_AFTER_S:
                    path.unlink()


def bytes_in(folder: Path) -> int:
    """Bytes that a folder's files take; one of several names counts at each with its share."""
    total = 0.0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for each in found:
            with contextlib.suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                total += status.st_size / status.st_nlink
    return round(total)


def _key(path: Path) -> str:
    return f"{path.parent.name}/{path.name.removesuffix(SUFFIX)}"


def _touch(descriptor: int) -> None:
    """Set the time of last use finer than the kernel does by itself, which is by its tick."""
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))
