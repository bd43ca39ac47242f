"""Name and list the files of a store's folders; functions take descriptors of folders, never paths."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from io import FileIO
from typing import NamedTuple

from baton_kv.folders import LOCK, open_file
from baton_kv.stores.base import StoreError

KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,63}/[A-Za-z0-9_-]{16,64}")
SUFFIX = ".kv"
PIN = ".pin"
ABANDONED_AFTER_S = 600
"""Seconds after which a file in `writing` is taken to have lost its writer."""


class StoredEntry(NamedTuple):
    """An entry as it is listed in a folder.

    Attributes:
        scope: first part of the key, the tenant's.
        name: name of the file.
        size: size of the file in bytes.
        used_ns: time of last use, nanoseconds since the epoch.
        pinned: whether the entry is protected from eviction.
    """

    scope: str
    name: str
    size: int
    used_ns: int
    pinned: bool

    @property
    def key(self) -> str:
        """Return the entry's key."""
        return f"{self.scope}/{self.name.removesuffix(SUFFIX)}"


def split(key: str) -> tuple[str, str]:
    """Return a key's scope and the name of its file.

    Raises:
        StoreError: the key does not have the form `scope/id`.
    """
    if KEY.fullmatch(key) is None:
        raise StoreError("not a valid key; keys have the form scope/id")
    scope, _, name = key.partition("/")
    return scope, f"{name}{SUFFIX}"


def pin_of(name: str) -> str:
    """Return the name of the file that pins an entry."""
    return f"{name.removesuffix(SUFFIX)}{PIN}"


def make_scope(scope: str, entries: int) -> bool:
    """Create a scope's folder if it is missing; return whether it was."""
    try:
        os.mkdir(scope, 0o700, dir_fd=entries)
    except FileExistsError:
        return False
    return True


def set_mark(name: str, target: int, wanted: bool) -> None:
    """Create an empty file, or remove it, as `wanted` says."""
    if wanted:
        os.close(open_file(name, within=target, flags=LOCK))
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=target)


def entries_in(scope: str, target: int) -> Iterator[StoredEntry]:
    """Yield the entries in a scope's folder."""
    with os.scandir(target) as listed:
        files = {each.name: each for each in listed}
    for name, each in files.items():
        if not name.endswith(SUFFIX):
            continue
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            status = each.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield StoredEntry(scope, name, status.st_size, status.st_mtime_ns, pin_of(name) in files)


def number_in(name: str, top: int) -> int:
    """Return the number in a file; 0 if the file is missing or holds no number."""
    try:
        with FileIO(open_file(name, within=top), "rb") as stream:
            return max(0, int(stream.read(32)))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return 0


def remove_abandoned(target: int, named: re.Pattern[str]) -> None:
    """Remove temporary files that a killed writer left in a folder.

    Args:
        target: descriptor of the folder.
        named: pattern of the temporary files' names; other files are left alone.
    """
    for name in os.listdir(target):
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(name, dir_fd=target, follow_symlinks=False).st_mtime
            if named.fullmatch(name) and age > ABANDONED_AFTER_S:
                os.unlink(name, dir_fd=target)
