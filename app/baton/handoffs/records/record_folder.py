"""Read and write the files of the records' folder, under the lock that all gateways over the store share.

records/
  ID.json   the record of one handoff
  .*        a record that is being written
  total     the lock file; it holds the bytes that all records take
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from baton_kv.folders import CREATE, LOCK, folder, open_file
from baton_kv.stores.file import RECORDS_TOTAL

ABANDONED_AFTER_S = 60.0
"""Age at which a record that is being written is one that a killed process left."""
SUFFIX = ".json"
ID = re.compile(r"[A-Za-z0-9_-]{16,64}")
TEMPORARY = re.compile(r"\.[0-9a-f]{16}")
"""The name of a record that is being written."""
Stamp = tuple[int, int, int]
"""Inode, time of change in nanoseconds and size: two versions of a file differ in one of them."""


@dataclass
class LockedFolder:
    """The records' folder while this process holds its lock.

    Attributes:
        descriptor: of the folder.
        total: bytes that all records take.
    """

    descriptor: int
    total: int

    @property
    def changed_at(self) -> int:
        """When the folder last changed, in nanoseconds."""
        return os.fstat(self.descriptor).st_mtime_ns

    def write(self, handoff_id: str, data: bytes) -> Stamp:
        """Write a record's file, as a whole or not at all; returns its stamp.

        Raises:
            OSError: it could not be written.
        """
        temporary, name = f".{secrets.token_hex(8)}", handoff_id + SUFFIX
        try:
            with FileIO(os.open(temporary, CREATE, 0o600, dir_fd=self.descriptor), "wb") as stream:
                _write_all(stream, data)
                status = os.fstat(stream.fileno())
            before = self._size(name)
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise
        self.total += len(data) - before
        return stamp_of(status)

    def remove(self, handoff_id: str) -> None:
        """Remove a record's file, if it exists.

        Raises:
            OSError: it could not be removed.
        """
        size = self._size(handoff_id + SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(handoff_id + SUFFIX, dir_fd=self.descriptor)
        self.total -= size

    def scan(self) -> dict[str, Stamp]:
        """Return the stamps of all records by id, and count `total` anew."""
        stamps: dict[str, Stamp] = {}
        total = 0
        with os.scandir(self.descriptor) as found:
            for each in found:
                handoff_id = each.name.removesuffix(SUFFIX)
                if handoff_id == each.name or ID.fullmatch(handoff_id) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        stamps[handoff_id] = stamp_of(status)
                        total += status.st_size
        self.total = total
        return stamps

    def remove_abandoned(self) -> None:
        """Remove what killed processes were writing; a process that writes now would hold the lock."""
        for name in os.listdir(self.descriptor):
            with contextlib.suppress(OSError):
                age = time.time() - os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime
                if TEMPORARY.fullmatch(name) and age > ABANDONED_AFTER_S:
                    os.unlink(name, dir_fd=self.descriptor)

    def _size(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[LockedFolder]:
    """Lock the records' folder against all other gateways while inside.

    Raises:
        OSError: the folder or its lock file cannot be used.
    """
    with (
        folder(path) as opened,
        FileIO(open_file(RECORDS_TOTAL, within=opened, flags=LOCK), "r+") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        digits = lock.read(32)
        held = LockedFolder(opened, int(digits) if digits.isdigit() else 0)
        before = held.total
        try:
            yield held
        finally:
            if held.total != before or not digits:
                os.pwrite(lock.fileno(), b"%020d" % max(0, held.total), 0)


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what tells one version of a file from the next."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def _write_all(stream: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]
