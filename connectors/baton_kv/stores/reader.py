"""Open an entry's file and read it, without following links and without memory maps."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton_kv.stores.base import EntryMissing, StoreError
from baton_kv.stores.buffers import MAX_BUFFERS, rest


class FileReader:
    """A `Reader` of an open file.

    It reads with `pread`, not from a memory map: a read error in a map would kill the process (SIGBUS).

    Args:
        descriptor: descriptor of the open file.
        size: size of the file in bytes.
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
            filled, waiting = filled + count, rest(waiting, count)
        return filled


@contextmanager
def open_entry(path: Path, key: str) -> Iterator[FileReader]:
    """Open an entry's file for the time of the context and mark it as used now.

    Args:
        path: path of the file.
        key: key of the entry, for messages.

    Raises:
        EntryMissing: there is no such file.
        StoreError: the file or its folder is a link or of another kind, or cannot be opened.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
            raise StoreError(f"reading {key}: its folder is a link or not a folder")
        # Without O_NONBLOCK, opening a pipe in an entry's place would block the engine for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise EntryMissing(key) from None
    except OSError as error:
        raise StoreError(f"reading {key}: {error.strerror}") from None
    try:
        status = _status(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"reading {key}: not a regular file")
        with contextlib.suppress(OSError):
            touch(descriptor)  # the least recently used entry is evicted first
        yield FileReader(descriptor, status.st_size)
    finally:
        os.close(descriptor)


def _status(descriptor: int) -> os.stat_result:
    try:
        return os.fstat(descriptor)
    except OSError as error:
        raise StoreError(f"reading: {error.strerror}") from None


def touch(descriptor: int) -> None:
    """Set a file's time of last use to now, finer than the kernel's clock tick."""
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))
